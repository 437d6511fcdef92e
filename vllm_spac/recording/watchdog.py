"""Says once, in the log and in a file, that a step stands still: what was done last, and where every thread is.

The thread that runs the model notes what it does (``Notes``): an append each, without a clock. Another thread looks at
the last note once a second. Nothing is noted outside of steps, and so a warm-up, a compilation or a graph's capture is
never a stall, and nor is an engine without requests. Behind the end of a step a GPU may still stand still in what was
launched; then its streams are busy long after, and that is reported too. So is a step that goes on and does not end.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from vllm_spac.system.files import FILE, prepare_folder, write_text

logger = logging.getLogger("vllm.spac")

SECONDS = 10.0  # without a note, of which a step is said to stand still
PROMPT_SECONDS = 60.0  # of one with rows of prompts, which may wait long in one place
ENDLESS_SECONDS = 900.0  # of a step that goes on; long prompts of a large model on a slow disk take minutes
PERIOD = 1.0
KEPT = 32  # notes
MOST_FILES = 8  # of one process; later stalls write over the first ones

Busy = Mapping[str, Callable[[], bool]]  # whether a stream has work, by its name
_named: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # streams that are in use


def watch(stream: Any, name: str) -> None:
    """A ``torch.cuda.Stream`` is used from now on, for as long as somebody has it."""
    _named[stream] = name


def device_streams() -> dict[str, Callable[[], bool]]:
    """As ``Busy``, of all that are known; asking one does not wait."""
    found = sorted(_named.copy().items(), key=lambda pair: pair[1])
    return {f"{name} ({number})": partial(_has_work, stream) for number, (stream, name) in enumerate(found)}


def _has_work(stream: Any) -> bool:
    return not stream.query()


class Notes:
    """The last things that the thread of the model did.

    Attributes:
        last: (what, number, e.g. of a layer), the newest last.
        in_step: whether a step has begun and not ended.
        steps: how many have begun.
        prompts: whether it has rows of prompts.
        thread: that began it.
    """

    def __init__(self) -> None:
        self.last: deque[tuple[str, int]] = deque(maxlen=KEPT)
        self.in_step = self.prompts = False
        self.steps = self.thread = 0

    def add(self, what: str, number: int) -> None:
        self.last.append((what, number))

    def begin(self, rows: int, prompts: bool) -> None:
        self.last.append(("step of rows", rows))
        self.steps += 1
        self.thread, self.prompts, self.in_step = threading.get_ident(), prompts, True

    def end(self, what: str, number: int = 0) -> None:
        """A step has ended, or failed."""
        if self.in_step:
            self.last.append((what, number))
            self.in_step = False


class Stall:
    """Decides when a step stands still: once, until something is noted again; or goes on without an end: once. Pure.

    A process that was stopped, or a machine that slept, did not look: such a time counts as two looks.
    """

    def __init__(self) -> None:
        self._note: object = None  # told from others by its identity
        self._steps = 0
        self._at = self._quiet = self._running = 0.0
        self._reported = self._reported_step = True

    def check(self, notes: Notes, now: float, busy: Callable[[], bool]) -> str | None:
        """Returns what to report now.

        Args:
            now: monotonic time in seconds.
            busy: whether the device has work; asked once where no step has begun.
        """
        passed, self._at = min(now - self._at, 2 * PERIOD), now
        note = notes.last[-1] if notes.last else None
        self._quiet += passed
        self._running += 0.0 if self._reported else passed  # what stood still was reported
        if notes.steps != self._steps or not notes.in_step:
            self._steps, self._running, self._reported_step = notes.steps, 0.0, False
        if note is not self._note:
            self._note, self._quiet, self._reported = note, 0.0, False
        if self._reported or note is None:
            return None
        where, limit = f"{note[0]} {note[1]}", PROMPT_SECONDS if notes.prompts else SECONDS
        if self._quiet >= limit:
            self._reported, self._running = True, 0.0
            if notes.in_step:
                return f"a step has done nothing for {limit:.0f} s, since {where}"
            still = f"the device is busy, and no step has begun for {limit:.0f} s since {where}"
            return still if busy() else None
        if self._running >= ENDLESS_SECONDS and not self._reported_step:
            self._reported_step = True
            return f"a step goes on and has not ended for {ENDLESS_SECONDS:.0f} s, now at {where}"
        return None


class Watchdog:
    """The thread that looks, from its making until ``close``; a process that was forked from this one has none.

    Args:
        notes: of the thread that runs the model.
        folder: of the files; made where it is missing.
        streams: returns those of the device, called only where something may stand still.
    """

    period: ClassVar[float] = PERIOD  # seconds from one look to the next

    def __init__(self, notes: Notes, folder: Path, streams: Callable[[], Busy] = device_streams) -> None:
        self._notes, self._folder, self._streams = notes, folder, streams
        self._stall, self._reports, self._process = Stall(), 0, os.getpid()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spac-watchdog", daemon=True)
        self._thread.start()

    @staticmethod
    def clock() -> float:
        """Monotonic time in seconds."""
        return time.monotonic()

    @property
    def stalls(self) -> int:
        """How often a step has been said to stand still, or to go on without an end."""
        return self._reports

    def close(self) -> None:
        """Ends the thread; one that waits for a device that stands still is left to the end of the process."""
        if os.getpid() == self._process:
            self._closed.set()
            if self._thread is not threading.current_thread():
                self._thread.join(2 * PERIOD)

    def _run(self) -> None:
        while not self._closed.wait(self.period):
            try:
                self.check()
            except Exception:
                logger.exception("spac: the watchdog of steps has ended; the engine goes on without it")
                return

    def check(self) -> None:
        """Looks once, and reports a stall."""

        def busy() -> bool:
            return any(has_work() for has_work in self._streams().values())

        if state := self._stall.check(self._notes, self.clock(), busy):
            self._report(state)

    def _report(self, state: str) -> None:
        """First what needs no device, since asking a device that stands still may not return."""
        path = self._folder / f"stall-{os.getpid()}-{self._reports % MOST_FILES}.txt"
        self._reports += 1
        frames = sys._current_frames()
        text = f"vllm_spac: {state}\n\n{_noted(self._notes.last.copy())}\n{_stacks(frames)}"
        where = f"the stacks of all threads are in {path}" if self._write(path, text) else f"\n{text}"
        logger.warning("spac: stall: %s%s; %s", state, _place(frames, self._notes.thread), where)
        if streams := self._streams():
            said = ", ".join(f"{name} {'busy' if busy() else 'idle'}" for name, busy in streams.items())
            logger.warning("spac: stall: streams of the device: %s", said)
            self._write(path, f"{text}\nstreams: {said}\n")

    def _write(self, path: Path, text: str) -> bool:
        try:
            prepare_folder(path.parent)
            write_text(path, text, durable=False, mode=FILE)
            return True
        except OSError as error:
            logger.warning("spac: %s cannot be written: %s", path, error.strerror or error)
            return False


def _noted(last: Iterable[tuple[str, int]]) -> str:
    return "the last things noted, the newest last:\n" + "".join(f"  {what} {number}\n" for what, number in last)


def _stacks(frames: Mapping[int, FrameType]) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in frames.items():
        stack = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(ident, 'without a name')} ({ident:#x}):\n{stack}")
    return "\n".join(parts)


def _place(frames: Mapping[int, FrameType], thread: int) -> str:
    """Where the thread of the model is, for the log."""
    if thread not in frames:
        return ""
    stack = traceback.extract_stack(frames[thread])
    ours = next((each for each in reversed(stack) if "vllm_spac" in each.filename), stack[-1])
    return f"; its thread is in {ours.name}, {Path(ours.filename).name}:{ours.lineno}"
