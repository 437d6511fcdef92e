"""The host's part in slots that layers give away on the device: what it offers, and what it learns. No I/O.

A layer that misses an expert may copy it into a slot before it computes, so that it crosses the bus once. Who gets
which slot is known when the router has spoken, on the device; what a slot is worth is known to the policy, on the host.
So the host offers slots between steps, those worth least first, and says what a slot would be worth to whom. Layers
compare (``vllm_spac.kernels.admit`` has the rule), and tell what they did behind the step.

The host may be late: what it offers is what it knew, perhaps a step or two ago. Hence an offer names the slot's owner
and is void if that has changed. Nothing else needs to be true of an offer: to take a bad one costs bytes and no token.
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
        slots: int32 [offers]; owners: int32; kept: float32, ascending.
        used: float32 [keys].
    """

    slots: np.ndarray
    owners: np.ndarray
    kept: np.ndarray
    used: np.ndarray


class Offering:
    """What the policy would give away, and what became of it. Pure; called between steps, by one thread.

    Args:
        keys: experts of all layers.
        slots: experts that fast memory holds; all are filled before the first step.
        policy: says what a slot is worth; owned.
        counters: ``hits``, ``misses`` and ``loads`` are counted here.
    """

    def __init__(self, keys: int, slots: int, policy: Policy, counters: Counters) -> None:
        self.residency = Residency(keys, slots, policy)
        self._counters = counters

    def offer(self) -> Offered:
        """Slots that some expert without one would be worth more in, as far as the host knows."""
        standing = self.residency.policy.standing(len(self.residency.slot_of))
        outside = self.residency.slot_of == NOWHERE
        most = standing.used[outside].max(initial=-np.inf)
        owners = standing.order[: int(np.searchsorted(standing.kept, most, side="right"))]
        kept = standing.kept[: len(owners)].astype(np.float32)
        slots = self.residency.slot_of[owners]
        return Offered(slots, owners.astype(np.int32), kept, standing.used.astype(np.float32))

    def learn(self, counts: np.ndarray, sources: np.ndarray, owner: np.ndarray, *, prompts: bool) -> tuple[int, int]:
        """A step is over; returns how many experts it read where they lay, and how many it gave slots.

        Args:
            counts: int [keys], rows that selected each expert.
            sources: int [keys], how each was reached: ``HIT``, ``STREAMED``, ``ADMITTED``, or not at all.
            owner: int [slots], whose each slot was when the step was over.
            prompts: some of its rows were those of prompts, which say little about the next step.
        """
        hits, streamed, admitted = (np.flatnonzero(sources == source) for source in (HIT, STREAMED, ADMITTED))
        self._counters.hits += len(hits)
        self._counters.misses += len(streamed) + len(admitted)
        self._counters.loads += len(admitted)
        policy = self.residency.policy
        if not prompts:
            policy.observe(counts)
            for key in hits[self.residency.slot_of[hits] != NOWHERE].tolist():
                policy.touch(key)
        changed = np.flatnonzero(owner != self.residency.owner)
        self.residency.take_over(changed, owner[changed])
        return len(streamed), len(admitted)
