"""Run several engines of one model in a process of their own: `compare.py JSON` prints their runs as JSON.

vLLM's CPU build survives about two engines with speculative decoding in one process, so each method of
speculation is compared in its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import engines


def compare(model: Path, configurations: list[dict | None], **options) -> list[engines.Run]:
    """One run per entry of ``configurations`` (None is stock vLLM) in a fresh process."""
    request = {"model": str(model), "configurations": configurations, "options": options}
    command = [sys.executable, __file__, json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return [engines.Run(**run) for run in json.loads(done.stdout.strip().splitlines()[-1])]


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    runs = [asdict(engines.generate(asked["model"], spac, **asked["options"])) for spac in asked["configurations"]]
    print(json.dumps(runs))
