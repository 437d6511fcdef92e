"""Kinds of routing that a budget must repeat, for the tests of its cuts."""

from __future__ import annotations

from torch import Tensor

from vllm_spac.methods.moe_spec.settings import RoutingRule


def rules(bias: Tensor) -> list[RoutingRule]:
    """Returns softmax with and without renormalisation, and sigmoid and groups with ``bias``, float [N]."""
    return [
        RoutingRule(),
        RoutingRule(renormalize=False, scale=2.5),
        RoutingRule(scoring="sigmoid", bias=bias),
        RoutingRule(scoring="sigmoid", bias=bias, groups=4, top_groups=2),
        RoutingRule(groups=2, top_groups=1),
    ]
