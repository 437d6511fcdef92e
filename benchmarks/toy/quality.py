"""Measures the cost of budgets: calibrates, sweeps budgets, with an EAGLE-3 head also generates, keeps the results.

    python benchmarks/toy/quality.py
    python benchmarks/toy/quality.py .cache/real --name real --window 6 --budgets 16,24,32

Windows are of as many tokens as a verify step has rows. An interrupted run continues where it stopped.
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
RANKINGS = "router,static,coactivation,selected,resident"
COVERAGES = "substitution,truncation"


def vllm_spac(*arguments: str | Path) -> None:
    """Runs one command from the checkout's root, so that the paths in its provenance are relative to it."""
    subprocess.run([Path(sys.executable).parent / "vllm-spac", *arguments], cwd=ROOT, check=True)


def main(
    models: Annotated[
        Path, typer.Argument(help="Folder of target and eagle3.", show_default="benchmarks/toy/models")
    ] = MODELS,
    name: Annotated[str, typer.Option(help="Of the results: NAME_quality.json.")] = "toy",
    window: Annotated[int, typer.Option(help="Rows of a verify step; generated is with one draft less.")] = 9,
    budgets: Annotated[str, typer.Option(help="Experts per layer.")] = BUDGETS,
    masses: Annotated[str, typer.Option("--mass", help="Shares of the mass; empty: none.")] = MASSES,
    rankings: Annotated[str, typer.Option(help="Of the experts.")] = RANKINGS,
    coverages: Annotated[str, typer.Option(help="What unranked experts are replaced by.")] = COVERAGES,
    slots: Annotated[str, typer.Option(help="Experts in fast memory.")] = "50%",
    calibrated: Annotated[str, typer.Option(help="Name of a run whose calibration this one takes.")] = "",
    generate: Annotated[bool, typer.Option(help="Also generate, with the EAGLE-3 head.")] = True,
) -> None:
    """Calibrate, sweep budgets, and copy the results."""
    models, cache = Path(os.path.relpath(models, ROOT)), WORK / name
    work, target = ROOT / cache, models / "target"
    work.mkdir(parents=True, exist_ok=True)
    for kind, training, count in (("calibration", True, 80), ("held-out", False, 20)):
        lines = [json.dumps(text) + "\n" for text in chosen(training, count, 192, ROOT / target)]
        (work / f"{kind}.jsonl").write_text("".join(lines))
    calibration = WORK / (calibrated or name) / "toy.calibration.safetensors"
    common = (target, "--window", str(window), "--slots", slots, "--disk-dir", cache / "packed")
    if not (ROOT / calibration).exists():
        vllm_spac("quality", "calibrate", *common, "--prompts", cache / "calibration.jsonl", "--output", calibration)
    options = ["--budgets", budgets, "--calibration", calibration, *(("--mass", masses) if masses else ())]
    options += ["--rankings", rankings, "--coverages", coverages]
    if generate:
        drafts = {"method": "eagle3", "model": str(models / "eagle3"), "num_speculative_tokens": window - 1}
        options += ["--speculative-config", json.dumps(drafts), "--new-tokens", "48"]
    vllm_spac("quality", "sweep", *common, "--prompts", cache / "held-out.jsonl", "--output", cache, *options)
    shutil.copyfile(work / "quality.json", RESULTS / f"{name}_quality.json")


if __name__ == "__main__":
    typer.run(main)
