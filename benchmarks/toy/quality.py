"""Measures the cost of budgets on the toy model: calibrates, sweeps budgets with EAGLE-3 drafts, keeps the results.

    python benchmarks/toy/quality.py

All numbers are of the toy model and not representative of a real one. An interrupted run continues where it stopped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from texts import chosen

ROOT = Path(__file__).resolve().parents[2]
MODELS = Path("benchmarks") / "toy" / "models"
WORK = Path(".cache") / "toy" / "quality"
RESULTS = ROOT / "benchmarks" / "results"
BUDGETS = "8,16,24,32,40,42,44,48,56"
MASSES = "0.9,0.95,0.98"  # of the routing weights of selected experts
DRAFTS = 8
TITLE = f"toy model (6 layers of 64 experts, top-8), {DRAFTS} EAGLE-3 draft tokens: not a measurement of a real model"


def vllm_spac(*arguments: str | Path) -> None:
    """Runs one command from the checkout's root, so that the paths in its provenance are relative to it."""
    subprocess.run([Path(sys.executable).parent / "vllm-spac", *arguments], cwd=ROOT, check=True)


def main() -> None:
    work = ROOT / WORK
    work.mkdir(parents=True, exist_ok=True)
    for name, training, count in (("calibration", True, 80), ("held-out", False, 20)):
        lines = [json.dumps(text) + "\n" for text in chosen(training, count, 192)]
        (work / f"{name}.jsonl").write_text("".join(lines))
    calibration, window = WORK / "toy.calibration.safetensors", str(1 + DRAFTS)
    common = (MODELS / "target", "--window", window, "--slots", "50%", "--disk-dir", WORK / "packed")
    if not (ROOT / calibration).exists():
        vllm_spac("calibrate", *common, "--prompts", WORK / "calibration.jsonl", "--output", calibration)
    drafts = {"method": "eagle3", "model": str(MODELS / "eagle3"), "num_speculative_tokens": DRAFTS}
    options = ("--budgets", BUDGETS, "--mass", MASSES, "--calibration", calibration, "--title", TITLE)
    generation = ("--speculative-config", json.dumps(drafts), "--new-tokens", "48")
    texts = ("--prompts", WORK / "held-out.jsonl", "--output", WORK)
    vllm_spac("quality", *common, *texts, *options, *generation)
    shutil.copyfile(work / "quality.json", RESULTS / "toy_quality.json")
    for name in ("pareto", "figures"):
        shutil.copyfile(work / f"{name}.png", RESULTS / f"toy_quality_{name}.png")


if __name__ == "__main__":
    main()
