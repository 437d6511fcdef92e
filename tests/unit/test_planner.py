"""Decisions of ``moves.Planner``, worked out by hand: four experts, two slots that hold 0 and 1, LRU."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_spac.cache.residency import NOWHERE
from vllm_spac.decisions.policies.lru import LRU
from vllm_spac.execution.moves import Move, Planner, Pointers, most_moves
from vllm_spac.recording.metrics import Counters


@pytest.fixture
def pointers() -> Pointers:
    made = Pointers(4, 2, LRU())
    made.arrived([made.placed(0), made.placed(1)])
    return made


def step(planner: Planner, pointers: Pointers, *used: int, prompts: bool = False) -> int:
    """A step that selects ``used``; returns its misses."""
    counts = np.zeros(4, dtype=np.int32)
    counts[list(used)] = 1
    return planner.learn(counts, pointers.at != NOWHERE, prompts=prompts)


def arrive(planner: Planner, pointers: Pointers, moves: list[Move]) -> None:
    pointers.arrived(moves)
    for move in moves:
        planner.moved_in(move.key)


def test_a_step_decides_once(pointers) -> None:
    planner = Planner(pointers, 1, Counters())
    assert planner.choose() == [], "nothing is known yet"
    assert step(planner, pointers, 2, 3) == 2
    moves = planner.choose()
    assert moves == [Move(2, 0, victim=0)], "no more than one at once"
    arrive(planner, pointers, moves)
    assert step(planner, pointers, 0, prompts=True) == 1
    assert planner.choose() == [], "the prompt says nothing, and the step before it has had its say"


def test_a_step_is_counted_against_what_was_there_while_it_ran(pointers) -> None:
    planner = Planner(pointers, 2, counters := Counters())
    then = pointers.at != NOWHERE
    step(planner, pointers, 2)
    arrive(planner, pointers, planner.choose())
    counts = np.array([1, 1, 1, 0])
    assert planner.learn(counts, then, prompts=False) == 1
    assert (counters.hits, counters.misses, counters.prefetch_hits) == (2, 2, 0)


def test_what_becomes_of_moves(pointers) -> None:
    """2 comes and is used, 3 comes and goes unused."""
    planner = Planner(pointers, 1, counters := Counters())
    step(planner, pointers, 1, 2)
    arrive(planner, pointers, planner.choose())
    step(planner, pointers, 2, 3)
    arrive(planner, pointers, planner.choose())
    step(planner, pointers, 2, 0)
    assert [move.victim for move in planner.choose()] == [3]
    assert (counters.prefetches, counters.prefetch_hits, counters.prefetch_wasted) == (2, 1, 1)


def test_no_layer_waits_for_those_before_it() -> None:
    """One move a step, and every step misses experts of every layer: all layers get their turn."""
    pointers = Pointers(24, 6, LRU())
    pointers.arrived([pointers.placed(layer * 8 + expert) for layer in range(3) for expert in range(2)])
    planner, counts, moved = Planner(pointers, 1, Counters()), np.zeros(24, dtype=np.int32), set()
    counts.reshape(3, 8)[:, 2:] = 1
    for _ in range(20):
        planner.learn(counts, pointers.at != NOWHERE, prompts=False)
        moves = planner.choose()
        moved |= {move.key // 8 for move in moves}
        arrive(planner, pointers, moves)
    assert moved == {0, 1, 2}


def test_most_moves() -> None:
    assert [most_moves(nbytes, 100) for nbytes in (0, 1, 100, 199, 200)] == [0, 1, 1, 1, 2]
