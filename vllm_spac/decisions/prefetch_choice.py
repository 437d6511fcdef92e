"""What ``prefetch=auto`` chooses: the predictor that was right most often, or none where reads ahead cannot pay. Pure.

Without reads ahead a step computes for C seconds, while nothing is loaded, and waits for loads for M seconds. Reads
ahead fill the C seconds: if all were of the right experts, the step would take max(C, M) and be (C + M) / max(C, M)
times as fast, the ceiling. Of a predictor that names as many experts as are needed, the share R is right (its recall),
and the step takes C + M - R min(C, M).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_spac.core import MoEShape

LEAST = 1.05  # promise below which nothing is read ahead
_NEAR = 0.01  # predictors whose recall is so close to the best are as good


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a decode step without reads ahead.

    Attributes:
        compute: C, in which the link is idle.
        loads: M, of the experts that are missing.
        origin: where they come from, for the log.
    """

    compute: float
    loads: float
    origin: str = ""

    @classmethod
    def of(cls, shape: MoEShape, slots: int, fast: float, load: float, other: float, origin: str) -> StepCosts:
        """Returns the costs of a row whose experts are used equally often, so that the share without a slot is missing.

        With several rows both costs grow with their experts, and the promise is about the same.

        Args:
            fast, load: seconds that an expert takes to be computed in fast memory, and to be loaded.
            other: seconds of a step outside of the experts.
        """
        used = len(shape.layers) * shape.top_k
        return cls(used * fast + other, used * (1 - slots / shape.total) * load, origin)

    @property
    def ceiling(self) -> float:
        """(C + M) / max(C, M), the promise of a predictor that is always right."""
        return self.promise(1.0)

    def promise(self, recall: float) -> float:
        """Returns how many times as fast a step may become with a predictor of this ``recall`` (0 to 1), at most."""
        total = self.compute + self.loads
        return total / (total - recall * min(self.compute, self.loads)) if total else 1.0


@dataclass(frozen=True)
class PrefetchChoice:
    """What is chosen, and why.

    Attributes:
        predictor: its name; None: nothing is read ahead.
        why: for the log.
    """

    predictor: str | None
    why: str

    def describe(self) -> str:
        """Returns the choice for the start-up line."""
        return f"auto ({self.predictor or 'off'}: {self.why})"


def choose(recalls: Mapping[str, float], nbytes: Mapping[str, int], costs: StepCosts) -> PrefetchChoice:
    """Returns the smallest of the predictors whose recall is close to the greatest; none if it promises too little.

    Args:
        recalls: predictor -> R@k over all layers, measured on texts that it was not fitted to; not empty.
        nbytes: predictor -> its size.
    """
    best = max(recalls.values())
    name = min((name for name in recalls if recalls[name] >= best - _NEAR), key=lambda name: (nbytes[name], name))
    promise, recall = costs.promise(recalls[name]), recalls[name]
    step = f"{1e3 * costs.compute:.3g} ms of computing and {1e3 * costs.loads:.3g} ms of loads per step{costs.origin}"
    if promise < LEAST:
        most = f"{promise:.2f}x with {name}, recall {recall:.2f}, and {costs.ceiling:.2f}x if always right"
        return PrefetchChoice(None, f"{step} promise {most}; at least {LEAST:g}x is asked for")
    return PrefetchChoice(
        name, f"recall {recall:.2f}; {step} promise {promise:.2f}x, {costs.ceiling:.2f}x if always right"
    )
