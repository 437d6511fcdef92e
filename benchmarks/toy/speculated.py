"""Measures what speculated execution (``--spac-speculate``) costs in quality on both toy models, beside its bytes.

    python benchmarks/toy/speculated.py

``linear`` is trained on files that are not reported on. All numbers are of the toy models and not representative of a
real one. None is a time.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import predictors
from common import RESULTS, ROOT, write_result

MODES = "restricted,predicted"
SLOTS = ("25%", "50%")
TEXTS, NEW_TOKENS = 8, 64  # generated after, tokens after each


def measured(name: str, model: str) -> dict[str, Any]:
    """Trains and measures on one model; returns points and generations of ``vllm-spac quality`` by share of slots."""
    work = predictors.WORK / "speculated" / name
    (ROOT / work).mkdir(parents=True, exist_ok=True)
    file = work / "linear.predictors.safetensors"
    target = f"{model}/target"
    predictors.train(target, predictors.WORK / "training.jsonl", file, 1, "linear")
    found = {}
    for slots in SLOTS:
        output = work / slots.rstrip("%")
        shutil.rmtree(ROOT / output, ignore_errors=True)  # an earlier run would be continued
        predictors.vllm_spac(
            *("quality", target, "--prompts", predictors.WORK / "held-out.jsonl", "--predictor", file),
            *("--speculate", MODES, "--slots", slots, "--window", "1", "--output", output),
            *("--generate", str(TEXTS), "--new-tokens", str(NEW_TOKENS)),
            *predictors.engine(),
        )
        content = json.loads((ROOT / output / "quality.json").read_text())
        generations = [{k: v for k, v in one.items() if k != "tokens_per_second"} for one in content["generation"]]
        found[slots] = {"points": content["points"], "generation": generations}
    return found


def main() -> None:
    """Write the texts, measure on both models, and write the result."""
    result = predictors.begun() | {"new_tokens": NEW_TOKENS}
    result["models"] = {name: measured(name, model) for name, model in predictors.MODELS.items()}
    write_result(RESULTS / "toy_speculated.json", result)


if __name__ == "__main__":
    main()
