"""A budget cuts nothing where no more experts are selected than may run: by any ranking, coverage and plane."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from effort import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from routing_rules import rules

from vllm_spac import components
from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.methods.moe_spec.control import BudgetControl, BudgetedLayer
from vllm_spac.methods.moe_spec.launches import BudgetLaunches
from vllm_spac.methods.moe_spec.rankings import Ranking, router_mass
from vllm_spac.methods.moe_spec.settings import BudgetSettings, RoutingRule

EXPERTS, TOP_K, ROWS = 32, 3, 8
BIAS = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(0)) / 3
RULES = rules(BIAS)
RANKINGS = [*components.names("rankings"), f"{__name__}:Quietest"]
COVERAGES = [{"coverage": each} for each in ("substitution", "truncation")]
VOTES = [{}, *({"votes": "path", "votes_alpha": alpha} for alpha in (0.5, 1.0))]


class Quietest(Ranking):
    """Of somebody else: the experts with the lowest scores."""

    def scores(self, probs, context) -> torch.Tensor:
        return -router_mass(probs)


@st.composite
def steps(draw) -> tuple[RoutingRule, Step, tuple[torch.Tensor, ...]]:
    """A rule, a step of verify rows, and (logits, weights, ids) [rows, ...].

    Rows want few experts. Often they choose others than their scores say, as models with a routing function of their
    own do, so that the scores of selected experts are among the least; some weights are 0.
    """
    rule, rows = draw(st.sampled_from(RULES)), draw(st.integers(1, ROWS))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = draw(st.sampled_from([0.1, 1.0, 60.0])) * torch.randn(rows, EXPERTS, generator=random)
    probs = rule.probs(logits)
    ids = (probs if rule.bias is None else probs + rule.bias).topk(TOP_K).indices
    if draw(st.booleans()):
        ids = torch.stack([torch.randperm(EXPERTS, generator=random)[:TOP_K] for _ in range(rows)])
    weights = torch.rand(rows, TOP_K, generator=random) * draw(st.sampled_from([1.0, 0.0]))
    reached = draw(st.lists(st.floats(0, 1), min_size=rows, max_size=rows).map(tuple))
    step = Step((RequestRows(0, rows, RowKind.VERIFY, rows - 1, reached),))
    return rule, step, (logits, weights, ids.to(torch.int32))


def controls(rule: RoutingRule, **asked) -> Iterator[tuple[str, BudgetControl]]:
    """The planes that a budget runs on: NumPy, torch operations without a read on the host, and those of a replay."""
    layer = BudgetedLayer("layer.0", EXPERTS, TOP_K, rule)
    for plane in ("host", "device", "replay"):
        made = BudgetControl([layer])
        made.update(BudgetSettings(**asked))
        made._on_host = made._on_host if plane == "host" else None
        if plane == "replay":
            made.prepare_graphs(ROWS)
        yield plane, made


def routed(plane: str, control: BudgetControl, step: Step, given: tuple) -> tuple:
    if plane != "replay":
        return control.apply(0, *given, control.begin_step(step))
    control.compile(0, *given)
    control.capture(0, *given)
    control.begin_step(step)
    return control.capture(0, *given)


@settings(max_examples=examples(300))
@given(
    case=steps(),
    ranking=st.sampled_from(RANKINGS),
    coverage=st.sampled_from(COVERAGES),
    votes=st.sampled_from(VOTES),
    more=st.integers(0, 3),
)
def test_no_more_selected_than_may_run(case, ranking, coverage, votes, more) -> None:
    """To the bit, and nothing is counted as dropped; also rows whose vote is next to nothing."""
    rule, step, given = case
    budget = max(TOP_K, min(EXPERTS - 1, len(given[2].unique()) + more))
    for plane, control in controls(rule, budget=budget, ranking=ranking, **coverage, **votes):
        weights, ids = routed(plane, control, step, given)
        assert torch.equal(weights, given[1]) and torch.equal(ids, given[2]), plane
        counted = control.counters.snapshot()
        assert (counted["rows"], counted["dropped_weight"], counted["emptied"]) == (len(ids), 0.0, 0), plane


@settings(max_examples=examples(100))
@given(case=steps(), ranking=st.sampled_from(RANKINGS), coverage=st.sampled_from(COVERAGES))
def test_one_fewer_is_cut(case, ranking, coverage) -> None:
    """The bound is one: all planes then run that many."""
    rule, step, given = case
    assume((most := len(given[2].unique())) > TOP_K)
    for plane, control in controls(rule, budget=most - 1, ranking=ranking, **coverage):
        assert len(routed(plane, control, step, given)[1].unique()) <= most - 1, plane


@settings(max_examples=examples(300))
@given(
    case=steps(),
    ranking=st.sampled_from(RANKINGS),
    coverage=st.sampled_from(COVERAGES),
    votes=st.sampled_from(VOTES),
    bound=st.integers(TOP_K, EXPERTS - 1).map(lambda count: {"budget": count})
    | st.sampled_from([{"mass": mass, "mass_of": of} for mass in (0.2, 0.9) for of in ("selected", "scores")]),
)
def test_what_is_cut_makes_room_for_selected_experts_only(case, ranking, coverage, votes, bound) -> None:
    """Where a selected expert is dropped, the rows run selected experts; a row that keeps all its own is unchanged."""
    rule, step, given = case
    wanted = given[2].unique()
    for plane, control in controls(rule, **bound, ranking=ranking, **coverage, **votes):
        weights, ids = routed(plane, control, step, given)
        run = ids[weights != 0].unique()
        if not torch.equal(ids, given[2]):
            assert torch.isin(run, wanted).all(), plane
        keeps = torch.isin(given[2], run).all(1) & (given[1] != 0).all(1)
        if coverage["coverage"] != "substitution":
            assert torch.equal(weights[keeps], given[1][keeps]) and torch.equal(ids[keeps], given[2][keeps]), plane


def test_the_device_s_cut_is_one_of_the_planes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = BudgetLaunches.cut
    monkeypatch.setattr(BudgetLaunches, "cut", lambda *given: asked.append(1) or real(*given))
    logits = torch.randn(4, EXPERTS, generator=torch.Generator().manual_seed(3))
    weights, ids = logits.softmax(1).topk(TOP_K)
    step = Step((RequestRows(0, 4, RowKind.VERIFY, 3),))
    for plane, control in controls(RULES[0], budget=20):
        routed(plane, control, step, (logits, weights, ids))
    assert asked == [1]
