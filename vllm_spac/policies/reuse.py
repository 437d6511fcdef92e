"""The expert that is expected back last goes first: Belady's rule with an estimate in place of the future."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np

from vllm_spac.policies.base import Policy, Standing

_RARE = 1e-9  # an expert that no step has selected is expected back, but after all others


class Reuse(Policy):
    """The victim is the expert whose expected next use lies furthest ahead, among equals the one used longest ago.

    A step selects an expert with probability p, the mean of its decayed shares of steps (as LRFU decays uses): one
    remembers a few steps, one many. So its next use is 1/p - 1 steps behind the next run of its layer, which comes in
    this step for the layers ahead and one step later for the layers that are over.

    O(1) a use, O(slots) in numpy an ``evict``, O(keys) an ``observe``. Before the first ``observe``, without
    ``enter``, it is LRU. What a missing expert was used for counts at the end of the step only, so a rare one makes
    room again before a popular one does, and no scan empties the slots.

    Args:
        half_lives: steps after which a share has halved, one average each.
    """

    def __init__(self, *, half_lives: Sequence[float] = (4, 32)) -> None:
        if not half_lives or min(half_lives) <= 0:
            raise ValueError("use half_lives of one or more numbers > 0")
        self._gains = 1 - 0.5 ** (1 / np.array(half_lives, dtype=np.float64))[:, None]
        self._shares: np.ndarray | None = None  # float64 [half_lives, keys]
        self._held: np.ndarray = np.zeros(0, dtype=bool)
        self._used: np.ndarray = np.zeros(0, dtype=np.int64)
        self._due: np.ndarray = np.zeros(0)  # in steps, for a layer that is ahead
        self._size = 0
        self._clock = 0
        self._layer = range(0)

    @property
    def probabilities(self) -> np.ndarray:
        """float64 [keys], that the next step selects each expert; empty before the first ``observe``."""
        return np.zeros(0) if self._shares is None else self._shares.mean(axis=0)

    def enter(self, layer: range) -> None:
        self._layer = layer

    def insert(self, key: int) -> None:
        self._reach(key + 1)
        assert not self._held[key], f"{key} is resident already"
        self._held[key] = True
        self._size += 1
        self.touch(key)

    def touch(self, key: int) -> None:
        assert key in self, f"{key} is not resident"
        self._clock += 1
        self._used[key] = self._clock

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
        for key in victims:
            self.remove(key)
        return victims

    def observe(self, counts: np.ndarray) -> None:
        if self._shares is None:
            self._shares = np.zeros((len(self._gains), len(counts)))
            self._reach(len(counts))
        self._shares += self._gains * ((counts > 0) - self._shares) * (counts >= 0)
        self._due[: len(counts)] = self._expected(self._shares)

    def standing(self, keys: int) -> Standing:
        """A slot is worth as much as the expert is due early: one that is used now, a step from now at the earliest.

        Of the others half are in layers that are ahead, on average, and may be due in this step: on the same scale the
        one that is used now is half a step later.
        """
        held = np.flatnonzero(self._held)
        order = held[np.lexsort((self._used[held], -self._due[held]))]
        used = np.zeros(keys)
        if self._shares is not None:
            used = -self._expected(self._shares + self._gains * (1 - self._shares)) - 0.5
        return Standing(order, -self._due[order], used)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: int) -> bool:
        return 0 <= key < len(self._held) and bool(self._held[key])

    def _expected(self, shares: np.ndarray) -> np.ndarray:
        """float64 [keys], steps until each expert is used next, the part of a step that lies before its layer too."""
        keys, experts = shares.shape[1], max(1, len(self._layer))
        layer = np.arange(keys) // experts * (experts / keys) if self._layer else 0
        return 1 / np.maximum(shares.mean(axis=0), _RARE) + layer

    def _last(self, keys: np.ndarray, due: np.ndarray, count: int) -> list[int]:
        """At least ``count`` of ``keys``, if there are so many: those that are due last, the very last first."""
        if count < len(keys):
            late = np.flatnonzero(due >= np.partition(due, -count)[-count])
            keys, due = keys[late], due[late]
        return keys[np.lexsort((self._used[keys], -due))].tolist()

    def _reach(self, size: int) -> None:
        """Have room for keys below ``size``."""
        more = max(size, 2 * len(self._held)) - len(self._held)
        if size > len(self._held):
            self._held, self._used, self._due = (np.pad(a, (0, more)) for a in (self._held, self._used, self._due))
