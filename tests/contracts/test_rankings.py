"""Contract of rankings in a verify step, and further guarantees of the packaged ones.

A new ranking is tested without a change here.
"""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from vllm_spac.kernels.reference.shortlist import mass_count, sorted_by

from vllm_spac import components
from vllm_spac.errors import ConfigError
from vllm_spac.methods.moe_spec import rankings
from vllm_spac.methods.moe_spec.rankings import LayerContext, Ranking, router_mass
from vllm_spac.methods.moe_spec.router_ranking import Router
from vllm_spac.methods.moe_spec.selected_ranking import Selected
from vllm_spac.methods.moe_spec.settings import check_budget, vote

BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
LAYERS, EXPERTS, TOP_K = 2, 8, 2

every_budget = pytest.mark.parametrize("name", [*components.names("rankings"), "outside:Loudest"])
seeds = st.integers(0, 2**32)


def scores(rows: int, generator: torch.Generator, experts: int = EXPERTS) -> Tensor:
    return (2 * torch.randn(rows, experts, generator=generator)).softmax(1)


def built(name: str) -> Ranking:
    return components.find("rankings", name)()


def step(seed: int, rows: int = 5, voting: int = 3) -> tuple[Tensor, Tensor, LayerContext]:
    """(probs, votes, context) of rows of which the first ``voting`` vote."""
    generator = torch.Generator().manual_seed(seed)
    probs = scores(rows, generator)
    return probs, (torch.arange(rows) < voting).double(), LayerContext(1, probs.topk(TOP_K).indices)


def moved(context: LayerContext, rows: Tensor) -> LayerContext:
    return LayerContext(context.layer, context.ids[rows])


@every_budget
@settings(max_examples=examples(30), **BUSY)
@given(seed=seeds, rows=st.integers(1, 6))
def test_an_order_has_each_expert_once(name: str, seed: int, rows: int) -> None:
    probs, votes, context = step(seed, rows, voting=max(1, rows // 2))
    everyone = built(name).rank(probs, votes, context)
    assert everyone.dtype == torch.int64 and sorted(everyone.tolist()) == list(range(EXPERTS))


@every_budget
@settings(max_examples=examples(30), **BUSY)
@given(seed=seeds)
def test_only_votes_count(name: str, seed: int) -> None:
    """Rows that do not vote may be anything: padding is not initialised."""
    probs, votes, context = step(seed)
    order = built(name).rank(probs, votes, context)
    other = moved(context, torch.arange(5))
    probs[3:] = float("nan")
    other.ids[3:] = EXPERTS - 1
    assert torch.equal(built(name).rank(probs, votes, other), order)


@every_budget
@settings(max_examples=examples(30), **BUSY)
@given(seed=seeds)
def test_a_rank_is_sorted_by_its_scores(name: str, seed: int) -> None:
    """With scores of 0 in rows that do not vote; also where none does."""
    probs, votes, context = step(seed)
    votes = votes * votes_of(seed)
    ranking, silent = built(name), rankings.weighted(probs, votes)
    found = ranking.scores(silent, context)
    assert found.shape in ((EXPERTS,), (2, EXPERTS)) and found.dtype in (torch.float64, torch.int64)
    assert torch.equal(sorted_by(found), ranking.rank(probs, votes, context))
    assert ranking.scores(torch.zeros_like(probs), context).shape == found.shape


@every_budget
@settings(max_examples=examples(30), **BUSY)
@given(seed=seeds)
def test_by_default_all_rows_vote(name: str, seed: int) -> None:
    probs, _, context = step(seed)
    everyone = torch.ones(5, dtype=torch.float64)
    assert torch.equal(built(name).rank(probs, None, context), built(name).rank(probs, everyone, context))


def votes_of(seed: int, rows: int = 5) -> Tensor:
    """float64 [rows], votes as ``budget.votes`` makes them."""
    chances = torch.rand(rows, generator=torch.Generator().manual_seed(seed))
    return torch.tensor([vote(float(chance), 1.0) for chance in chances], dtype=torch.float64)


@every_budget
@settings(max_examples=examples(60), **BUSY)
@given(seed=seeds, alpha=st.floats(0, 1))
def test_without_weights_votes_are_what_they_were(name: str, seed: int, alpha: float) -> None:
    """To the bit: alpha = 0 gives every row the vote 1, and votes of 1 are votes of bool."""
    probs, voting, context = step(seed)
    weighed = voting * torch.tensor([vote(float(p), 0.0) for p in probs[:, 0]], dtype=torch.float64)
    assert torch.equal(weighed, voting)
    mass = router_mass(rankings.weighted(probs, weighed))
    assert torch.equal(mass, router_mass(rankings.weighted(probs, voting != 0)))
    assert torch.equal(mass, probs[:3].sum(0, dtype=torch.float64))
    alone = built(name).rank(probs[:3], None, moved(context, torch.arange(3)))
    assert torch.equal(built(name).rank(probs, weighed, context), alone)


@every_budget
@settings(max_examples=examples(60), **BUSY)
@given(seed=seeds)
def test_a_row_with_half_a_vote_twice_is_one_row(name: str, seed: int) -> None:
    """Votes add up. Not for a ranking that takes the greatest score instead of a sum."""
    if name.startswith("outside"):
        pytest.skip("it adds nothing up")
    probs, _, context = step(seed)
    votes, twice = votes_of(seed), torch.tensor([0, 1, 2, 3, 4, 2])
    halved = votes[twice].clone()
    halved[[2, 5]] /= 2
    order = built(name).rank(probs, votes, context)
    assert torch.equal(built(name).rank(probs[twice], halved, moved(context, twice)), order)


@every_budget
@settings(max_examples=examples(60), **BUSY)
@given(seed=seeds)
def test_the_scale_of_the_votes_does_not_matter(name: str, seed: int) -> None:
    probs, _, context = step(seed)
    votes = votes_of(seed)
    order = built(name).rank(probs, votes, context)
    assert torch.equal(built(name).rank(probs, votes / 4, context), order)


@every_budget
@settings(max_examples=examples(30), **BUSY)
@given(seed=seeds, random=st.randoms(use_true_random=False))
def test_rows_have_no_order(name: str, seed: int, random) -> None:
    probs, votes, context = step(seed)
    rows = torch.tensor(random.sample(range(5), 5))
    order = built(name).rank(probs, votes, context)
    assert torch.equal(built(name).rank(probs[rows], votes[rows], moved(context, rows)), order)


@every_budget
@settings(max_examples=examples(30), **BUSY)
@given(seed=seeds, random=st.randoms(use_true_random=False))
def test_experts_have_no_order(name: str, seed: int, random) -> None:
    probs, votes, context = step(seed)
    new = torch.tensor(random.sample(range(EXPERTS), EXPERTS))
    budget, other = built(name), built(name)
    for attribute, value in vars(other).items():
        if isinstance(value, Tensor):
            setattr(other, attribute, value[:, new])
    place = torch.empty_like(new)
    place[new] = torch.arange(EXPERTS)
    there = LayerContext(1, place[context.ids])
    order = budget.rank(probs, votes, context)
    assert torch.equal(new[other.rank(probs[:, new], votes, there)], order)


@every_budget
def test_ties_go_by_the_lowest_id_and_nothing_is_changed(name: str) -> None:
    probs, votes = torch.full((4, 300), 1 / 300), torch.ones(4, dtype=torch.bool)
    ids = torch.arange(8).view(4, 2)
    context = LayerContext(0, ids)
    budget = built(name)
    for attribute, value in vars(budget).items():
        if isinstance(value, Tensor):
            setattr(budget, attribute, torch.ones(1, *[300] * (value.ndim - 1), dtype=value.dtype))
    for _ in range(2):
        assert budget.rank(probs, votes, context).tolist() == list(range(300))


@every_budget
def test_nobody_votes(name: str) -> None:
    probs, votes, context = step(0)
    with pytest.raises(AssertionError, match="no row votes"):
        built(name).rank(probs, torch.zeros_like(votes), context)


@settings(max_examples=examples(400), **BUSY)
@given(seed=seeds, rows=st.integers(1, 12), uniform=st.booleans())
def test_sums_are_added_row_by_row(seed: int, rows: int, uniform: bool) -> None:
    """``router`` (Eq. 5) and ``selected``, whose equals are in the order of ``router``."""
    generator = torch.Generator().manual_seed(seed)
    probs, votes = scores(rows, generator), torch.rand(rows, generator=generator).double()
    ids = probs.topk(TOP_K).indices
    context = LayerContext(1, ids=ids)
    weights = [1.0] * rows if uniform else votes.tolist()
    every, own = [0.0] * EXPERTS, [0.0] * EXPERTS
    for weight, row, chosen in zip(weights, probs.double().tolist(), ids.tolist(), strict=True):
        for expert, score in enumerate(row):
            every[expert] += weight * score
            own[expert] += weight * score * (expert in chosen)
    wanted = {"router": every, "selected": list(zip(own, every, strict=True))}
    for name, ranking in (("router", Router()), ("selected", Selected())):
        found = ranking.rank(probs, None if uniform else votes, context).tolist()
        assert found == sorted(range(EXPERTS), key=lambda i: wanted[name][i], reverse=True), name


def mass_cut(order: Tensor, held: Tensor, mass: float, least: int = 1) -> int:
    """How many experts of ``order`` hold a share of the mass."""
    return int(mass_count(order, held, torch.tensor(mass, dtype=torch.float64), least))


@settings(max_examples=examples(60), **BUSY)
@given(seed=seeds, mass=st.floats(0.01, 0.999))
def test_mass_cut_is_the_smallest_prefix(seed: int, mass: float) -> None:
    probs, votes, _ = step(seed)
    held, order = router_mass(rankings.weighted(probs, votes)), Router().rank(probs, votes, LayerContext())
    count = mass_cut(order, held, mass)
    assert held[order[:count]].sum() >= mass * held.sum() * (1 - 1e-12)
    assert held[order[: count - 1]].sum() < mass * held.sum() * (1 + 1e-12)


def test_mass_cut_by_hand() -> None:
    order, held = torch.tensor([2, 0, 1]), torch.tensor([0.25, 0.25, 0.5])
    assert [mass_cut(order, held, mass) for mass in (0.1, 0.5, 0.51, 0.75, 0.8)] == [1, 1, 2, 2, 3]
    assert mass_cut(order, torch.tensor([0.0, 0.0, 1.0]), 1.0) == 3, "1.0 is exact: all, even those without mass"
    assert mass_cut(order, held, 0.1, least=2) == 2


@pytest.mark.parametrize(
    ("budget", "coverage", "says"),
    [
        (
            1,
            "substitution",
            r"every token 2 experts; use 2 to 8, or use --spac-budget 1@coverage=truncation",
        ),
        (0, "substitution", r"has 8 experts; use 2 to 8"),
        (9, "substitution", r"has 8 experts; use 2 to 8"),
        (0, "truncation", r"has 8 experts; use 1 to 8"),
        (-3, "truncation", r"has 8 experts; use 1 to 8"),
        (9, "truncation", r"has 8 experts; use 1 to 8"),
    ],
)
def test_budgets_that_cannot_be_met(budget: int, coverage: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"budget={budget} \(--spac-budget\).*{says}"):
        check_budget(budget, 8, 2, coverage)
