"""Simulates ``execution=pointers`` with ``admission=layer``, using the serving code's offers and the kernel's twin.

Assumptions in addition to those of ``pointers_by_step``, each where nothing was measured:

- A layer first copies the experts it admits, each once over the bus, and then runs as one launch, as in that module.
- The kernels that decide and copy are launched in every layer and take ``LAUNCHES`` seconds in addition to the bytes.
- Nothing else uses the bus.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_spac.execution.pointers.slot_offers import Offering
from vllm_spac.kernels.reference.admit import admit
from vllm_spac.kernels.types import ADMITTED, STREAMED, Experts, Offers
from vllm_spac.metrics import Counters
from vllm_spac.policies.base import Policy
from vllm_spac.profiling.costs import Costs
from vllm_spac.simulation.parts import Part
from vllm_spac.simulation.replay import Outcome, Replay
from vllm_spac.traces.format import Trace

LAUNCHES = 5e-6  # seconds per layer: one program that decides, and a grid that finds nothing to copy


class AdmittedReplay(Replay[list[Part]]):
    """Replays a trace over a table of pointers whose layers admit the experts that they miss.

    Args:
        outcome: with ``slots``.
        policy: estimates what a slot is worth; owned.
    """

    def __init__(self, trace: Trace, costs: Costs, nbytes: int, outcome: Outcome, policy: Policy) -> None:
        super().__init__(trace, costs, nbytes, outcome)
        keys = trace.facts.total
        self.counters = Counters()
        self.offering = Offering(keys, outcome.slots, policy, self.counters)
        no_addresses = torch.zeros(0, keys, dtype=torch.int64), torch.zeros(0, keys, dtype=torch.int64)
        residency = self.offering.residency
        slot_of, owner = (torch.from_numpy(array.copy()) for array in (residency.slot_of, residency.owner))
        self.experts = Experts(slot_of, owner, *no_addresses, torch.zeros(0, outcome.slots, dtype=torch.int64))
        self.offers = Offers(*(torch.zeros(0) for _ in Offers._fields))
        self._copies = torch.zeros(1 + 2 * trace.facts.experts, dtype=torch.int32)
        self._counts, self._sources = (torch.zeros(keys, dtype=torch.int32) for _ in range(2))
        self._prompts = False

    def fill(self, keys: Sequence[int]) -> None:
        residency = self.offering.residency
        placement = residency.prepare(keys)
        for key, _ in placement.loads:
            residency.loaded(key)
        residency.release(keys)
        self.experts.slot_of.copy_(torch.from_numpy(residency.slot_of))
        self.experts.owner.copy_(torch.from_numpy(residency.owner))

    def begin_step(self, step: int, drafting: float, layers: int) -> None:
        self._prompts = self.has_prompts(step)
        offered = self.offering.offer()
        end = 0 if self._prompts else len(offered.slots)
        self.offers = Offers(torch.tensor([0, end], dtype=torch.int32), *map(torch.from_numpy, offered))
        self._counts.fill_(-1)
        self._sources.fill_(-1)

    def layer(self, layer: int, work: list[Part]) -> None:
        (part,), outcome = work, self.outcome
        first = layer * self.trace.facts.experts
        ids = torch.tensor(part.keys)[:, None] - first
        admit(ids, torch.ones(ids.shape), first, self.experts, self.offers, self._counts, self._sources, self._copies)
        self._counts[part.keys] = torch.tensor(part.rows, dtype=torch.int32)
        sources = self._sources[part.keys].tolist()
        computed = sum(self.fast[rows] for rows, source in zip(part.rows, sources, strict=True) if source != STREAMED)
        copied, streamed = sources.count(ADMITTED), sources.count(STREAMED)
        load = float(self.costs.load.ideal(self.nbytes))
        launches = LAUNCHES if outcome.slots < self.trace.facts.total else 0.0
        took = launches + copied * load + max(computed, streamed * load)
        outcome.parts += 1
        outcome.seconds += took
        outcome.stall_seconds += took - computed
        missed = copied + streamed
        outcome.bound_seconds += self.costs.bound(self.nbytes, len(part.keys) - missed, missed, 0)

    def end_step(self) -> None:
        reported = (tensor.numpy().copy() for tensor in (self._counts, self._sources, self.experts.owner))
        streamed = self.offering.learn(*reported, prompts=self._prompts).streamed
        outcome, counters = self.outcome, self.counters
        outcome.hits, outcome.misses, outcome.loads = counters.hits, counters.misses, counters.loads
        outcome.bytes = outcome.loads * self.nbytes
        outcome.streamed_bytes += streamed * self.nbytes
