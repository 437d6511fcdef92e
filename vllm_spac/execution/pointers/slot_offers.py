"""Host side of in-layer admission: which slots a step may reassign, and what the device reports back. No I/O.

A layer that misses an expert may copy it into a slot before it computes, so that it crosses PCIe once. The experts that
need a slot are known on the device, after the router; the value of a slot is known on the host, to the policy. So
between steps the host offers slots, the least valuable first, together with the value of a slot to each expert. The
layers compare these values (the rule is in ``vllm_spac.kernels.admit``), and what they did is reported after the step.

The host's state may be a step or two old. Hence an offer contains the slot's owner and is void if that has changed.
Nothing else about an offer must hold for correctness: accepting a bad one costs transferred bytes, never a wrong token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_spac.cache.residency import NOWHERE, Residency
from vllm_spac.kernels.types import ADMITTED, HIT, STREAMED
from vllm_spac.metrics import Counters
from vllm_spac.policies.base import Policy


class Offered(NamedTuple):
    """Slots that the layers of a step may take; see ``vllm_spac.kernels.types.Offers``.

    Attributes:
        slots: int32 [offers], the slots.
        owners: int32 [offers], the expert in each slot.
        kept: float32 [offers], ascending, the value of each slot to its owner.
        used: float32 [keys], the value of a slot to an expert that the step uses.
    """

    slots: np.ndarray
    owners: np.ndarray
    kept: np.ndarray
    used: np.ndarray


class Offering:
    """Computes the offers of each step and applies its result. Pure; called between steps, by one thread.

    Args:
        keys: number of experts of all layers.
        slots: number of slots; all are filled before the first step.
        policy: values slots; owned.
        counters: ``hits``, ``misses`` and ``loads`` are counted here.
    """

    def __init__(self, keys: int, slots: int, policy: Policy, counters: Counters) -> None:
        self.residency = Residency(keys, slots, policy)
        self._counters = counters

    def offer(self) -> Offered:
        """Returns the slots that are worth at least as much to some expert without a slot as to their owner."""
        standing = self.residency.policy.standing(len(self.residency.slot_of))
        outside = self.residency.slot_of == NOWHERE
        most = standing.used[outside].max(initial=-np.inf)
        owners = standing.order[: int(np.searchsorted(standing.kept, most, side="right"))]
        kept = standing.kept[: len(owners)].astype(np.float32)
        slots = self.residency.slot_of[owners]
        return Offered(slots, owners.astype(np.int32), kept, standing.used.astype(np.float32))

    def learn(self, counts: np.ndarray, sources: np.ndarray, owner: np.ndarray, *, prompts: bool) -> tuple[int, int]:
        """Applies the report of a finished step; returns the numbers of experts that it streamed and that it admitted.

        Args:
            counts: int [keys], rows that selected each expert.
            sources: int [keys], how each was read: ``HIT``, ``STREAMED``, ``ADMITTED``, or not at all.
            owner: int [slots], the expert in each slot at the end of the step.
            prompts: whether the step had prefill rows, which predict little about the next step.
        """
        hits, streamed, admitted = (np.flatnonzero(sources == source) for source in (HIT, STREAMED, ADMITTED))
        self._counters.hits += len(hits)
        self._counters.misses += len(streamed) + len(admitted)
        self._counters.loads += len(admitted)
        policy = self.residency.policy
        if not prompts:
            self.residency.observe(counts)
            for key in hits[self.residency.slot_of[hits] != NOWHERE].tolist():
                policy.touch(key)
        changed = np.flatnonzero(owner != self.residency.owner)
        self.residency.take_over(changed, owner[changed])
        return len(streamed), len(admitted)
