"""Counters are read by another thread and reset after warm-up: neither may leave anything shared behind."""

from __future__ import annotations

from dataclasses import fields

import pytest

from vllm_spac.recording.metrics import Counters, adds_up, settled, total


def used() -> Counters:
    return Counters(
        hits=3, misses=2, loads=2, bytes={"disk": 64}, stall_seconds=0.5, waves=1, steps={"decode": 1, "prefill": 2}
    )


def test_reset_starts_from_zero_and_keeps_old_snapshots() -> None:
    counters = used()
    snapshot = counters.snapshot()
    counters.reset()
    assert counters == Counters()
    assert snapshot == used().snapshot()
    counters.bytes["host"] = 1
    assert Counters().bytes == {}


def of_rank(rank: int, divided: str, **others) -> dict:
    facts = {"rank": rank, "ranks": 2, "divided": divided, "mode": "exact", "slots": 4, "slot_bytes": 40}
    return facts | {"expert_bytes": 10, "budget": {"rows": 7}} | used().snapshot() | others


@pytest.mark.parametrize(("divided", "hits", "slots", "expert_bytes"), [("tensors", 5, 4, 20), ("experts", 8, 8, 10)])
def test_the_total_of_two_ranks(divided: str, hits: int, slots: int, expert_bytes: int) -> None:
    """A part of each expert in both: its hit is one hit. Some of the experts in each: hits add up."""
    second = {"hits": 5, "stall_seconds": 0.7, "bytes": {"disk": 6, "host": 1}, "steps": {"decode": 1, "verify": 3}}
    found = total([of_rank(0, divided), of_rank(1, divided, **second)])
    assert (found["hits"], found["slots"], found["expert_bytes"]) == (hits, slots, expert_bytes)
    assert found["slot_bytes"] == 80 and found["bytes"] == {"disk": 70, "host": 1}
    assert found["steps"] == {"decode": 1, "prefill": 2, "verify": 3} and found["stall_seconds"] == 0.7
    assert found["budget"] == {"rows": 7} and found["mode"] == "exact" and found["ranks"] == 2
    assert "rank" not in found


@pytest.mark.parametrize("inner", ["", "tensors", "experts"])
def test_the_total_of_two_stages(inner: str) -> None:
    """Layers of a stage are its own, so what they do adds up; both count the same steps. Ranks within merge first."""
    counted = {"hits": 5, "layers": 3, "waves": 4, "stall_seconds": 0.5, "steps": {"decode": 7}, "bytes": {"host": 9}}
    each, divided = 2 if inner else 1, " and ".join(filter(None, ("layers", inner)))
    workers = [of_rank(at, divided, stage=at // each, **counted) for at in range(2 * each)]
    found, experts = total(workers), 2 if inner == "experts" else 1
    assert (found["hits"], found["slots"]) == (10 * experts, 8 * experts)
    assert (found["layers"], found["waves"], found["stall_seconds"]) == (6, 8, 1.0)
    assert found["steps"] == {"decode": 7} and found["bytes"] == {"host": 18 * each}
    assert found["expert_bytes"] == (20 if inner == "tensors" else 10) and "stage" not in found
    assert found["slot_bytes"] == 80 * each


def test_each_counter_adds_up_or_not() -> None:
    """A new one needs a rule: of facts without one, the total has the first rank's."""
    ruled = [{f.name: getattr(used(), f.name) for f in fields(Counters)} | {"divided": "experts"}] * 2
    grown = total([ruled[0], {name: _more(value) for name, value in ruled[1].items()}])
    for name, value in ruled[0].items():
        if name != "divided":
            assert grown[name] != value, f"{name}: how does it add up over ranks?"
    assert adds_up("bytes", "tensors") and not adds_up("hits", "tensors")


def _more(value):
    if isinstance(value, str):
        return value
    return {key: count + 1 for key, count in value.items()} if isinstance(value, dict) else value + 1


@pytest.mark.parametrize(
    ("ages", "seconds", "ends"),
    [
        ({}, 0.0, True),
        ({"worker-0": (1, 0.1)}, 0.2, True),
        ({"worker-0": (1, 0.3)}, 0.2, False),
        ({"worker-0": (1, 0.1), "worker-1": (1, 0.3)}, 0.2, False),
        ({"worker-0": (1, 0.1), "worker-1": (0, 0.3)}, 0.2, True),
        ({"worker-0": (1, 60.0)}, 1.1, True),
    ],
    ids=["no workers", "asked since", "asked before", "one asked before", "which is lost", "one that is busy"],
)
def test_statistics_are_read_again_until_workers_have_answered_or_for_a_second(
    ages: dict[str, tuple[int, float]], seconds: float, ends: bool
) -> None:
    each = {name: {"present": present, "counts_age_seconds": age} for name, (present, age) in ages.items()}
    assert settled([{"expert_workers": each} if each else {}], seconds) is ends
