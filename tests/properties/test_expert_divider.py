"""Experts divided among the workers of a group: each once, where it has a slot, and no worker alone is faster."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.methods.od_moe.division import ExpertDivider, greedy
from vllm_spac.methods.od_moe.wire import Speed

LAYERS, EXPERTS, WORKERS = 3, 6, 3
SPEED = Speed(expert=1.0, row=0.1, load=5.0)
seconds = st.floats(0.001, 10.0)
speeds = st.builds(Speed, expert=seconds, row=seconds, load=seconds)


def divider(given: Speed = SPEED, workers: int = WORKERS, message: float = 0.0) -> ExpertDivider:
    found = ExpertDivider(LAYERS, EXPERTS, [range(LAYERS)] * workers, message)
    for worker in range(workers):
        found.admit(worker, given)
    return found


def where(parts: list) -> dict[int, list[int]]:
    return {part.worker: part.experts.tolist() for part in parts}


def has(*experts: int, layer: int = 0) -> np.ndarray:
    found = np.zeros((LAYERS, EXPERTS), dtype=bool)
    found[layer, list(experts)] = True
    return found.reshape(-1)


@given(data=st.data(), each=st.lists(speeds, min_size=WORKERS, max_size=WORKERS), seed=st.integers(0, 1000))
def test_each_expert_once_and_no_worker_alone_is_faster(data: st.DataObject, each: list[Speed], seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = ExpertDivider(LAYERS, EXPERTS, [range(LAYERS)] * WORKERS)
    there = rng.random((WORKERS, LAYERS, EXPERTS)) < 0.4
    for worker in range(WORKERS):
        found.admit(worker, each[worker])
        found.observe_resident(worker, there[worker].reshape(-1))
    ids = np.stack([rng.permutation(EXPERTS)[:2] for _ in range(data.draw(st.integers(1, 3)))])
    workers = data.draw(st.lists(st.integers(0, WORKERS - 1), min_size=1, unique=True))
    parts = found.divide(1, ids, workers)
    active, rows = np.unique(ids, return_counts=True)
    assert sorted(np.concatenate([part.experts for part in parts]).tolist()) == active.tolist()
    assert {part.worker for part in parts} <= set(workers) and all(len(part.experts) for part in parts)

    def ends(worker: int, mine: list[int]) -> float:
        """Loads one after another, meanwhile what is there, then what was loaded."""
        rate, of = each[worker], dict(zip(active.tolist(), rows.tolist(), strict=True))
        takes = {expert: max(rate.expert, of[expert] * rate.row) for expert in mine}
        lacks = [expert for expert in mine if not there[worker, 1, expert]]
        first = sum(takes[expert] for expert in mine if expert not in lacks)
        return max(first, rate.load * len(lacks)) + sum(takes[expert] for expert in lacks)

    def last(division: dict[int, list[int]]) -> float:
        return max(ends(worker, mine) for worker, mine in division.items())

    assert last(where(parts)) <= min(ends(worker, active.tolist()) for worker in workers) * (1 + 1e-12)


costs = st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=3, max_size=3)


def finish(compute: np.ndarray, load: np.ndarray, message: float, where: Sequence[int]) -> float:
    """When the last worker has finished."""
    ends, link = [], message * len(set(where))
    for w in set(where):
        mine = [e for e, here in enumerate(where) if here == w]
        held = sum(compute[w, e] for e in mine if not load[w, e])
        waits = max(sum(load[w, e] for e in mine), held)
        ends.append(link + waits + sum(compute[w, e] for e in mine if load[w, e]))
    return max(ends)


@given(costs, costs, st.sampled_from([0, 1, 3]))
def test_greedy_of_any_costs(compute: list, load: list, message: int) -> None:
    given = np.array(compute, dtype=float), np.array(load, dtype=float)
    kept = [array.copy() for array in given]
    found = greedy(*given, message)
    assert found == greedy(*kept, message) and all((a == b).all() for a, b in zip(given, kept, strict=True))
    assert finish(*given, message, found) <= min(finish(*given, message, [w] * 4) for w in range(3))


def test_an_expert_goes_where_it_has_a_slot_until_another_worker_is_faster() -> None:
    found = divider(workers=2)
    found.observe_resident(0, has(0, 1, 2, 3))
    assert where(found.divide(0, np.array([[0, 1]]), [0, 1])) == {0: [0, 1]}, "a load takes five times an expert"
    both = where(found.divide(0, np.array([[0, 1, 4]]), [0, 1]))
    assert set(both[0]) >= {0, 1} and sum(both.values(), []) == [0, 1, 4], "what is there runs while the other loads"
    assert where(found.divide(0, np.array([[4, 5]]), [0, 1])) in ({0: [4], 1: [5]}, {0: [5], 1: [4]})
    assert where(found.divide(0, np.array([[0, 4]]), [0])) == {0: [0, 4]}, "the other one is lost"
    quick = Speed(expert=1.0, row=0.1, load=0.25)
    for worker in range(2):
        found.admit(worker, quick)
    found.observe_resident(0, has(0, 1, 2, 3))
    assert {len(part.experts) for part in found.divide(0, np.arange(4)[None], [0, 1])} == {2}
    assert where(found.divide(1, np.array([[0]]), [0, 1])) == {1: [0]}, "what has a slot of another layer is not there"


def test_a_message_that_takes_longer_than_it_saves_is_not_sent() -> None:
    assert len(divider(message=100.0).divide(0, np.arange(4)[None], [0, 1, 2])) == 1


def test_experts_are_computed_where_they_were_told_to_be_loaded_once() -> None:
    found = divider(workers=2)
    told = where(found.expect(2, np.array([5, 0, 3]), [0, 1]))
    assert sorted(sum(told.values(), [])) == [0, 3, 5] and all(len(mine) for mine in told.values())
    assert [mine.index(5) for mine in told.values() if 5 in mine] == [0], "the likeliest first"
    parts = where(found.divide(2, np.array([[0, 3, 5]]), [0, 1]))
    assert {worker: sorted(mine) for worker, mine in told.items()} == parts
    found.expect(1, np.arange(4), [0])
    assert where(found.divide(1, np.arange(4)[None], [0, 1])) == {0: [0, 1, 2, 3]}
    assert len(where(found.divide(1, np.arange(4)[None], [0, 1]))) == 2, "the hint was for one run of the layer"


def test_answers_of_a_worker_are_of_its_layers() -> None:
    found = ExpertDivider(LAYERS, EXPERTS, [(0, 2), (1,)])
    assert [found.served(worker) for worker in range(2)] == [2 * EXPERTS, EXPERTS]
    found.admit(0, SPEED)
    with pytest.raises(ValueError):
        found.observe_resident(0, np.zeros(EXPERTS - 1, dtype=bool))
