"""Least recently used per layer, with an equal number of slots per layer: the cache of most offloaders."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterator

from vllm_spac.decisions.policies.base import Policy


class LayerLRU(Policy):
    """Evicts the least recently used expert of the layer that needs a slot.

    Each layer thus keeps the equal share of the slots that it was filled with. A layer that needs more than that at
    once (a prompt) takes the rest from the layer that holds most, and a layer that holds two experts fewer than another
    takes from that one, until the shares are equal again. Mixtral-offloading (arXiv:2312.17238) caches in this way, but
    without such loans.

    O(layers) per victim. Before the first ``begin_layer`` layers are unknown, and it is LRU.
    """

    def __init__(self) -> None:
        self._length = 0  # experts per layer; 0: unknown, and all keys are treated as one layer
        self._asks: int | None = None
        self._layers: defaultdict[int, OrderedDict[int, int]] = defaultdict(OrderedDict)  # key -> time of its last use
        self._clock = 0

    def begin_layer(self, layer: range) -> None:
        if not self._length:
            self._length = len(layer)
            for key, used in self._layers.pop(0, {}).items():
                self._of(key)[key] = used
        self._asks = layer.start // self._length

    def insert(self, key: int) -> None:
        assert key not in self, f"{key} is resident already"
        self._use(key)

    def touch(self, key: int) -> None:
        assert key in self, f"{key} is not resident"
        self._use(key)

    def remove(self, key: int) -> None:
        del self._of(key)[key]

    def evict(self, count: int, pinned: Container[int]) -> list[int]:
        victims: list[int] = []
        if count:
            for key in self._victims(pinned):
                victims.append(key)
                if len(victims) == count:
                    break
            else:
                raise LookupError(f"{count} victims wanted, {len(victims)} are not in use")
        for key in victims:
            self.remove(key)
        return victims

    def __len__(self) -> int:
        return sum(map(len, self._layers.values()))

    def __contains__(self, key: int) -> bool:
        return key in self._layers.get(self._number(key), ())

    def _number(self, key: int) -> int:
        return key // self._length if self._length else 0

    def _of(self, key: int) -> OrderedDict[int, int]:
        return self._layers[self._number(key)]

    def _use(self, key: int) -> None:
        self._clock += 1
        held = self._of(key)
        held[key] = self._clock
        held.move_to_end(key)

    def _victims(self, pinned: Container[int]) -> Iterator[int]:
        """Yields all possible victims in order of eviction; each victim's slot is counted for the layer that asks."""
        asks = self._asks
        free = {number: (key for key in held if key not in pinned) for number, held in self._layers.items()}
        first = {number: key for number, keys in free.items() if (key := next(keys, None)) is not None}
        sizes = {number: len(held) for number, held in self._layers.items()}
        while first:
            most = min(first, key=lambda number: (-sizes[number], self._layers[number][first[number]]))
            giver = asks if asks in first and sizes[most] <= sizes[asks] + 1 else most
            yield first.pop(giver)
            sizes[giver] -= 1
            if asks is not None:
                sizes[asks] = sizes.get(asks, 0) + 1
            if (key := next(free[giver], None)) is not None:
                first[giver] = key
