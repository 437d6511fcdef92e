"""A MoE layer whose routing may be changed, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from vllm_spac.budget.limits import validate
from vllm_spac.budget.routing_rule import RoutingRule
from vllm_spac.budget.settings import BudgetSettings
from vllm_spac.errors import ConfigError, UnsupportedError


@dataclass(frozen=True)
class BudgetedLayer:
    """A MoE layer under a budget.

    Attributes:
        name: of the layer.
        experts: routed experts (N).
        top_k: experts per token.
        rule: how the layer turns router logits into weights.
        resident: returns bool [N], which experts are in fast memory; None if no ranking uses it.
    """

    name: str
    experts: int
    top_k: int
    rule: RoutingRule
    resident: Callable[[], Tensor] | None = field(default=None, compare=False)


def check_layer(layer: BudgetedLayer, settings: BudgetSettings) -> None:
    """Refuses a budget that ``layer`` cannot run with.

    Raises:
        ConfigError: the bound does not fit it.
        UnsupportedError: it routes by a function of its own, which the coverage would have to repeat.
    """
    if settings.coverage == "substitution" and layer.rule.custom:
        raise UnsupportedError(
            f"spac: {layer.name} routes by a function of its own, which substitution cannot repeat; "
            "use --spac-budget-coverage truncation"
        )
    if settings.rescue and layer.rule.custom:
        raise UnsupportedError(
            f"spac: {layer.name} routes by a function of its own, which gives no weight to an expert that it did not "
            "choose; drop --spac-budget-rescue"
        )
    if isinstance(settings.budget, dict) and layer.name not in settings.budget:
        raise ConfigError(f"spac: the budget names no experts for {layer.name}; name every MoE layer")
    bound = settings.budget[layer.name] if isinstance(settings.budget, dict) else settings.budget
    if bound is not None:
        validate(bound, layer.experts, layer.top_k, settings.coverage)
