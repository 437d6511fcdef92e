"""Evicts the expert whose next use is expected last: Belady's rule with an estimate in place of the future.

The estimate is an online logistic regression of the probability that the next step selects each expert. How well past
routing predicts the next step differs between models and texts: with local routing an expert that was just used is
used again, with flat routing only long-run popularity matters. A fixed mean of short and long averages is wrong for one
of the two, so the weights of the averages are fitted online (recursive logistic regression: one Newton step per step of
the model, with an exponentially decayed Hessian).
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

import numpy as np

from vllm_spac.decisions.policies.base import Policy, Standing

_MEMORY = 0.5 ** (1 / 200)  # the fit forgets half in 200 steps
_LEAST_VARIANCE = 1e-3  # of a prediction in the Hessian, which bounds the correction of a confident wrong one
_LONGEST_STEP = 1.0  # norm of one update of the weights
_LARGEST = 20.0  # log-odds
_SAMPLE = 1024  # experts fitted per step, others in the next one: enough, and bounds the time


class NextUse:
    """P(selected in the next step) per key, from decayed shares of steps.

    Features of a key are a constant and the log-odds of each decayed share of the steps that selected it.

    Args:
        half_lives: steps after which a share has halved, one per average.
    """

    def __init__(self, half_lives: tuple[float, ...], keys: int) -> None:
        self._gains = (1 - 0.5 ** (1 / np.array(half_lives, dtype=np.float32)))[:, None].astype(np.float32)
        self._floors = self._gains / 4  # a share of 0 or 1 has finite odds
        self._shares = np.zeros((len(half_lives), keys), dtype=np.float32)
        self._weights = np.full(len(half_lives) + 1, 1 / len(half_lives))
        self._weights[0] = 0.0
        self._hessian = np.eye(len(self._weights))
        self._features = self._features_of(self._shares)
        self.probabilities = self._predict(self._features)
        self._ridge = (1 - _MEMORY) * np.eye(len(self._weights))
        self._strides = max(1, keys // _SAMPLE)
        self._steps = 0

    def observe(self, counts: np.ndarray) -> None:
        """Updates from a step.

        Args:
            counts: int or float [keys], above 0 for the experts that were selected; -1 where the layer did not run.
        """
        if self._steps:  # before the first step all experts have the same features
            some = slice(self._steps % self._strides, None, self._strides)
            self._fit(self._features[:, some], counts[some], self.probabilities[some])
        self._steps += 1
        change = (counts > 0) - self._shares
        change *= self._gains
        change *= counts >= 0
        self._shares += change
        self._features = self._features_of(self._shares)
        self.probabilities = self._predict(self._features)

    def observe_prompt(self, rows: np.ndarray) -> None:
        """Updates from the last rows of a prompt, bool [rows, keys], each as if it were a step; fits nothing.

        They replace what earlier texts left in the averages, without which a new text starts with their experts.
        """
        left = (1 - self._gains) ** np.arange(len(rows), -1, -1, dtype=np.float32)  # [half-lives, 1 + rows]
        self._shares *= left[:, :1]
        self._shares += (self._gains * left[:, 1:]) @ rows.astype(np.float32)
        self._features = self._features_of(self._shares)
        self.probabilities = self._predict(self._features)

    def if_used(self) -> np.ndarray:
        """Returns float64 [keys], the probabilities after a hypothetical step that selects every expert."""
        return self._predict(self._features_of(self._shares + self._gains * (1 - self._shares)))

    def _fit(self, features: np.ndarray, counts: np.ndarray, predicted: np.ndarray) -> None:
        """Takes one Newton step towards what was selected."""
        ran = counts >= 0
        error = ((counts > 0) - predicted) * ran
        variance = np.maximum(predicted * (1 - predicted), _LEAST_VARIANCE) * ran
        self._hessian = _MEMORY * self._hessian + self._ridge + (features * variance) @ features.T
        change = np.linalg.solve(self._hessian, features @ error)
        self._weights += change * min(1.0, _LONGEST_STEP / max(math.sqrt(change @ change), 1e-30))

    def _features_of(self, shares: np.ndarray) -> np.ndarray:
        """Returns the features, float32 [1 + half-lives, keys]."""
        odds = np.ones((1 + len(shares), shares.shape[1]), dtype=np.float32)
        odds[1:] = np.log((shares + self._floors) / (1 + self._floors - shares))
        return odds

    def _predict(self, features: np.ndarray) -> np.ndarray:
        """Returns the probabilities, float64 [keys]."""
        odds = self._weights.astype(np.float32) @ features
        return 1 / (1 + np.exp(-odds.clip(-_LARGEST, _LARGEST), dtype=np.float64))


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
        return np.zeros(0) if self._next_use is None else self._next_use.probabilities

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
        self._learn(len(counts)).observe(counts)
        self._expect()

    def observe_prompt(self, rows: np.ndarray) -> None:
        self._learn(rows.shape[1]).observe_prompt(rows)
        self._expect()

    def standing(self, keys: int) -> Standing:
        """As in ``Policy``; the value of a slot is the negative number of steps until the expert's expected next use.

        An expert that is used now is needed again in the next step at the earliest. Of the held experts half are, on
        average, in layers that have not run yet and may be needed in this step. On the same scale an expert that is
        used now is therefore due half a step later.
        """
        held = np.flatnonzero(self._held)
        order = held[np.lexsort((self._used[held], -self._due[held]))]
        used = np.zeros(keys)
        if self._next_use is not None:
            used = -self._expected(self._next_use.if_used()) - 0.5
        return Standing(order, -self._due[order], used)

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
