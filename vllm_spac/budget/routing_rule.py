"""How a checkpoint turns router logits into routing weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class RoutingRule:
    """How a checkpoint turns router logits into weights, as vLLM configured it.

    Attributes:
        scoring: ``softmax`` or ``sigmoid``.
        renormalize: whether the weights of a row are divided by their sum.
        bias: float [N] added to the scores to choose by, not to weigh by.
        groups, top_groups: limit to the best groups of experts.
        custom: a routing function of the model's own, which substitution cannot repeat.
    """

    scoring: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    bias: Tensor | None = None
    groups: int | None = None
    top_groups: int | None = None
    custom: bool = False

    def probs(self, logits: Tensor) -> Tensor:
        """float32 [rows, N], the scores of all experts."""
        logits = logits.float()
        return logits.sigmoid() if self.scoring == "sigmoid" else logits.softmax(-1)
