"""What is recorded of a step: its events in a timeline, and notes for who looks whether it stands still."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_spac.core import Step
from vllm_spac.recording.timeline_recorder import STEP_KINDS, UNKNOWN, Kind, Timeline, now
from vllm_spac.recording.watchdog import Notes, Watchdog


class StepRecorder:
    """Called by the forward thread.

    Attributes:
        timeline: events are recorded there; None: nobody looks.
        notes: what was done last.
        watchdogs: who looks whether a step stands still: one, or none.
    """

    def __init__(self) -> None:
        self.timeline: Timeline | None = None
        self.notes = Notes()
        self.watchdogs: list[Watchdog] = []
        self._began = 0  # in the timeline

    def watch(self, timeline: Timeline | None) -> None:
        """Records the following steps in ``timeline``; None ends that. Called between steps."""
        self.timeline, self._began = timeline, 0

    def report_stalls(self, folder: Path) -> None:
        """Has a thread look from now on whether a step stands still, which writes into ``folder``; called once."""
        self.watchdogs.append(Watchdog(self.notes, folder))

    @property
    def stalls(self) -> int:
        """How often a step has been said to stand still."""
        return sum(watchdog.stalls for watchdog in self.watchdogs)

    def begin(self, step: Step) -> None:
        """A step begins."""
        self.notes.begin(step.rows, step.prompts)
        if self.timeline is not None:
            self._began = now()

    def begin_layer(self, layer: int) -> int:
        """A layer of the step begins, ``layer`` of all layers; returns what ``end_layer`` takes."""
        self.notes.add("layer", layer)
        return 0 if self.timeline is None else now()

    def end_layer(self, entered: int, layer: int, rows: int) -> None:
        """It has run ``rows`` rows of requests."""
        if self.timeline is not None:
            self.timeline.add(Kind.LAYER, entered, layer, rows)

    @contextlib.contextmanager
    def ending(self, step: Step | None) -> Iterator[None]:
        """Records the end of the layers, and what is learned of them in the block; ``step``: None outside of steps."""
        timeline, start = (self.timeline if self._began and step is not None else None), 0
        if step is not None:
            self.notes.add("end of the layers, rows", step.rows)
            if timeline is not None:
                timeline.add(Kind.FORWARD, self._began, step.rows, len(step.requests))
                start = now()
        yield
        if timeline is not None:
            timeline.add(Kind.UPDATE, start)

    def end(self, step: Step | None, tokens: Sequence[int] | None) -> None:
        """Ends ``step``, if one has begun, whose requests emitted some ``tokens``; None: not known on the host."""
        self.notes.end("end of a step")
        if self.timeline is not None and self._began and step is not None:
            count = UNKNOWN if tokens is None else sum(tokens)
            self.timeline.add(Kind.STEP, self._began, STEP_KINDS.index(step.kind), count)
        self._began = 0
