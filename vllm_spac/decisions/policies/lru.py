"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from itertools import islice
from typing import ClassVar

import torch

from vllm_spac.decisions.policies.base import Formula, Policy


class LRUFormula(Formula):
    """All slots are worth the same to their owners, and one to an expert that is used now is worth more."""

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        super().__init__(layers, experts, device)
        self.used.fill_(torch.inf)


class LRU(Policy):
    """Evicts the expert whose last use is longest ago."""

    on_device: ClassVar[bool] = True

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def formula(self, layers: int, experts: int, device: torch.device) -> Formula:
        return LRUFormula(layers, experts, device)

    def insert(self, key: int) -> None:
        assert key not in self._order, f"{key} is resident already"
        self._order[key] = None

    def touch(self, key: int) -> None:
        self._order.move_to_end(key)

    def remove(self, key: int) -> None:
        del self._order[key]

    def evict(self, count: int, pinned: Container[int]) -> list[int]:
        victims = list(islice((key for key in self._order if key not in pinned), count))
        if len(victims) < count:
            raise LookupError(f"{count} victims wanted, {len(victims)} are not in use")
        for key in victims:
            del self._order[key]
        return victims

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: int) -> bool:
        return key in self._order
