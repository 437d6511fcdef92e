"""Python programs in processes of their own, forked from one that has imported vLLM.

``run`` does what ``subprocess.run`` of this interpreter does, without the seconds that importing vLLM takes. The first
call starts a server: an interpreter that imports ``PRELOADED``, builds nothing, and forks for each program. A lock that
another thread holds would stay locked in a child, so the server refuses to fork while it has more than one thread.

What a program reads from its environment while it imports vLLM was read by the server. A program whose environment
differs in more than ``READ_LATE`` gets a fresh interpreter. So does every program on a machine with an NVIDIA driver,
whose state may not survive a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import engines  # noqa: F401  sets what vLLM reads while it is imported

ENVIRONMENT = dict(os.environ)  # of every program, whatever a test changes in its own
PRELOADED = ("warm",)
READ_LATE = {"COLUMNS", "NO_COLOR", "VLLM_ALLOW_INSECURE_SERIALIZATION"}
FORKS = sys.platform == "linux" and not Path("/dev/nvidiactl").exists()
SHOWN = 4000  # characters of an output's end in an error


def run(
    program: Sequence[object], changes: Mapping[str, str] | None = None, timeout: float = 1000
) -> subprocess.CompletedProcess[str]:
    """What ``python *program`` printed, and its exit status: a script or ``-c`` and code, then arguments.

    Args:
        changes: environment variables that differ from ``ENVIRONMENT``.
        timeout: seconds.

    Raises:
        AssertionError: it ran longer, or the server ended; with the last lines of what was printed.
    """
    line = [str(part) for part in program]
    changes = {name: value for name, value in (changes or {}).items() if ENVIRONMENT.get(name) != value}
    if FORKS and changes.keys() <= READ_LATE:
        return _server().run(line, changes, timeout)
    command = [sys.executable, *line]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT | changes)
    except subprocess.TimeoutExpired as late:
        raise _late(timeout, _text(late.stdout), _text(late.stderr)) from None


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON of the last line that a program printed."""
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout[-SHOWN:]}\n{done.stderr[-SHOWN:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])


class Server:
    """Forks programs, one at a time; it ends with this process."""

    def __init__(self, preloaded: Sequence[str] = PRELOADED) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self.process = subprocess.Popen(
            [sys.executable, __file__, *preloaded],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=ENVIRONMENT | {"OPENBLAS_NUM_THREADS": "1"},  # NumPy would start threads when it is imported
            start_new_session=True,  # a Ctrl-C ends this process, and then the server its program
        )

    def run(self, line: list[str], changes: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
        """As the function ``run``."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            asked = {"line": line, "changes": changes, "timeout": timeout, "out": str(out), "err": str(err)}
            asked["folder"] = os.getcwd()
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(json.dumps(asked).encode() + b"\n")
                self.process.stdin.flush()
            reply = self.process.stdout.readline()
            if not reply:
                self._log.seek(0)
                log = self._log.read().decode(errors="replace")[-SHOWN:]
                raise AssertionError(f"the server of forks ended with status {self.process.wait()}:\n{log}")
            stdout, stderr = (path.read_text(errors="replace") if path.exists() else "" for path in (out, err))
        status = json.loads(reply)
        if status is None:
            raise _late(timeout, stdout, stderr)
        return subprocess.CompletedProcess(line, status, stdout, stderr)

    def close(self) -> None:
        """Ends the server, and the program that it runs."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self._log.close()


@functools.cache
def _server() -> Server:
    server = Server()
    atexit.register(server.close)
    return server


def _late(timeout: float, stdout: str, stderr: str) -> AssertionError:
    return AssertionError(f"not over after {timeout:g} s:\n{stdout[-SHOWN:]}\n{stderr[-SHOWN:]}")


def _text(output: Any) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


# --- in the server ----------------------------------------------------------------------------------------------------


def serve(preloaded: Sequence[str]) -> dict:
    """Forks for each line of standard input and replies with an exit status; returns in a child, with its request.

    Raises:
        SystemExit: in the server, at the end of its input.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed during imports
    for name in preloaded:
        importlib.import_module(name)
    for request in iter(sys.stdin.buffer.readline, b""):
        threads = len(os.listdir("/proc/self/task"))
        assert threads == 1, f"a process with {threads} threads may not be forked: see PRELOADED"
        sys.stdout.flush()
        asked = json.loads(request)
        if (child := os.fork()) == 0:
            replies.close()
            return asked
        os.setpgid(child, child)  # here and there, whichever comes first
        print(json.dumps(_status(child, asked["timeout"])), file=replies, flush=True)
    raise SystemExit


def _status(child: int, seconds: float) -> int | None:
    """The exit status of ``child``; None if it was ended because its time is over or nobody waits for it any more."""
    deadline, pause = time.monotonic() + seconds, 0.02
    while not _over(child):
        abandoned = select.select([0], [], [], pause)[0]
        if not abandoned and time.monotonic() < deadline:
            continue
        os.kill(child, signal.SIGABRT)  # shows where its threads are
        time.sleep(1)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _over(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def become(asked: dict) -> None:
    """Runs a program in this process, as a new interpreter would."""
    os.setpgid(0, 0)
    for target, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, asked["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, asked["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, target)
        os.close(opened)
    faulthandler.enable()
    os.environ.update(asked["changes"])
    os.chdir(asked["folder"])
    script, *arguments = asked["line"]
    main = types.ModuleType("__main__")
    if script == "-c":
        code, *arguments = arguments
        sys.path[0], name = "", "<string>"
    else:
        code, name = Path(script).read_text(), script
        sys.path[0], main.__file__ = str(Path(script).resolve().parent), script
    sys.argv, sys.modules["__main__"] = [script, *arguments], main
    exec(compile(code, name, "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    become(serve(sys.argv[1:]))
