"""Child processes that answer lines of JSON, and that are ended with everything they started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_LOG_LINES = 15


class LiveProcessError(RuntimeError):
    """A process did not start, ended, or did not answer; with the end of its log."""


class LiveProcess:
    """A process that answers each line of its input with a line of JSON, and one line when it is ready.

    Args:
        command: what is run, given a folder for its files; its output other than answers goes to a log there.
        timeout: time limit in seconds for its start and for each answer.
        environment: variables in addition to this process's.
        before: called in the process before the command, e.g. to limit its memory.

    Attributes:
        ready: its first line.

    Raises:
        LiveProcessError: it did not start.
    """

    def __init__(
        self,
        command: Callable[[Path], Sequence[str]],
        timeout: float,
        environment: Mapping[str, str],
        before: Callable[[], None] | None = None,
    ) -> None:
        self._timeout = timeout
        self._scratch = tempfile.TemporaryDirectory(prefix="spac-live-")
        folder = Path(self._scratch.name)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._child = start(command(folder), environment, folder, before, **pipes)
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
            LiveProcessError: the process ended, or did not answer in time.
        """
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
        if not select.select([self._answers], [], [], self._timeout)[0]:
            raise LiveProcessError(f"no answer after {self._timeout:.0f} s")
        line = self._answers.readline()
        if not line:
            raise LiveProcessError(ending(self._child.wait(), Path(self._scratch.name)))
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


def end(child: subprocess.Popen) -> None:
    """Kills the child's process group, with any processes that a stopped child has left."""
    with contextlib.suppress(ProcessLookupError):  # all of them have gone, as they should
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
