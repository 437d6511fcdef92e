"""Measures how many tokens a step drafts bring on stock vLLM: the EAGLE-3 head, the dense parent, n-grams.

    python benchmarks/real/fit/drafts.py --models .cache/real --texts texts.safetensors

Greedy, in bfloat16, on held-out texts (``texts.py`` writes them) and questions (``chats.py`` has them).
Each method runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from transformers import AutoTokenizer

DRAFTS = 4
PROMPT = 96  # tokens of a text that is to be continued
KINDS = ("code", "handbook", "prose")
COUNTERS = ("num_drafts", "num_accepted_tokens")

app = typer.Typer(add_completion=False, help=__doc__)
console = Console(highlight=False)


def methods(models: Path) -> dict[str, dict[str, Any]]:
    """Name -> vLLM's ``speculative_config``."""
    ngram = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    return {
        "eagle3": {"method": "eagle3", "model": str(models / "eagle3")},
        "dense parent": {"method": "draft_model", "model": str(models / "dense")},
        "ngram": ngram,
    }


def prompts(models: Path, texts: Path, count: int) -> dict[str, list[list[int]]]:
    """Kind of text -> its prompts, as token ids."""
    from chats import HELD_QUESTIONS
    from llama import windows

    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    chats = [[{"role": "user", "content": question}] for question in HELD_QUESTIONS[:count]]
    found = {"chat": [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]}
    with safe_open(texts, "pt") as file:
        for kind in KINDS:
            found[kind] = windows(file.get_tensor(f"{kind}.held"), count, PROMPT, 1).tolist()
    return found


@app.command(hidden=True)
def one(job: Path, result: Path) -> None:
    """Runs the job file in this process; called by ``all``."""
    from vllm import LLM, SamplingParams

    todo = json.loads(job.read_text())
    llm = LLM(
        todo["target"],
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=32,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        kv_cache_memory_bytes=1 << 30,
        speculative_config=todo["drafts"],
    )

    def counters() -> dict[str, float]:
        names = {f"vllm:spec_decode_{name}": name for name in COUNTERS}
        return {names[metric.name]: metric.value for metric in llm.get_metrics() if metric.name in names}

    sampling = SamplingParams(temperature=0, max_tokens=todo["tokens"], ignore_eos=False)
    figures, before = {}, counters()
    for kind, asked in todo["prompts"].items():
        llm.generate([{"prompt_token_ids": ids} for ids in asked], sampling, use_tqdm=False)
        after = counters()
        drafts, accepted = (after[name] - before.get(name, 0) for name in COUNTERS)
        figures[kind] = 1 + accepted / drafts
        before = after
    result.write_text(json.dumps(figures))


@app.command("all")
def measure(
    models: Annotated[Path, typer.Option(help="the folder that build.py wrote")],
    texts: Annotated[Path, typer.Option(help="the file of texts.py")],
    count: Annotated[int, typer.Option(help="prompts of a kind")] = 8,
    tokens: Annotated[int, typer.Option(help="tokens of an answer")] = 96,
    only: Annotated[list[str] | None, typer.Option(help="methods; default: all")] = None,
) -> None:
    """Measures every method and prints a table."""
    asked = prompts(models, texts, count)
    table = Table(f"tokens a step, {DRAFTS} drafts", *asked, "mean")
    for name, config in methods(models).items():
        if only and name not in only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            job, result, log = (Path(folder) / part for part in ("job.json", "result.json", "log"))
            drafts = config | {"num_speculative_tokens": DRAFTS}
            job.write_text(
                json.dumps({"target": str(models / "target"), "drafts": drafts, "tokens": tokens, "prompts": asked})
            )
            with log.open("w") as stream:
                command = [sys.executable, __file__, "one", str(job), str(result)]
                environment = os.environ | {"VLLM_PLUGINS": ""}  # stock: no line of the plugin is loaded
                done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
            if done.returncode:
                console.print(log.read_text()[-3000:], markup=False)
                raise typer.Exit(1)
            figures = json.loads(result.read_text())
        table.add_row(
            name, *(f"{value:.2f}" for value in figures.values()), f"{sum(figures.values()) / len(figures):.2f}"
        )
    console.print(table)


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    app()
