"""Simulates ``plane=slots``: the serving code's decisions, with costs in place of a store and of kernels.

``SlotLayers``, ``ExpertLoader`` and what they call are those of an engine. Assumptions where nothing was measured:

- The time that a step spends outside its experts is divided equally and placed before its layers; reads ahead continue
  in it, while drafts are made, and while kernels run.
- The CPU computes its experts from the beginning of a layer, concurrently with loads and kernels. Both read host
  memory: a layer takes at least as long as this needs for both. Reads ahead do not slow the CPU.
- The host's own work in a layer (``Costs.host_work``) runs concurrently with nothing but reads ahead.
- An expert takes as long as its own rows need, on each side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_spac.cache.host_tier import HostTier
from vllm_spac.cache.link import reads_ahead
from vllm_spac.cache.loader import ExpertLoader
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.cache.residency import Residency
from vllm_spac.decisions.balancers.base import Balancer
from vllm_spac.decisions.costs import Costs
from vllm_spac.decisions.policies.base import Policy
from vllm_spac.decisions.predictors.base import START, PredictorInputs, Signal
from vllm_spac.execution.host.slot_layers import HeldRows, SlotLayers
from vllm_spac.execution.row_shares import Share
from vllm_spac.recording.metrics import Counters
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.traces.replayed import Outcome, Replay
from vllm_spac.tools.traces.virtual_link import VirtualLink


class _Hot(NamedTuple):
    """The rows of a layer that need slots: ``ids`` int [rows, top_k], and which of these pairs count (None: all)."""

    ids: np.ndarray
    own: np.ndarray | None


class SlotsReplay(Replay[np.ndarray]):
    """Replays a trace over slots that experts are loaded into before they run; work: the ids of a record's rows.

    Args:
        outcome: with ``slots``.
        policy: decides which expert is evicted; owned.
        balancer: gives missing experts to the CPU, if given; owned.
        tier: host memory beside the store, if any; owned.
    """

    def __init__(
        self,
        trace: Trace,
        costs: Costs,
        nbytes: int,
        outcome: Outcome,
        policy: Policy,
        balancer: Balancer | None,
        ahead: PrefetchSettings,
        tier: HostTier | None = None,
    ) -> None:
        super().__init__(trace, costs, nbytes, outcome)
        facts = trace.facts
        self.counters = Counters()
        self.residency = Residency(facts.total, outcome.slots, policy)
        io_threads = costs.load_at_once - 1  # the forward thread also reads
        self.link = VirtualLink(costs, nbytes, reads_ahead(io_threads, ahead.background), tier)
        self.tier = tier
        loader = ExpertLoader(self.residency, self.link, self.counters, facts.experts, ahead, balancer, facts.top_k)
        self.layers = SlotLayers(loader, facts.experts)
        self._balancer = balancer
        self.cpu = np.asarray(costs.cpu.seconds(nbytes, np.arange(len(self.fast)))).tolist()
        self._deciding = 0.0 if outcome.slots == facts.total else costs.host_work.layer
        self._counts = trace.step_counts()
        self._step = 0
        self._records = 0  # of the step
        self._number = 0  # records before the next layer
        self._between = 0.0  # seconds before each layer that are not spent on its experts

    def fill(self, keys: Sequence[int]) -> None:
        for _ in self.layers.fill([list(keys)]):
            pass

    def fill_host(self, keys: Sequence[int]) -> None:
        """Puts those of ``keys`` that have neither slot nor row into free rows of host memory."""
        assert self.tier is not None
        self.link.fill_host(self.tier.first(keys, self.residency.slot_of))

    def begin_step(self, step: int, drafting: float, layers: int) -> None:
        self._step, self._records, self._between = step, layers, self.costs.other / max(1, layers)
        self.link.run(drafting if layers else drafting + self.costs.other)
        if self._balancer is not None and not self.has_prompts(step):
            drafts = self.drafts(step)
            self._balancer.observe_verify(float(drafts.mean()) if len(drafts) else 0.0)
            if drafting:
                self._balancer.observe_draft(drafting / int(drafts.max()))
        self.layers.begin_step(None if self.has_prompts(step) else self._inputs())

    def end_step(self) -> None:
        counts = next(self._counts)
        if self._records:
            self.layers.loader.end_step(counts, self.trace.prompt_rows(self._step))
        outcome, counters = self.outcome, self.counters
        outcome.hits, outcome.misses, outcome.cpu = counters.hits, counters.misses, counters.cpu_experts
        outcome.host_loads = counters.host_loads
        outcome.loads, outcome.parts, outcome.prefetches = counters.loads, counters.waves, counters.prefetches
        outcome.prefetch_hits, outcome.prefetch_late = counters.prefetch_hits, counters.prefetch_late
        outcome.prefetch_wasted, outcome.prefetch_harmful = counters.prefetch_wasted, counters.prefetch_harmful
        outcome.bytes = (outcome.loads + outcome.prefetches) * self.nbytes

    def run_layer(self, layer: int, work: np.ndarray) -> None:
        routed, counters, outcome = work.astype(np.int32), self.counters, self.outcome
        hits, loads, cpu = counters.hits, counters.misses - counters.prefetch_late, counters.cpu_experts
        near, began = counters.host_loads, counters.loads
        self.link.run(self._between)
        if self.layers.observes_layers:
            self.layers.observe_layer(layer, None, torch.from_numpy(routed), self._weights())
        self._number += 1
        cold = self.layers.cpu.cold(layer, routed, counters)
        hot, on_cpu, deciding = self._divide(routed, cold)
        self.link.take_waited()
        took = computed = 0.0
        for wave in self.layers.waves(layer, hot.ids, counters):
            seconds, busy = self._run(layer, hot, wave)
            took, computed = took + seconds, computed + busy
        on_cpu = max(on_cpu, self.costs.sharing(self.nbytes, counters.loads - began, counters.cpu_experts - cpu))
        self.link.run(max(0.0, on_cpu - took) + deciding)
        self.layers.cpu.admit()
        took = max(took, on_cpu) + deciding
        outcome.seconds += took
        outcome.stall_seconds += took - computed
        used = counters.hits - hits, counters.misses - counters.prefetch_late - loads, counters.cpu_experts - cpu
        near = min(used[1], counters.host_loads - near)  # a wave may load an expert again
        outcome.bound_seconds += self.costs.bound(self.nbytes, *used, near)

    def _inputs(self) -> PredictorInputs | None:
        """Returns what a predictor may see of a step at its start; the oracle, what all of its routers will choose."""
        if Signal.FUTURE not in (self.layers.loader.needs or ()):
            return PredictorInputs(START)
        facts, starts = self.trace.facts, self.trace.record_start
        if self._records < facts.layers:  # the others would have to be guessed
            return None
        ids = self.trace.ids[starts[self._number] : starts[self._number + self._records]].astype(np.int64)
        return PredictorInputs(START, future=torch.from_numpy(ids).view(facts.layers, -1, facts.top_k))

    def _weights(self) -> torch.Tensor | None:
        """Returns float32 [rows, top_k], the routing weights of the next layer, if the trace has them."""
        if self.trace.weights is None:
            return None
        start, stop = self.trace.record_start[self._number : self._number + 2]
        return torch.from_numpy(self.trace.weights[start:stop].astype(np.float32))

    def _divide(self, routed: np.ndarray, cold: np.ndarray | None) -> tuple[_Hot, float, float]:
        """Returns (rows that need slots, seconds of the ``cold`` pairs on the CPU, seconds of the host's decisions)."""
        if cold is None:
            return _Hot(routed, None), 0.0, self._deciding
        _, rows = np.unique(routed[cold], return_counts=True)
        hot = Share.of(torch.from_numpy(routed), torch.from_numpy(~cold))
        on_cpu = sum(self.cpu[count] for count in rows.tolist())
        return _Hot(hot.ids.numpy(), hot.own.numpy()), on_cpu, self._deciding + self.costs.host_work.divide

    def _run(self, layer: int, hot: _Hot, wave: HeldRows) -> tuple[float, float]:
        """Passes the time of a wave; returns (its seconds, those in which fast memory computed)."""
        rows = wave.rows
        ids = hot.ids[rows] if hot.own is None else hot.ids[rows][hot.own[rows]]
        experts, counts = np.unique(ids, return_counts=True)
        late = {key - layer * self.trace.facts.experts for key in wave.missed}
        computed = waiting = 0.0
        for expert, count in zip(experts.tolist(), counts.tolist(), strict=True):
            if expert in late:
                waiting += self.fast[count]
            else:
                computed += self.fast[count]
        loading = self.link.take_waited()
        took = loading + computed + waiting
        took += self.costs.host_work.load if late else 0.0
        self.link.run(took - loading)
        return took, computed + waiting
