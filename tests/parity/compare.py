"""Run each engine in a process of its own: `compare.py JSON` prints one run as JSON.

vLLM's CPU build does not survive a second engine with speculative decoding in one process (numba).
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import engines

TOY = Path(__file__).parents[2] / "benchmarks" / "toy" / "models"
METHODS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "eagle3": {"method": "eagle3", "model": str(TOY / "eagle3"), "num_speculative_tokens": 4},
    "draft_model": {"method": "draft_model", "model": str(TOY / "draft"), "num_speculative_tokens": 4},
}


def compare(model: Path, configurations: list[dict | None], **options) -> list[engines.Run]:
    """One run per entry of ``configurations`` (None is stock vLLM), each in a fresh process."""
    commands = [command(model, spac, **options) for spac in configurations]
    return [answer(subprocess.run(line, capture_output=True, text=True, timeout=1000)) for line in commands]


def command(model: Path, spac: dict | None, **options) -> list[str]:
    """What runs one engine and prints what it said."""
    return [sys.executable, __file__, json.dumps({"model": str(model), "spac": spac, "options": options})]


def answer(done: subprocess.CompletedProcess) -> engines.Run:
    """What a ``command`` that is over printed."""
    assert done.returncode == 0, done.stderr[-4000:]
    return engines.Run(**json.loads(done.stdout.strip().splitlines()[-1]))


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(asdict(engines.generate(asked["model"], asked["spac"], **asked["options"]))))
