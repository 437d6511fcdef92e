"""Where the time of generated tokens went: the forward thread's events of a recording, summed by what it did."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_spac.recording.timeline_recorder import STEP_KINDS, UNKNOWN, Kind, Recording

_GENERATING = [STEP_KINDS.index(kind) for kind in ("decode", "verify")]


@dataclass(frozen=True)
class TokenTime:
    """Where the time of some steps went."""

    steps: int
    tokens: int | None  # tokens that they emitted; None if the host does not know it
    parts: dict[str, int]  # name -> nanoseconds; together the steps and the gaps before them

    @classmethod
    def of(cls, recording: Recording) -> TokenTime:
        """Sums the steps without prompts.

        A gap counts as a part of the step that follows it; not before steps with prompts, because before a new request
        the engine may have had nothing to do, and not before the first step.
        """
        is_step = recording.kind == Kind.STEP
        start, end, tokens = recording.start[is_step], recording.end[is_step], recording.b[is_step]
        chosen = np.isin(recording.a[is_step], _GENERATING)
        sums = _sums(recording, start, end, chosen)
        layers, waits = sums[Kind.LAYER], sums[Kind.WAIT] + sums[Kind.WAIT_AHEAD]
        inside = sums[Kind.FORWARD] + sums[Kind.UPDATE] + sums[Kind.DRAFT]
        parts = {
            "waiting for loads": waits,
            "waiting for CPU experts": sums[Kind.WAIT_CPU],
            "experts": layers - waits - sums[Kind.WAIT_CPU],
            "rest of the forward": sums[Kind.FORWARD] - layers,
            "policies and predictors": sums[Kind.UPDATE],
            "drafts": sums[Kind.DRAFT],
            "sampling and the rest of the step": sums[Kind.STEP] - inside,
            "between steps": int((start[1:] - end[:-1])[chosen[1:]].sum()),
        }
        emitted = tokens[chosen]
        return cls(int(chosen.sum()), None if (emitted == UNKNOWN).any() else int(emitted.sum()), parts)


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
