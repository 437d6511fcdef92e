"""Measures the acceptance length of a model's drafters on stock vLLM, one process per method.

    python benchmarks/toy/accept.py all
    python benchmarks/toy/accept.py all --only eagle3-5 --only draft-3 --dtype float32
    python benchmarks/toy/accept.py all --models .cache/real --output real_acceptance.json

Prompts are held-out library files, or for the carved model its held-out texts and questions; decoding is greedy.
Acceptance length is 1 + accepted / drafts: the tokens per forward of the target. Its 95 % interval is of prompts drawn
with repetition, by groups that ran together.
"""

from __future__ import annotations

import random
import sysconfig
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from tokenizers import Tokenizer

from benchmarks.common import RESULTS, ROOT, is_toy, provenance, write_result
from benchmarks.real import held
from benchmarks.serving.processes import LiveEngine
from benchmarks.toy import corpus
from benchmarks.toy.quantize import rounded_copy

HERE = Path(__file__).parent
MODELS = HERE / "models"
CACHE = ROOT / ".cache" / "toy"
RESULT = RESULTS / "toy_acceptance.json"
TARGET = "target"
COPIES = {"int8": 8, "int4": 4}  # of the target, to their bits
_TIMEOUT = 1800.0  # seconds of a start, and of the answers of a group
GROUP = 4  # prompts of a kind that run together
DRAWN = 2000  # samples of groups that the interval is of

app = typer.Typer(add_completion=False, help=__doc__)


def methods(models: Path, copies: Path) -> dict[str, dict | None]:
    """Returns name -> vLLM's ``speculative_config``, for the folder of the models and that of their rounded copies."""
    ngram = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    table: dict[str, dict | None] = {"none": None, "ngram-5": ngram}
    for k in (3, 4, 5, 8):
        table[f"eagle3-{k}"] = {"method": "eagle3", "model": str(models / "eagle3"), "num_speculative_tokens": k}
    drafters = {"draft": models / "draft", "dense": models / "dense"} | {name: copies / name for name in COPIES}
    for name, folder in drafters.items():
        for k in (3, 5) if name in COPIES or folder.is_dir() else ():
            table[f"{name}-{k}"] = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": k}
    return table


def held_out(model: Path, count: int, length: int) -> list[dict]:
    """Returns prompts as ``prompts``: those of the carved model by kind of text, else files of the standard library."""
    if not (files := held.beside(model)):
        return prompts(Tokenizer.from_file(str(model / "tokenizer.json")), count, length)
    kinds = ["chat", *(kind for kind in held.texts(files, "held") if kind != "chat")]
    asked = held.prompts(model, files, count, length, 0)
    return [{"file": kinds[number % len(kinds)], "ids": ids} for number, ids in enumerate(asked)]


def prompts(tokenizer: Tokenizer, count: int, length: int) -> list[dict]:
    """Returns ``count`` held-out files, each the ``length`` tokens before its middle: {"file", "ids"}."""
    root = Path(sysconfig.get_paths()["stdlib"])
    chosen = []
    for path in filter(corpus.is_held_out, corpus.files()):
        ids = tokenizer.encode(corpus.read(path)).ids
        if len(ids) >= 2 * length:
            middle = len(ids) // 2
            chosen.append({"file": str(path.relative_to(root)), "ids": ids[middle - length : middle]})
    if len(chosen) < count:
        raise ValueError(f"only {len(chosen)} held-out files have {2 * length} tokens, {count} were asked for")
    return chosen[:count]


def summary(counters: dict, outputs: list[list[int]], reference: list[list[int]]) -> dict:
    """Returns the counters of one run and the figures derived from them; ``reference``: tokens without speculation."""
    equal = sum(a == b for a, b in zip(outputs, reference, strict=True))
    result: dict = {**counters, "requests": len(outputs), "requests_equal_to_no_speculation": equal}
    return result | ({"acceptance_length": acceptance_length([counters])} if counters else {})


def acceptance_length(counters: Sequence[Mapping[str, int]]) -> float:
    """Returns the tokens that a step with drafts emits, of groups of prompts."""
    accepted, drafts = (sum(each[name] for each in counters) for name in ("accepted_tokens", "drafts"))
    return round(1 + accepted / drafts, 4)


def acceptance_interval(groups: Sequence[Mapping[str, int]]) -> list[float]:
    """Returns the 95 % interval of the acceptance length, of groups drawn with repetition."""
    draw = random.Random(0)
    found = sorted(acceptance_length(draw.choices(groups, k=len(groups))) for _ in range(DRAWN))
    return [found[int(0.025 * DRAWN)], found[int(0.975 * DRAWN)]]


def generate(job: dict, prompts: list[dict], by_kind: bool) -> dict:
    """Runs stock vLLM in a process of its own, one kind of text after the other, ``GROUP`` prompts at a time.

    Returns:
        "outputs": token ids per request; "groups": speculation counters of each group, by kind of text, if any.
    """
    kinds: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        kinds.setdefault(prompt["file"] if by_kind else "", []).append(number)
    outputs: list[list[int]] = [[]] * len(prompts)
    groups: dict[str, list[dict]] = {kind: [] for kind in kinds}
    with closing(LiveEngine(job, True, _TIMEOUT)) as engine:
        for kind, every in kinds.items():
            for numbers in (every[start : start + GROUP] for start in range(0, len(every), GROUP)):
                answer = engine.batch([prompts[number]["ids"] for number in numbers], job["output_tokens"])
                for number, tokens in zip(numbers, answer["tokens"], strict=True):
                    outputs[number] = tokens
                if found := answer["counters"].get("speculation", {}):
                    groups[kind].append(found)
    return {"outputs": outputs, "groups": {kind: found for kind, found in groups.items() if found}}


def portable(config: dict | None) -> dict | None:
    """Returns ``config`` without the path of this checkout."""
    if config is None or "model" not in config:
        return config
    return {**config, "model": Path(config["model"]).name}


@app.callback()
def named() -> None:
    """Makes ``all`` a command with a name, which recorded commands give."""


@app.command("all")
def run_all(
    count: Annotated[int, typer.Option(help="Prompts.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens per prompt.")] = 192,
    max_tokens: Annotated[int, typer.Option(help="New tokens per request.")] = 128,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    only: Annotated[list[str] | None, typer.Option(help="Methods to run in addition to none; default: all.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target, eagle3, and draft or dense.")] = MODELS,
    output: Annotated[Path, typer.Option(help="JSON to write.")] = RESULT,
) -> None:
    """Measure every method and write the table."""
    origin = provenance()
    copies = CACHE if is_toy(models / TARGET) else models
    table = methods(models, copies)
    unknown = set(only or ()) - table.keys()
    if unknown:
        raise typer.BadParameter(f"unknown methods {sorted(unknown)}; there are {', '.join(table)}")
    for name, bits in COPIES.items():
        if any(method.startswith(name) for method in only or table):
            rounded_copy(models / TARGET, copies / name, bits)
    toy = is_toy(models / TARGET)
    asked = held_out(models / TARGET, count, length)
    options = {"skip_tokenizer_init": True, "enforce_eager": True, "enable_prefix_caching": False, "dtype": dtype}
    options |= {"disable_log_stats": False, "max_model_len": 512, "max_num_batched_tokens": 2048}
    options |= {"max_num_seqs": GROUP, "gpu_memory_utilization": 0.2}
    job: dict[str, Any] = {"model": str(models / TARGET), "spac": None, "seed": 0, "output_tokens": max_tokens}
    job |= {"options": options}
    reference: list[list[int]] | None = None
    results: dict[str, dict[str, Any]] = {}
    for method in [name for name in table if not only or name == "none" or name in only]:
        answer = generate(job | {"speculative": table[method]}, asked, not toy)
        reference = reference or answer["outputs"]
        results[method] = {"config": portable(table[method])}
        groups = [each for kind in answer["groups"].values() for each in kind]
        counters: Counter[str] = Counter()
        for each in groups:
            counters.update(each)
        results[method] |= summary(dict(counters), answer["outputs"], reference)
        if groups:
            results[method]["acceptance_interval"] = acceptance_interval(groups)
        if groups and not toy:
            by_kind = {kind: acceptance_length(each) for kind, each in answer["groups"].items()}
            results[method]["acceptance_by_kind"] = by_kind
        equal = f"{results[method]['requests_equal_to_no_speculation']}/{count} requests equal"
        typer.echo(f"{method:10} acceptance length {results[method].get('acceptance_length', '-')}  {equal}")
    record = {
        "model": "toy model (trained from scratch for this repository; not a measurement of any real model)"
        if toy
        else models.name,
        "provenance": origin,
        "dtype": dtype,
        "decoding": "greedy",
        "new_tokens": max_tokens,
        "prompt_tokens": length,
        "prompt_files": [prompt["file"] for prompt in asked],
        "methods": results,
    }
    write_result(output, record)


if __name__ == "__main__":
    app()
