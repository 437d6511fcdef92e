"""Host side of in-layer admission: which slots a step may reassign, and what the device reports back. No I/O.

A layer that misses an expert may copy it into a slot before it computes, so that it crosses PCIe once. The experts that
need a slot are known on the device, after the router; the value of a slot is known on the host, to the policy. So
between steps the host offers slots, the least valuable first, together with the value of a slot to each expert. The
layers compare these values (the rule is in ``vllm_spac.kernels.admit``), and what they did is reported after the step.

The host's state may be a step or two old. Hence an offer contains the slot's owner and is void if that has changed.
Nothing else about an offer must hold for correctness: accepting a bad one costs transferred bytes, never a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_spac.cache.allowance import Allowance, Depths
from vllm_spac.cache.residency import NOWHERE, Residency
from vllm_spac.decisions.policies.base import Policy
from vllm_spac.kernels.types import ADMITTED, COMPUTED, HIT, LATE, STREAMED, UNUSED
from vllm_spac.recording.metrics import Counters


def with_prompts(counts: np.ndarray, sources: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Returns ``sources`` (as of ``Offering.learn``) of all rows of a step whose layers reported those of its first.

    Later rows take no slot, and no layer takes the slot of an expert that it or one before it uses for other rows, so
    that an expert that only they used was read from its slot if it has one at the end of the step.

    Args:
        counts: int [keys], rows that selected each expert.
        sources: of the experts that the first rows selected.
        owner: int [slots], the expert in each slot at the end.
    """
    has_slot = np.isin(np.arange(len(counts)), owner)
    return np.where((counts > 0) & (sources == UNUSED), np.where(has_slot, HIT, STREAMED), sources)


class SlotOffers(NamedTuple):
    """Slots that the layers of a step may take; see ``vllm_spac.kernels.types.Offers``."""

    slots: np.ndarray  # int32 [offers], the slots
    owners: np.ndarray  # int32 [offers], the expert in each slot
    kept: np.ndarray  # float32 [offers], ascending, the value of each slot to its owner
    used: np.ndarray  # float32 [keys], the value of a slot to an expert that the step uses
    to_layers: int  # number of the first offers, those that are worth at least as much to some expert without a slot


class Learned(NamedTuple):
    """Numbers of experts of a step: streamed, given a slot in the layer that missed them, or ahead of it."""

    streamed: int
    admitted: int
    ahead: int
    computed: int  # by the CPU; ``late``: of those streamed, what the CPU was to compute
    late: int
    judged: tuple[int, int] | None  # as ``Allowance.end_step`` returns it


class Offering:
    """Computes the offers of each step and applies its result. Pure; called between steps, by one thread.

    Args:
        keys: number of experts of all layers; ``experts``: of each layer.
        slots: number of slots; all are filled before the first step.
        policy: values slots; owned.
        counters: ``hits``, ``misses``, ``loads`` and those of prefetches and of the CPU are counted here.

    Attributes:
        allowance: limits reads ahead of need that the device decides, if there are any; ``depths``: under a budget,
            besides.
    """

    def __init__(self, keys: int, experts: int, slots: int, policy: Policy, counters: Counters) -> None:
        self._experts = experts
        self.residency = Residency(keys, slots, policy)
        self._counters = counters
        self.allowance: Allowance | None = None
        self.depths: Depths | None = None
        self._wanted = np.zeros(keys, dtype=bool)  # what might have taken a slot that was offered last
        self._unused: set[int] = set()  # read ahead, and no layer has used them
        self._displaced: dict[int, int] = {}  # evicted for an expert that was read ahead and is not used yet, and that

    def read_of(self, bounds: Sequence[int] | None) -> list[int]:
        """Returns how many names of each layer are read, the likeliest first; ``bounds``: as of ``Step``."""
        if bounds is None or self.depths is None:
            return [self._experts] * (len(self.residency.slot_of) // self._experts)
        return np.minimum(bounds, self.depths.depths).tolist()

    def offer(self, *, every: bool = False) -> SlotOffers:
        """Returns the slots that are worth at least as much to some expert without a slot as to their owner.

        Args:
            every: behind these also the others.
        """
        residency = self.residency
        standing = residency.policy.standing(len(residency.slot_of))
        order, kept, used = standing.order, standing.kept, standing.used.astype(np.float32)
        self._wanted = used >= kept.min(initial=np.inf)
        most = standing.used[residency.slot_of == NOWHERE].max(initial=-np.inf)
        count = int(np.searchsorted(kept, most, side="right"))
        owners, kept = (order, kept) if every else (order[:count], kept[:count])
        return SlotOffers(residency.slot_of[owners], owners.astype(np.int32), kept.astype(np.float32), used, count)

    def learn(
        self,
        counts: np.ndarray,
        sources: np.ndarray,
        owner: np.ndarray,
        guessed: np.ndarray | None = None,
        places: np.ndarray | None = None,
        *,
        generating: np.ndarray | None,
        prompt: np.ndarray | None = None,
        between: bool = False,
    ) -> Learned:
        """Applies the report of a finished step.

        Args:
            counts: int [keys], rows that selected each expert.
            sources: int [keys], how each was read: ``HIT``, ``STREAMED``, ``ADMITTED``, ``COMPUTED`` (by the CPU),
                ``LATE`` (streamed because the CPU was late), or not at all.
            owner: int [slots], the expert in each slot at the end of the step.
            guessed: int [keys], ``ADMITTED`` for the experts that got a slot before their layer; None without guesses.
            places: int [keys], under a budget, the place of each name among those of its layer; -1: not named.
            generating: ``counts`` of the rows that generate, those of prompts predict little about the next step; None:
                they are not known, or there are none.
            prompt: as in ``Policy.observe_prompt``; None unless prompts ran alone.
            between: it is no step: slots were given away between two, and nothing was used.
        """
        hits, admitted, computed = (np.flatnonzero(sources == source) for source in (HIT, ADMITTED, COMPUTED))
        late = int((sources == LATE).sum())
        streamed = np.flatnonzero((sources == STREAMED) | (sources == LATE))
        self._counters.hits += len(hits)
        self._counters.misses += len(streamed) + len(admitted)
        self._counters.loads += len(admitted)
        self._counters.cpu_experts += len(computed)
        self._counters.cpu_rows += int(counts[computed].sum())
        self._counters.cpu_late += late
        policy = self.residency.policy
        if prompt is not None:
            policy.observe_prompt(prompt)
        if generating is not None:
            self.residency.observe(generating)
            for key in hits[(generating[hits] > 0) & (self.residency.slot_of[hits] != NOWHERE)].tolist():
                policy.touch(key)
        changed = np.flatnonzero(owner != self.residency.owner)
        ahead = np.zeros(0, dtype=np.int64) if guessed is None else np.flatnonzero(guessed == ADMITTED)
        victims = self.residency.owner[changed]
        for_guesses = np.isin(owner[changed], ahead)
        displaced = dict(zip(victims[for_guesses].tolist(), owner[changed][for_guesses].tolist(), strict=True))
        outside = self.residency.slot_of == NOWHERE  # when the step began
        self.residency.update_owners(changed, owner[changed])
        missed, judged = np.concatenate([streamed, admitted, computed]), None
        if self.allowance is not None:
            self._judge(self.allowance, counts, missed.tolist(), ahead.tolist(), displaced)
            judged = None if between else self.allowance.end_step()
        if self.depths is not None and guessed is not None and places is not None:
            self.depths.end_step(np.where(outside & self._wanted, places, -1), counts > 0)
        return Learned(len(streamed), len(admitted), len(ahead), len(computed), late, judged)

    def _judge(
        self, allowance: Allowance, counts: np.ndarray, missed: list[int], ahead: list[int], displaced: dict[int, int]
    ) -> None:
        """Counts what became of reads ahead, after a step that missed ``missed`` and read ``ahead``.

        ``displaced``: experts whose slots were taken for some of these, and for which.
        """
        again = self._unused.intersection(ahead)
        self._unused.update(ahead)
        self._displaced |= displaced
        used = {key for key in self._unused if counts[key] > 0}
        harm = sum(self._early(self._displaced[key], key, used) for key in missed if key in self._displaced)
        wasted = {key for key in self._unused - used if self.residency.slot_of[key] == NOWHERE}
        self._unused -= used | wasted
        gone = set(missed)
        self._displaced = {
            victim: key for victim, key in self._displaced.items() if key in self._unused and victim not in gone
        }
        counters = self._counters
        counters.prefetches += len(ahead)
        counters.prefetch_hits += len(used)
        counters.prefetch_wasted += len(wasted) + len(again)  # evicted unused, and read once more
        counters.prefetch_harmful += harm
        allowance.add_misses(len(missed), harm)
        allowance.add_reads(len(ahead))
        allowance.add_uses(len(used))

    def _early(self, key: int, victim: int, used: set[int]) -> bool:
        """Whether a step needed ``victim`` before it used ``key``, which was read into its slot, or instead of it."""
        return key not in used or victim // self._experts <= key // self._experts
