"""Chunks of prompts: how many rows one has, and which steps compute none, so that running requests go on.

A chunk reads nearly every expert that has no slot, whatever its rows. So it should have as many rows as the link's time
covers; and the requests that run beside it get one token in the time of many.
"""

from __future__ import annotations

import math
from collections import deque

from vllm_spac.decisions.costs import Costs

SHARE = 0.25  # of their speed that running requests keep while prompts are computed
_RECENT = 0.25  # weight of the last step in the mean duration of steps that only decode
_OF_MEMORY = 20  # activations of a chunk take at most this part of a GPU's memory,
_FEW = 8192  # or those of so many rows, which a chunk has at least
ATTAINED = 0.5  # of a data sheet's arithmetic, by matrices of long prompts; assumed
_SLOTS = 0.75  # of the fast memory that vLLM may use; assumed
_STEP = 1024  # rows: a chunk is a multiple of them
_OPERANDS = 2  # a value of a weight is multiplied and added; ``Costs`` counts both as the bytes of 16 bits


def missing(experts_bytes: int, fast_bytes: int) -> float:
    """Returns the share of the experts that has no slot, before slots are counted: these get about ``_SLOTS``."""
    return max(0.0, 1 - _SLOTS * fast_bytes / experts_bytes)


def rows(costs: Costs, *, missing: float, layer_bytes: int, layer_values: int, row_bytes: int, memory: int) -> int:
    """Returns the rows of a chunk at which arithmetic takes as long as loads, a multiple of ``_STEP``.

    Where that is a step at least, ``_FEW``: how many experts are missing is not known yet, prompts borrow slots of
    others, and what is read too often costs more than rows that are computed too late.

    Args:
        costs: of the machine; peaks of a data sheet count in part.
        missing: share of the experts that has no slot.
        layer_bytes: of all experts of a layer.
        layer_values: weights that a row is multiplied with in a layer.
        row_bytes: of activations per row.
        memory: bytes of the GPU's memory, which bound the rows.
    """
    most = max(_FEW, memory // _OF_MEMORY // row_bytes)
    link, flops = costs.host if costs.provenance.store == "disk" else costs.load, arithmetic(costs)
    if flops is not None and link is not None:
        row = _OPERANDS * layer_values / flops
        meets = int(missing * layer_bytes / link.bytes_per_second / row)
        most = min(most, max(meets, _FEW if meets >= _STEP else 0))
    return max(_STEP, most // _STEP * _STEP)


def arithmetic(costs: Costs) -> float | None:
    """Returns ``flops_per_second`` of matrices of long prompts: of a data sheet's peak, a part; None: not known."""
    peak = costs.fast.flops_per_second
    return peak if peak is None or costs.provenance.how == "measured" else ATTAINED * peak


class ChunkPacing:
    """Decides which steps leave prompts out, so that running requests keep ``share`` of their speed.

    A step emits a token for each running request, which without prompts takes as long as a step that only decodes. So a
    step with a chunk owes them ``share`` of its seconds, less that; and each step that only decodes pays the rest of
    its own. While something is owed, prompts wait: they take at most ``share / (1 - share)`` longer, and a step.

    Where steps are planned before those before them have ended, a chunk is taken to owe what the last one did.
    """

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._owed = 0.0  # by steps that have ended, seconds
        self._decode: float | None = None  # seconds of a step that only decodes
        self._chunk = math.inf  # that the last step with a chunk owed; before the first: not known
        self._planned: deque[float] = deque()  # what steps that have not ended are taken to owe

    @property
    def waits(self) -> bool:
        """Whether the next step has to leave prompts out if a request runs."""
        return self._owed + sum(self._planned) > 0

    def begin_step(self, chunk: bool) -> None:
        """Records a step that is about to be planned; ``chunk``: it may compute prompts beside running requests."""
        pays = (1 - self._share) * (self._decode or 0.0)
        self._planned.append(self._chunk if chunk else -pays)

    def end_step(self, prompts: bool, decoding: bool, seconds: float) -> None:
        """Records a step that has ended, in the order of ``begin_step``.

        Args:
            prompts: it computed a part of some prompt.
            decoding: it emitted a token of a request that was running.
            seconds: since it was planned, or since the step before it ended if that is later.
        """
        self._planned.popleft()
        if not decoding:
            self._owed = 0.0  # nobody waited
            return
        if prompts:
            self._chunk = self._share * seconds - (self._decode or 0.0)
            self._owed += self._chunk
        else:
            before = seconds if self._decode is None else self._decode
            self._decode = before + _RECENT * (seconds - before)
            self._owed -= (1 - self._share) * seconds
        self._owed = max(0.0, self._owed)
