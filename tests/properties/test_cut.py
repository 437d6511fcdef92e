"""The cut of routing in host memory compared with the launches that a GPU runs, by their twins."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spac.methods.moe_spec import host_cut, replay
from vllm_spac.methods.moe_spec.settings import RoutingRule

EXPERTS, TOP_K = 32, 3
BIAS = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(0)) / 3
RULES = [
    RoutingRule(),
    RoutingRule(renormalize=False, scale=2.5),
    RoutingRule(scoring="sigmoid", bias=BIAS),
    RoutingRule(scoring="sigmoid", bias=BIAS, groups=4, top_groups=2, scale=1.5),
    RoutingRule(groups=2, top_groups=1),
]


@st.composite
def cuts(draw) -> tuple[tuple, dict]:
    """Arguments of ``cut``; coarse scores are often equal, and some are 0."""
    rule, rows = draw(st.sampled_from(RULES)), draw(st.integers(1, 7))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = draw(st.sampled_from([0.1, 1.0, 40.0])) * torch.randn(rows, EXPERTS, generator=random)
    probs = rule.probs(logits.round() if draw(st.booleans()) else logits)
    ids = (probs if rule.bias is None else probs + rule.bias).topk(TOP_K).indices
    weights = probs.gather(1, ids)
    if draw(st.booleans()):
        weights = weights / weights.sum(1, keepdim=True)
    substitute, mass = draw(st.booleans()), draw(st.none() | st.sampled_from([0.1, 0.5, 0.9, 1.0]))
    least = TOP_K if substitute else 1
    order = torch.randperm(EXPERTS, generator=random)
    votes = draw(st.none() | st.lists(st.integers(1, 4096), min_size=rows, max_size=rows))
    votes = None if votes is None else torch.tensor(votes, dtype=torch.float64) / 4096
    options = {
        "bound": draw(st.integers(least, EXPERTS)) if mass is None else None,
        "mass": mass,
        "mass_of": draw(st.sampled_from(["selected", "scores"])),
        "least": least,
        "substitute": substitute,
    }
    return (probs, order, (weights, ids.to(draw(st.sampled_from([torch.int32, torch.int64])))), votes, rule), options


@settings(max_examples=500, deadline=None)
@given(cuts())
def test_both_choose_the_same(given: tuple[tuple, dict]) -> None:
    """The ids are equal; the host's sum that renormalises a row adds the same ``TOP_K`` weights in another order."""
    arguments, options = given
    weights, ids, keeps = host_cut.cut(*arguments, **options)
    mass = None if options["mass"] is None else torch.tensor(options["mass"], dtype=torch.float64)
    kernels = replay.BudgetKernels.on(torch.device("cpu"))
    expected, experts, kept = replay.cut(kernels, *arguments, **{**options, "mass": mass})
    assert ids.dtype == experts.dtype and ids.equal(experts)
    torch.testing.assert_close(weights, expected, rtol=TOP_K * 2**-23, atol=0)
    assert keeps.equal(kept)

    natural, whole = arguments[2], kept.all(1)
    assert weights[whole].equal(natural[0][whole]), "rows that keep all are unchanged to the bit"
    assert (weights is natural[0]) == bool(whole.all())
