"""What is expected soon: distances across the end of a step, and which guess is in force."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.cache.lookahead import Expected
from vllm_spac.decisions.predictors.base import Guess

LAYERS, EXPERTS = 4, 6


def expected(top_k: int = 2) -> Expected:
    return Expected(LAYERS, EXPERTS, top_k)


def guess(layer: int, *rows: list[float]) -> Guess:
    return Guess(layer * EXPERTS, torch.tensor(rows))


def row(*experts: int) -> list[float]:
    """Scores of a row that names ``experts``, the likeliest first."""
    return [float(EXPERTS - experts.index(e)) if e in experts else 0.0 for e in range(EXPERTS)]


def soon(made: Expected) -> list[int]:
    return [key for key in range(LAYERS * EXPERTS) if key in made]


def test_a_guess_names_the_best_of_each_row_and_those_of_more_rows_first() -> None:
    made = expected()
    made.update(guess(1, row(3, 1), row(5, 1), row(1, 5)))
    assert list(made.ranked()) == [EXPERTS + e for e in (1, 5, 3)] and soon(made) == [7, 9, 11]


def test_one_guess_about_all_layers_is_ranked_by_distance() -> None:
    made = expected()
    made.begin()
    made.update(Guess(0, torch.tensor([[*row(5, 0), *row(1, 2), *row(3, 4), *row(0, 1)]])))
    assert list(made.ranked()) == [5, 0, 7, 8, 15, 16, 18, 19]
    made.begin_layer(1, np.array([[2, 3]]))
    assert list(made.ranked()) == [15, 16, 18, 19], "what has run is not expected again"
    assert soon(made) == [8, 9, 15, 16, 18, 19], "what the running layer uses is"


def test_the_next_step_comes_after_the_last_layer() -> None:
    made = expected()
    made.begin()
    made.begin_layer(2, np.array([0]))
    made.update(guess(0, row(4, 5)))
    made.update(guess(3, row(1, 2)))
    assert [made.distance(key) for key in (2 * EXPERTS, 3 * EXPERTS, 0, EXPERTS)] == [0, 1, 2, 3]
    assert list(made.ranked()) == [19, 20, 4, 5]
    made.begin_layer(3, np.array([1]))
    made.begin()
    assert soon(made) == [4, 5] and made.distance(4) == 1, "it survives the end of the step"


def test_layers_that_did_not_run_are_forgotten_and_others_of_the_next_step_not() -> None:
    made = expected()
    made.begin()
    made.begin_layer(1, np.array([0]))
    for layer in (0, 2, 3):
        made.update(guess(layer, row(4, 5)))
    made.begin()
    assert soon(made) == [4, 5]
    made.begin_layer(2, np.array([0]))
    assert soon(made) == [12], "layer 0 did not run either"


def test_until_a_key_are_those_of_its_layer_and_of_nearer_ones() -> None:
    made = expected()
    made.begin_layer(1, np.array([0]))
    for layer in (2, 3, 0):
        made.update(guess(layer, row(4, 5)))
    until = made.until(3 * EXPERTS)
    assert [key for key in range(LAYERS * EXPERTS) if key in until] == [6, 16, 17, 22, 23]


@given(st.data())
def test_named_and_used_are_all_that_is_expected(data: st.DataObject) -> None:
    """Whatever the order of layers and guesses; ranked keys are named ones, nearest first."""
    made, running = expected(), -1
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["begin", "enter", "name"]))
        if action == "begin":
            made.begin()
            running = -1
        elif action == "enter":
            running = data.draw(st.integers(0, LAYERS - 1))
            used = data.draw(st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=3))
            made.begin_layer(running, np.array(sorted(used)))
            here = [key for key in soon(made) if key // EXPERTS == running]
            assert here == [running * EXPERTS + expert for expert in sorted(used)]
        else:
            best = data.draw(st.permutations(range(EXPERTS)))[:2]
            made.update(guess(data.draw(st.integers(0, LAYERS - 1)), row(*best)))
        ranked = list(made.ranked())
        assert [made.distance(key) for key in ranked] == sorted(made.distance(key) for key in ranked)
        assert sorted(ranked) == [key for key in soon(made) if key // EXPERTS != running]
        assert all(made.distance(key) == (key // EXPERTS - running) % LAYERS or running < 0 for key in soon(made))


def test_a_layer_that_was_left_is_guessed_for_its_next_run() -> None:
    """As of a worker, between whose layers other machines' layers run."""
    made = expected()
    made.begin()
    made.begin_layer(1, np.array([2, 3]))
    made.update(guess(1, row(4, 5)))
    assert soon(made) == [8, 9], "it still runs"
    made.end_layer()
    assert soon(made) == [] and made.distance(1 * EXPERTS) == LAYERS
    made.update(guess(1, row(4, 5)))
    made.update(guess(2, row(0, 1)))
    assert list(made.ranked()) == [12, 13, 10, 11], "layer 2 comes sooner"
    made.begin_layer(3, np.array([0]))
    assert soon(made) == [10, 11, 18], "layer 2 was passed over"
    made.end_layer()
    made.begin()
    assert soon(made) == [10, 11], "of this step"
    made.begin_layer(1, np.array([4]))
    assert soon(made) == [10]


def test_a_layer_that_runs_again_without_a_step_has_passed_all_others() -> None:
    made = expected()
    made.begin_layer(1, np.array([2]))
    made.end_layer()
    for layer in range(LAYERS):
        made.update(guess(layer, row(0, 1)))
    made.begin_layer(1, np.array([2]))
    assert soon(made) == [8]


def test_what_a_row_does_not_name_is_not_expected() -> None:
    """Also if it names fewer experts than it will use, or none."""
    nothing, some = [-np.inf] * EXPERTS, [-np.inf, -np.inf, 1.0, -np.inf, -np.inf, -np.inf]
    for rows, keys in (([some], [2]), ([nothing, some], [2]), ([nothing], []), ([nothing, nothing], [])):
        made = expected()
        made.update(guess(0, *rows))
        assert list(made.ranked()) == soon(made) == keys


def test_a_process_that_holds_some_experts_expects_those() -> None:
    """Guesses and routers name experts of the model: here 6 of which 1, 3 and 5 are held, as 0, 1 and 2."""
    made = Expected(LAYERS, 3, 2, np.array([-1, 0, -1, 1, -1, 2]))
    made.begin()
    made.update(guess(1, row(3, 0), row(5, 1)))
    assert list(made.ranked()) == [3 + 1, 3 + 2, 3 + 0], "of layer 1, the likeliest first"
    made.receive(made.names(guess(2, row(2, 5))))
    assert list(made.ranked()) == [4, 5, 3, 6 + 2]
    made.begin_layer(2, np.array([[1, 2], [4, 5]]))
    assert [key for key in range(LAYERS * 3) if key in made] == [6, 8] and list(made.ranked()) == []
