"""Contract of rankings in a verify step, and further guarantees of the packaged ones.

A new ranking is tested without a change here.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from vllm_spac.kernels.reference.shortlist import mass_count

from vllm_spac import components
from vllm_spac.errors import ConfigError
from vllm_spac.methods.moe_spec import rankings
from vllm_spac.methods.moe_spec.calibration import Calibration, CalibrationRecorder
from vllm_spac.methods.moe_spec.coactivation_ranking import Coactivation, natural, similarity
from vllm_spac.methods.moe_spec.oracle_ranking import OracleRanking
from vllm_spac.methods.moe_spec.rankings import LayerContext, Ranking, least_residual, router_mass
from vllm_spac.methods.moe_spec.replay import members
from vllm_spac.methods.moe_spec.resident_ranking import Resident
from vllm_spac.methods.moe_spec.router_ranking import Router
from vllm_spac.methods.moe_spec.selected_ranking import Selected
from vllm_spac.methods.moe_spec.settings import check_mass, validate, vote
from vllm_spac.methods.moe_spec.static_ranking import Static

BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
LAYERS, EXPERTS, TOP_K, WIDTH = 2, 8, 2, 6

every_budget = pytest.mark.parametrize("name", [*components.names("rankings"), "outside:Loudest"])
seeds = st.integers(0, 2**32)


def scores(rows: int, generator: torch.Generator, experts: int = EXPERTS) -> Tensor:
    return (2 * torch.randn(rows, experts, generator=generator)).softmax(1)


def calibrated(layers: int = LAYERS, experts: int = EXPERTS, top_k: int = TOP_K) -> Calibration:
    """Layers differ; text from a fixed seed."""
    generator = torch.Generator().manual_seed(1)
    recorder = CalibrationRecorder("f" * 32, "toy", [f"layer.{i}" for i in range(layers)], experts, top_k, window=4)
    for layer in range(layers):
        probs = (torch.randn(2000, experts, generator=generator) + torch.randn(experts, generator=generator)).softmax(1)
        recorder.observe(layer, probs, *probs.topk(top_k))
    recorder.end_text()
    return recorder.result()


CALIBRATED = calibrated()
assert all(len(set(row)) == EXPERTS for row in CALIBRATED.counts.tolist()), "ties would hide what is tested"


def built(name: str) -> Ranking:
    return components.find("rankings", name).of(CALIBRATED)


def step(seed: int, rows: int = 5, voting: int = 3) -> tuple[Tensor, Tensor, LayerContext]:
    """(probs, votes, context) of rows of which the first ``voting`` vote."""
    generator = torch.Generator().manual_seed(seed)
    probs = scores(rows, generator)
    outputs = torch.randn(rows, EXPERTS, WIDTH, generator=generator)
    fast = torch.rand(EXPERTS, generator=generator) < 0.5
    ids = probs.topk(TOP_K).indices
    context = LayerContext(1, fast, natural(probs, TOP_K), outputs, ids)
    return probs, (torch.arange(rows) < voting).double(), context


def moved(context: LayerContext, rows: Tensor) -> LayerContext:
    parts = (part[rows] for part in (context.mixing, context.outputs, context.ids))
    return LayerContext(context.layer, context.resident, *parts)


@every_budget
@settings(max_examples=30, **BUSY)
@given(seed=seeds, rows=st.integers(1, 6))
def test_a_shortlist_is_distinct_experts_and_a_prefix(name: str, seed: int, rows: int) -> None:
    probs, votes, context = step(seed, rows, voting=max(1, rows // 2))
    everyone = built(name).rank(probs, votes, EXPERTS, context)
    assert everyone.dtype == torch.int64 and sorted(everyone.tolist()) == list(range(EXPERTS))
    for budget in range(1, EXPERTS + 1):
        assert torch.equal(built(name).rank(probs, votes, budget, context), everyone[:budget])


@every_budget
@settings(max_examples=30, **BUSY)
@given(seed=seeds)
def test_only_votes_count(name: str, seed: int) -> None:
    """Rows that do not vote may be anything: padding is not initialised."""
    probs, votes, context = step(seed)
    order = built(name).rank(probs, votes, EXPERTS, context)
    other = moved(context, torch.arange(5))
    for tensor in (probs, other.mixing, other.outputs):
        tensor[3:] = float("nan")
    other.ids[3:] = EXPERTS - 1
    assert torch.equal(built(name).rank(probs, votes, EXPERTS, other), order)


@every_budget
@settings(max_examples=30, **BUSY)
@given(seed=seeds)
def test_what_can_be_replayed_is_sorted_by_its_scores(name: str, seed: int) -> None:
    """With scores of 0 in rows that do not vote; also where none does."""
    probs, votes, context = step(seed)
    votes = votes * votes_of(seed)
    ranking, silent = built(name), rankings.weighted(probs, votes)
    if not ranking.replayable:
        with pytest.raises(NotImplementedError):
            ranking.scores(silent, context)
        return
    found = ranking.scores(silent, context)
    assert found.shape in ((EXPERTS,), (2, EXPERTS)) and found.dtype in (torch.float64, torch.int64)
    assert torch.equal(rankings.best(found, EXPERTS), ranking.rank(probs, votes, EXPERTS, context))
    assert ranking.scores(torch.zeros_like(probs), context).shape == found.shape


@every_budget
@settings(max_examples=30, **BUSY)
@given(seed=seeds)
def test_by_default_all_rows_vote(name: str, seed: int) -> None:
    probs, _, context = step(seed)
    everyone = torch.ones(5, dtype=torch.float64)
    assert torch.equal(
        built(name).rank(probs, None, EXPERTS, context), built(name).rank(probs, everyone, EXPERTS, context)
    )


def votes_of(seed: int, rows: int = 5) -> Tensor:
    """float64 [rows], votes as ``budget.votes`` makes them."""
    chances = torch.rand(rows, generator=torch.Generator().manual_seed(seed))
    return torch.tensor([vote(float(chance), 1.0) for chance in chances], dtype=torch.float64)


@every_budget
@settings(max_examples=60, **BUSY)
@given(seed=seeds, alpha=st.floats(0, 1))
def test_without_weights_votes_are_what_they_were(name: str, seed: int, alpha: float) -> None:
    """To the bit: alpha = 0 gives every row the vote 1, and votes of 1 are votes of bool."""
    probs, voting, context = step(seed)
    weighed = voting * torch.tensor([vote(float(p), 0.0) for p in probs[:, 0]], dtype=torch.float64)
    assert torch.equal(weighed, voting)
    assert torch.equal(rankings.router_mass(probs, weighed), rankings.router_mass(probs, voting != 0))
    assert torch.equal(rankings.router_mass(probs, weighed), probs[:3].sum(0, dtype=torch.float64))
    alone = built(name).rank(probs[:3], None, EXPERTS, moved(context, torch.arange(3)))
    assert torch.equal(built(name).rank(probs, weighed, EXPERTS, context), alone)


@every_budget
@settings(max_examples=60, **BUSY)
@given(seed=seeds)
def test_a_row_with_half_a_vote_twice_is_one_row(name: str, seed: int) -> None:
    """Votes add up. Not for a ranking that takes the greatest score instead of a sum."""
    if name.startswith("outside"):
        pytest.skip("it adds nothing up")
    probs, _, context = step(seed)
    votes, twice = votes_of(seed), torch.tensor([0, 1, 2, 3, 4, 2])
    halved = votes[twice].clone()
    halved[[2, 5]] /= 2
    order = built(name).rank(probs, votes, EXPERTS, context)
    assert torch.equal(built(name).rank(probs[twice], halved, EXPERTS, moved(context, twice)), order)


@every_budget
@settings(max_examples=60, **BUSY)
@given(seed=seeds)
def test_the_scale_of_the_votes_does_not_matter(name: str, seed: int) -> None:
    probs, _, context = step(seed)
    votes = votes_of(seed)
    order = built(name).rank(probs, votes, EXPERTS, context)
    assert torch.equal(built(name).rank(probs, votes / 4, EXPERTS, context), order)


@pytest.mark.parametrize("name", ["router", "selected", "resident", "coactivation", "oracle"])
def test_a_vote_decides(name: str) -> None:
    """Two rows want other experts; the first in the shortlist is that of the row with the greater vote."""
    probs = torch.tensor([[0.8, 0.2] + [0.0] * 6, [0.2, 0.8] + [0.0] * 6])
    choice = torch.tensor([[0], [1]])
    context = LayerContext(1, torch.zeros(8, dtype=torch.bool), probs, torch.eye(8).repeat(2, 1, 1), choice)
    for votes, first in (([1, 0.5], 0), ([0.5, 1], 1), ([1, 2**-12], 0), ([2**-12, 1], 1)):
        order = built(name).rank(probs, torch.tensor(votes, dtype=torch.float64), 1, context)
        assert order.tolist() == [first]


@every_budget
@settings(max_examples=30, **BUSY)
@given(seed=seeds, random=st.randoms(use_true_random=False))
def test_rows_have_no_order(name: str, seed: int, random) -> None:
    probs, votes, context = step(seed)
    rows = torch.tensor(random.sample(range(5), 5))
    order = built(name).rank(probs, votes, EXPERTS, context)
    assert torch.equal(built(name).rank(probs[rows], votes[rows], EXPERTS, moved(context, rows)), order)


@every_budget
@settings(max_examples=30, **BUSY)
@given(seed=seeds, random=st.randoms(use_true_random=False))
def test_experts_have_no_order(name: str, seed: int, random) -> None:
    probs, votes, context = step(seed)
    new = torch.tensor(random.sample(range(EXPERTS), EXPERTS))
    budget, other = built(name), built(name)
    for attribute, value in vars(other).items():
        if isinstance(value, Tensor):
            value = value[:, new]
            setattr(other, attribute, value[:, :, new] if value.ndim == 3 else value)
    place = torch.empty_like(new)
    place[new] = torch.arange(EXPERTS)
    there = LayerContext(1, context.resident[new], context.mixing[:, new], context.outputs[:, new], place[context.ids])
    order = budget.rank(probs, votes, EXPERTS, context)
    assert torch.equal(new[other.rank(probs[:, new], votes, EXPERTS, there)], order)


@every_budget
def test_ties_go_by_the_lowest_id_and_nothing_is_changed(name: str) -> None:
    probs, votes = torch.full((4, 300), 1 / 300), torch.ones(4, dtype=torch.bool)
    ids = torch.arange(8).view(4, 2)
    context = LayerContext(0, torch.ones(300, dtype=torch.bool), torch.zeros(4, 300), torch.ones(4, 300, 2), ids)
    budget = built(name)
    for attribute, value in vars(budget).items():
        if isinstance(value, Tensor):
            setattr(budget, attribute, torch.ones(1, *[300] * (value.ndim - 1), dtype=value.dtype))
    for _ in range(2):
        assert budget.rank(probs, votes, 300, context).tolist() == list(range(300))


@every_budget
def test_nobody_votes(name: str) -> None:
    probs, votes, context = step(0)
    with pytest.raises(AssertionError, match="no row votes"):
        built(name).rank(probs, torch.zeros_like(votes), 3, context)


@every_budget
@pytest.mark.parametrize("budget", [0, EXPERTS + 1])
def test_no_list_of_no_or_more_than_all_experts(name: str, budget: int) -> None:
    probs, votes, context = step(0)
    with pytest.raises(AssertionError, match="a budget of"):
        built(name).rank(probs, votes, budget, context)


@every_budget
def test_what_needs_a_calibration_says_so(name: str) -> None:
    kind = components.find("rankings", name)
    if kind.needs_calibration:
        with pytest.raises(ConfigError, match=f"{name} needs a calibration file.*vllm-spac quality calibrate"):
            kind.of(None)
    else:
        assert isinstance(kind.of(None), kind)
    assert built(name).to("cpu").rank(*step(1)[:2], 3, step(1)[2]).shape == (3,)


def test_which_are_offline_and_which_are_calibrated() -> None:
    kinds = {name: components.find("rankings", name) for name in components.names("rankings")}
    assert {name for name, kind in kinds.items() if kind.offline} == {"oracle"}
    assert {name for name, kind in kinds.items() if kind.needs_calibration} == {"coactivation", "static"}


def test_router_by_hand() -> None:
    probs = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.5, 0.4], [0.0, 0.0, 1.0]])
    assert Router().rank(probs, torch.tensor([True, True, False]), 3).tolist() == [1, 0, 2]
    assert Router().rank(probs, torch.tensor([True, True, True]), 1).tolist() == [2]


@settings(max_examples=400, **BUSY)
@given(seed=seeds, rows=st.integers(1, 12), uniform=st.booleans())
def test_sums_are_added_row_by_row(seed: int, rows: int, uniform: bool) -> None:
    """``router`` (Eq. 5), ``static`` (Eq. 4) and ``selected``, whose equals are in the order of ``router``."""
    generator = torch.Generator().manual_seed(seed)
    probs, votes = scores(rows, generator), torch.rand(rows, generator=generator).double()
    ids = probs.topk(TOP_K).indices
    counts = torch.stack([torch.randperm(EXPERTS, generator=generator) for _ in range(LAYERS)])
    context = LayerContext(1, ids=ids)
    weights = [1.0] * rows if uniform else votes.tolist()
    every, own = [0.0] * EXPERTS, [0.0] * EXPERTS
    for weight, row, chosen in zip(weights, probs.double().tolist(), ids.tolist(), strict=True):
        for expert, score in enumerate(row):
            every[expert] += weight * score
            own[expert] += weight * score * (expert in chosen)
    wanted = {"router": every, "static": counts[1].tolist(), "selected": list(zip(own, every, strict=True))}
    for name, ranking in (("router", Router()), ("static", Static(counts=counts)), ("selected", Selected())):
        found = ranking.rank(probs, None if uniform else votes, EXPERTS, context).tolist()
        assert found == sorted(range(EXPERTS), key=lambda i: wanted[name][i], reverse=True), name


def test_selected_by_hand() -> None:
    """Expert 2 has most of all scores, and nobody selects it; 3 and 4 are nobody's either."""
    probs = torch.tensor([[0.4, 0.1, 0.3, 0.2, 0.0], [0.05, 0.4, 0.3, 0.15, 0.1], [0.4, 0.1, 0.3, 0.2, 0.0]])
    ids, ones = torch.tensor([[0], [1], [0]]), torch.ones(3, dtype=torch.float64)
    context, few = LayerContext(ids=ids), torch.tensor([0.25, 1, 0.25]).double()
    assert Selected().rank(probs, ones, 5, context).tolist() == [0, 1, 2, 3, 4]
    assert Selected().rank(probs, None, 2, context).tolist() == [0, 1]
    assert Selected().rank(probs, few, 5, context).tolist() == [1, 0, 2, 3, 4]
    assert Router().rank(probs, ones, 5).tolist() == [2, 0, 1, 3, 4]


def test_selected_by_as_much_are_ranked_by_all_scores() -> None:
    probs = torch.tensor([[0.4, 0.4, 0.2, 0.0], [0.1, 0.3, 0.0, 0.6]])
    assert Selected().rank(probs, None, 4, LayerContext(ids=torch.tensor([[0, 1], [3, 2]]))).tolist() == [3, 1, 0, 2]


def test_static_takes_the_counts_of_its_layer() -> None:
    budget = Static(counts=torch.tensor([[5, 1, 3], [0, 9, 9]]))
    probs, votes = torch.eye(3), torch.ones(3, dtype=torch.bool)
    assert budget.rank(probs, votes, 3).tolist() == [0, 2, 1]
    assert budget.rank(probs, votes, 3, LayerContext(layer=1)).tolist() == [1, 2, 0]


@pytest.mark.parametrize(("bonus", "order"), [(0.0, [0, 1, 2, 3]), (0.5, [0, 1, 3, 2]), (2.0, [3, 0, 1, 2])])
def test_resident_lifts_what_is_in_fast_memory(bonus: float, order: list[int]) -> None:
    """Mean mass 0.25, so the last has 0.1 + 0.25 * bonus."""
    probs, fast = torch.tensor([[0.45, 0.25, 0.2, 0.1]]), torch.tensor([False, False, False, True])
    ranking, context = Resident(bonus=bonus), LayerContext(resident=fast)
    assert ranking.rank(probs, torch.tensor([True]), 4, context).tolist() == order
    assert ranking.rank(torch.cat((probs, probs)), torch.tensor([True, True]), 4, context).tolist() == order


@pytest.mark.parametrize("bonus", [-1.0, float("nan")])
def test_resident_refuses_a_wrong_bonus(bonus: float) -> None:
    with pytest.raises(ConfigError, match="use 0 or more"):
        Resident(bonus=bonus)


@settings(max_examples=400, **BUSY)
@given(seed=seeds)
def test_oracle_is_greedy_by_the_definition(seed: int) -> None:
    """Those that change nothing, because no row's top-k has them, go by the router's mass."""
    probs, votes, context = step(seed)
    parts = (context.outputs * context.mixing[:, :, None])[:3].double()
    whole = parts.sum(1)
    mass = probs[:3].sum(0).tolist()
    chosen: list[int] = []
    for _ in range(EXPERTS):
        errors = {
            i: float((whole - parts[:, [*chosen, i]].sum(1)).square().sum()) for i in range(EXPERTS) if i not in chosen
        }
        chosen.append(min(errors, key=lambda i: (round(errors[i], 8), -mass[i])))
    found = OracleRanking().rank(probs, votes, EXPERTS, context)
    assert found.tolist() == chosen


def test_coactivation_skips_the_partner_of_one_it_has() -> None:
    """0 and 1 are alike and the heaviest; 2 is alone. All selected by another row, so that squares add up by pairs."""
    mixing = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.6, 0.0], [0.0, 0.0, 0.0, 0.1]])
    votes, alike = torch.ones(3, dtype=torch.bool), torch.eye(4)
    alike[0, 1] = alike[1, 0] = 1.0
    for similar, order in ((torch.eye(4), [2, 0, 1, 3]), (alike, [0, 2, 1, 3])):
        assert Coactivation(alike=similar[None], top_k=4).rank(mixing, votes, 4).tolist() == order


@settings(max_examples=40, **BUSY)
@given(seed=seeds)
def test_coactivation_is_greedy_by_its_formula(seed: int) -> None:
    probs, votes, context = step(seed)
    rho = similarity(CALIBRATED.pairs[1], CALIBRATED.tokens).tolist()
    rows = context.mixing[:3].double().tolist()

    def loss(kept: list[int]) -> float:
        out = [i for i in range(EXPERTS) if i not in kept]
        return sum(rho[i][j] * row[i] * row[j] for row in rows for i in out for j in out)

    chosen: list[int] = []
    while len(chosen) < EXPERTS and loss(chosen) > 1e-12:
        chosen.append(min((i for i in range(EXPERTS) if i not in chosen), key=lambda i: loss([*chosen, i])))
    ranking = Coactivation(alike=torch.tensor(rho).expand(LAYERS, -1, -1), top_k=TOP_K, prior=0.0)
    found = ranking.rank(probs, votes, EXPERTS, context)
    assert found.tolist()[: len(chosen)] == chosen


def test_coactivation_ranks_those_that_nobody_selected_by_the_router() -> None:
    probs = torch.tensor([[0.5, 0.1, 0.0, 0.15, 0.25]])
    budget = Coactivation(alike=torch.eye(5)[None], top_k=1)
    assert budget.rank(probs, torch.tensor([True]), 5).tolist() == [0, 4, 3, 1, 2]


def test_coactivation_takes_the_similarity_of_its_layer() -> None:
    alike = torch.eye(4).repeat(2, 1, 1)
    alike[1, 0, 1] = alike[1, 1, 0] = 1.0
    budget = Coactivation(alike=alike, top_k=2)
    probs, votes = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.6, 0.0]]), torch.ones(2, dtype=torch.bool)
    assert [budget.rank(probs, votes, 1, LayerContext(layer)).tolist() for layer in (0, 1)] == [[2], [0]]


def test_similarity_is_the_squared_correlation_of_selections() -> None:
    chosen = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 0, 1, 0], [0, 1, 1, 0]])
    found = similarity(chosen.T @ chosen, 5)
    expected = torch.corrcoef(chosen[:, :3].T.double()).clamp(min=0).square()
    torch.testing.assert_close(found[:3, :3], expected)
    assert found[3].tolist() == [0, 0, 0, 1], "never selected: like nobody"


def test_similarity_does_not_overflow() -> None:
    """10^10 tokens: products of int64 counts must not be taken in int64."""
    pairs = torch.tensor([[5, 4], [4, 5]]) * 10**9
    assert similarity(pairs, 10**10)[0, 1] == pytest.approx(0.36)


@settings(max_examples=60, **BUSY)
@given(seed=seeds, size=st.integers(1, 9))
def test_least_residual_is_the_naive_greedy(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors, whole = torch.randn(size, 4, generator=generator).double(), torch.randn(4, generator=generator).double()
    chosen: list[int] = []
    for _ in range(size):
        left = [i for i in range(size) if i not in chosen]
        chosen.append(min(left, key=lambda i: float((whole - vectors[[*chosen, i]].sum(0)).square().sum())))
    assert least_residual(vectors @ vectors.T, size, vectors @ whole).tolist() == chosen


def world(seed: int, experts: int = 32, width: int = 32, cluster: int = 4):
    """Random experts; those of a cluster share half of their weights and of their router's direction."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        shared = torch.randn(experts // cluster, *shape, generator=generator).repeat_interleave(cluster, 0)
        return 0.5**0.5 * (torch.randn(experts, *shape, generator=generator) + shared)

    up, down, gate = draw(width, 16), draw(16, width), draw(width)

    def run(rows: int) -> tuple[Tensor, Tensor]:
        base = torch.randn(width, generator=generator)
        hidden = 0.6**0.5 * base + 0.4**0.5 * torch.randn(rows, width, generator=generator)
        inner = torch.einsum("td,ndf->tnf", hidden, up / width**0.5).relu()
        return (2 * hidden @ gate.T / width**0.5).softmax(1), torch.einsum("tnf,nfd->tnd", inner, down / 4)

    return run


@pytest.mark.parametrize("budget", [6, 8, 12, 16])
def test_rankings_in_order_of_their_error(budget: int) -> None:
    """Truncation on random experts: oracle <= coactivation <= router <= static, over 3 models of 8 steps of 16 rows."""
    top_k, lost = 4, dict.fromkeys(("oracle", "coactivation", "router", "static"), 0.0)
    for seed in range(3):
        run = world(seed)
        recorder = CalibrationRecorder("f", "random", ["0"], 32, top_k, window=16)
        for _ in range(40):
            probs, _ = run(16)
            recorder.observe(0, probs, *probs.topk(top_k))
            recorder.end_text()
        rankings = {name: components.find("rankings", name).of(recorder.result()) for name in lost}
        for _ in range(8):
            probs, outputs = run(16)
            weights, ids = probs.topk(top_k)
            mixing = torch.zeros_like(probs).scatter(1, ids, weights)
            context = LayerContext(0, mixing=mixing, outputs=outputs)
            for name, ranking in rankings.items():
                shortlist = ranking.rank(probs, torch.ones(16, dtype=torch.bool), budget, context)
                kept = mixing * members(shortlist, probs.shape[1])
                lost[name] += float(((kept - mixing)[:, :, None] * outputs).sum(1).square().sum())
    assert lost["oracle"] <= lost["coactivation"] <= lost["router"] <= lost["static"], lost


def mass_cut(order: Tensor, held: Tensor, mass: float, least: int = 1) -> int:
    """How many experts of ``order`` hold a share of the mass."""
    return int(mass_count(order, held, torch.tensor(mass, dtype=torch.float64), least))


@settings(max_examples=60, **BUSY)
@given(seed=seeds, mass=st.floats(0.01, 0.999))
def test_mass_cut_is_the_smallest_prefix(seed: int, mass: float) -> None:
    probs, votes, _ = step(seed)
    held, order = router_mass(probs, votes), Router().rank(probs, votes, EXPERTS)
    count = mass_cut(order, held, mass)
    assert held[order[:count]].sum() >= mass * held.sum() * (1 - 1e-12)
    assert held[order[: count - 1]].sum() < mass * held.sum() * (1 + 1e-12)


def test_mass_cut_by_hand() -> None:
    order, held = torch.tensor([2, 0, 1]), torch.tensor([0.25, 0.25, 0.5])
    assert [mass_cut(order, held, mass) for mass in (0.1, 0.5, 0.51, 0.75, 0.8)] == [1, 1, 2, 2, 3]
    assert mass_cut(order, torch.tensor([0.0, 0.0, 1.0]), 1.0) == 3, "1.0 is exact: all, even those without mass"
    assert mass_cut(order, held, 0.1, least=2) == 2


@pytest.mark.parametrize("mass", [0.0, -0.1, 1.001, float("nan")])
def test_a_share_out_of_range_is_refused(mass: float) -> None:
    with pytest.raises(ConfigError, match="--spac-budget.*above 0 and at most 1"):
        check_mass(mass)


@pytest.mark.parametrize(
    ("budget", "coverage", "says"),
    [
        (
            1,
            "substitution",
            r"every token 2 experts; use --spac-budget 2 to 8, or use --spac-budget-coverage truncation",
        ),
        (0, "substitution", r"has 8 experts; use 2 to 8"),
        (9, "substitution", r"has 8 experts; use 2 to 8"),
        (0, "truncation", r"has 8 experts; use 1 to 8"),
        (-3, "truncation", r"has 8 experts; use 1 to 8"),
        (9, "truncation", r"has 8 experts; use 1 to 8"),
        (9, "rescue", r"has 8 experts; use 1 to 8"),
    ],
)
def test_budgets_that_cannot_be_met(budget: int, coverage: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"budget={budget} \(--spac-budget\).*{says}"):
        validate(budget, 8, 2, coverage)


@pytest.mark.parametrize(("budget", "coverage"), [(2, "substitution"), (8, "substitution"), (1, "truncation")])
def test_budgets_that_can_be_met(budget: int, coverage: str) -> None:
    validate(budget, 8, 2, coverage)


def test_the_base_holds_no_component() -> None:
    assert "base" not in components.names("rankings") and inspect.isabstract(rankings.Ranking)
