"""Simulates ``execution=pointers``: the serving code's planner and pointers, over one shared bus.

Assumptions, each where nothing was measured:

- A layer is one launch. Its blocks overlap, so it takes as long as the slower of two: its hits, read from fast memory
  one after the other, or its misses, each of which crosses the bus once. The bus hides the arithmetic of misses.
- Moves are copied in order. While a layer streams misses, moves in flight and the layer get half of the bus each;
  otherwise moves have the bus to themselves. The time that a step spends outside its experts is divided equally and
  placed before its layers.
- The counts of a step are known when the next one begins, as without async scheduling; with it they are a step later.
- Long prompts are no exception: an expert crosses the bus once, as with staging. Steps with only prompts do not count
  towards the time per token; steps that mix prompts with other rows do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from vllm_spac.cache.residency import NOWHERE
from vllm_spac.decisions.costs import Costs
from vllm_spac.decisions.policies.base import Policy
from vllm_spac.execution.moves import Move, Planner, Pointers, most_moves
from vllm_spac.recording.metrics import Counters
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.traces.replayed import Outcome, Part, Replay


class Bus:
    """The pending work of the copy stream, in seconds at full bus bandwidth."""

    def __init__(self) -> None:
        self._copying: deque[tuple[list[Move], float]] = deque()  # the oldest first, with the seconds that are left

    def begin(self, moves: list[Move], seconds: float) -> None:
        """Queues ``moves`` after those in flight; they arrive together."""
        if moves:
            self._copying.append((moves, seconds))

    def copy(self, seconds: float) -> None:
        """Advances the moves by ``seconds`` in which they have the bus to themselves."""
        for number, (moves, left) in enumerate(self._copying):
            spent = min(seconds, left)
            seconds -= spent
            self._copying[number] = moves, left - spent

    def stream(self, seconds: float) -> float:
        """Streams misses that take ``seconds`` on an idle bus; returns how long they take while moves share it."""
        shared = min(seconds, sum(left for _, left in self._copying))
        self.copy(shared)
        return seconds + shared

    def arrived(self) -> list[Move]:
        """Removes and returns the moves that have finished."""
        found: list[Move] = []
        while self._copying and self._copying[0][1] <= 0:
            found += self._copying.popleft()[0]
        return found


class PointersReplay(Replay[list[Part]]):
    """Replays a trace over a table of pointers.

    Args:
        outcome: with ``slots`` and ``step_bytes``, as ``PointerExecution`` has them.
        policy: decides which expert is evicted; owned.
    """

    def __init__(self, trace: Trace, costs: Costs, nbytes: int, outcome: Outcome, policy: Policy) -> None:
        super().__init__(trace, costs, nbytes, outcome)
        assert outcome.step_bytes is not None
        self.counters = Counters()
        self.pointers = Pointers(trace.facts.total, outcome.slots, policy)
        self.planner = Planner(self.pointers, most_moves(outcome.step_bytes, nbytes), self.counters)
        self.bus = Bus()
        self._counts = np.zeros(trace.facts.total, dtype=np.int64)
        self._resident = self.pointers.at != NOWHERE
        self._prompts = False
        self._between = 0.0  # seconds before each layer that are not spent on its experts

    def fill(self, keys: Sequence[int]) -> None:
        self.pointers.arrived([self.pointers.placed(key) for key in keys])

    def begin_step(self, step: int, drafting: float, layers: int) -> None:
        self._prompts = self.has_prompts(step)
        self._between = self.costs.other / max(1, layers)
        self.bus.copy(drafting)
        arrived = self.bus.arrived()
        self.pointers.arrived(arrived)
        for move in arrived:
            self.planner.moved_in(move.key)
        moves = self.planner.choose()
        self.bus.begin(moves, len(moves) * float(self.costs.load.seconds(self.nbytes)))
        self._resident = self.pointers.at != NOWHERE
        self._counts = np.full_like(self._counts, -1)

    def layer(self, layer: int, work: list[Part]) -> None:
        experts, outcome = self.trace.facts.experts, self.outcome
        (part,) = work
        self._counts[layer * experts : (layer + 1) * experts] = 0
        self._counts[part.keys] = part.rows
        hit = self._resident[part.keys].tolist()
        computed = sum(self.fast[rows] for rows, here in zip(part.rows, hit, strict=True) if here)
        misses = len(hit) - sum(hit)
        self.bus.copy(self._between)
        streamed = self.bus.stream(misses * float(self.costs.load.ideal(self.nbytes)))
        took = max(computed, streamed)
        self.bus.copy(took - streamed)
        outcome.parts += 1
        outcome.seconds += took
        outcome.stall_seconds += took - computed
        outcome.bound_seconds += self.costs.bound(self.nbytes, sum(hit), misses, 0)

    def end_step(self) -> None:
        self.planner.learn(self._counts, self._resident, prompts=self._prompts)
        outcome, counters = self.outcome, self.counters
        outcome.hits, outcome.misses, outcome.loads = counters.hits, counters.misses, counters.prefetches
        outcome.bytes, outcome.streamed_bytes = outcome.loads * self.nbytes, outcome.misses * self.nbytes
