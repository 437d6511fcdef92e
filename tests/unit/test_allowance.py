"""The share that reads ahead may add, and the pause while they do not pay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.cache.allowance import LEAST, PAUSE, PAYS, SETTLE, WINDOW, Allowance, Depths


def read_all(allowance: Allowance, most: int = 10_000) -> int:
    """Reads as many as it may, one by one, and at most ``most``."""
    left = allowance.left
    for count in range(most):
        if not allowance.left:
            assert count == left
            return count
        allowance.add_reads(1)
    assert left >= most
    return most


@pytest.mark.parametrize(("extra", "count"), [(0.0, 0), (0.1, 10), (0.25, 25), (1.0, 100)])
def test_unused_reads_are_a_share_of_what_was_loaded(extra: float, count: int) -> None:
    allowance = Allowance(extra)
    allowance.add_misses(100)
    assert read_all(allowance) == count


@given(
    st.sampled_from([0.05, 0.1, 0.5]),
    st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1), st.floats(0, 1)), min_size=50, max_size=400),
)
def test_the_total_stays_below_the_share(extra: float, steps: list[tuple[int, float, float]]) -> None:
    """Whatever share of reads is used and does harm: reads and loads against what layers needed without reads ahead.

    Beyond the share, what the window forgets at its end may be read again: at most its own content.
    """
    allowance = Allowance(extra)
    loaded = read = used = harm = 0
    for count, right, wrong in steps:
        now = read_all(allowance, 8)
        hits = int(right * now)
        harmful = min(count, int(wrong * (now - hits)))
        allowance.add_uses(hits)
        allowance.add_misses(count, harmful)
        allowance.end_step()
        loaded, read, used, harm = loaded + count, read + now, used + hits, harm + harmful
    needed = loaded + used - harm
    most_at_once = 8 + 8  # reads of a step, and their harm, which is known after the reads
    assert loaded + read - needed <= extra * needed + most_at_once + extra * needed * len(steps) / WINDOW


def judged(right: float, steps: int, allowance: Allowance | None = None) -> tuple[Allowance, list]:
    """Steps of 100 loads and 4 reads of which a share is used in the same step."""
    allowance, found = allowance or Allowance(0.5), []
    for step in range(steps):
        allowance.add_misses(100)
        if allowance.left:
            allowance.add_reads(4)
            allowance.add_uses(round(4 * right * (step + 1)) - round(4 * right * step))
        found.append(allowance.end_step())
    return allowance, found


def test_reads_that_do_not_pay_pause_and_are_tried_again() -> None:
    allowance, found = judged(PAYS - 0.2, WINDOW)
    [(used, read)] = [one for one in found if one]
    assert used < PAYS * read and read >= LEAST - 1
    assert allowance.paused and not allowance.left
    for _ in range(PAUSE):
        allowance.add_misses(100)
        assert allowance.end_step() is None
    assert not allowance.paused and allowance.left
    _, found = judged(PAYS - 0.2, WINDOW, allowance)
    assert sum(one is not None for one in found) == 1, "and judged again"


def test_the_first_steps_are_not_judged() -> None:
    """What is read before anything is known says little of what is read later."""
    allowance = Allowance(1.0)
    for step in range(4 * SETTLE):
        allowance.add_misses(1000)
        allowance.add_reads(100)
        allowance.add_uses(100 if step >= SETTLE // 2 else 0)
        assert allowance.end_step() is None


def test_few_reads_are_not_judged() -> None:
    allowance = Allowance(0.5)
    for _ in range(10 * WINDOW):
        allowance.add_misses(1)
        if allowance.left:
            allowance.add_reads(1)
        allowance.end_step()
    assert not allowance.paused


def test_reads_go_down_to_the_place_where_names_are_worth_it() -> None:
    """Of layer 0 the first two names are always used and the third never; of layer 1 none is."""
    made, places = Depths(2, 4, 0.1), np.array([0, 1, 2, -1, 0, 1, -1, -1])
    used = np.array([True, True, False, True, False, False, True, True])
    assert made.depths.tolist() == [0, 0], "nothing is known"
    made.end_step(np.full(8, -1), used)
    assert made.depths.tolist() == [0, 0], "names with a slot say nothing"
    made.end_step(places, used)
    assert made.depths.tolist() == [0, 0], "two of two are few"
    for _ in range(40):
        made.end_step(places, used)
    assert made.depths.tolist() == [2, 0]
    for _ in range(400):
        made.end_step(places, ~used)
    assert made.depths.tolist()[0] == 0 < made.depths.tolist()[1], "it forgets"


@pytest.mark.parametrize(("extra", "depth"), [(0.1, 1), (0.5, 2), (1.0, 3)])
def test_who_allows_more_extra_reads_reads_more_names(extra: float, depth: int) -> None:
    """Of the names of four places 100, 50, 25 and 0 % are used."""
    made, rng = Depths(1, 4, extra), np.random.default_rng(0)
    for _ in range(2000):
        made.end_step(np.arange(4), rng.random(4) < (1.0, 0.5, 0.25, 0.0))
    assert made.depths.tolist() == [depth]
