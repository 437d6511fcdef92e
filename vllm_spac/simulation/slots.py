"""Simulates ``execution=slots``: the serving code's residency, policy and balancer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_spac.balancers.base import Balancer, LayerState
from vllm_spac.cache.residency import NOWHERE, Residency
from vllm_spac.policies.base import Policy
from vllm_spac.predictors.utility import UtilityEstimator
from vllm_spac.profiling.costs import Costs
from vllm_spac.simulation.parts import Part
from vllm_spac.simulation.replay import Outcome, Replay
from vllm_spac.traces.format import Trace


class SlotsReplay(Replay):
    """Replays a trace over slots that experts are loaded into before they run.

    Args:
        outcome: with ``slots``.
        policy: decides which expert is evicted; owned.
        balancer: gives missing experts to the CPU, if given; owned.
        overlap: loads run concurrently with the computation of hits.
    """

    def __init__(
        self,
        trace: Trace,
        costs: Costs,
        nbytes: int,
        outcome: Outcome,
        policy: Policy,
        balancer: Balancer | None,
        overlap: bool,
    ) -> None:
        super().__init__(trace, costs, nbytes, outcome)
        self.overlap, self.policy, self.balancer = overlap, policy, balancer
        self.residency = Residency(trace.facts.total, outcome.slots, policy)
        self.estimator = UtilityEstimator(trace.facts.total)
        self.cpu = np.asarray(costs.cpu.seconds(nbytes, np.arange(len(self.fast)))).tolist()
        self._counts = trace.step_counts()

    def fill(self, keys: Sequence[int]) -> None:
        self.make_resident(keys)

    def begin_step(self, step: int, drafting: float, layers: int) -> None:
        """Nothing is decided between steps."""

    def end_step(self) -> None:
        counts = next(self._counts)
        if counts is not None:
            self.policy.observe(counts)
            if self.balancer:
                self.estimator.observe_step(counts)

    def make_resident(self, keys: Sequence[int]) -> list[int]:
        """Loads the missing ``keys`` into slots; returns those that were loaded."""
        placement = self.residency.prepare(keys)
        for key, _ in placement.loads:
            self.residency.loaded(key)
        self.residency.release(keys)
        return [key for key, _ in placement.loads]

    def layer(self, layer: int, parts: list[Part]) -> None:
        missed: set[int] = set()
        elsewhere: set[int] = set()
        used: set[int] = set()
        outcome = self.outcome
        experts = self.trace.facts.experts
        self.policy.enter(range(layer * experts, (layer + 1) * experts))
        for part in parts:
            keys, cpu = (part.keys, set()) if self.balancer is None else self._plan(self.balancer, layer, part)
            loaded = self.make_resident(keys)
            self._pass_time(part, loaded, cpu)
            outcome.loads += len(loaded)
            missed.update(loaded)
            elsewhere.update(cpu)
            used.update(part.keys)
        elsewhere -= missed
        hits = len(used) - len(missed) - len(elsewhere)
        outcome.parts += len(parts)
        outcome.hits += hits
        outcome.misses += len(missed)
        outcome.cpu += len(elsewhere)
        outcome.bytes = outcome.loads * self.nbytes
        outcome.bound_seconds += self.costs.bound(self.nbytes, hits, len(missed), len(elsewhere))

    def _plan(self, balancer: Balancer, layer: int, part: Part) -> tuple[list[int], set[int]]:
        """Returns (keys that run in fast memory, keys that run on the CPU)."""
        experts = self.trace.facts.experts
        first = layer * experts
        rows = np.zeros(experts, dtype=np.int64)
        rows[np.array(part.keys) - first] = part.rows
        here = slice(first, first + experts)
        resident = self.residency.slot_of[here] != NOWHERE
        free = self.residency.slots - int(resident[rows > 0].sum())
        plan = balancer.plan(LayerState(layer, rows, resident, self.estimator.scores[here], free))
        cpu = {first + expert for expert in plan.cpu}
        return [key for key in part.keys if key not in cpu], cpu

    def _pass_time(self, part: Part, loaded: list[int], cpu: set[int]) -> None:
        late = set(loaded)
        computed = waiting = on_cpu = 0.0
        for key, rows in zip(part.keys, part.rows, strict=True):
            if key in cpu:
                on_cpu += self.cpu[rows]
            elif key in late:
                waiting += self.fast[rows]
            else:
                computed += self.fast[rows]
        load = self.costs.loading(len(loaded), self.nbytes)
        fast = (max(load, computed) if self.overlap else load + computed) + waiting
        took = max(fast, on_cpu)
        self.outcome.seconds += took
        self.outcome.stall_seconds += took - computed - waiting
