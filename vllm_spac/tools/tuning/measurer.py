"""Measures variants, each in an engine of its own process: its memory is free afterwards.

Processes answer lines of JSON, and end with everything they started.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_spac.decisions.comparison import ReferenceAnswer
from vllm_spac.system.host_memory import available_host_bytes
from vllm_spac.tools.tuning.variants import Variant


class MeasuringError(RuntimeError):
    """A process did not start, ended, or did not answer; the message ends with the end of its log."""


@dataclass(frozen=True)
class Answer:
    """The greedy answer to one prompt, alone in the engine."""

    ids: Sequence[int]
    seconds: float  # from the request to the last token
    first_token: float  # to the first

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return len(self.ids) / self.seconds


_LOG_LINES = 15
_SAYING = 2.0  # seconds that a process has for the stacks of its threads


class LiveProcess:
    """A process that answers each line of its input with a line of JSON, and one line when it is ready.

    Args:
        command: what is run, given a folder for its files; its output other than answers goes to a log there.
        timeout: time limit in seconds for its start and for each answer; may be changed between two answers.
        environment: variables in addition to this process's.
        before: called in the process before the command, e.g. to limit its memory.

    Raises:
        MeasuringError: it did not start.
    """

    def __init__(
        self,
        command: Callable[[Path], Sequence[str]],
        timeout: float,
        environment: Mapping[str, str],
        before: Callable[[], None] | None = None,
    ) -> None:
        self.timeout = timeout
        self._scratch = tempfile.TemporaryDirectory(prefix="spac-live-")
        folder = Path(self._scratch.name)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._child = start(command(folder), environment, folder, before, **pipes)
        assert self._child.stdin is not None and self._child.stdout is not None, "both are pipes"
        self._asked, self._answers = self._child.stdin, self._child.stdout
        try:
            self.ready = self._answer()
        except BaseException:
            end(self._child)  # while it starts it does not see the end of its input
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, line: dict) -> Any:
        """Returns the answer to a line; ``MeasuringError``: the process ended, or did not answer in time."""
        with contextlib.suppress(BrokenPipeError):  # it has ended; ``_answer`` raises with its log
            self._asked.write(json.dumps(line) + "\n")
            self._asked.flush()
        return self._answer()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._asked.close()  # the end of its input is its end
            self._child.wait(30)
        end(self._child)
        self._answers.close()
        self._scratch.cleanup()

    def _answer(self) -> Any:
        if not select.select([self._answers], [], [], self.timeout)[0]:
            where = stacks(self._child, Path(self._scratch.name))
            end(self._child)  # its answers would no longer be to what is asked
            raise MeasuringError(f"no answer after {self.timeout:.0f} s; its threads, the first one last:\n{where}")
        line = self._answers.readline()
        if not line:
            raise MeasuringError(ending(self._child.wait(), Path(self._scratch.name)))
        return json.loads(line)


def start(
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


def ending(code: int, folder: Path) -> str:
    """Returns the exit code and the last lines of ``folder / "log"``."""
    tail = (folder / "log").read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return f"exit code {code}: " + "\n".join(tail)


def stacks(child: subprocess.Popen, folder: Path) -> str:
    """Returns the stacks of a process that gives them on SIGUSR1 (``faulthandler``); of another one, its log's end."""
    log = folder / "log"
    before = log.stat().st_size
    child.send_signal(signal.SIGUSR1)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_SAYING)
    with open(log, errors="replace") as file:
        file.seek(before)
        return file.read() or ending(child.poll() or 0, folder)


def end(child: subprocess.Popen) -> None:
    """Kills the child's process group, with any processes that a stopped child has left."""
    with contextlib.suppress(ProcessLookupError):  # all of them have gone, as they should
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


class Engine(LiveProcess):
    """A running engine, ``measured_engine`` in a process of its own."""

    def __init__(self, job: dict, timeout: float) -> None:
        def command(folder: Path) -> Sequence[str]:
            (folder / "job.json").write_text(json.dumps(job))
            return [sys.executable, "-P", "-m", "vllm_spac.tools.tuning.measured_engine", str(folder / "job.json")]

        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
        if job["spac"] is None:
            environment["VLLM_PLUGINS"] = ""  # stock means that no line of the plugin is loaded
        super().__init__(command, timeout, environment)
        self.near_ties = self.ready["near_ties"]  # kernels may round a row differently beside others: not in float32
        self.on_cpu = self.ready["on_cpu"]  # steps with the same rows give the same bits, and engines fit together
        self.nbytes = self.ready["nbytes"]  # host memory of its processes
        self.resident = self.ready["resident"]  # every expert has a slot

    def answer(self, prompt: str | Sequence[int], tokens: int) -> Answer:
        """Generates ``tokens`` tokens; ``MeasuringError`` if the engine has ended."""
        return Answer(**self.ask({"prompt": prompt, "tokens": tokens, "explain": False}))

    def explain(self, prompt: str | Sequence[int], tokens: int) -> ReferenceAnswer:
        """Generates as ``answer`` does, with the second best token at each place."""
        return ReferenceAnswer.model_validate(self.ask({"prompt": prompt, "tokens": tokens, "explain": True}))


class Measurer:
    """Starts engines on this machine.

    Args:
        disk_dir: folder of the packed experts; None: the default.
        prompt_tokens: longer prompts are cut.
        timeout: seconds that a start, which may pack the experts, or an answer may take.
    """

    def __init__(
        self, model: str, disk_dir: Path | None, options: Mapping[str, Any], prompt_tokens: int, timeout: float = 3600.0
    ) -> None:
        self._model, self._disk_dir, self._options, self._most = model, disk_dir, dict(options), prompt_tokens
        self._timeout = timeout

    def start(self, variant: Variant) -> AbstractContextManager[Engine]:
        """Returns a context with an engine that is gone afterwards; ``MeasuringError`` if it does not start."""
        return contextlib.closing(Engine(self.job(variant), self._timeout))

    def job(self, variant: Variant) -> dict:
        """Returns what ``measured_engine`` is told."""
        spac: dict[str, Any] | None = None
        if variant.knobs is not None:
            spac = {**variant.knobs, "tuned": "off"}
            in_place = str(spac.get("plane")).startswith("pointers")
            if self._disk_dir is not None and spac.get("store", "disk") == "disk" and not in_place:
                spac["disk_dir"] = str(self._disk_dir)
        return {
            "model": self._model,
            "spac": spac,
            "drafts": None if variant.drafts is None else dict(variant.drafts),
            "options": self._options,
            "prompt_tokens": self._most,
        }

    def clock(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def room(self) -> int:
        """Bytes of host memory that are free."""
        return available_host_bytes()
