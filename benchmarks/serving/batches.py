"""Measures whether stock vLLM's greedy tokens depend on the batch that a request is in, on this machine.

If a kernel splits its work by the number of rows, the rounding of a row depends on the other rows of the batch; a
near-tie between the two best tokens is then decided by how the batch is formed. A comparison with stock under
concurrency cannot be stricter than stock compared with itself, which is measured here. In one engine of each dtype,
without the plugin, every prompt is requested alone, all at once, and in random groups. The groups are compared with
the first by their tokens and, as these change long before a token does, by the two greatest logits up to the first
different token.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import plan
import prompts
from common import RESULTS, TOY, is_toy, provenance, show, write_result

TOY_MODEL = TOY / "models" / "target"
_FLAGS = ("avx512f", "avx512_bf16", "amx_bf16")
app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


def groups(count: int, largest: int, rounds: int, seed: int) -> dict[str, list[list[int]]]:
    """Returns name -> groups of request numbers that are sent at once, one group after the other."""
    draw, found = random.Random(seed), {"all at once": [list(range(count))]}
    for number in range(rounds):
        left, parts = draw.sample(range(count), count), []
        while left:
            size = draw.randint(1, largest)
            parts.append(left[:size])
            left = left[size:]
        found[f"random groups {number + 1}"] = parts
    return found


def difference(alone: list[dict], other: list[dict]) -> dict:
    """Compares answers to the same requests, each ``{"tokens": ids, "logits": the two greatest of each token}``."""
    texts, seen, moved, farthest, gaps = 0, 0, 0, 0.0, []
    for a, b in zip(alone, other, strict=True):
        pairs = enumerate(zip(a["tokens"], b["tokens"], strict=True))
        place = next((i for i, (x, y) in pairs if x != y), None)
        if place is not None:
            texts += 1
            gaps.append(gap(a["logits"][place]))
        for x, y in zip(a["logits"][:place], b["logits"][:place], strict=True):
            seen += 1
            moved += x != y
            farthest = max(farthest, *(abs(p - q) for p, q in zip(x, y, strict=True)))
    return {
        "requests": len(alone),
        "with_other_tokens": texts,
        "logits_compared": seen,
        "with_other_logits": moved,
        "greatest_difference": farthest,
        "gaps_where_tokens_part": gaps,
    }


def gap(logits: list[float]) -> float:
    return logits[0] - logits[1]


def ask(job: dict) -> dict:
    """Runs the job in this process; returns ``difference`` by grouping, and the gaps between the best two tokens."""
    from vllm import LLM, SamplingParams

    options = {"skip_tokenizer_init": True, "enforce_eager": job["eager"], "enable_prefix_caching": False}
    options |= {"max_model_len": len(job["prompts"][0]) + job["tokens"] + 8, "max_num_seqs": job["largest"]}
    llm = LLM(model=job["model"], dtype=job["dtype"], logprobs_mode="raw_logits", seed=0, **options)
    sampling = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False, logprobs=2)

    def answers(parts: list[list[int]]) -> list[dict]:
        found: dict[int, dict] = {}
        for part in parts:
            asked = [{"prompt_token_ids": job["prompts"][number]} for number in part]
            for number, output in zip(part, llm.generate(asked, sampling, use_tqdm=False), strict=True):
                said = output.outputs[0]
                ranked = [sorted((entry.logprob for entry in each.values()), reverse=True) for each in said.logprobs]
                found[number] = {"tokens": list(said.token_ids), "logits": [each[:2] for each in ranked]}
        return [found[number] for number in sorted(found)]

    alone = answers([[number] for number in range(len(job["prompts"]))])
    gaps = sorted(gap(logits) for answer in alone for logits in answer["logits"])
    same = {"alone once more": [[number] for number in range(len(job["prompts"]))]}
    return {
        "tokens": len(gaps),
        "gaps": {"smallest": gaps[:8], "below 1e-4": sum(gap < 1e-4 for gap in gaps), "median": gaps[len(gaps) // 2]},
        "greatest_logit": max(abs(value) for answer in alone for logits in answer["logits"] for value in logits),
        "by_batch": {name: difference(alone, answers(parts)) for name, parts in (same | job["groups"]).items()},
    }


def in_fresh_process(job: dict) -> dict:
    env = os.environ | {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with tempfile.TemporaryDirectory() as scratch:
        asked, answer = Path(scratch, "job.json"), Path(scratch, "result.json")
        asked.write_text(json.dumps(job))
        subprocess.run([sys.executable, __file__, "one", asked, answer], env=env, check=True)
        return json.loads(answer.read_text())


@app.command(hidden=True)
def one(job: Path, result: Path) -> None:
    """Run the job file in this process; called by ``measure``."""
    result.write_text(json.dumps(ask(json.loads(job.read_text()))))


@app.command(help=__doc__)
def measure(
    model: Annotated[Path, typer.Argument(help="Folder.", exists=True, file_okay=False)] = TOY_MODEL,
    dtype: Annotated[str, typer.Option(help="Of the engines.")] = "bfloat16,float32",
    count: Annotated[int, typer.Option("--prompts", min=2, help="Prompts.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated per prompt.")] = 64,
    rounds: Annotated[int, typer.Option(min=0, help="Random groupings.")] = 4,
    eager: Annotated[bool, typer.Option("--eager/--compile", help="enforce_eager.")] = True,
    seed: Annotated[int, typer.Option(help="Of prompts and groups.")] = 0,
    output: Annotated[Path, typer.Option(help="JSON to write.")] = RESULTS / "stock_batches.json",
) -> None:
    origin, ids = provenance(), prompts.load(model, count, prompt_tokens, seed)
    origin["machine"]["instructions"] = [name for name in _FLAGS if name in Path("/proc/cpuinfo").read_text()]
    origin["machine"]["onednn_max_cpu_isa"] = os.environ.get("ONEDNN_MAX_CPU_ISA")
    job = {"model": str(model), "prompts": ids.ids, "tokens": output_tokens, "largest": count, "eager": eager}
    job |= {"groups": groups(count, count, rounds, seed)}
    result: dict[str, Any] = {
        "label": "toy model" if is_toy(model) else None,
        "model": model.name,
        "prompts": ids.describe(),
        "output_tokens": output_tokens,
        "enforce_eager": eager,
        "seed": seed,
        "dtypes": {},
        "provenance": origin,
    }
    for name in plan.split(dtype):
        result["dtypes"][name] = in_fresh_process(job | {"dtype": name})
        write_result(output, result)
    for dtype, found in result["dtypes"].items():
        rows = ({"batches": name, **row} for name, row in found["by_batch"].items())
        counts = "requests", "with_other_tokens", "with_other_logits", "logits_compared", "greatest_difference"
        show(f"stock vLLM against itself, {result['model']}, {dtype}", rows, "batches", *counts)
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    app()
