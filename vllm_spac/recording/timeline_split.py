"""Divides the time of recorded steps into what the forward thread did."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from vllm_spac.recording.timeline_file import Recording
from vllm_spac.recording.timeline_recorder import STEP_KINDS, UNKNOWN, Kind

GENERATING = ("decode", "verify")
PROMPTS = ("prefill", "mixed")
WAITS = (Kind.WAIT, Kind.WAIT_AHEAD)


@dataclass(frozen=True)
class TimeSplit:
    """Where the time of some steps went.

    Attributes:
        tokens: tokens that they emitted; None if the host does not know it.
        parts: name -> nanoseconds; together the steps and the gaps before them.
    """

    steps: int
    tokens: int | None
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Nanoseconds of all parts."""
        return sum(self.parts.values())


def split(recording: Recording, kinds: Collection[str]) -> TimeSplit:
    """Returns where the time of the steps of these ``kinds`` (of ``STEP_KINDS``) went.

    A gap counts as a part of the step that follows it, if the forward thread had a reason to go on: not before steps
    with prompts, because before a new request the engine may have had nothing to do, and not before the first step.
    """
    is_step = recording.kind == Kind.STEP
    start, end, tokens = recording.start[is_step], recording.end[is_step], recording.b[is_step]
    chosen = np.isin(recording.a[is_step], [STEP_KINDS.index(kind) for kind in kinds])
    sums = _sums(recording, start, end, chosen)
    layers, waits = sums[Kind.LAYER], sum(sums[kind] for kind in WAITS)
    inside = sums[Kind.FORWARD] + sums[Kind.UPDATE] + sums[Kind.DRAFT]
    follows = chosen[1:] & np.isin(recording.a[is_step][1:], [STEP_KINDS.index(kind) for kind in GENERATING])
    parts = {
        "waiting for loads": waits,
        "waiting for CPU experts": sums[Kind.WAIT_CPU],
        "experts": layers - waits - sums[Kind.WAIT_CPU],
        "rest of the forward": sums[Kind.FORWARD] - layers,
        "policies and predictors": sums[Kind.UPDATE],
        "drafts": sums[Kind.DRAFT],
        "sampling and the rest of the step": sums[Kind.STEP] - inside,
        "between steps": int((start[1:] - end[:-1])[follows].sum()),
    }
    emitted = tokens[chosen]
    return TimeSplit(int(chosen.sum()), None if (emitted == UNKNOWN).any() else int(emitted.sum()), parts)


def median_step(recording: Recording, kinds: Collection[str]) -> tuple[int, int] | None:
    """Returns (start, end) in nanoseconds of the step of median duration among those of ``kinds``; None without any."""
    codes = [STEP_KINDS.index(kind) for kind in kinds]
    steps = np.flatnonzero((recording.kind == Kind.STEP) & np.isin(recording.a, codes))
    if not len(steps):
        return None
    chosen = steps[np.argsort(recording.duration[steps], kind="stable")[len(steps) // 2]]
    return int(recording.start[chosen]), int(recording.end[chosen])


def _sums(recording: Recording, start: np.ndarray, end: np.ndarray, chosen: np.ndarray) -> dict[Kind, int]:
    """Returns the nanoseconds of each kind on the forward thread, inside the ``chosen`` steps."""
    if not len(start):
        return dict.fromkeys(Kind, 0)
    forward = recording.thread[recording.kind == Kind.STEP][0]
    step = np.searchsorted(start, recording.start, side="right") - 1
    inside = (recording.thread == forward) & (step >= 0) & (recording.end <= end[step]) & chosen[step]
    sums = np.zeros(len(Kind), dtype=np.int64)
    np.add.at(sums, recording.kind[inside], recording.duration[inside])
    return {kind: int(sums[kind]) for kind in Kind}
