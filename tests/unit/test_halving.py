"""The scheduler of ``vllm-spac tune``: its time, its rounds, and what it never drops."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.tools.tuning.halving import FIRST, Halving, Run

NAMES = [f"arm {number}" for number in range(12)]


def drive(halving: Halving, rates: dict[str, float], costs: Sequence[float], failing: frozenset[str] = frozenset()):
    """Runs until the scheduler ends; returns the runs."""
    runs: list[Run] = []
    while (run := halving.next()) is not None:
        assert halving.next() == run, "asking twice changes nothing"
        found = [] if run.arm in failing else [rates[run.arm]] * 3
        halving.observe(run, found, costs[len(runs) % len(costs)])
        runs.append(run)
    return runs


arms = st.integers(1, len(NAMES)).map(lambda count: NAMES[:count])
speeds = st.lists(st.floats(0.1, 100), min_size=12, max_size=12).map(
    lambda values: dict(zip(NAMES, values, strict=True))
)
costs = st.lists(st.floats(0.1, 100), min_size=1, max_size=20)


@given(arms, speeds, costs, st.floats(1, 2000), st.integers(0, 3), st.sets(st.sampled_from(NAMES[1:])))
def test_time_is_exceeded_by_less_than_a_run_and_the_same_seed_gives_the_same_runs(
    names: list[str], rates: dict[str, float], spent: list[float], seconds: float, seed: int, failing: set[str]
) -> None:
    kept = names[1:2]
    halving = Halving(names, kept, seconds, seed)
    runs = drive(halving, rates, spent, frozenset(failing))
    assert halving.spent < seconds + max(spent)
    if len(runs) > 1:  # a run does not begin if one as long as the longest so far would be too long
        before = [spent[n % len(spent)] for n in range(len(runs))]
        assert sum(before[:-1]) + max(before[:-1]) <= seconds
    assert runs == drive(Halving(names, kept, seconds, seed), rates, spent, frozenset(failing))


@given(arms, speeds, costs, st.integers(0, 3))
def test_the_reference_and_what_is_kept_are_in_every_round(
    names: list[str], rates: dict[str, float], spent: list[float], seed: int
) -> None:
    kept = names[1:3]
    halving = Halving(names, kept, 1e9, seed)
    runs = drive(halving, rates, spent)
    rounds = [[run.arm for run in runs if run.round == number] for number in range(halving.round + 1)]
    assert all(found[0] == names[0] for found in rounds), "others are compared with it"
    assert all(set(kept) <= set(found) for found in rounds)
    sizes = [len(set(found) - set(kept) - {names[0]}) for found in rounds]
    assert all(after == (before + 1) // 2 for before, after in zip(sizes, sizes[1:], strict=False))
    assert sizes[-1] <= 1 or len(names) == 1
    assert all(len(found) == len(set(found)) for found in rounds)


@given(speeds, costs, st.integers(0, 3))
def test_with_enough_time_the_fastest_is_first(rates: dict[str, float], spent: list[float], seed: int) -> None:
    halving = Halving(NAMES, [], 1e9, seed)
    drive(halving, rates, spent)
    assert rates[halving.ranked()[0]] == pytest.approx(max(rates.values()))
    assert halving.speed(NAMES[0]) == 1


def test_the_first_round_leaves_time_for_others_and_baselines_come_first() -> None:
    rates = dict.fromkeys(NAMES, 1.0) | {"arm 3": 2.0}
    runs = drive(Halving(NAMES, ["arm 7"], 100.0), rates, [10.0])
    assert [run.arm for run in runs[:3]] == ["arm 0", "arm 7", "arm 1"]
    first = [run for run in runs if run.round == 0]
    assert len(first) == FIRST * 10 and len(runs) == 10, "no arm is new after 60 s, and all of 100 s are used"
    assert {run.arm for run in runs[len(first) :]} <= {run.arm for run in first}


def test_a_drift_of_the_machine_drops_nobody() -> None:
    """In the second round everything takes twice as long: what was measured earlier does not look faster for it."""
    halving, rates = Halving(NAMES[:3], [], 1e9), {"arm 0": 10.0, "arm 1": 12.0, "arm 2": 11.0}
    while (run := halving.next()) is not None:
        halving.observe(run, [rates[run.arm] / 2**run.round], 1.0)
    assert halving.ranked() == ["arm 1", "arm 0"] and halving.speed("arm 1") == pytest.approx(1.2)
    assert halving.speed("arm 2") == pytest.approx(1.1), "of its last round"


def test_what_fails_is_dropped_and_what_joins_takes_part() -> None:
    halving, seen = Halving(NAMES[:4], [], 1e9), []
    while (run := halving.next()) is not None:
        if run.round == 1 and "new" not in seen:
            halving.join("new")
            seen.append("new")
            with pytest.raises(ValueError, match="takes part already"):
                halving.join("new")
        seen.append(run.arm)
        halving.observe(run, [] if run.arm == "arm 2" else [99.0 if run.arm == "new" else 1.0], 1.0)
    assert seen.count("arm 2") == 1 and halving.ranked()[0] == "new" and halving.speed("arm 2") is None


def test_the_first_engine_does_not_count() -> None:
    halving = Halving(NAMES[:2], [], 20.0)
    halving.observe(Run("arm 0", 0), [1.0], 500.0)
    assert halving.next() is None
    halving.free(500.0)
    assert halving.spent == 0 and halving.next() == Run("arm 1", 0)


def test_it_is_told_in_order() -> None:
    halving = Halving(NAMES[:2], [], 20.0)
    with pytest.raises(ValueError, match="not what was to be measured"):
        halving.observe(Run("arm 1", 0), [1.0], 1.0)
    with pytest.raises(ValueError, match="each once"):
        Halving(["a", "a"], [], 1.0)
