"""P(selected in the next step) of every expert, learned online, in tensors on any device: for ``reuse``.

It is an online logistic regression. How well past routing predicts the next step differs between models and texts: with
local routing an expert that was just used is used again, with flat routing only long-run popularity matters. A fixed
mean of short and long averages is wrong for one of the two, so the weights of the averages are fitted (recursive
logistic regression: one Newton step per step of the model, with an exponentially decayed Hessian).

The same code runs on the host, where the host decides, and on the device, where that does. Nothing waits, no shape
depends on data, and memory stays where it is, so an update may be captured into a CUDA graph. Experts of the same
history have the same bits: what is summed over averages is written out, and not left to a library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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

    Attributes:
        probabilities: float64 [keys], overwritten in place.
    """

    def __init__(self, half_lives: Sequence[float], keys: int, device: torch.device | str = "cpu") -> None:
        float32: dict[str, Any] = {"dtype": torch.float32, "device": device}
        float64: dict[str, Any] = {"dtype": torch.float64, "device": device}
        size = len(half_lives) + 1
        self._gains = 1 - 0.5 ** (1 / torch.tensor(half_lives, **float32)[:, None])
        self._floors = self._gains / 4  # a share of 0 or 1 has finite odds
        self._shares = torch.zeros(len(half_lives), keys, **float32)
        self._weights = torch.full((size,), 1 / len(half_lives), **float64)
        self._weights[0] = 0.0
        self._identity = torch.eye(size, **float64)
        self._hessian, self._ridge = self._identity.clone(), (1 - _MEMORY) * self._identity
        self._features = torch.ones(size, keys, **float32)
        self.probabilities = torch.zeros(keys, **float64)
        self._strides = max(1, keys // _SAMPLE)
        self._sample = torch.arange(0, keys, self._strides, device=device)
        self._steps = torch.zeros(1, dtype=torch.int64, device=device)
        self._predict()

    @torch.inference_mode()
    def observe(self, counts: Tensor) -> None:
        """Updates from a step.

        Args:
            counts: int or float [keys], above 0 for the experts that were selected; -1 where the layer did not run.
        """
        self._fit(*self._some(counts))
        self._steps += 1
        change = (counts > 0).float() - self._shares
        change *= self._gains
        change *= counts >= 0
        self._shares += change
        self._predict()

    @torch.inference_mode()
    def observe_prompt(self, rows: Tensor) -> None:
        """Updates from the last rows of a prompt, bool [rows, keys], each as if it were a step; fits nothing.

        They replace what earlier texts left in the averages, without which a new text starts with their experts.
        """
        powers = torch.arange(len(rows), -1, -1, dtype=torch.float32, device=rows.device)
        left = (1 - self._gains) ** powers  # [half-lives, 1 + rows]
        self._shares *= left[:, :1]
        self._shares += ((self._gains * left[:, 1:])[:, :, None] * rows).sum(1)
        self._predict()

    @torch.inference_mode()
    def if_used(self) -> Tensor:
        """Returns float64 [keys], the probabilities after a hypothetical step that selects every expert."""
        return self._predicted(self._odds_of(self._shares + self._gains * (1 - self._shares)))

    def _some(self, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the features, counts and probabilities that a step fits: every ``_strides``-th expert."""
        if self._strides == 1:
            return self._features, counts, self.probabilities
        keys = len(counts)
        some = self._sample + self._steps % self._strides
        inside, some = some < keys, some.clamp(max=keys - 1)
        counts = torch.where(inside, counts[some], -1)
        return self._features[:, some], counts, self.probabilities[some]

    def _fit(self, features: Tensor, counts: Tensor, predicted: Tensor) -> None:
        """Takes one Newton step towards what was selected; before the first step all experts have the same features."""
        ran = counts >= 0
        error = ((counts > 0).double() - predicted) * ran
        variance = (predicted * (1 - predicted)).clamp_(min=_LEAST_VARIANCE) * ran
        hessian = _MEMORY * self._hessian + self._ridge + ((features * variance)[:, None] * features).sum(-1)
        change = _solved(hessian, (features * error).sum(-1), self._identity)
        norm = (change * change).sum().sqrt().clamp(min=1e-30)
        some = self._steps > 0
        self._hessian.copy_(torch.where(some, hessian, self._hessian))
        self._weights += change * (_LONGEST_STEP / norm).clamp(max=1.0) * some

    def _odds_of(self, shares: Tensor) -> Tensor:
        """Returns the features but the constant, float32 [half-lives, keys]."""
        return ((shares + self._floors) / (1 + self._floors - shares)).log_()

    def _predict(self) -> None:
        odds = self._odds_of(self._shares)
        self._features[1:] = odds
        self.probabilities.copy_(self._predicted(odds))

    def _predicted(self, odds: Tensor) -> Tensor:
        """Returns the probabilities, float64 [keys]."""
        weights = self._weights.float()
        total = odds[0] * weights[1]
        for each, weight in zip(odds[1:], weights[2:], strict=True):
            total += each * weight
        return (total + weights[0]).clamp_(-_LARGEST, _LARGEST).double().sigmoid_()


def _solved(matrix: Tensor, right: Tensor, identity: Tensor) -> Tensor:
    """Returns x, float64 [n], with matrix @ x = right; a positive definite matrix needs no exchange of rows.

    By elimination, unrolled: a library's solver would wait for the device, to say whether it is singular.
    """
    rows = torch.cat((matrix, right[:, None]), 1)
    for number in range(len(right)):
        first = rows[number] / rows[number, number]
        rows = torch.where(identity[:, number, None] > 0, first, rows - rows[:, number, None] * first)
    return rows[:, -1]
