"""The contract of a balancer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from vllm_spac.core import Rates

_DRAFTS = 64  # over which the seconds of a draft token are averaged
_STEPS = 64  # over which the number of drafts is averaged


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the active experts of a layer run in one forward: each is in exactly one tuple, in ascending order."""

    hit: tuple[int, ...] = ()  # resident in fast memory; run there
    stream: tuple[int, ...] = ()  # loaded into fast memory first; run there
    cpu: tuple[int, ...] = ()  # run on the CPU, from the store's memory


@dataclass(frozen=True, slots=True)
class LayerState:
    """Input of a balancer's decision, after a layer's router has chosen.

    Attributes:
        resident: bool [experts], in fast memory, or, if layers wait for loads (``Balancer.loads``), loading into it.
        likely: float64 [experts], the policy's estimate of the probability that the next step selects each expert;
            empty if it estimates none.
    """

    layer: int
    rows: np.ndarray  # int [experts], rows of this forward that selected each expert; 0 for an idle one
    resident: np.ndarray
    scores: np.ndarray  # int [experts], utility from 0 to K; zeros without an estimator
    free_slots: int  # slots that this layer may still take, with or without eviction
    likely: np.ndarray = field(default_factory=lambda: np.zeros(0))
    reading: int = 0  # reads ahead that are in flight, behind which loads of this layer wait


class Balancer(ABC):
    """Divides the active experts of a layer between the processors; moves nothing and is deterministic.

    Attributes:
        admits: experts that ran on the CPU get slots in the background, where the policy prefers them to others.
        by_number: how many experts the CPU computes follows from how many are missing, if each has one row: then the
            number can be known before a layer runs (``plane=pointers``).
        passed: arguments that an engine gives, and no user.
        loads: layers load, or wait for, some of the experts that they miss; else the CPU computes all of these.

    Args:
        rates: measured seconds.
        layers: MoE layers of the model (L).
        top_k: experts per token (k).
        gamma: draft tokens in one speculative step, until steps say how many they have (``observe_verify``).
        upper: the highest utility score (K).
        expert_bytes: bytes of one expert (W_e).
    """

    needs_rates: ClassVar[bool] = True  # it weighs costs, so ``rates`` must be given
    needs_scores: ClassVar[bool] = False  # it reads ``LayerState.scores``; otherwise they may be zeros
    uses_cpu: ClassVar[bool] = True  # some of its plans run experts on the CPU
    offline: ClassVar[str] = ""  # why no engine can select it by name; empty if one can
    by_number: ClassVar[bool] = False
    passed: ClassVar[frozenset[str]] = frozenset({"rates", "layers", "top_k", "expert_bytes"})
    admits: bool = False
    loads: bool = True

    def __init__(
        self,
        *,
        rates: Rates | None = None,
        layers: int,
        top_k: int,
        gamma: float = 8,
        upper: int = 4,
        expert_bytes: int = 1,
    ) -> None:
        assert rates is not None or not self.needs_rates, f"{type(self).__name__} weighs costs"
        self.rates = rates
        self.layers = layers
        self.top_k = top_k
        self.gamma = gamma
        self.upper = upper
        self.expert_bytes = expert_bytes
        self._draft_fixed = rates is not None and rates.draft > 0
        self._drafts = 0  # of which ``rates.draft`` is a mean
        self._steps = 0  # of which ``gamma`` is a mean

    @abstractmethod
    def plan(self, state: LayerState) -> Plan:
        """Splits the active experts (``rows > 0``) of a layer; ``hit`` is exactly those that are resident."""

    def observe_draft(self, seconds: float) -> None:
        """A draft token took ``seconds``: ``rates.draft`` becomes a mean of the last, unless it was given."""
        if self.rates is not None and not self._draft_fixed:
            self._drafts = min(_DRAFTS, self._drafts + 1)
            self.rates = replace(self.rates, draft=self.rates.draft + (seconds - self.rates.draft) / self._drafts)

    def observe_verify(self, drafts: float) -> None:
        """A step verifies so many drafts per request: ``gamma`` becomes a mean of the last steps."""
        self._steps = min(_STEPS, self._steps + 1)
        self.gamma += (drafts - self.gamma) / self._steps

    def threshold(self, layer: int) -> int:
        """Returns the lowest score worth prefetching for ``layer`` (MoE-SpAc's tau), from 1 to ``upper``."""
        return 1


def split(state: LayerState) -> tuple[tuple[int, ...], np.ndarray]:
    """Returns (active experts that are resident, int array of the active ones that are not), both ascending."""
    active = state.rows > 0
    return tuple(np.flatnonzero(active & state.resident).tolist()), np.flatnonzero(active & ~state.resident)
