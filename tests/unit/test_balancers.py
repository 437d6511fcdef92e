"""The balancers against exhaustive search, and the contract that the runtime relies on."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spac import components
from vllm_spac.core import Rates
from vllm_spac.decisions.balancers import waterfill
from vllm_spac.decisions.balancers.base import LayerState
from vllm_spac.errors import ConfigError
from vllm_spac.methods.moe_spac import threshold_balancer

RATES = Rates(fast=1e-4, stream=4e-4, cpu=3e-4, cpu_row=1e-4, draft=1e-3)
EXPERTS = 16
COSTS = {
    "gamma": 8,
    "top_k": 2,
    "distinct": 8,
    "t_cpu": 1.0,
    "t_gpu": 1.0,
    "t_io": 0.0,
    "t_draft": 0.0,
    "layers": 2,
    "free_bytes": 100,
    "expert_bytes": 10,
}


def brute_force(r_c, r_g, n, *, gamma, top_k, distinct, t_cpu, t_gpu, t_io, t_draft, layers, free_bytes, expert_bytes):
    """Every tau; the last of the best."""
    best, least = len(n), float("inf")
    for i in range(len(n)):
        cpu, gpu = r_c[i] * gamma * top_k * t_cpu, r_g[i] * distinct * t_gpu
        fits = t_io * n[i] <= max(cpu, gpu) + gamma * t_draft / layers and expert_bytes * n[i] <= free_bytes
        if fits and abs(cpu - gpu) <= least:
            best, least = i + 1, abs(cpu - gpu)
    return best


def test_threshold_agrees_with_trying_every_tau():
    """10^5 cases, many with plateaus, ties, infeasible ends and holes in the feasible set."""
    rng = np.random.default_rng(3)
    answers, holes, fallbacks = set(), 0, 0
    for _ in range(100_000):
        size = int(rng.integers(1, 9))
        shares = rng.random((2, size)) if rng.random() < 0.5 else rng.integers(0, 5, (2, size)) / 4
        r_c, r_g = np.sort(shares[0]).tolist(), np.sort(shares[1])[::-1].tolist()
        n = np.sort(rng.integers(0, 12, size))[::-1].tolist()
        costs = COSTS | {
            "distinct": int(rng.integers(1, 17)),
            "t_cpu": float(rng.integers(0, 4)),
            "t_gpu": float(rng.integers(0, 9)),
            "t_io": float(rng.integers(0, 12)),
            "t_draft": float(rng.integers(0, 3)),
            "free_bytes": int(rng.integers(0, 120)),
        }
        expected = brute_force(r_c, r_g, n, **costs)
        assert threshold_balancer.solve(r_c, r_g, n, **costs) == expected, (r_c, r_g, n, costs)
        fits = [
            costs["t_io"] * x
            <= max(c * 16 * costs["t_cpu"], g * costs["distinct"] * costs["t_gpu"]) + 4 * costs["t_draft"]
            and 10 * x <= costs["free_bytes"]
            for c, g, x in zip(r_c, r_g, n, strict=True)
        ]
        answers.add(expected)
        fallbacks += not any(fits)
        first = fits.index(True) if any(fits) else size
        holes += any(fits) and not all(fits[first:])
    assert answers == set(range(1, 9)) and holes > 1000 and fallbacks > 1000


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        (([0.5, 0.25], [1, 0], [1, 1]), "r_c"),
        (([0, 0], [0, 1], [1, 1]), "r_g"),
        (([0, 0], [1, 0], [1, 2]), "n is"),
        (([0, 0], [1, 0], [1]), "one per score"),
        (([], [], []), "one per score"),
        (([0, float("nan")], [1, 0], [1, 1]), "r_c"),
    ],
)
def test_threshold_refuses_what_the_search_cannot_trust(arrays, named):
    with pytest.raises(ValueError, match=named):
        threshold_balancer.solve(*arrays, **COSTS)


@given(
    rows=st.lists(st.integers(1, 6), max_size=7),
    t_stream=st.integers(0, 5),
    t_cpu=st.integers(0, 5),
    t_row=st.integers(0, 3),
    busy=st.integers(0, 6),
    t_memory=st.integers(0, 4),
)
@settings(max_examples=examples(300), deadline=None)
def test_waterfill_agrees_with_trying_every_subset(rows, t_stream, t_cpu, t_row, busy, t_memory):
    experts = [3 * i + 1 for i in range(len(rows))][::-1]

    def finish(cpu: set[int]) -> tuple[float, int]:
        work = [max(t_cpu, r * t_row) for e, r in zip(experts, rows, strict=True) if e in cpu]
        streamed = len(rows) - len(cpu)
        ends = sum(work), (busy + streamed * t_stream if streamed else 0)
        both = len(rows) * t_memory if cpu and streamed else 0
        return max(*ends, both), len(cpu)

    subsets = chain.from_iterable(combinations(experts, size) for size in range(len(rows) + 1))
    costs = {"t_stream": t_stream, "t_cpu": t_cpu, "t_row": t_row, "busy": busy, "t_memory": t_memory}
    streamed, cpu = waterfill.solve(experts, rows, **costs)
    assert sorted(streamed + cpu) == sorted(experts) and streamed == sorted(streamed) and cpu == sorted(cpu)
    assert finish(set(cpu)) == min(finish(set(subset)) for subset in subsets)


def test_waterfill_streams_what_is_likely_to_be_selected_again():
    """One row each: half of them are streamed, those with the highest estimates."""
    rows, likely = np.ones(EXPERTS, dtype=int), np.random.default_rng(3).random(EXPERTS)
    balancer = components.build("balancers", "waterfill", rates=Rates(1, 1, 1, 0), layers=1, top_k=2)
    plan = balancer.plan(LayerState(0, rows, np.zeros(EXPERTS, dtype=bool), rows, EXPERTS, likely))
    assert len(plan.cpu) == EXPERTS // 2 and likely[list(plan.cpu)].max() < likely[list(plan.stream)].min()
    assert list(plan.cpu) == sorted(plan.cpu) and list(plan.stream) == sorted(plan.stream)


# --- what holds for every balancer -----------------------------------------------------------------------------------


def state(rng: np.random.Generator, layer: int = 0, **facts) -> LayerState:
    rows = rng.integers(0, 10, EXPERTS) * (rng.random(EXPERTS) < 0.6)
    known = {"rows": rows, "resident": rng.random(EXPERTS) < 0.3, "scores": rng.integers(0, 5, EXPERTS)}
    return LayerState(layer=layer, free_slots=int(rng.integers(0, 17)), **known | facts)


def build(name: str, **knobs):
    return components.build("balancers", name, rates=RATES, layers=4, top_k=2, expert_bytes=100, **knobs)


@pytest.mark.parametrize("name", components.names("balancers"))
def test_every_active_expert_runs_once(name):
    rng, balancer = np.random.default_rng(11), build(name)
    for number in range(300):
        known = state(rng, layer=number % 4)
        plan = balancer.plan(known)
        active = np.flatnonzero(known.rows).tolist()
        assert sorted(plan.hit + plan.stream + plan.cpu) == active
        assert list(plan.hit) == [expert for expert in active if known.resident[expert]]
        assert all(list(part) == sorted(part) for part in (plan.hit, plan.stream, plan.cpu))
        assert all(type(expert) is int for expert in plan.hit + plan.stream + plan.cpu)
        assert 1 <= balancer.threshold(known.layer) <= 4


def test_threshold_lets_the_cpu_compute_all_misses_as_the_paper_does():
    """tau is the same as of the variant that loads hot misses: it says what is prefetched."""
    rng, balancer, loading = np.random.default_rng(2), build("threshold"), build("threshold", misses="load")
    taus = set()
    for number in range(100):
        known = state(rng, layer=number % 4)
        plan, other = balancer.plan(known), loading.plan(known)
        assert plan.stream == () and list(plan.cpu) == sorted(other.stream + other.cpu)
        taus.add(balancer.threshold(number % 4))
        assert balancer.threshold(number % 4) == loading.threshold(number % 4)
    assert len(taus) > 1 and not balancer.loads and loading.loads
    with pytest.raises(ConfigError, match="misses='wait': use compute or load"):
        build("threshold@misses=wait")


def test_balancers_count_the_drafts_of_the_last_steps():
    balancer = build("threshold", gamma=8)
    balancer.observe_verify(4)
    assert balancer.gamma == 4, "what steps have, not what they may have"
    balancer.observe_verify(0)
    assert balancer.gamma == 2
    for _ in range(2000):
        balancer.observe_verify(6)
    assert balancer.gamma == pytest.approx(6)


def test_threshold_divides_misses_by_score():
    balancer = build("threshold", misses="load")
    rng = np.random.default_rng(2)
    divided = 0
    for number in range(100):
        known = state(rng, layer=number % 4)
        plan, tau = balancer.plan(known), balancer.threshold(number % 4)
        assert all(known.scores[expert] >= tau for expert in plan.stream)
        assert all(known.scores[expert] < tau for expert in plan.cpu)
        divided += bool(plan.stream and plan.cpu)
    assert divided > 10


def test_fixed_threshold():
    """The paper's ablation without its balancer."""
    shape = {"rates": RATES, "layers": 4, "top_k": 2}
    balancer = components.build("balancers", "threshold", fixed=2, misses="load", **shape)
    known = state(np.random.default_rng(6))
    plan = balancer.plan(known)
    missing = [expert for expert in np.flatnonzero(known.rows).tolist() if not known.resident[expert]]
    assert plan.stream == tuple(expert for expert in missing if known.scores[expert] >= 2)
    assert balancer.threshold(0) == balancer.threshold(3) == 2


def test_threshold_learns_each_layer_apart():
    balancer, rng = build("threshold"), np.random.default_rng(4)
    before = state(rng, layer=0)
    balancer.plan(before)
    means = balancer._means[0].copy()
    balancer.plan(state(rng, layer=1))
    assert (balancer._means[0] == means).all() and balancer.threshold(3) == 1
    hot = before.scores >= 2
    assert means[0, 1] == pytest.approx(before.rows[~hot].sum() / before.rows.sum())
    assert means[1, 1] == pytest.approx((hot & (before.rows > 0)).sum() / (before.rows > 0).sum())
    assert means[2, 1] == (hot & ~before.resident).sum()


def test_fixed_takes_those_with_the_fewest_rows():
    resident = np.arange(EXPERTS) == 0
    rows = np.zeros(EXPERTS, dtype=int)
    rows[:6] = [9, 3, 1, 2, 1, 5]
    known = state(np.random.default_rng(0), rows=rows, resident=resident)
    for count, cpu in ((1, (2,)), (2, (2, 4)), (3, (2, 3, 4)), (9, (1, 2, 3, 4, 5))):
        plan = components.build("balancers", "fixed", count=count, layers=4, top_k=2).plan(known)
        assert plan.cpu == cpu and plan.hit == (0,)


def test_none_streams_all_misses():
    known = state(np.random.default_rng(1))
    plan = build("none").plan(known)
    assert plan.cpu == () and len(plan.stream) == ((known.rows > 0) & ~known.resident).sum()
