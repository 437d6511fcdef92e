"""The comparison of plans with measured speeds: what is planned, and when a plan is good enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from benchmarks.serving import planned
from vllm_spac.decisions.costs import Costs
from vllm_spac.storage.checkpoint.published import find_model
from vllm_spac.tools.planning.planned_model import ServedModel
from vllm_spac.tools.planning.predict import Prediction
from vllm_spac.tools.traces.synthetic import synthetic_trace

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def comparison(measured: float, low: float = 8.0, high: float = 12.0, trace: float = 10.0):
    speeds = {"even": 5.0, "low": low, "high": high, "trace": trace}
    found = {name: Prediction(name, speed, 0.5, "disk") for name, speed in speeds.items()}
    return planned.Comparison(1 << 20, 25, found, measured, 0.9 * measured, 1.1 * measured, 0.6)


def test_the_error_is_a_share_of_what_was_measured() -> None:
    assert comparison(8.0).error == pytest.approx(0.25) and comparison(8.0).plain()["within"]
    assert comparison(12.5).error == pytest.approx(-0.2)
    assert not comparison(7.9).plain()["within"]
    assert comparison(12.0).in_range and not comparison(12.1).in_range
    assert comparison(5.0).in_range and not comparison(4.9).in_range, "5.0 is what it would be without locality"
    assert comparison(10.0, low=12.0, high=8.0).in_range, "drafts and locality may turn a range around"


def test_more_slots_are_planned_to_be_faster_and_the_recording_counts() -> None:
    model = ServedModel.of(find_model(str(BENCHMARKS / "toy" / "models" / "target")))
    costs = Costs.read("rtx4090")
    origin = costs.provenance.model_copy(update={"store": "disk"})
    costs = costs.model_copy(update={"load": costs.disk, "host": costs.load, "disk": None, "provenance": origin})
    speeds = {}
    for reuse in (0.0, 0.9):
        trace = synthetic_trace(layers=6, experts=64, top_k=8, steps=150, reuse=reuse, expert_bytes=model.expert_bytes)
        for percent in (25, 50):
            found = planned.predictions(model, costs, percent, 96, trace, "t")
            assert set(found) == {"even", "low", "high", "trace"}
            speeds[reuse, percent] = found["trace"].tokens_per_second
            assert found["trace"].limit == "disk"
    assert speeds[0.0, 25] < speeds[0.0, 50] < speeds[0.9, 50] and speeds[0.0, 25] < speeds[0.9, 25]


def test_slots_are_whole_percentages() -> None:
    assert planned.percent_of("25%") == 25
    for text in ("25", "2.5%", "0%", "101%", "x%"):
        with pytest.raises(typer.BadParameter, match="use whole percentages"):
            planned.percent_of(text)
