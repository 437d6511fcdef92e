"""A link that moves nothing: loads and reads ahead take seconds on a virtual clock, with the rules of ``Transfers``.

Each read has a fixed part, in which it does not use the bandwidth, and then shares the bandwidth with all others. A
layer that waits keeps reads ahead from beginning; those in flight continue.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, KeysView, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_spac.cache.host_tier import HostMove, HostTier
from vllm_spac.cache.link import Moved
from vllm_spac.cache.transfers import HOST
from vllm_spac.decisions.costs import Costs, Rate
from vllm_spac.recording.metrics import Counters


@dataclass(slots=True, eq=False)
class Flow:
    """Reads that began together and finish together."""

    fixed: float  # seconds left in which the bandwidth is not used
    work: float  # seconds left after that, if the reads had the whole bandwidth
    weight: int = 1  # their share of the bandwidth, relative to other flows

    @property
    def done(self) -> bool:
        return self.fixed <= 0 and self.work <= 0


class VirtualAhead:
    """Reads ahead of need, as ``cache.transfers.Background`` has them."""

    def __init__(self, link: VirtualLink, readers: int) -> None:
        self._link, self._readers = link, readers
        self._tickets: dict[int, Flow | None] = {}  # None: not begun
        self._moves: dict[int, HostMove] = {}
        self._waiting: deque[int] = deque()
        self.running: list[Flow] = []

    @property
    def keys(self) -> KeysView[int]:
        return self._tickets.keys()

    @property
    def reading(self) -> int:
        return len(self.running)

    def fetch(self, loads: Iterable[tuple[int, int]]) -> None:
        for key, slot in loads:
            assert key not in self._tickets, f"a read of expert {key} is in flight already"
            self._tickets[key], self._moves[key] = None, self._link.plan(key, slot)
            self._waiting.append(key)
        self.begin()

    def cancel(self, keys: Iterable[int]) -> list[int]:
        gone = [key for key in keys if self._tickets[key] is None]
        for key in gone:
            del self._tickets[key]
            self._waiting.remove(key)
            self._link.cancel(self._moves.pop(key))
        return gone

    def take_finished(self) -> dict[int, Moved | BaseException]:
        over = [key for key, flow in self._tickets.items() if flow is not None and flow.done]
        return {key: self._end(key) for key in over}

    def wait(self, keys: Sequence[int]) -> dict[int, Moved | BaseException]:
        flows = [flow for key in keys if (flow := self._tickets[key]) is not None]
        assert len(flows) == len(keys), "cancel before waiting: nothing is begun meanwhile"
        self._link.wait(flows)
        return {key: self._end(key) for key in keys}

    def begin(self) -> None:
        """Begins as many of the queued reads as may be in flight."""
        self.running = [flow for flow in self.running if not flow.done]
        while self._waiting and len(self.running) < self._readers:
            key = self._waiting.popleft()
            flow = self._tickets[key] = self._link.read_ahead(self._moves[key])
            if not flow.done:  # else the next one begins at once
                self.running.append(flow)

    def _end(self, key: int) -> Moved:
        del self._tickets[key]
        return self._link.finish(self._moves.pop(key))


class VirtualLink:
    """Passes the time that loads take.

    Loads that a layer waits for run ``costs.load_at_once`` at a time, and take ``costs.loading`` seconds if no read
    ahead is in flight.

    Args:
        costs: seconds of a load.
        nbytes: bytes of an expert.
        tier: host memory beside the store, if any; ``costs.host`` is then the cost of a load from it. Copies to it cost
            nothing: they go in the other direction, or into memory.
    """

    def __init__(self, costs: Costs, nbytes: int, readers: int, tier: HostTier | None = None) -> None:
        self._costs, self.nbytes, self._tier = costs, nbytes, tier
        self.ahead = VirtualAhead(self, readers)
        self._now = self._waited = 0.0

    def clock(self) -> float:
        return self._now

    def flow(self, count: int, rate: Rate | None = None) -> Flow:
        """Returns the flow of ``count`` loads that begin together, at ``rate``, or at that of the store."""
        load, at_once = rate or self._costs.load, self._costs.load_at_once
        work = count * self.nbytes / load.bytes_per_second
        return Flow(-(-count // at_once) * load.fixed, work, min(count, at_once))

    def plan(self, key: int, slot: int) -> HostMove:
        """As ``Mover.plan``."""
        return HostMove(key, slot) if self._tier is None else self._tier.plan(key, slot)

    def finish(self, move: HostMove) -> Moved:
        """Completes ``move``; returns what it moved."""
        if self._tier is not None:
            self._tier.finish(move, read=True, saved=move.row is not None)
        return Moved("link" if move.source is None else HOST, self.nbytes)

    def cancel(self, move: HostMove) -> None:
        """As ``Mover.cancel``."""
        if self._tier is not None:
            self._tier.cancel(move)

    def read_ahead(self, move: HostMove) -> Flow:
        """Returns the flow of one read ahead."""
        return self.flow(1, None if move.source is None else self._costs.host)

    def load(self, loads: Sequence[tuple[int, int]], counters: Counters | None) -> dict[int, BaseException]:
        start = self._now
        moves = [self.plan(key, slot) for key, slot in loads]
        near = sum(move.source is not None for move in moves)
        flows = [self.flow(len(moves) - near)] if near < len(moves) else []
        flows += [self.flow(near, self._costs.host)] if near else []
        self.wait(flows)
        for moved in map(self.finish, moves):
            if counters is not None:
                counters.loads += 1
                counters.host_loads += moved.path == HOST
                counters.count_bytes(moved.path, moved.nbytes)
        if counters is not None:
            counters.stall_seconds += self._now - start
        return {}

    def fill_host(self, keys: Sequence[int]) -> None:
        """As ``Transfers.fill_host``; passes no time."""
        assert self._tier is not None
        for key in keys:
            self._tier.admit(key)

    def begin_layer(self, layer: range) -> None:
        if self._tier is not None:
            self._tier.policy.begin_layer(layer)

    def observe(self, counts: np.ndarray) -> None:
        if self._tier is not None:
            self._tier.policy.observe(counts)

    def observe_prompt(self, rows: np.ndarray) -> None:
        if self._tier is not None:
            self._tier.policy.observe_prompt(rows)

    def run(self, seconds: float) -> None:
        """Passes ``seconds`` in which no layer waits: reads ahead continue and begin."""
        end, left = self._now + seconds, seconds
        while self.ahead.running and left > 0:
            left -= self._advance(self.ahead.running, left)
            self.ahead.begin()
        self._now = end

    def take_waited(self) -> float:
        """Returns the seconds that layers have waited since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        """Does nothing: there are no threads."""

    def wait(self, flows: Collection[Flow]) -> None:
        """Passes time until ``flows`` are done; reads ahead in flight continue, and none begins before the end."""
        others = [flow for flow in flows if flow not in self.ahead.running]
        while not all(flow.done for flow in flows):
            running = [flow for flow in (*self.ahead.running, *others) if not flow.done]
            self._waited += self._advance(running, math.inf)
        self.ahead.begin()

    def _advance(self, flows: Sequence[Flow], most: float) -> float:
        """Passes time until one of ``flows`` has finished a part, at most ``most`` seconds; returns the seconds."""
        weights = sum(flow.weight for flow in flows if flow.fixed <= 0)
        lefts = [flow.fixed if flow.fixed > 0 else flow.work * (weights / flow.weight) for flow in flows]
        passed = min(most, *lefts)
        for flow, left in zip(flows, lefts, strict=True):
            if flow.fixed > 0:
                flow.fixed = 0.0 if left <= passed else flow.fixed - passed
            else:
                flow.work = 0.0 if left <= passed else flow.work - passed * (flow.weight / weights)
        self._now += passed
        return passed
