"""The guard for draft trees, on simulated machines: which number of nodes it settles on, and what looking costs."""

from __future__ import annotations

import random

import pytest

from vllm_spac.decisions.guard.tree_guard import TreeAcceptance, TreeGuard, sizes_of

NODES = 63


def reached(node: int) -> float:
    """Chance that a node is on the accepted path, given that an earlier one was: falls with its rank."""
    return 0.5 / node**0.5


def path_of(rng: random.Random, nodes: int) -> list[int]:
    return [node for node in (1, 2, 5, 9, 20, 40) if node <= nodes and rng.random() < reached(node)]


def play(seconds, tokens: int, seed: int = 0) -> tuple[TreeGuard, float, float]:
    """(guard, seconds, tokens); ``seconds``: of a step, by nodes."""
    rng, guard, took, made = random.Random(seed), TreeGuard(NODES), 0.0, 0
    while made < tokens:
        nodes = guard.choose(1)
        path = path_of(rng, nodes)
        step = seconds(nodes) * rng.lognormvariate(0, 0.1)
        guard.accepted([path])
        guard.observe(nodes, [1 + len(path)], 1, step)
        took, made = took + step, made + 1 + len(path)
    return guard, took, made


def rate(seconds, nodes: int) -> float:
    """Tokens per second with this number of nodes for good."""
    rng = random.Random(1)
    return sum(1 + len(path_of(rng, nodes)) for _ in range(4000)) / 4000 / seconds(nodes)


@pytest.mark.parametrize("nodes, sizes", [(2, [0, 1, 2]), (5, [0, 1, 2, 5]), (63, [0, 7, 15, 31, 63])])
def test_a_few_sizes_of_which_each_is_about_twice_the_last(nodes: int, sizes: list[int]) -> None:
    assert sizes_of(nodes) == sizes


@pytest.mark.parametrize("cost", [0.0005, 0.02, 0.2])
def test_it_settles_within_a_few_percent_of_the_best_size(cost: float) -> None:
    def seconds(nodes: int) -> float:
        return 1 + cost * nodes

    best = max(rate(seconds, nodes) for nodes in sizes_of(NODES))
    _, took, made = play(seconds, 12_000)
    assert made / took > 0.95 * best


def test_trees_that_never_pay_cost_less_than_two_percent() -> None:
    guard, took, made = play(lambda nodes: 1 + 0.5 * nodes, 8000)
    assert guard.choose(1) == 0
    assert made / took > 0.98


def test_a_large_tree_measures_the_smaller_ones() -> None:
    acceptance, rng = TreeAcceptance(sizes_of(NODES), 1000), random.Random(0)
    for _ in range(3000):
        path = path_of(rng, NODES)
        acceptance.paths = [path]
        acceptance.update(4, [1 + len(path)])
    for size, nodes in enumerate(sizes_of(NODES)):
        assert acceptance.tokens()[size] == pytest.approx(rate(lambda nodes: 1.0, nodes), abs=0.08)
    assert acceptance.tokens() == sorted(acceptance.tokens())


def test_a_size_that_was_not_seen_gains_as_much_as_the_one_before() -> None:
    acceptance = TreeAcceptance(sizes_of(NODES), 100)
    acceptance.paths = [[1, 5], [2]]
    acceptance.update(1, [3, 2])
    assert acceptance.tokens() == pytest.approx([1, 2.5, 4, 5.5, 7])


def test_facts_speak_of_nodes() -> None:
    guard, *_ = play(lambda nodes: 1 + 0.0005 * nodes, 500)
    assert set(guard.facts()["steps"]) <= set(sizes_of(NODES)) and guard.facts()["draft_length"] in sizes_of(NODES)
