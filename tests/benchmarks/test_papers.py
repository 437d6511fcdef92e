"""Figures of the papers from recorded routing, on traces whose figures are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.papers import five_papers, recorded
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.presets import PRESETS
from vllm_spac.config.types import EXTRA
from vllm_spac.decisions.costs import Costs
from vllm_spac.tools.traces.synthetic import synthetic_trace


def test_every_recipe_replays_with_the_knobs_of_its_preset(caplog: pytest.LogCaptureFixture) -> None:
    """Reads ahead within the limit of serving, and none that fails: a draft model's names reach the prefetcher."""
    trace, costs = synthetic_trace(layers=3, experts=16, top_k=4, steps=30, drafts=2), Costs.read("rtx4090")
    assert SpacConfig.parse({"prefetch": "utility"}).prefetch_share == EXTRA
    chosen, knobs = five_papers.recipes(), PRESETS["moe-spac"].knobs
    assert (chosen["MoE-SpAc"].policy, chosen["MoE-SpAc"].balancer) == (knobs["policy"], knobs["cpu_experts"])
    for name, recipe in chosen.items():
        found = five_papers.run(recipe, trace, costs, 0.5)
        assert f"@extra={EXTRA}" in recipe.prefetch or recipe.prefetch in ("off", "draft_gate"), name
        assert found.prefetches or recipe.prefetch == "off", name
    assert "failed" not in caplog.text


def test_traces_of_two_models_are_refused(tmp_path: Path) -> None:
    for experts in (8, 16):
        synthetic_trace(layers=1, experts=experts, top_k=2, steps=3).save(tmp_path / f"{experts}.trace")
    with pytest.raises(Exception, match="different models"):
        recorded.load([tmp_path])
    with pytest.raises(Exception, match="name traces"):
        recorded.load([tmp_path / "8.trace", tmp_path / "8.trace"])


def test_results_have_null_for_nan() -> None:
    assert recorded.nan_to_none({"a": [1.0, float("nan")]}) == {"a": [1.0, None]}


def test_a_budgeted_trace_has_at_most_so_many_experts_in_a_layer() -> None:
    """Rows keep what is in the shortlist; prompts and steps of fewer experts are as they were."""
    trace = synthetic_trace(layers=2, experts=16, top_k=4, steps=20, drafts=3)
    cut, few = five_papers.budgeted(trace, 5), five_papers.budgeted(trace, 16)
    assert (few.ids == trace.ids).all()
    for first, last in zip(trace.record_start[:-1], trace.record_start[1:], strict=True):
        ours, theirs = cut.ids[first:last], trace.ids[first:last]
        used = np.unique(ours)
        assert len(used) <= 5 and all(len(set(row)) == 4 for row in ours.tolist())
        assert all(set(a) >= set(b) & set(used.tolist()) for a, b in zip(ours.tolist(), theirs.tolist(), strict=True))


def test_executed_names_are_the_routers_as_often_as_the_recall_says() -> None:
    """In decoding rows behind the first layer; a row runs as many different experts as before."""
    trace = synthetic_trace(layers=3, experts=16, top_k=4, steps=60, drafts=2)
    assert (five_papers.executed(trace, 1.0).ids == trace.ids).all()
    found = five_papers.executed(trace, 0.7)
    right, layers = [], np.repeat(trace.record_layer, np.diff(trace.record_start))
    for ours, theirs, layer, counted in zip(found.ids, trace.ids, layers, trace.counted(), strict=True):
        assert len(set(ours.tolist())) == 4
        if layer == 0 or not counted:
            assert (ours == theirs).all()
        else:
            right += np.isin(ours, theirs).tolist()
    assert 0.65 < np.mean(right) < 0.75


def test_thresholds_divide_the_more_to_the_cpu_the_higher_they_are() -> None:
    trace = synthetic_trace(layers=2, experts=16, top_k=4, steps=60, drafts=3)
    found = [*five_papers.thresholds(trace).values()]
    assert len(found) == 4 and all(0 <= value <= 1 for each in found for value in each.values())
    assert sorted(each["cpu"] for each in found) == [each["cpu"] for each in found]
    assert sorted((each["gpu"] for each in found), reverse=True) == [each["gpu"] for each in found]


def test_what_a_draft_model_names() -> None:
    """All of what is routed at recall 1, a part below it, and nothing of the last draft."""
    trace = synthetic_trace(layers=2, experts=64, top_k=4, steps=20, drafts=3)
    for recall in (1.0, 0.5):
        found = [each for each in five_papers.named(trace, recall) if each is not None]
        step = next(number for number, each in enumerate(five_papers.named(trace, recall)) if each is not None)
        first = trace.record_start[np.searchsorted(trace.record_step, step)]
        ids = trace.ids[first : first + 8].reshape(2, 4, 4).transpose(1, 0, 2)
        assert found[0].shape == (4, 2, 4) and (found[0][-1] == -1).all()
        same = np.mean([(each[:-1, :, :, None] == ids[:-1, :, None]).any(3).mean() for each in found[:1]])
        assert same == 1.0 if recall == 1.0 else 0.25 < same < 0.8


def test_a_recipe_without_its_trace_is_refused_with_what_to_record(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(five_papers, "TRACES", tmp_path)
    (tmp_path / "real").mkdir()
    for name in ("none1", "draft4_1", "draft8_1"):
        synthetic_trace(layers=1, experts=8, top_k=2, steps=3).save(tmp_path / "real" / f"{name}.trace")
    done = CliRunner().invoke(five_papers.app, ["--output", str(tmp_path / "out.json")])
    assert done.exit_code == 2 and "no trace eagle4_1" in " ".join(done.output.split())
