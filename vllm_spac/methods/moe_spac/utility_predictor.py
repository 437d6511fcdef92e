"""MoE-SpAc's utility estimator (Algorithm 1): a score from 0 to K per expert, from how often steps select it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

import numpy as np
import torch

from vllm_spac.core import NOT_RUN
from vllm_spac.decisions.predictors.base import START, Guess, Predictor, PredictorInputs

RELEASED_UP, RELEASED_DOWN = 5, 1

Variant = Literal["paper", "literal", "released"]


class UtilityEstimator(Predictor):
    """Utility scores, independent for each expert: pass L * N for all layers of a model together.

    With f_t the rows of step t that selected an expert (or, ours, the sum of their votes) and d = f_t - f_{t-1}
    (f_0 = 0), its score rises by one when d >= up, else falls by one when -d >= down, within [0, ``upper``]. Then the
    boundary on the side of d's sign moves to (1 - forget) * boundary + forget * abs(d). Each expert has its own
    boundaries (Eq. 6: "expert-specific"), which start at floor(gamma / 2).

    Variants:
        ``paper``: boundaries are real numbers, at least 1, and floored only for the comparison.
        ``literal``: boundaries are floored whenever they move, as in the text of the paper: with forget = 0.1 they only
            fall, and with one that starts at 0 (gamma < 2) the score of an idle expert keeps rising.
        ``released``: the authors' code: d = f_t - score, up at 5, down at 1, no boundary moves. ``gamma`` is ignored.

    Ablations: ``upper=1`` is "w/o SpecUE"; ``boundaries=(3, 1)`` (up, down; they stay) is "w/o AdaBC".

    Args:
        gamma: draft tokens in one speculative step.
        upper: the highest score (K).
        forget: weight of the newest change in a boundary (lambda), from 0 to 1.
        boundaries: fixed (up, down), each >= 0; not with ``released``.

    Raises:
        ValueError: an argument out of range.
    """

    @classmethod
    def follows_drafts(cls, options: Mapping[str, Any]) -> bool:
        return options.get("variant", "paper") == "paper"  # literal: see its note on gamma < 2

    def __init__(
        self,
        num_experts: int,
        gamma: int = 8,
        upper: int = 4,
        forget: float = 0.1,
        variant: Variant = "paper",
        *,
        boundaries: tuple[int, int] | None = None,
    ) -> None:
        if num_experts < 1 or gamma < 0 or upper < 1 or not 0 <= forget <= 1:
            raise ValueError("use num_experts >= 1, gamma >= 0, upper >= 1 and forget from 0 to 1")
        if variant not in ("paper", "literal", "released"):
            raise ValueError(f"no variant is called {variant!r}; use paper, literal or released")
        pair = isinstance(boundaries, tuple | list) and [type(end) for end in boundaries] == [int, int]
        if boundaries is not None and (variant == "released" or not pair or min(boundaries) < 0):
            raise ValueError("boundaries are (up, down), each at least 0, and only for paper and literal")
        self.upper = upper
        self.forget = forget
        self.variant = variant
        self.fixed = boundaries is not None or variant == "released"
        start = (gamma // 2, gamma // 2) if boundaries is None else boundaries
        if variant == "released":
            start = (RELEASED_UP, RELEASED_DOWN)
        elif variant == "paper" and boundaries is None:
            start = (max(1, start[0]), max(1, start[1]))
        self.up: Any = np.full(num_experts, start[0], dtype=np.float64)
        self.down: Any = np.full(num_experts, start[1], dtype=np.float64)
        self.last: Any = np.zeros(num_experts)
        self.scores: Any = np.zeros(num_experts, dtype=np.int64)

    def observe_step(self, counts: np.ndarray) -> None:
        """As in ``Predictor``. Nothing changes for an expert whose layer did not run; its next change is relative to
        the last step in which the layer ran."""
        counts = np.asarray(counts)
        assert counts.shape == self.scores.shape and counts.dtype.kind in "iuf", "a count for each expert"
        ran = counts != NOT_RUN
        assert (counts[ran] >= 0).all(), "a count is at least 0, or -1 for a layer that did not run"
        self.scores, self.last, self.up, self.down = self._next(counts)

    def on(self, device: torch.device) -> Self:
        """Returns itself, whose numbers are tensors on ``device`` from now on; then only ``update`` is called."""
        for name in ("up", "down", "last", "scores"):
            setattr(self, name, torch.from_numpy(getattr(self, name)).to(device, copy=True))
        return self

    def update(self, counts: torch.Tensor) -> None:
        """As ``observe_step``, of tensors, which are overwritten in place."""
        for old, new in zip((self.scores, self.last, self.up, self.down), self._next(counts), strict=True):
            old.copy_(new)

    def guesses(self, inputs: PredictorInputs) -> Iterable[Guess]:
        if inputs.layer == START:
            yield Guess(0, torch.from_numpy(self.scores)[None])

    def _next(self, counts: Any) -> tuple[Any, Any, Any, Any]:
        """Returns ``scores``, ``last``, ``up`` and ``down`` after a step; over arrays or tensors, by the same bits."""
        ran = counts != NOT_RUN
        delta = (counts - (self.scores if self.variant == "released" else self.last)) * ran
        rises = ran & (delta >= self.up // 1)
        falls = ran & ~rises & (-delta >= self.down // 1)
        scores = (self.scores + rises * 1 - falls * 1).clip(0, self.upper)
        last = counts * ran + self.last * ~ran
        if self.fixed:
            return scores, last, self.up, self.down
        return scores, last, self._moved(self.up, delta, delta > 0), self._moved(self.down, -delta, delta < 0)

    def _moved(self, boundary: Any, change: Any, where: Any) -> Any:
        moved = (1 - self.forget) * boundary + self.forget * change
        moved = moved // 1 if self.variant == "literal" else moved.clip(1.0, None)
        return moved * where + boundary * ~where
