"""Measures the cost of budgets on the toy model: calibrates, sweeps budgets with EAGLE-3 drafts, keeps the results.

    python benchmarks/toy/quality.py
    python benchmarks/toy/quality.py benchmarks/toy/models/local --name toy_local

All numbers are of the toy model and not representative of a real one. An interrupted run continues where it stopped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from texts import chosen

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "benchmarks" / "toy" / "models"
WORK = Path(".cache") / "toy" / "quality"
RESULTS = ROOT / "benchmarks" / "results"
BUDGETS = "8,16,24,32,40,42,44,48,56"
MASSES = "0.9,0.95,0.98"  # of the routing weights of selected experts
DRAFTS = 8
TITLE = f"toy model (6 layers of 64 experts, top-8), {DRAFTS} EAGLE-3 draft tokens: not a measurement of a real model"


def vllm_spac(*arguments: str | Path) -> None:
    """Runs one command from the checkout's root, so that the paths in its provenance are relative to it."""
    subprocess.run([Path(sys.executable).parent / "vllm-spac", *arguments], cwd=ROOT, check=True)


def main(
    models: Annotated[
        Path, typer.Argument(help="Folder of target and eagle3.", show_default="benchmarks/toy/models")
    ] = MODELS,
    name: Annotated[str, typer.Option(help="Of the results: NAME_quality.json.")] = "toy",
) -> None:
    """Calibrate, sweep budgets, and copy the results."""
    models, cache = Path(os.path.relpath(models, ROOT)), WORK / name
    work = ROOT / cache
    work.mkdir(parents=True, exist_ok=True)
    for kind, training, count in (("calibration", True, 80), ("held-out", False, 20)):
        lines = [json.dumps(text) + "\n" for text in chosen(training, count, 192)]
        (work / f"{kind}.jsonl").write_text("".join(lines))
    calibration, window = cache / "toy.calibration.safetensors", str(1 + DRAFTS)
    common = (models / "target", "--window", window, "--slots", "50%", "--disk-dir", cache / "packed")
    if not (ROOT / calibration).exists():
        vllm_spac("calibrate", *common, "--prompts", cache / "calibration.jsonl", "--output", calibration)
    drafts = {"method": "eagle3", "model": str(models / "eagle3"), "num_speculative_tokens": DRAFTS}
    options = ("--budgets", BUDGETS, "--mass", MASSES, "--calibration", calibration, "--title", TITLE)
    generation = ("--speculative-config", json.dumps(drafts), "--new-tokens", "48")
    texts = ("--prompts", cache / "held-out.jsonl", "--output", cache)
    vllm_spac("quality", *common, *texts, *options, *generation)
    shutil.copyfile(work / "quality.json", RESULTS / f"{name}_quality.json")


if __name__ == "__main__":
    typer.run(main)
