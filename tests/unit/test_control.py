"""Which rows vote, which are cut, and what is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.integration.loading import description
from vllm_spac.methods.moe_spec.control import BudgetControl, BudgetedLayer
from vllm_spac.methods.moe_spec.host_cut import _held, leading
from vllm_spac.methods.moe_spec.rankings import LayerContext
from vllm_spac.methods.moe_spec.selected_ranking import Selected
from vllm_spac.methods.moe_spec.settings import BudgetSettings, RoutingRule

EXPERTS, TOP_K = 8, 2
PROMPT, DECODE = RequestRows(0, 3, RowKind.PREFILL), RequestRows(3, 4, RowKind.DECODE)
VERIFY, OTHER = RequestRows(4, 8, RowKind.VERIFY, 3), RequestRows(8, 10, RowKind.VERIFY, 1)
MIXED = Step((PROMPT, DECODE, VERIFY, OTHER))
ROWS = 12  # the last two are padding


def control(rule: RoutingRule | None = None, layers: int = 1) -> BudgetControl:
    rule = rule or RoutingRule()
    return BudgetControl([BudgetedLayer(f"layer.{i}", EXPERTS, TOP_K, rule) for i in range(layers)])


def routing(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(seed)) * 2
    weights, ids = logits.softmax(-1).topk(TOP_K)
    return logits, weights / weights.sum(1, keepdim=True), ids.to(torch.int32)


def ranked(logits: torch.Tensor, ids: torch.Tensor, votes: torch.Tensor | None = None) -> list[int]:
    """All experts by the default ranking: by the scores of rows that selected them, then by those of all rows."""
    scores = logits.softmax(-1).double() * (1.0 if votes is None else votes[:, None])
    own = torch.zeros_like(scores).scatter(1, ids.long(), scores.gather(1, ids.long())).sum(0)
    return sorted(range(EXPERTS), key=lambda i: (i not in ids, -float(own[i]), -float(scores[:, i].sum())))


@pytest.mark.parametrize(
    ("when", "cut"),
    [("verify", range(4, 10)), ("decode", range(3, 10)), ("all", range(10))],
)
@pytest.mark.parametrize("coverage", ["truncation", "substitution"])
def test_only_the_rows_asked_for_are_cut_and_vote(when: str, cut: range, coverage: str) -> None:
    logits, weights, ids = routing()
    inside, outside = torch.tensor(cut), torch.tensor([row for row in range(ROWS) if row not in cut])
    logits[outside] = torch.tensor([50.0, 50, -50, -50, -50, -50, -50, -50])  # they would decide, did they vote
    budget = control()
    budget.update(BudgetSettings(budget=3, when=when, coverage=coverage))
    got_weights, got_ids = budget.apply(0, logits, weights, ids, MIXED)
    assert torch.equal(got_weights[outside], weights[outside]) and torch.equal(got_ids[outside], ids[outside])
    shortlist = torch.tensor(ranked(logits[inside], ids[inside])[:3])
    assert torch.isin(got_ids[inside], shortlist).all()
    kept = torch.isin(ids[inside], shortlist)
    share = (weights[inside] * ~kept).sum(1) / weights[inside].sum(1)
    counters = budget.counters.snapshot()
    assert (counters["rows"], counters["shortlists"], counters["experts"]) == (
        len(cut),
        1,
        len(got_ids[inside].unique()),
    )
    assert counters["dropped_weight"] == pytest.approx(share.sum().item(), abs=1e-5)
    if coverage == "truncation":
        assert torch.equal(got_weights[inside], weights[inside] * kept)
    else:
        assert torch.allclose(got_weights[inside].sum(1), torch.ones(len(cut)))


def test_windows_rank_by_themselves() -> None:
    logits, weights, ids = routing(1)
    budget = control()
    budget.update(BudgetSettings(budget=2, when="verify", window=2))
    _, got = budget.apply(0, logits, weights, ids, MIXED)
    for start in (4, 6, 8):  # two windows of the first request, one of the second
        rows = slice(start, start + 2)
        assert set(got[rows].unique().tolist()) == set(ranked(logits[rows], ids[rows])[:2])
    assert budget.counters.snapshot()["shortlists"] == 3


def test_nobody_votes() -> None:
    logits, weights, ids = routing()
    budget = control()
    budget.update(BudgetSettings(budget=2))
    got = budget.apply(0, logits, weights, ids, Step((PROMPT, DECODE)))
    assert got[0] is weights and got[1] is ids
    assert budget.counters.snapshot()["rows"] == 0


@pytest.mark.parametrize("bound", [{"budget": EXPERTS}, {"mass": 1.0}, {"mass": 1.0, "mass_of": "scores"}])
@pytest.mark.parametrize("coverage", ["truncation", "substitution"])
def test_everything_within_the_budget_is_unchanged_to_the_bit(bound: dict, coverage: str) -> None:
    logits, weights, ids = routing()
    budget = control()
    budget.update(BudgetSettings(**bound, coverage=coverage, when="all"))
    got = budget.apply(0, logits, weights, ids, MIXED)
    assert torch.equal(got[0], weights) and torch.equal(got[1], ids)
    counted = budget.counters.snapshot()
    assert counted["dropped_weight"] == 0 and counted["rows"] == 10 and counted["experts"] == len(ids[:10].unique())


def test_rows_that_the_shortlist_covers_are_the_router_s_own() -> None:
    """Its tensors, not equal ones."""
    logits, weights, ids = routing()
    logits[:, 4:] -= 50
    ids = logits.topk(TOP_K).indices.int()
    budget = control()
    budget.update(BudgetSettings(budget=4))
    got = budget.apply(0, logits, weights, ids, MIXED)
    assert got[0] is weights and got[1] is ids
    assert budget.counters.snapshot() == {
        "rows": 6, "dropped_weight": 0, "shortlists": 1, "experts": len(ids[4:10].unique()), "emptied": 0,
        "unweighted": 0, "dropped_share": 0,
    }  # fmt: skip


@pytest.mark.parametrize("coverage", ["truncation", "substitution"])
def test_what_is_counted_later_is_what_was(coverage: str) -> None:
    """Of more layers than are counted at once, by tensors that are overwritten meanwhile."""
    together, times = control(), 150
    alone = dict.fromkeys(("rows", "dropped_weight", "shortlists", "experts", "emptied"), 0)
    together.update(BudgetSettings(budget=3, coverage=coverage))
    for seed in range(times):
        logits, weights, ids = routing(seed)
        one = control()
        one.update(BudgetSettings(budget=3, coverage=coverage))
        one.apply(0, logits, weights, ids, MIXED)
        alone = {name: alone[name] + one.counters.snapshot()[name] for name in alone}
        for tensor in (*together.apply(0, logits, weights, ids, MIXED), logits, weights, ids):
            tensor.zero_()
    counted = together.counters.snapshot()
    assert counted["dropped_share"] == counted["dropped_weight"] / counted["rows"] > 0
    assert {name: counted[name] for name in alone} == pytest.approx(alone)
    together.counters.reset()
    assert set(together.counters.snapshot().values()) == {0}


@pytest.mark.parametrize(("mass_of", "kept"), [("selected", {0, 1}), ("scores", {0, 1, 2, 3, 4, 5})])
def test_which_mass_is_held_by_hand(mass_of: str, kept: set[int]) -> None:
    """Weights 0.6 and 0.4 of the two selected; the scores of all: 0.5 with two experts, 0.9 with six."""
    probs = torch.tensor([[0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05]] * 4)
    routed = torch.tensor([[0.6, 0.4]] * 4), torch.tensor([[0, 1]] * 4)
    budget = control()
    budget.update(BudgetSettings(mass=0.85, mass_of=mass_of))
    order = Selected().rank(probs, None, LayerContext(0, routed[1])).numpy()
    held = _held(probs.numpy(), *(part.numpy() for part in routed), None, mass_of)
    shortlist = leading(order, held, 0.85, 1).tolist()
    assert set(shortlist) == kept and shortlist[0] == 0
    assert (
        budget.settings.describe() == f"lossy (budget 0.85 of the mass {mass_of}, selected, substitution, verify rows)"
    )


@settings(deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    mass=st.floats(0.01, 0.999),
    scale=st.sampled_from([1.0, 2.5]),
    renormalize=st.booleans(),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
)
def test_the_selected_mass_is_held_by_the_least_experts(seed, mass, scale, renormalize, spread) -> None:
    """By the ranking, those that no row selected left out."""
    rows, verify = 6, slice(4, 10)
    logits = spread * torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    weights, ids = logits.softmax(-1).topk(TOP_K)
    weights = scale * (weights / weights.sum(1, keepdim=True) if renormalize else weights)
    budget = control()
    budget.update(BudgetSettings(mass=mass, coverage="truncation"))
    kept, used = (found[verify] for found in budget.apply(0, logits, weights, ids, MIXED))
    whole = weights[verify].double().sum()
    assert kept.double().sum() >= mass * whole * (1 - 1e-12)
    order = [i for i in ranked(logits[verify], ids[verify]) if i in ids[verify]]
    count = budget.counters.snapshot()["experts"]
    assert count <= len(order) <= TOP_K * rows
    assert set(used[kept > 0].tolist()) == set(order[:count])
    fewer = weights[verify][torch.isin(ids[verify], torch.tensor(order[: count - 1]))].double().sum()
    assert fewer < mass * whole * (1 + 1e-12)


def test_the_selected_mass_never_takes_fewer_than_a_row_needs() -> None:
    logits, weights, ids = routing()
    budget = control()
    budget.update(BudgetSettings(mass=0.01))
    assert len(budget.apply(0, logits, weights, ids, MIXED)[1][4:10].unique()) == TOP_K


def test_the_mass_of_all_scores_is_held() -> None:
    logits, weights, ids = routing()
    budget = control()
    budget.update(BudgetSettings(mass=0.8, mass_of="scores", coverage="truncation"))
    got_weights, got_ids = budget.apply(0, logits, weights, ids, MIXED)
    mass = logits[4:10].softmax(-1).sum(0)
    used = got_ids[4:10][got_weights[4:10] > 0].unique()
    order = ranked(logits[4:10], ids[4:10])
    needed = 1 + int((mass[order].cumsum(0) < 0.8 * mass.sum()).sum())
    assert set(used.tolist()) <= set(order[:needed]) and mass[order[:needed]].sum() >= 0.8 * mass.sum()


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"budget": 9}, "a layer has 8 experts"),
        ({"budget": 1}, "substitution gives every token 2 experts"),
        ({"budget": 0}, "use 2 to 8"),
        ({"mass": 1.5}, "above 0 and at most 1"),
        ({"mass": 0.0}, "above 0 and at most 1"),
        ({"budget": 4, "mass": 0.5}, "use one of them"),
        ({"budget": 4, "mass_of": "scores"}, "give mass as well"),
        ({"mass": 0.5, "mass_of": "softmax"}, "'selected' or 'scores'"),
        ({"budget": True}, "use a number"),
        ({"budgets": 4}, "known: budget, mass"),
        ({"budget": 4, "ranking": "coactivation"}, "has no 'coactivation'; use one of router, selected"),
        ({"budget": 4, "ranking": "best"}, "has no 'best'"),
        ({"budget": {"layer.0": 4}}, "valid integer"),
        ({"budget": 4, "when": "never"}, "verify"),
        ({"budget": 4, "votes": "equal"}, "'uniform' or 'path'"),
        ({"budget": 4, "votes_alpha": 0.25}, "no effect on uniform votes; give votes=path"),
        ({"budget": 4, "votes": "path", "votes_alpha": 1.5}, "votes_alpha: .*less than or equal to 1"),
        ({"budget": 4, "votes": "path", "votes_alpha": True}, "use a number"),
        ({"budget": 4, "best": True}, "best: .*known: budget, mass, mass_of, ranking, coverage"),
        ({"budget": 4, "coverage": "rescue"}, "'substitution' or 'truncation'"),
        ("16", "is a mapping"),
    ],
    ids=str,
)
def test_errors_change_nothing(raw, text: str) -> None:
    budget = control()
    budget.update(BudgetSettings(budget=5))
    with pytest.raises(ConfigError, match=text):
        budget.update(BudgetSettings.parse(raw))
    assert budget.settings == BudgetSettings(budget=5)


def test_a_routing_function_of_the_models_own_cannot_be_substituted() -> None:
    budget = control(RoutingRule(custom=True))
    with pytest.raises(UnsupportedError, match="coverage=truncation .--spac-budget"):
        budget.update(BudgetSettings(budget=4))
    budget.update(BudgetSettings(budget=4, coverage="truncation"))


# --- weighted votes ---------------------------------------------------------------------------------------------------

CERTAIN, LIKELY, RARE = 1.0, 0.25, 0.0
WEIGHED = Step((DECODE, replace(VERIFY, weights=(CERTAIN, LIKELY, LIKELY, RARE)), OTHER))
VOTES = torch.tensor([1, 0.5, 0.5, 2**-12, 1, 1], dtype=torch.float64)  # of rows 4 to 9, with alpha 0.5


@pytest.mark.parametrize("bound", [{"budget": 3}, {"mass": 0.6}, {"mass": 0.6, "mass_of": "scores"}], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_rows_count_by_the_probability_that_they_are_reached(bound: dict, seed: int) -> None:
    """To the power of alpha, in the ranking and in both masses; a row that is never reached is still cut."""
    logits, weights, ids = routing(seed)
    budget = control()
    budget.update(BudgetSettings(**bound, votes="path", coverage="truncation"))
    cut, used = (found[4:10] for found in budget.apply(0, logits, weights, ids, WEIGHED))
    mass = (logits[4:10].softmax(-1).double() * VOTES[:, None]).sum(0)
    held = mass
    if bound.get("mass") and "mass_of" not in bound:
        held = torch.zeros(EXPERTS).double()
        held.index_add_(0, ids[4:10].flatten().long(), (weights[4:10].double() * VOTES[:, None]).flatten())
    order = ranked(logits[4:10], ids[4:10], VOTES)
    count, total = 3, 0.0
    if "mass" in bound:
        count = 0
        while total < 0.6 * float(held.sum()):
            total, count = total + float(held[order[count]]), count + 1
    kept = torch.isin(ids[4:10], torch.tensor(order[:count]))
    assert torch.equal(cut, weights[4:10] * kept) and torch.equal(used[kept], ids[4:10][kept])
    assert budget.counters.snapshot()["rows"] == 6


@pytest.mark.parametrize("settings", [{"votes": "path", "votes_alpha": 0.0}, {}], ids=["alpha 0", "uniform"])
@pytest.mark.parametrize("window", [None, 2])
def test_votes_that_are_all_the_same_change_nothing(settings: dict, window: int | None) -> None:
    """To the bit: the ranking is asked as it is without weights."""
    plain, weighed = control(), control()
    plain.update(BudgetSettings(budget=3, window=window))
    weighed.update(BudgetSettings(budget=3, window=window, **settings))
    unweighted = Step((DECODE, VERIFY, OTHER))
    for seed in range(20):
        found, expected = (b.apply(0, *routing(seed), s) for b, s in ((weighed, WEIGHED), (plain, unweighted)))
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert weighed.begin_step(WEIGHED) == unweighted


@pytest.mark.parametrize(
    ("settings", "step", "bounds"),
    [
        ({"budget": 3}, Step((VERIFY, OTHER)), (3, 3)),
        ({"budget": 3, "when": "decode"}, Step((DECODE, VERIFY)), (3, 3)),
        ({"budget": 3}, Step((DECODE, VERIFY)), None),
        ({"budget": 3, "window": 2}, Step((VERIFY,)), None),
        ({"mass": 0.9}, Step((VERIFY,)), None),
        ({}, Step((VERIFY,)), None),
    ],
    ids=str,
)
def test_a_number_bounds_a_step_whose_rows_it_cuts_together(settings: dict, step: Step, bounds: tuple | None) -> None:
    """Other rows keep what they chose, and a share of the mass bounds no number."""
    budget = control(layers=2)
    budget.update(BudgetSettings(**settings))
    assert budget.begin_step(step).bounds == bounds


def test_a_window_has_the_votes_of_its_rows() -> None:
    asked = []
    budget = control()
    budget.update(BudgetSettings(budget=1, votes="path", window=3, coverage="truncation"))
    ranking = budget._on_host._ranking
    rank = ranking.rank
    ranking.rank = lambda probs, votes, *rest: asked.append(votes) or rank(probs, votes, *rest)
    budget.apply(0, *routing(), WEIGHED)
    assert [votes if votes is None else votes.tolist() for votes in asked] == [[1, 0.5, 0.5], [2**-12], None]


def test_requests_whose_probabilities_are_not_known_are_counted() -> None:
    budget = control()
    budget.begin_step(WEIGHED)
    assert budget.counters.snapshot()["unweighted"] == 0, "votes are uniform"
    budget.update(BudgetSettings(votes="path"))
    for _ in range(2):
        budget.begin_step(WEIGHED)
    budget.begin_step(Step((PROMPT, DECODE)))
    assert budget.counters.snapshot()["unweighted"] == 2, "the second verified request, twice"
    budget.counters.reset()
    assert budget.counters.snapshot()["unweighted"] == 0


def test_a_budget_of_drafts_that_there_are_none_of_is_no_budget() -> None:
    layers = [BudgetedLayer("layer.0", EXPERTS, TOP_K, RoutingRule())]
    drafting, plain = BudgetControl(layers), BudgetControl(layers, drafts=False)
    for asked, idle in (({}, False), ({"budget": 4}, True), ({"budget": 4, "when": "decode"}, False)):
        for budget in (drafting, plain):
            budget.update(BudgetSettings(**asked))
        assert plain.idle is idle and not drafting.idle
        assert drafting.describe() == drafting.settings.describe()
        assert (plain.describe() == plain.settings.describe()) is not idle
    plain.update(BudgetSettings(budget=4))
    assert plain.describe().startswith("exact (") and "--speculative-config" in plain.describe()
    assert "when=decode of --spac-budget" in plain.describe()


@pytest.mark.parametrize(
    ("asked", "holds"),
    [
        ({"budget": EXPERTS}, True),
        ({"budget": EXPERTS - 1}, False),
        ({"mass": 1.0}, True),
        ({"mass": 0.99}, False),
        ({"mass": 1.0, "votes": "path"}, False),
        ({}, False),
    ],
)
def test_a_budget_that_holds_all_experts_is_exact(asked: dict, holds: bool) -> None:
    budget = BudgetControl([BudgetedLayer("layer.0", EXPERTS, TOP_K, RoutingRule())])
    budget.update(BudgetSettings(**asked))
    assert budget.holds_all is holds and budget.lossy is (bool(asked) and not holds)
    assert description.mode(budget, ()) == ("lossy" if budget.lossy else "exact")
    assert budget.describe().startswith("lossy (" if budget.lossy else "exact")
    assert ("the budget holds all experts" in budget.describe()) is holds


def test_votes_are_refused_where_no_probabilities_are_known() -> None:
    budget = BudgetControl([BudgetedLayer("layer.0", EXPERTS, TOP_K, RoutingRule())], unweighted="because; do this")
    budget.update(BudgetSettings(budget=4))
    for bound in ({}, {"budget": 4}):
        with pytest.raises(UnsupportedError, match="--spac-budget.*because; do this, or use uniform votes"):
            budget.update(BudgetSettings(**bound, votes="path"))
    assert budget.settings == BudgetSettings(budget=4) and not budget.weighs


def test_the_settings_say_how_rows_vote() -> None:
    said = BudgetSettings(budget=4, votes="path", coverage="truncation").describe()
    assert said == "lossy (budget 4, selected, truncation, verify rows, path votes ** 0.5)"
