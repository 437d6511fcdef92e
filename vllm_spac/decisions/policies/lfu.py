"""Least frequently used, with ageing so that formerly popular experts can be evicted."""

from __future__ import annotations

from typing import ClassVar

import torch
from sortedcontainers import SortedSet
from torch import Tensor

from vllm_spac.decisions.policies._sorted import SortedPolicy
from vllm_spac.decisions.policies.base import Formula


class LFUFormula(Formula):
    """As ``LFU``, of all uses of a step at once: those before a moment of ageing are halved, and later ones are not."""

    def __init__(self, half_life: int, layers: int, experts: int, device: torch.device) -> None:
        super().__init__(layers, experts, device)
        self.used.fill_(1)
        self._half_life = half_life
        self._clock = torch.zeros(1, dtype=torch.int64, device=device)  # uses of any expert

    def touch(self, touched: Tensor, came: Tensor) -> None:
        super().touch(touched, came)
        in_order = torch.stack((touched.view(self.layers, -1), came.view(self.layers, -1)), 1)
        moments = in_order.flatten().cumsum(0).add_(self._clock).view_as(in_order)
        end = moments.flatten()[-1:]
        now = touched | came
        moment = torch.where(touched, moments[:, 0].flatten(), moments[:, 1].flatten())
        before = torch.where(now, moment - 1, end) // self._half_life
        self.kept *= _halved(before - self._clock // self._half_life)
        self.kept += now
        self.kept *= _halved(end // self._half_life - before)
        self.used.copy_(self.kept + 1)
        self._clock.copy_(end)


def _halved(times: Tensor) -> Tensor:
    return 0.5 ** times.double()


class LFU(SortedPolicy):
    """Evicts the expert with the fewest uses, among equals the one used longest ago.

    Counts of uses survive evictions (an expert that is loaded repeatedly is popular) and are halved every
    ``half_life`` uses of any expert.
    """

    on_device: ClassVar[bool] = True

    def __init__(self, *, half_life: int = 65536) -> None:
        super().__init__()
        self._half_life = half_life
        self._uses: dict[int, float] = {}
        self._clock = 0

    def formula(self, layers: int, experts: int, device: torch.device) -> Formula:
        return LFUFormula(self._half_life, layers, experts, device)

    def _rank_of_use(self, key: int) -> tuple:
        self._clock += 1
        self._uses[key] = self._uses.get(key, 0.0) + 1
        if self._clock % self._half_life == 0:
            self._age()
        return (self._uses[key], self._clock, key)

    def _age(self) -> None:
        self._uses = {key: uses / 2 for key, uses in self._uses.items()}
        self._rank = {key: (self._uses[key], rank[1], key) for key, rank in self._rank.items()}
        self._order = SortedSet(self._rank.values())
