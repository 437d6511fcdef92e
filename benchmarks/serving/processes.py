"""Runs engines in their own processes: one that runs a job and ends, or one that stays and takes turns."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).with_name("engine.py")
_LOG_LINES = 15


class EngineError(RuntimeError):
    """An engine did not start, ended, or did not answer; with the end of its log."""


def run_engine(job: dict, is_stock: bool, timeout: float) -> tuple[dict | None, str | None]:
    """(result, None) of one engine that runs ``job`` and ends, or (None, why it failed)."""
    with tempfile.TemporaryDirectory(prefix="spac-serving-") as scratch:
        folder, result = Path(scratch), Path(scratch, "result.json")
        child = _start(_engine(job, folder, str(result)), _environment(job, is_stock), folder)
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            return None, f"no end after {timeout:.0f} s"
        finally:
            _end(child)
        if code or not result.exists():
            return None, _ending(code, folder)
        return json.loads(result.read_text()), None


class LiveProcess:
    """A process that answers each line of its input with a line of JSON, and one line when it is ready.

    Args:
        command: what is run; its output other than answers goes to a log.
        timeout: time limit in seconds for its start and for each answer.
        environment: variables in addition to this process's.
        before: called in the process before the command, e.g. to limit its memory.

    Attributes:
        ready: its first line.

    Raises:
        EngineError: it did not start.
    """

    def __init__(
        self,
        command: Callable[[Path], Sequence[str]],
        timeout: float,
        environment: Mapping[str, str],
        before: Callable[[], None] | None = None,
    ) -> None:
        self._timeout = timeout
        self._scratch = tempfile.TemporaryDirectory(prefix="spac-serving-")
        folder = Path(self._scratch.name)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._child = _start(command(folder), environment, folder, before, **pipes)
        assert self._child.stdin is not None and self._child.stdout is not None, "both are pipes"
        self._asked, self._answers = self._child.stdin, self._child.stdout
        try:
            self.ready = self._answer()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, line: dict) -> Any:
        """Returns the answer to a line.

        Raises:
            EngineError: the process ended, or did not answer in time.
        """
        with contextlib.suppress(BrokenPipeError):  # it has ended; ``_answer`` raises with its log
            self._asked.write(json.dumps(line) + "\n")
            self._asked.flush()
        return self._answer()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._asked.close()  # the end of its input is its end
            self._child.wait(30)
        _end(self._child)
        self._answers.close()
        self._scratch.cleanup()

    def _answer(self) -> Any:
        if not select.select([self._answers], [], [], self._timeout)[0]:
            raise EngineError(f"no answer after {self._timeout:.0f} s")
        line = self._answers.readline()
        if not line:
            raise EngineError(_ending(self._child.wait(), Path(self._scratch.name)))
        return json.loads(line)


class LiveEngine(LiveProcess):
    """An engine that generates for one prompt or one batch per call and waits in between.

    Args:
        timeout: time limit in seconds for its start and for each turn.

    Raises:
        EngineError: it did not start.
    """

    def __init__(self, job: dict, is_stock: bool, timeout: float) -> None:
        super().__init__(lambda folder: _engine(job, folder), timeout, _environment(job, is_stock))

    def turn(self, prompt: list[int], tokens: int, without: Sequence[str] = (), **more: Any) -> dict:
        """Runs one prompt; returns the result of ``engine.measure`` and the plugin's ``choices``.

        Args:
            without: what is paused meanwhile, see ``engine.paused``.
            more: ``budget``, ``temperature`` and ``seed`` of this turn.

        Raises:
            EngineError: the engine ended, or did not answer in time.
        """
        return self.batch([prompt], tokens, without, **more)

    def batch(self, prompts: Sequence[list[int]], tokens: int, without: Sequence[str] = (), **more: Any) -> dict:
        """Runs prompts together; everything else is as in ``turn``."""
        return self.ask({"prompts": list(prompts), "tokens": tokens, "without": list(without), **more})

    def score(self, ids: list[int], first: int) -> list[float]:
        """Returns the log-probabilities of ``ids[first:]``; raises as ``turn`` does."""
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


def _start(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    before: Callable[[], None] | None = None,
    **pipes: int,
) -> subprocess.Popen[str]:
    """Starts a command in a process group of its own; output without a pipe goes to ``folder / "log"``."""
    with open(folder / "log", "w") as log:
        streams: dict[str, Any] = {"stdout": log, "stderr": log} | pipes
        env = {**os.environ, **environment}
        return subprocess.Popen(command, env=env, start_new_session=True, text=True, preexec_fn=before, **streams)


def _ending(code: int, folder: Path) -> str:
    tail = (folder / "log").read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return f"exit code {code}: " + "\n".join(tail)


def _end(child: subprocess.Popen) -> None:
    """Kills the child's process group, with any processes that a stopped engine has left."""
    with contextlib.suppress(ProcessLookupError):  # all of them have gone, as they should
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
