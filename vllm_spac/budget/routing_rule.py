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
        scale: factor of the weights (``routed_scaling_factor``).
        bias: float [N], added to the scores for the choice of experts, not for their weights.
        groups, top_groups: experts are chosen from the ``top_groups`` best of ``groups`` equal groups; None: from all.
        custom: the model has its own routing function, which substitution cannot reproduce.
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
