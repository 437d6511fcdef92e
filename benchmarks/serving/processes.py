"""Runs engines in their own processes: one that runs a job and ends, or one that stays and takes turns."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vllm_spac.tools.tuning.measurer import LiveProcess, end, ending, start
from vllm_spac.tools.tuning.measurer import MeasuringError as EngineError

__all__ = ["EngineError", "LiveEngine", "LiveProcess", "run_engine"]

ENGINE = Path(__file__).with_name("engine.py")


def run_engine(job: dict, is_stock: bool, timeout: float) -> tuple[dict | None, str | None]:
    """(result, None) of one engine that runs ``job`` and ends, or (None, why it failed)."""
    with tempfile.TemporaryDirectory(prefix="spac-serving-") as scratch:
        folder, result = Path(scratch), Path(scratch, "result.json")
        child = start(_engine(job, folder, str(result)), _environment(job, is_stock), folder)
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            return None, f"no end after {timeout:.0f} s"
        finally:
            end(child)
        if code or not result.exists():
            return None, ending(code, folder)
        return json.loads(result.read_text()), None


class LiveEngine(LiveProcess):
    """An engine that generates for one prompt or one batch per call and waits in between.

    Args:
        timeout: time limit in seconds for its start and for each turn.

    Raises:
        EngineError: it did not start.
    """

    def __init__(self, job: dict, is_stock: bool, timeout: float) -> None:
        super().__init__(lambda folder: _engine(job, folder), timeout, _environment(job, is_stock))

    def turn(self, prompt: list[int], tokens: int) -> dict:
        """Runs one prompt; returns the result of ``engine.measure`` and the plugin's ``choices``.

        Raises:
            EngineError: the engine ended, or did not answer in time.
        """
        return self.batch([prompt], tokens)

    def batch(self, prompts: Sequence[list[int]], tokens: int) -> dict:
        """Runs prompts together; everything else is as in ``turn``."""
        return self.ask({"prompts": list(prompts), "tokens": tokens})

    def score(self, ids: list[int], first: int) -> dict[str, list]:
        """Returns the result of ``engine.scores``; raises as ``turn`` does."""
        return self.ask({"score": ids, "first": first})


def _engine(job: dict, folder: Path, *arguments: str) -> list[str]:
    """Returns the command of ``engine.py`` with further arguments."""
    (folder / "job.json").write_text(json.dumps(job))
    return [sys.executable, str(ENGINE), str(folder / "job.json"), *arguments]


def _environment(job: dict, is_stock: bool) -> dict[str, str]:
    return {
        "VLLM_PLUGINS": "" if is_stock else "spac",  # stock means that no line of the plugin is loaded
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **job.get("environment", {}),
    }
