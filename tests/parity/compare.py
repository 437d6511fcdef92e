"""Runs each engine in a process of its own: `compare.py JSON` prints one run as JSON.

vLLM's CPU build does not survive a second engine with speculative decoding in one process (numba).
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import engines
import forked

TOY = Path(__file__).parents[2] / "benchmarks" / "toy" / "models"
METHODS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "eagle3": {"method": "eagle3", "model": str(TOY / "eagle3"), "num_speculative_tokens": 4},
    "draft_model": {"method": "draft_model", "model": str(TOY / "draft"), "num_speculative_tokens": 4},
}


@functools.cache
def copied(model: Path) -> str:
    """Another folder with the model's files: as a draft model, a copy, and not the model that drafts for itself."""
    folder = tempfile.mkdtemp(prefix="spac-copy-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(model, folder, copy_function=os.symlink, dirs_exist_ok=True)
    return folder


def compare(model: Path, configurations: list[dict | None], **options) -> list[engines.Run]:
    """One run per entry of ``configurations``, each in a process of its own. None is stock vLLM, which runs once."""

    def run(spac: dict | None) -> engines.Run:
        return engines.Run(**forked.answer(forked.run(program(model, spac, **options))))

    return [engines.stock(model, options, lambda: run(None)) if spac is None else run(spac) for spac in configurations]


def program(model: Path, spac: dict | None, **options) -> list[str]:
    """What runs one engine and prints what it said, as arguments of the interpreter."""
    return [__file__, json.dumps({"model": str(model), "spac": spac, "options": options})]


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(asdict(engines.run(asked["model"], asked["spac"], **asked["options"]))))
