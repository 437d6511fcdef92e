"""The sentence by which a process of an engine refuses to start: the last line of the command that started it.

The command names a file of its own in the environment, and its children write the sentence there. With
``VLLM_LOGGING_LEVEL=DEBUG`` there is no such file, and all ends in tracebacks as in stock vLLM.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from vllm_spac.errors import SpacError, printable
from vllm_spac.system.untrusted import read_text

FILE = "SPAC_LAST_WORDS"

_owner: int | None = None  # the process of the command, which sees its own errors without a file


def expect() -> None:
    """Lets this command end by what a child of it says; a second call, and one in a child, does nothing."""
    global _owner
    if FILE in os.environ or os.environ.get("VLLM_LOGGING_LEVEL", "").upper() == "DEBUG":
        return
    handle, path = tempfile.mkstemp(prefix="spac-")
    os.close(handle)
    os.environ[FILE] = path
    _owner = os.getpid()
    atexit.register(_remove, Path(path), os.getpid())
    usual = sys.excepthook

    def last(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if said := _said(path):
            print(f"vllm: error: {printable(said)}", file=sys.stderr)
        else:
            usual(kind, error, trace)

    sys.excepthook = last


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Hands a ``SpacError`` raised inside to the command that waits for this process, and ends it without a trace.

    An engine in the command's own process raises: whoever built it may catch the error.
    """
    try:
        yield
    except SpacError as error:
        path = os.environ.get(FILE)
        if path is None or os.getpid() == _owner or not _say(path, str(error)):
            raise
        raise SystemExit(1) from None


def _say(path: str, sentence: str) -> bool:
    """Writes the sentence unless another process was first; returns whether there is one."""
    try:
        with open(os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW), "r+b", buffering=0) as file:
            if not os.fstat(file.fileno()).st_size:
                file.write(sentence.encode(errors="replace"))
    except OSError:
        return False
    return True


def _said(path: str) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError):
        return ""


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
