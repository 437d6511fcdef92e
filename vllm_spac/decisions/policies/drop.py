"""Experts are dropped after use: OD-MoE's cacheless serving, for slots of twice the experts per token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator
from itertools import islice

from vllm_spac.decisions.policies.base import Policy


class Drop(Policy):
    """Evicts the experts of layers that have run before those that wait for theirs, which were read ahead.

    With slots for the experts of two tokens (``--spac-slots 2k``) the running layer has one half, and what is read
    ahead for the next layer has the other: OD-MoE (Wang et al., 2025), section 3, without a cache. First come the
    experts of past layers, the longest past first, then those of the running layer, then those of layers to come, the
    last of these layers first. Before the first ``begin_layer`` all experts wait.
    """

    keeps = False

    def __init__(self) -> None:
        self._past: OrderedDict[int, None] = OrderedDict()
        self._running: OrderedDict[int, None] = OrderedDict()
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._layer = range(0)

    def begin_layer(self, layer: range) -> None:
        self._past.update(self._running)
        self._running = OrderedDict.fromkeys(key for key in self._waiting if key in layer)
        for key in self._running:
            del self._waiting[key]
        self._layer = layer

    def insert(self, key: int) -> None:
        assert key not in self, f"{key} is resident already"
        (self._running if key in self._layer else self._waiting)[key] = None

    def touch(self, key: int) -> None:
        self.remove(key)
        self.insert(key)

    def remove(self, key: int) -> None:
        for held in (self._running, self._waiting, self._past):
            if key in held:
                del held[key]
                return
        raise KeyError(key)

    def evict(self, count: int, pinned: Container[int]) -> list[int]:
        victims = list(islice((key for key in self._order() if key not in pinned), count))
        if len(victims) < count:
            raise LookupError(f"{count} victims wanted, {len(victims)} are not in use")
        for key in victims:
            self.remove(key)
        return victims

    def __len__(self) -> int:
        return len(self._past) + len(self._running) + len(self._waiting)

    def __contains__(self, key: int) -> bool:
        return key in self._past or key in self._running or key in self._waiting

    def _order(self) -> Iterator[int]:
        """Yields all keys, the first victim first."""
        yield from self._past
        yield from self._running
        later = self._layer.start
        yield from sorted(self._waiting, key=lambda key: (key < later, key), reverse=True)
