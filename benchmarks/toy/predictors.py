"""Trains predictors of experts on both toy models and measures their recall on files that training never saw.

    python benchmarks/toy/predictors.py

The drafter whose states ``draft_gate`` maps is each model's EAGLE-3 head. All numbers are of the toy models and not
representative of a real one; microseconds per layer are of one row, on this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from texts import chosen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import RESULTS, ROOT, provenance, write_result

MODELS = {"flat": "benchmarks/toy/models", "local": "benchmarks/toy/models/local"}  # with target and eagle3
WORK = Path(".cache") / "toy" / "predictors"  # from the checkout's root
TEXTS = {"training": (True, 120, 512), "held-out": (False, 10, 384)}  # whether training saw them, files, tokens of each
REACH, SLOTS = 3, 25
DRAFTS = 5


def vllm_spac(*arguments: str | Path) -> None:
    """Runs one command from the checkout's root, so that it needs no absolute path."""
    subprocess.run([Path(sys.executable).parent / "vllm-spac", *map(str, arguments)], cwd=ROOT, check=True)


def write_texts(kind: str, folder: Path) -> Path:
    """Writes the texts of ``kind``, a key of ``TEXTS``, into ``folder``."""
    path, (training, count, length) = folder / f"{kind}.jsonl", TEXTS[kind]
    path.write_text("".join(json.dumps(text) + "\n" for text in chosen(training, count, length)))
    return path


def engine(head: str = "") -> tuple[str | Path, ...]:
    """Returns the options of the engines that read texts, with the EAGLE-3 ``head`` as drafter, if any."""
    options: dict[str, Any] = {"gpu_memory_utilization": 0.2}
    if head:
        options["speculative_config"] = {"method": "eagle3", "model": head, "num_speculative_tokens": DRAFTS}
    return "--engine", json.dumps(options), "--disk-dir", WORK / "packed", "--limit-tokens", "100000"


def train(model: str | Path, texts: Path, output: Path, reach: int, only: str = "", head: str = "") -> None:
    """Trains predictors of ``model`` on ``texts``: those called ``only``, separated by commas, or all."""
    some = ("--only", only) if only else ()
    options = ("--prompts", texts, "--output", output, "--reach", str(reach), *some, *engine(head))
    vllm_spac("train-predictor", model, *options)


def measured(name: str, model: str) -> dict[str, Any]:
    """Trains and measures on one model; returns the results by predictor."""
    file, output = WORK / f"{name}.predictors.safetensors", WORK / f"{name}.json"
    target, head = f"{model}/target", f"{model}/eagle3"
    train(target, WORK / "training.jsonl", file, REACH, head=head)
    texts = ("--prompts", WORK / "held-out.jsonl", "--predictor", file, "--slots", f"{SLOTS}%")
    vllm_spac("predictors", target, *texts, "--json", output, *engine(head))
    return json.loads((ROOT / output).read_text())


def begun() -> dict[str, Any]:
    """Writes the texts into ``WORK``; returns a result's beginning, which says what they are."""
    (ROOT / WORK).mkdir(parents=True, exist_ok=True)
    for kind in TEXTS:
        write_texts(kind, ROOT / WORK)
    texts = {kind: {"files": count, "tokens": count * length} for kind, (_, count, length) in TEXTS.items()}
    return {"provenance": provenance(), "toy_model": True, "texts": texts}


def main() -> None:
    """Write the texts, measure on both models, and write the result."""
    result = begun() | {"slots_percent": SLOTS}
    result["models"] = {name: measured(name, model) for name, model in MODELS.items()}
    write_result(RESULTS / "toy_predictors.json", result)


if __name__ == "__main__":
    main()
