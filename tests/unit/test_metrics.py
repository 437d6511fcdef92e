"""Counters are read by another thread and reset after warm-up: neither may leave anything shared behind."""

from __future__ import annotations

import json
from dataclasses import fields

from vllm_spac.metrics import Counters


def used() -> Counters:
    return Counters(
        hits=3, misses=2, loads=2, bytes={"disk": 64}, stall_seconds=0.5, waves=1, steps={"decode": 1, "prefill": 2}
    )


def test_starts_at_zero() -> None:
    assert not any(Counters().snapshot().values())


def test_snapshot_is_plain_data_of_every_counter() -> None:
    snapshot = used().snapshot()
    assert list(snapshot) == [field.name for field in fields(Counters)]
    assert snapshot["bytes"] == {"disk": 64} and snapshot["steps"] == {"decode": 1, "prefill": 2}
    json.dumps(snapshot)


def test_snapshot_does_not_change_with_the_counters() -> None:
    counters = used()
    snapshot = counters.snapshot()
    counters.hits += 1
    counters.bytes["disk"] += 1
    counters.steps["verify"] = 1
    assert snapshot == used().snapshot()
    snapshot["bytes"]["disk"] = 0
    assert counters.bytes == {"disk": 65}


def test_reset_starts_from_zero_and_keeps_old_snapshots() -> None:
    counters = used()
    snapshot = counters.snapshot()
    counters.reset()
    assert counters == Counters()
    assert snapshot == used().snapshot()
    counters.bytes["host"] = 1
    assert Counters().bytes == {}
