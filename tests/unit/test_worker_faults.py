"""What the benchmark of worker faults counts as lost, and when it takes a worker for returned."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "serving")]
worker_faults = importlib.import_module("worker_faults")

PROMPTS = [[1, 2], [3, 4]]
TOKENS = 4


class Imagined:
    """An engine of two workers; one that fails computes nothing for ``away`` answers, which take longer."""

    def __init__(self, away: int, wrong: bool = False) -> None:
        self._away, self._wrong, self._left = away, wrong, 0
        self.rows, self.losses = {"worker-0": 10, "worker-1": 10}, 0

    def fail(self, fault: str, pid: int) -> None:
        self.losses, self._left = self.losses + 1, self._away

    def answer(
        self, ids: Sequence[int], count: int, found: worker_faults.Answers, at: Callable[[int], None] | None = None
    ) -> None:
        for number in range(count):
            if at is not None:
                at(number)
            found.steps.append(1.0)
        away = self._left > 0
        self._left -= away
        found.seconds.append(6.0 if away else 4.0)
        found.tokens.append([*ids, int(away and self._wrong)])
        self.rows["worker-0"] += 0 if away else count
        self.rows["worker-1"] += count

    def stats(self) -> dict:
        workers = {name: {"rows": rows, "losses": self.losses} for name, rows in self.rows.items()}
        return {"expert_workers": workers, "worker_rows_elsewhere": 0}


def turn(engine: Imagined, monkeypatch: pytest.MonkeyPatch, fault: str = "kill") -> dict:
    monkeypatch.setattr(worker_faults, "fail", engine.fail)
    return worker_faults.turn(engine, PROMPTS, TOKENS, fault, 0)


def test_what_is_lost_is_beyond_the_undisturbed_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = turn(Imagined(away=3), monkeypatch)
    assert found["lost_seconds"] == 3 * 2.0 and found["answers"] == 4
    assert found["noticed"] and found["back_within_seconds"] > 0 and found["tokens_equal"]


def test_wrong_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not turn(Imagined(away=1, wrong=True), monkeypatch)["tokens_equal"]


def test_a_worker_that_does_not_return_and_a_fault_that_nobody_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_faults, "_BACK", 0.05)
    found = turn(Imagined(away=1 << 40), monkeypatch)
    assert found["noticed"] and found["back_within_seconds"] is None
    monkeypatch.setattr(worker_faults, "_UNNOTICED", 0.05)
    monkeypatch.setattr(worker_faults, "STOPPED", {"late": 0.0})
    engine = Imagined(away=0)
    monkeypatch.setattr(engine, "fail", lambda fault, pid: None)
    found = turn(engine, monkeypatch, "late")
    assert not found["noticed"] and found["back_within_seconds"] is None and found["lost_seconds"] == 0
