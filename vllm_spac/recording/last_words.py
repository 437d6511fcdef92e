"""The sentence by which a process of an engine ends it: the last line of the command that started the engine.

The command names a file of its own in the environment, and a process of its engine writes the sentence there. From then
on none of them logs a traceback. With ``VLLM_LOGGING_LEVEL=DEBUG`` there is no such file, and all ends in tracebacks as
in stock vLLM.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from vllm_spac.errors import SpacError, printable
from vllm_spac.system.untrusted import read_text

FILE = "SPAC_LAST_WORDS"
_owner: int | None = None  # the process that called ``install``


def install() -> None:
    """Lets this command end by what a child of it says; a second call, and one in a child, does nothing."""
    global _owner
    if FILE in os.environ or os.environ.get("VLLM_LOGGING_LEVEL", "").upper() == "DEBUG":
        return
    handle, path = tempfile.mkstemp(prefix="spac-")
    os.close(handle)
    os.environ[FILE], _owner = path, os.getpid()
    atexit.register(_end, Path(path), _owner)
    usual = sys.excepthook

    def last(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not _sentence(path):
            usual(kind, error, trace)

    sys.excepthook = last
    install_short_errors("")


def report(error: BaseException) -> None:
    """Hands the sentence of a ``SpacError`` that ends the engine to the command, if one waits in another process."""
    path = os.environ.get(FILE)
    if isinstance(error, SpacError) and path is not None and os.getpid() != _owner:
        _say(path, str(error))


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Tells of an error that is raised inside, and lets it pass."""
    try:
        yield
    except SpacError as error:
        report(error)
        raise


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Ends this process without a traceback by an error inside, if the command tells what it comes from."""
    try:
        yield
    except Exception as error:
        report(error)
        if os.getpid() == _owner or not _sentence(os.environ.get(FILE)):
            raise
        raise SystemExit(1) from None


def install_short_errors(fatal: str) -> None:
    """Lets this process log errors whose reason is known in one line; a second call, or no command, changes nothing.

    Args:
        fatal: the function that logs what ends the engine. Its ``SpacError`` is told at once: other processes learn
            from vLLM that the engine is dead before the error leaves it.
    """
    usual = logging.getLogRecordFactory()
    if FILE not in os.environ or hasattr(usual, "spac"):
        return

    def made(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = usual(*args, **kwargs)
        error = record.exc_info[1] if record.exc_info else None
        if error is None or FILE not in os.environ:
            return record
        reason = _reason(error)
        if reason is not None and record.funcName == fatal:
            report(reason)
        if sentence := _sentence(os.environ.get(FILE)) or reason:
            record.msg, record.args = f"{record.getMessage().removesuffix('.')}: {printable(sentence)}", ()
            record.exc_info = None
        return record

    made.spac = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(made)


def _reason(error: BaseException | None) -> SpacError | None:
    """The first ``SpacError`` among an error and those that it was raised from."""
    while error is not None and not isinstance(error, SpacError):
        error = error.__cause__
    return error


def _say(path: str, sentence: str) -> None:
    """Writes the sentence unless another process was first; without the file, the log has it alone."""
    with (
        contextlib.suppress(OSError),
        open(os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW), "r+b", buffering=0) as file,
    ):
        if not os.fstat(file.fileno()).st_size:
            file.write(sentence.encode(errors="replace"))


def _sentence(path: str | None) -> str:
    """What the command will end by; empty as long as there is nothing."""
    try:
        return read_text(path) if path is not None else ""
    except (OSError, ValueError):
        return ""


def _end(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        if sentence := _sentence(str(path)):
            print(f"vllm: error: {printable(sentence)}", file=sys.stderr)
        path.unlink(missing_ok=True)
