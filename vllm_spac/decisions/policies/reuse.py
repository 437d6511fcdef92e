"""Evicts the expert whose next use is expected last: Belady's rule with an estimate in place of the future.

The estimate is ``NextUse``, of the probability that the next step selects each expert.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vllm_spac.decisions.policies._next_use import NextUse
from vllm_spac.decisions.policies.base import Formula, Policy

LATER = 0.5  # steps, by which an expert that is used now is due later than its probability says


class ReuseFormula(Formula):
    """As ``Reuse`` without layers: the value of a slot is the negative number of steps until the expected next use."""

    def __init__(self, half_lives: Sequence[float], layers: int, experts: int, device: torch.device) -> None:
        super().__init__(layers, experts, device)
        self._next_use = NextUse(half_lives, layers * experts, device)

    def observe_counts(self, counts: Tensor) -> None:
        self._next_use.observe(counts)
        self._expect()

    def observe_rows(self, rows: Tensor) -> None:
        self._next_use.observe_prompt(rows)
        self._expect()

    def _expect(self) -> None:
        self.kept.copy_(-(1 / self._next_use.probabilities))
        self.used.copy_(-(1 / self._next_use.if_used()) - LATER)


class Reuse(Policy):
    """Evicts the expert whose expected next use is furthest ahead, among equals the least recently used one.

    A step selects an expert with probability p, which ``NextUse`` estimates from its past and adapts to how local the
    routing is. Its next use is then expected 1/p - 1 steps after the next run of its layer, which is in this step for
    layers that have not run yet and in the next step for layers that have.

    O(1) per use, O(slots) in numpy per ``evict``, O(keys) per ``observe``. Before the first ``observe``, without
    ``begin_layer``, it is LRU. Uses count when the step ends, so a missing expert that is rarely used is evicted before
    a popular one, and a scan does not flush the slots.

    Args:
        half_lives: half-lives, in steps, of the averages from which p is estimated.
    """

    on_device: ClassVar[bool] = True

    def __init__(self, *, half_lives: Sequence[float] = (2, 8, 32)) -> None:
        listed = isinstance(half_lives, tuple | list) and len(half_lives) > 0
        if not listed or not all(isinstance(steps, int | float) and steps > 0 for steps in half_lives):
            raise ValueError("use half_lives of one or more numbers > 0, e.g. half_lives=(2,8,32) or half_lives=(3,)")
        self._half_lives = tuple(half_lives)
        self._next_use: NextUse | None = None
        self._held: np.ndarray = np.zeros(0, dtype=bool)
        self._used: np.ndarray = np.zeros(0, dtype=np.int64)
        self._due: np.ndarray = np.zeros(0)  # in steps, for a layer that has not run yet
        self._before: np.ndarray = np.zeros(0)  # the share of a step that runs before the layer of each key
        self._size = 0
        self._clock = 0
        self._layer = range(0)

    @property
    def likely(self) -> np.ndarray:
        return np.zeros(0) if self._next_use is None else self._next_use.probabilities.numpy()

    def formula(self, layers: int, experts: int, device: torch.device) -> ReuseFormula:
        return ReuseFormula(self._half_lives, layers, experts, device)

    def begin_layer(self, layer: range) -> None:
        if not self._layer:
            self._before = np.zeros(0)  # layers were unknown
        self._layer = layer

    def insert(self, key: int) -> None:
        if key >= len(self._held):
            self._reach(key + 1)
        assert not self._held[key], f"{key} is resident already"
        self._held[key] = True
        self._size += 1
        self._clock += 1
        self._used[key] = self._clock

    def touch(self, key: int) -> None:
        assert key in self, f"{key} is not resident"
        self._clock += 1
        self._used[key] = self._clock

    def touch_all(self, keys: Sequence[int] | np.ndarray) -> None:
        before, self._clock = self._clock, self._clock + len(keys)
        self._used[keys] = np.arange(before + 1, self._clock + 1)

    def remove(self, key: int) -> None:
        assert key in self, f"{key} is not resident"
        self._held[key] = False
        self._size -= 1

    def evict(self, count: int, pinned: Container[int]) -> list[int]:
        victims: list[int] = []
        if count:
            keys = np.flatnonzero(self._held)
            due = self._due[keys] + (keys < self._layer.stop)
            looked = count
            while len(victims) < count:
                if looked >= 2 * len(keys):
                    raise LookupError(f"{count} victims wanted, {len(victims)} are not in use")
                victims = [key for key in self._last(keys, due, looked) if key not in pinned][:count]
                looked *= 2
        self._held[victims] = False
        self._size -= len(victims)
        return victims

    def observe(self, counts: np.ndarray) -> None:
        self._learn(len(counts)).observe(torch.from_numpy(counts))
        self._expect()

    def observe_prompt(self, rows: np.ndarray) -> None:
        self._learn(rows.shape[1]).observe_prompt(torch.from_numpy(rows))
        self._expect()

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: int) -> bool:
        return 0 <= key < len(self._held) and bool(self._held[key])

    def _learn(self, keys: int) -> NextUse:
        if self._next_use is None:
            self._next_use = NextUse(self._half_lives, keys)
            self._reach(keys)
        return self._next_use

    def _expect(self) -> None:
        likely = self.likely
        self._due[: len(likely)] = self._expected(likely)

    def _expected(self, probabilities: np.ndarray) -> np.ndarray:
        """Returns float64 [keys], steps until each expert's next use, including the part of a step before its layer."""
        if len(self._before) != len(probabilities):
            keys, experts = len(probabilities), max(1, len(self._layer))
            self._before = np.arange(keys) // experts * (experts / keys) if self._layer else np.zeros(keys)
        return 1 / probabilities + self._before

    def _last(self, keys: np.ndarray, due: np.ndarray, count: int) -> list[int]:
        """Returns at least ``count`` of ``keys``, if there are that many: those due last, in descending order."""
        if count < len(keys):
            late = np.flatnonzero(due >= np.partition(due, -count)[-count])
            keys, due = keys[late], due[late]
        return keys[np.lexsort((self._used[keys], -due))].tolist()

    def _reach(self, size: int) -> None:
        """Grows the arrays to hold keys below ``size``."""
        more = max(size, 2 * len(self._held)) - len(self._held)
        if size > len(self._held):
            self._held, self._used, self._due = (np.pad(a, (0, more)) for a in (self._held, self._used, self._due))
