"""The benchmark of the cost of budgets: which seconds it sums."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.methods.moe_spec.settings import BudgetSettings

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "toy"))
budget_cost = importlib.import_module("budget_cost")


class Runtime:
    """Of a simulated clock."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.budget = Control(clock)

    def begin_step(self, step: Step) -> None:
        self.clock[0] += 0.25

    def end_step(self, tokens: list[int] | None, paths: list[list[int]] | None) -> None:
        """What follows the tokens is no part of the step."""
        self.clock[0] += 100


class Control:
    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def apply(self, layer: int) -> int:
        self.clock[0] += 0.5
        return layer


def test_only_verify_steps_are_timed(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(budget_cost, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    runtime = Runtime(clock)
    verify = Step((RequestRows(0, 3, RowKind.VERIFY, 2),))
    prompt = Step((RequestRows(0, 3, RowKind.PREFILL),))
    with budget_cost.timed(runtime) as found:
        for step in (verify, prompt, verify):
            runtime.begin_step(step)
            assert [runtime.budget.apply(layer) for layer in range(3)] == [0, 1, 2]
            clock[0] += 0.75
            runtime.end_step([2], [[0]])
    assert found == {"steps": 2, "seconds": 2 * (0.25 + 1.5 + 0.75), "budget_seconds": 3.0}
    assert not {"begin_step", "end_step"} & set(vars(runtime)) and "apply" not in vars(runtime.budget)


@pytest.mark.parametrize("settings", [*budget_cost.SETTINGS.values(), *budget_cost.ENGINE_SETTINGS.values()], ids=str)
def test_settings_are_budgets(settings: dict) -> None:
    assert BudgetSettings.parse(settings).active == bool(settings)


def test_layers_alone_take_time() -> None:
    found = budget_cost.layers_alone(2, {"budget": 32}, times=20)
    assert 0 < found["p10"] <= found["median"]
