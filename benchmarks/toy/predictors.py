"""Trains predictors of experts on models and measures their recall on texts that training never saw.

    python benchmarks/toy/predictors.py
    python benchmarks/toy/predictors.py .cache/real --name real --only gate,quasi_hidden

Microseconds per layer are of one row, on this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from texts import TARGET, chosen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import RESULTS, ROOT, is_toy, provenance, write_result

MODELS = {"flat": "benchmarks/toy/models", "local": "benchmarks/toy/models/local"}  # with target
WORK = Path(".cache") / "toy" / "predictors"  # from the checkout's root
TEXTS = {"training": (True, 120, 512), "held-out": (False, 10, 384)}  # whether training saw them, files, tokens of each
REACH, SLOTS = 3, 25


def vllm_spac(*arguments: str | Path) -> None:
    """Runs one command from the checkout's root, so that it needs no absolute path."""
    subprocess.run([Path(sys.executable).parent / "vllm-spac", *map(str, arguments)], cwd=ROOT, check=True)


def write_texts(kind: str, folder: Path, model: Path = TARGET, count: int = 0) -> Path:
    """Writes the texts of ``kind``, a key of ``TEXTS``, into ``folder``; ``count``: another number of them."""
    path, (training, usual, length) = folder / f"{kind}.jsonl", TEXTS[kind]
    path.write_text("".join(json.dumps(text) + "\n" for text in chosen(training, count or usual, length, model)))
    return path


# Options of the engines that read texts.
ENGINE = ("--engine", '{"gpu_memory_utilization": 0.2}', "--disk-dir", WORK / "packed", "--limit-tokens", "100000")


def train(model: str | Path, texts: Path, output: Path, reach: int, only: str = "") -> None:
    """Trains predictors of ``model`` on ``texts``: those called ``only``, separated by commas, or all."""
    some = ("--only", only) if only else ()
    options = ("--prompts", texts, "--output", output, "--reach", str(reach), *some, *ENGINE)
    vllm_spac("predictors", "train", model, *options)


def measured(name: str, model: str, reach: int = REACH, only: str = "") -> dict[str, Any]:
    """Trains and measures on one model; returns the results by predictor."""
    file, output = WORK / f"{name}.predictors.safetensors", WORK / f"{name}.json"
    target = f"{model}/target"
    train(target, WORK / "training.jsonl", file, reach, only)
    texts = ("--prompts", WORK / "held-out.jsonl", "--predictor", file, "--slots", f"{SLOTS}%")
    vllm_spac("predictors", "measure", target, *texts, "--json", output, *ENGINE)
    return json.loads((ROOT / output).read_text())


def begun(model: Path = TARGET, training: int = 0) -> dict[str, Any]:
    """Writes the texts into ``WORK``; returns a result's beginning, which says what they are."""
    (ROOT / WORK).mkdir(parents=True, exist_ok=True)
    counts = {kind: count for kind, (_, count, _) in TEXTS.items()} | ({"training": training} if training else {})
    for kind, count in counts.items():
        write_texts(kind, ROOT / WORK, model, count)
    texts = {kind: {"files": count, "tokens": count * TEXTS[kind][2]} for kind, count in counts.items()}
    return {"provenance": provenance(), "toy_model": is_toy(model), "texts": texts}


def main(
    model: Annotated[Path | None, typer.Argument(help="Folder of target.", show_default="both toys")] = None,
    name: Annotated[str, typer.Option(help="Of the model; the result is NAME_predictors.json.")] = "toy",
    only: Annotated[str, typer.Option(help="Predictors, separated by commas; empty: all.")] = "",
    reach: Annotated[int, typer.Option(min=1, help="Layers that predictors look ahead.")] = REACH,
    training: Annotated[int, typer.Option(help="Texts to train on.")] = TEXTS["training"][1],
) -> None:
    """Write the texts, measure on each model, and write the result."""
    models = {name: str(model)} if model else MODELS
    result = begun(model / "target" if model else TARGET, training) | {"slots_percent": SLOTS}
    result["models"] = {one: measured(one, folder, reach, only) for one, folder in models.items()}
    write_result(RESULTS / f"{name}_predictors.json", result)


if __name__ == "__main__":
    typer.run(main)
