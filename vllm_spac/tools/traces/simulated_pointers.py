"""Simulates ``plane=pointers``, using the serving code's formula and offers, and the kernel's twin.

Assumptions, each where nothing was measured:

- A layer runs as one launch whose blocks overlap, so it takes as long as the slower of two: the experts that had slots,
  read from fast memory one after the other; or the others, each of which crosses the bus once. The bus hides the
  arithmetic of those that are read in place. Those that the launch copies into slots are read there when all have
  arrived, at worst; so much is added.
- The kernel that decides is launched in every layer and takes ``LAUNCHES`` seconds in addition to the bytes.
- Nothing else uses the bus. The CPU begins with its share when the layer begins, and rows cross the bus at no time. A
  layer takes at least as long as host memory needs for what crosses the bus and what the CPU reads.
- What a step used is known to the next one, as on the device that decides. It takes no time. Host memory before a disk
  learns of it a step later. What is only on the disk is read there before anything else of the layer begins, and an
  order takes ``ORDER`` seconds besides. The CPU computes what is in host memory meanwhile.
- Long prompts are no exception: an expert crosses the bus once. That they borrow slots, the least valuable ones, which
  hold other experts afterwards, is left out. Simulated as the pool does it, 2,048 rows before each 64 to 256 tokens
  changed the time per token by less than 0.2 %: of the carved model with 15, 25 and 50 % of its experts in slots, of
  synthetic routing of 48 layers of 128 experts with 25 %.
- Steps with only prompts do not count towards the time per token; steps that mix prompts with other rows do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_spac.cache.host_tier import HostTier, OrderedRows
from vllm_spac.cache.residency import NOWHERE
from vllm_spac.decisions.costs import Costs
from vllm_spac.decisions.policies.base import Policy
from vllm_spac.execution.device.admission_reports import with_prompts
from vllm_spac.execution.device.cpu_share import MOST_ROWS
from vllm_spac.execution.device.slot_offers import SlotOffers
from vllm_spac.kernels.reference.admit import admit_alone
from vllm_spac.kernels.types import ADMITTED, COMPUTED, HIT, STREAMED, UNUSED, Experts, Kept
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.traces.replayed import Outcome, Part, Replay

ADMISSIONS = 1  # launches of a layer beside those of a layer whose experts all have a slot
LAUNCH = 5e-6  # seconds: on an H100 two took 9.9 us, the replay of their graph included
LAUNCHES = ADMISSIONS * LAUNCH  # seconds per layer
ORDER = 200e-6  # seconds: a nap of the thread that looks for orders, and Python; assumed, as nothing was measured


class PointersReplay(Replay[list[Part]]):
    """Replays a trace over a table of pointers whose layers admit the experts that they miss.

    Args:
        outcome: with ``slots``.
        policy: its formula says what a slot is worth.
        shares: experts that the CPU computes, by how many a layer misses, as of ``shares_of``; empty: none. beside:
            where it waits for the disk, too.
        settled: slots whose experts have them for good.
        tier: host memory before a disk, whose loads cost ``costs.host``; None: there is no disk.
    """

    def __init__(
        self,
        trace: Trace,
        costs: Costs,
        nbytes: int,
        outcome: Outcome,
        policy: Policy,
        shares: Sequence[int] = (),
        settled: int = 0,
        tier: HostTier | None = None,
        beside: Sequence[int] = (),
    ) -> None:
        super().__init__(trace, costs, nbytes, outcome)
        self._rows = None if tier is None else OrderedRows(tier)
        link = costs.load if tier is None or costs.host is None else costs.host
        self._load = float(link.ideal(nbytes))
        self._place_of = torch.zeros(trace.facts.total, dtype=torch.int32)  # as of ``Kept``, but any number is one row
        self._near = self._place_of.numpy()
        self._shared: tuple[torch.Tensor, Kept | None] | None = None
        if shares:
            kept = Kept(self._place_of, torch.tensor(beside, dtype=torch.int32)) if tier is not None else None
            self._shared = torch.tensor(shares, dtype=torch.int32), kept
        self._cpu = np.asarray(costs.cpu.seconds(nbytes, np.arange(len(self.fast)))).tolist()
        facts = trace.facts
        formula = policy.formula(facts.layers, facts.experts, torch.device("cpu"))
        self._offers = SlotOffers(formula, outcome.slots, settled)
        keys = facts.total
        no_addresses = torch.zeros(0, keys, dtype=torch.int64), torch.zeros(0, keys, dtype=torch.int64)
        slot_of, owner = (torch.full((size,), NOWHERE, dtype=torch.int32) for size in (keys, outcome.slots))
        self.experts = Experts(slot_of, owner, *no_addresses, torch.zeros(0, outcome.slots, dtype=torch.int64))
        self._copies = torch.zeros(1 + 2 * trace.facts.experts, dtype=torch.int32)
        self._counts, self._sources, self._decided = (torch.zeros(keys, dtype=torch.int32) for _ in range(3))
        self._last: tuple[np.ndarray, np.ndarray] | None = None  # as of ``OrderedRows.observe``, of the last step
        self._slots = slot_of.numpy().copy()  # as the host knows them when a step begins
        self._ending = self._slots  # after the last step
        self._leading = 0  # rows of the step that slots are for
        self._number = 0  # records before the next layer

    def fill(self, keys: Sequence[int]) -> None:
        """As in ``Replay``: all slots, or none, which then stay empty."""
        assert len(keys) in (0, self.outcome.slots)
        if not keys:
            return
        self.experts.owner.copy_(torch.tensor(keys))
        self.experts.slot_of[list(keys)] = torch.arange(len(keys), dtype=torch.int32)
        self._offers.update(self.experts.owner)
        self._slots = self._ending = self.experts.slot_of.numpy().copy()

    def fill_host(self, keys: Sequence[int]) -> None:
        """Puts those of ``keys`` that have no slot into host memory, as it has room."""
        assert self._rows is not None
        self._near[:] = NOWHERE
        for key in self._rows.tier.first(keys, self.experts.slot_of.numpy()):
            self._rows.tier.admit(key)
            self._near[key] = 0

    def begin_step(self, step: int, drafting: float, layers: int) -> None:
        self._step, self._leading = step, self.leading(step)
        if self._rows is not None:
            leaving = self._rows.begin_step(self._slots)
            self._near[list(leaving)] = NOWHERE
            self._rows.release(list(leaving.values()))
        state = self._offers.offers.state
        state.copy_(self._offers.ready if self._leading else torch.zeros_like(state))
        self._counts.fill_(-1)
        self._decided.fill_(-1)
        self._sources.fill_(UNUSED)

    def run_layer(self, layer: int, work: list[Part]) -> None:
        (part,), outcome = work, self.outcome
        first = layer * self.trace.facts.experts
        start = self.trace.record_start[self._number]
        self._number += 1
        ids = torch.from_numpy(self.trace.ids[start : start + self._leading].astype(np.int32))
        state = self.experts, self._offers.offers, self._decided, self._sources, self._copies
        shared = self._shared if self._shared is not None and self._may_leave() else (None, None)
        admit_alone(ids, torch.ones(ids.shape), first, *state, None, *shared)
        self._counts[first : first + self.trace.facts.experts] = 0
        self._counts[part.keys] = torch.tensor(part.rows, dtype=torch.int32)
        sources = self._sources[part.keys].tolist()
        if UNUSED in sources:  # by later rows, which take no slot
            sources = self._read_from()[part.keys].tolist()
        by_rows = list(zip(part.rows, sources, strict=True))
        on_cpu = sum(self._cpu[rows] for rows, source in by_rows if source == COMPUTED)
        hits, filled = (sum(self.fast[rows] for rows, each in by_rows if each == source) for source in (HIT, ADMITTED))
        copied, streamed, left = (sources.count(source) for source in (ADMITTED, STREAMED, COMPUTED))
        load, ordered = self._load, self._order(part.keys, sources)
        launches = LAUNCHES if outcome.slots < self.trace.facts.total else 0.0
        memory = self.costs.sharing(self.nbytes, copied + streamed, left)
        link = (copied + streamed) * load + filled
        took = launches + max(ordered + max(hits, link), on_cpu, memory)
        outcome.parts += 1
        outcome.seconds += took
        outcome.stall_seconds += took - hits - filled
        missed = copied + streamed
        outcome.bound_seconds += self.costs.bound(self.nbytes, len(part.keys) - missed - left, missed, left)

    def _order(self, keys: Sequence[int], sources: Sequence[int]) -> float:
        """Returns the seconds of reading what is only on the disk; a row of host memory has it then, if one is free."""
        missed = (key for key, source in zip(keys, sources, strict=True) if source in (ADMITTED, STREAMED))
        away = [key for key in missed if self._near[key] == NOWHERE]
        if self._rows is None or not away:
            return 0.0
        self._near[away] = [NOWHERE if self._rows.place(key) is None else 0 for key in away]
        self.outcome.disk_loads += len(away)
        return ORDER + self.costs.loading(len(away), self.nbytes)

    def _may_leave(self) -> bool:
        """Whether the CPU takes part in the step, as ``CpuShare.begin`` says."""
        return not self.has_prompts(self._step) and self._leading <= MOST_ROWS

    def _read_from(self) -> np.ndarray:
        """Returns int [keys], how each expert was read by the layers that have run."""
        return with_prompts(*(tensor.numpy() for tensor in (self._counts, self._sources, self.experts.owner)))

    def end_step(self) -> None:
        self._count(self._read_from())
        if self._rows is not None:
            if self._last is not None:
                self._rows.observe(*self._last)
            self._slots, self._ending = self._ending, self.experts.slot_of.numpy().copy()
            sources, counts = self._read_from(), np.maximum(self._decided.numpy(), 0)
            self._last = (counts, sources > HIT) if counts.any() else None
        if self.experts.owner[0] == NOWHERE:
            return
        if (prompt := self.trace.prompt_rows(self._step)) is not None:
            self._offers.formula.observe_rows(torch.from_numpy(prompt))
        self._offers.update(self.experts.owner, self._decided if self._leading else None)

    def _count(self, sources: np.ndarray) -> None:
        hits, admitted, streamed, computed = (
            int(np.count_nonzero(sources == source)) for source in (HIT, ADMITTED, STREAMED, COMPUTED)
        )
        outcome = self.outcome
        outcome.hits, outcome.misses = outcome.hits + hits, outcome.misses + admitted + streamed
        outcome.loads, outcome.cpu = outcome.loads + admitted, outcome.cpu + computed
        outcome.bytes = outcome.loads * self.nbytes
        outcome.streamed_bytes += streamed * self.nbytes
