"""Experts of a layer divided between processors, against trying every division with a plain formula."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spac import components
from vllm_spac.core import Rates
from vllm_spac.decisions.balancers import makespan
from vllm_spac.decisions.balancers._processors import Work, by_counts, greedy
from vllm_spac.decisions.balancers.base import LayerState

FAR = float("inf")
BUSY = {"deadline": None}


def finish(work: Work, where) -> float:
    """When the last processor has finished, one expert after another."""
    used, ends = set(where), []
    link = sum(work.wire[p] for p in used)
    for p in used:
        loads = held = after = 0.0
        for expert, here in enumerate(where):
            if here == p and work.load[p, expert] > 0:
                loads, after = loads + work.load[p, expert], after + work.compute[p, expert]
            elif here == p:
                held += work.compute[p, expert]
        ends.append(work.fixed[p] + (link if work.wire[p] else 0) + max(loads, held) + after)
    return max(ends, default=0.0)


def brute_force(work: Work) -> float:
    processors, experts = work.compute.shape
    allowed = [[p for p in range(processors) if work.compute[p, e] < FAR] for e in range(experts)]
    return min(finish(work, where) for where in product(*allowed))


def alone(work: Work) -> list[float]:
    """The seconds with each single processor, where it may have all experts that have a choice."""
    may = work.compute < FAR
    free, found = may.sum(axis=0) > 1, []
    for p in range(len(may)):
        if may[p, free].all() and may[p].any():
            found.append(finish(work, [p if free[e] else int(may[:, e].argmax()) for e in range(len(free))]))
    return found


def check(work: Work, division: makespan.Division) -> None:
    assert len(division.where) == work.compute.shape[1]
    assert all(type(p) is int and work.compute[p, e] < FAR for e, p in enumerate(division.where))
    assert division.seconds == pytest.approx(finish(work, division.where))
    assert all(division.seconds <= seconds * (1 + 1e-12) for seconds in alone(work))


@st.composite
def works(draw, processors=st.integers(1, 4), most: int = 6, real: bool = False) -> Work:
    """Costs of any kind: an expert may run on some processors, and each has it or loads it."""
    count, experts = draw(processors), draw(st.integers(0, most))
    cost = st.floats(0, 5) if real else st.integers(0, 5)
    costs = st.lists(st.lists(cost, min_size=experts, max_size=experts), min_size=count, max_size=count)
    compute, load = (np.array(draw(costs), dtype=float).reshape(count, experts) for _ in range(2))
    must = draw(st.lists(st.integers(0, count - 1), min_size=experts, max_size=experts))
    for expert, p in enumerate(must):
        away = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=bool)
        away[p] = False
        compute[away, expert] = FAR
    load *= np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=bool)[:, None]
    each = st.lists(st.sampled_from([0, 0, 1, 3]), min_size=count, max_size=count)
    return Work(compute, load, np.array(draw(each), dtype=float), np.array(draw(each), dtype=float))


@st.composite
def layers(draw, processors=st.integers(2, 4), most: int = 5) -> Work:
    """A layer: some only on the first processor, most of them hits; the others anywhere, on one of them by rows."""
    count, hits, misses = draw(processors), draw(st.integers(0, 2)), draw(st.integers(1, most))
    one = draw(st.integers(0, count - 1))
    rows = np.array(draw(st.lists(st.integers(1, 4), min_size=misses, max_size=misses)))
    each = [draw(st.integers(0, 4)) for _ in range(count)]
    compute = np.full((count, hits + misses), FAR)
    compute[0, :hits] = draw(st.integers(0, 3))
    compute[:, hits:] = np.array(each)[:, None]
    compute[one, hits:] = np.maximum(each[one], rows * draw(st.integers(0, 3)))
    load = np.zeros_like(compute)
    load[0, :hits] = [draw(st.sampled_from([0, 0, 5])) for _ in range(hits)]
    load[:, hits:] = np.array([draw(st.sampled_from([0, 2, 5])) for _ in range(count)])[:, None]
    costs = np.array([[draw(st.sampled_from([0, 1, 4])) for _ in range(count)] for _ in range(2)], dtype=float)
    return Work(compute, load, *costs)


@given(works())
@settings(max_examples=400, **BUSY)
def test_up_to_four_processors_are_exact(work: Work) -> None:
    division = makespan.solve(work, nodes=10**6)
    check(work, division)
    assert division.exact and division.seconds == brute_force(work)


@given(works(real=True))
@settings(max_examples=150, **BUSY)
def test_with_costs_that_are_no_integers(work: Work) -> None:
    division = makespan.solve(work, nodes=10**6)
    check(work, division)
    assert division.exact and division.seconds == pytest.approx(brute_force(work), rel=2e-9, abs=1e-300)


@given(layers())
@settings(max_examples=300, **BUSY)
def test_experts_that_are_alike_but_on_one_processor_are_counted(work: Work) -> None:
    """No branch is tried, and the result is exact."""
    division = makespan.solve(work, nodes=0)
    check(work, division)
    assert division.exact and division.seconds == brute_force(work)
    assert by_counts(work, range(len(work.compute))) is not None


@given(works(processors=st.integers(5, 6), most=4))
@settings(max_examples=150, **BUSY)
def test_more_processors_are_divided_greedily(work: Work) -> None:
    division = makespan.solve(work)
    check(work, division)
    able = int((work.compute < FAR).any(axis=1).sum())
    assert division.exact == (able <= makespan.EXACT) and division.seconds >= brute_force(work)
    assert not division.exact or division.seconds == brute_force(work)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=5, max_size=6), st.integers(1, 4))
@settings(max_examples=100, **BUSY)
def test_greedy_is_exact_for_experts_that_are_alike(costs: list[tuple[int, int]], experts: int) -> None:
    """Each has one row and could run anywhere; a processor has a cost of use, and no link is shared."""
    fixed, each = np.array(costs, dtype=float).T
    compute = np.repeat(each[:, None], experts, axis=1)
    work = Work(compute, np.zeros_like(compute), fixed, np.zeros(len(costs)))
    assert makespan.solve(work).seconds == brute_force(work)


@given(works(most=9), st.integers(0, 30))
@settings(max_examples=150, **BUSY)
def test_with_few_branches_no_processor_alone_is_faster(work: Work, nodes: int) -> None:
    check(work, makespan.solve(work, nodes))
    check(work, greedy(work))


def test_what_is_there_is_computed_while_another_expert_is_loaded() -> None:
    """Only the first processor may have the first expert; it computes both others in that load's time."""
    compute = np.array([[1.0, 2.0, 2.0], [FAR, 7.0, 7.0]])
    load = np.array([[5.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    division = makespan.solve(Work(compute, load, np.zeros(2), np.zeros(2)), nodes=0)
    assert division == makespan.Division((0, 0, 0), 6.0, exact=True)


def test_one_processor_where_the_greedy_list_is_slower() -> None:
    """Costs for which neither all processors nor those left without one are as fast as the last one alone."""
    compute = np.array([[1.0, 1.0], [3.0, 0.0], [1.0, 3.0]])
    load = np.array([[3.0, 1.0], [0.0, 2.0], [0.0, 2.0]])
    work = Work(compute, load, np.array([1.0, 0.0, 0.0]), np.array([1.0, 3.0, 3.0]))
    assert greedy(work).seconds == min(alone(work)) == 6


@given(works())
@settings(max_examples=100, **BUSY)
def test_the_same_costs_give_the_same_division(work: Work) -> None:
    copies = [work.compute.copy(), work.load.copy(), work.fixed.copy(), work.wire.copy()]
    first = makespan.solve(work)
    assert makespan.solve(Work(*(copy.copy() for copy in copies))) == first
    kept = (work.compute, work.load, work.fixed, work.wire)
    assert all((a == b).all() for a, b in zip(kept, copies, strict=True))


def test_what_runs_out_of_branches_is_not_called_exact() -> None:
    """Costs that differ on every processor: 40 experts have too many divisions for 50 branches."""
    compute = np.random.default_rng(1).random((4, 40))
    work = Work(compute, np.zeros_like(compute), np.zeros(4), np.zeros(4))
    few, more = makespan.solve(work, 50), makespan.solve(work, 20_000)
    assert not few.exact and more.seconds < few.seconds == greedy(work).seconds


def test_a_worker_is_used_when_it_pays_for_the_way() -> None:
    """One expert is loaded and computed in 4 seconds, and the way to the worker takes 4: it gets all others."""
    for experts, there in ((1, 0), (2, 1), (3, 2), (8, 7), (9, 7)):
        compute = np.repeat([[1.0], [0.5]], experts, axis=1)
        load = np.repeat([[3.0], [0.0]], experts, axis=1)
        division = makespan.solve(Work(compute, load, np.array([0.0, 4.0]), np.zeros(2)))
        assert sum(division.where) == there, experts


def test_workers_share_the_link() -> None:
    """Two workers halve the computing, and each waits for the other's rows: not worth it for one expert less."""
    compute, zeros = np.ones((2, 4)), np.zeros((2, 4))
    assert len(set(makespan.solve(Work(compute, zeros, np.zeros(2), np.full(2, 1.0))).where)) == 2
    assert len(set(makespan.solve(Work(compute, zeros, np.zeros(2), np.full(2, 2.0))).where)) == 1
    assert makespan.solve(Work(compute, zeros, np.zeros(2), np.full(2, 1.0))).seconds == 4.0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"compute": np.full((2, 3), FAR)}, "no processor"),
        ({"compute": -np.ones((2, 3))}, "negative"),
        ({"fixed": np.array([0.0, np.nan])}, "no number"),
        ({"wire": np.zeros(3)}, "not of the same"),
        ({"fixed": np.zeros(3)}, "not of the same"),
        ({"load": np.zeros((2, 4))}, "not of the same"),
        ({"load": np.full((2, 3), FAR)}, "infinite"),
    ],
)
def test_costs_that_are_none_are_refused(change: dict, problem: str) -> None:
    given = {"compute": np.ones((2, 3)), "load": np.ones((2, 3)), "fixed": np.zeros(2), "wire": np.zeros(2)}
    with pytest.raises(ValueError, match=problem):
        Work(**given | change)


@given(
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=9),
    resident=st.lists(st.booleans(), min_size=9, max_size=9),
    rates=st.builds(Rates, st.integers(0, 4), st.integers(0, 5), st.integers(0, 5), st.integers(0, 3)),
)
@settings(max_examples=200, **BUSY)
def test_the_balancer_s_plan_finishes_first(rows: list[int], resident: list[bool], rates: Rates) -> None:
    """Of all subsets for the CPU; hits are computed while loads run, what was loaded afterwards."""
    active, held = np.array(rows), np.array(resident[: len(rows)])

    def seconds(cpu) -> float:
        missing = [e for e in range(len(rows)) if rows[e] and not held[e]]
        loads = len(missing) - len(cpu)
        on_cpu = sum(max(rates.cpu, rows[e] * rates.cpu_row) for e in cpu)
        hits = int((active[held] > 0).sum()) * rates.fast
        waits = max(loads * rates.stream, hits) + loads * rates.fast
        return max(waits, on_cpu)

    balancer = components.build("balancers", "makespan", rates=rates, layers=1, top_k=2)
    plan = balancer.plan(LayerState(0, active, held, active, len(rows), np.zeros(0)))
    missing = sorted(plan.stream + plan.cpu)
    subsets = ([e for e, on in zip(missing, bits, strict=True) if on] for bits in product([0, 1], repeat=len(missing)))
    assert seconds(plan.cpu) == min(map(seconds, subsets))
