"""The cut of routing in host memory compared with the launches that a GPU runs, by their twins."""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_spac.methods.moe_spec.host_cut import HostCut
from vllm_spac.methods.moe_spec.launches import BudgetLaunches
from vllm_spac.methods.moe_spec.rankings import LayerContext, Ranking
from vllm_spac.methods.moe_spec.replay import BudgetCounters
from vllm_spac.methods.moe_spec.settings import BudgetedLayer, BudgetSettings, RoutingRule

EXPERTS, TOP_K = 32, 3
BIAS = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(0)) / 3
RULES = [
    RoutingRule(),
    RoutingRule(renormalize=False, scale=2.5),
    RoutingRule(scoring="sigmoid", bias=BIAS),
    RoutingRule(scoring="sigmoid", bias=BIAS, groups=4, top_groups=2, scale=1.5),
    RoutingRule(groups=2, top_groups=1),
]


class Given(Ranking):
    """Any order of the experts."""

    def __init__(self, places: Tensor) -> None:
        self._places = places

    def scores(self, probs: Tensor, context: LayerContext) -> Tensor:
        return self._places


@st.composite
def cuts(draw) -> tuple[RoutingRule, BudgetSettings, Ranking, tuple[Tensor, ...], Tensor | None]:
    """A rule, settings, any order of the experts, (logits, weights, ids) and votes; coarse scores are often equal."""
    rule, rows = draw(st.sampled_from(RULES)), draw(st.integers(1, 7))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = draw(st.sampled_from([0.1, 1.0, 40.0])) * torch.randn(rows, EXPERTS, generator=random)
    logits = logits.round() if draw(st.booleans()) else logits
    probs = rule.probs(logits)
    ids = (probs if rule.bias is None else probs + rule.bias).topk(TOP_K).indices
    weights = probs.gather(1, ids)
    if draw(st.booleans()):
        weights = weights / weights.sum(1, keepdim=True)
    coverage, mass = (
        draw(st.sampled_from(["substitution", "truncation"])),
        draw(st.sampled_from([None, 0.1, 0.5, 0.9, 1])),
    )
    least = TOP_K if coverage == "substitution" else 1
    bound = {"budget": draw(st.integers(least, EXPERTS))}
    if mass is not None:
        bound = {"mass": mass, "mass_of": draw(st.sampled_from(["selected", "scores"]))}
    order = Given(torch.randperm(EXPERTS, generator=random).double())
    votes = draw(st.none() | st.lists(st.integers(1, 4096), min_size=rows, max_size=rows))
    votes = None if votes is None else torch.tensor(votes, dtype=torch.float64) / 4096
    routed = logits, weights, ids.to(draw(st.sampled_from([torch.int32, torch.int64])))
    return rule, BudgetSettings(**bound, coverage=coverage), order, routed, votes


@settings(max_examples=examples(500), deadline=None)
@given(cuts())
def test_both_choose_the_same(case: tuple) -> None:
    """The ids are equal; the host's sum that renormalises a row adds the same ``TOP_K`` weights in another order."""
    rule, asked, order, routed, votes = case
    layer, host_s, theirs = BudgetedLayer("layer", EXPERTS, TOP_K, rule), BudgetCounters(), BudgetCounters()
    host, there = HostCut([layer], host_s), BudgetLaunches([layer], "cpu", theirs)
    host.apply(asked, order)
    there.update(asked, order, None)
    found, expected = host.cut(0, *routed, votes), there.cut(0, *routed, votes)
    weights, ids = found or routed[1:]
    assert ids.dtype == expected[1].dtype and ids.equal(expected[1])
    torch.testing.assert_close(weights, expected[0], rtol=TOP_K * 2**-23, atol=0)
    assert host_s.snapshot() == pytest.approx(theirs.snapshot())

    whole = (ids == routed[2]).all(1) & (weights == routed[1]).all(1)
    assert expected[0][whole].equal(routed[1][whole]), "rows that keep all are unchanged to the bit"
    assert (found is None) == (host_s.snapshot()["dropped_weight"] == 0 and bool(whole.all()))
