"""Figures of the papers from recorded routing, on traces whose figures are known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.papers import moe_spac, moe_spac_tables, moe_spec, od_moe, spread
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.presets import PRESETS
from vllm_spac.config.types import EXTRA
from vllm_spac.decisions.costs import Costs
from vllm_spac.tools.traces.simulation import simulate
from vllm_spac.tools.traces.synthetic import synthetic_trace
from vllm_spac.tools.traces.trace_text import Text


def text(tokens: list[list[int]], experts: int, weights: list[list[float]] | None = None) -> Text:
    """One sequence of one layer."""
    given = None if weights is None else np.array(weights, dtype=np.float16)[:, None]
    ids = np.array(tokens, dtype=np.uint8)[:, None]
    return Text(experts, ids, given, np.array([0, len(tokens)]), len(tokens))


def test_mass_by_hand() -> None:
    """Windows of two: expert 0 twice, 1 and 2 once; 3 twice, 0 and 1 once."""
    found = text([[0, 1], [0, 2], [3, 0], [3, 1]], 4, [[0.5, 0.25], [0.5, 0.25], [0.75, 0.25], [0.5, 0]])
    assert moe_spec.mass(found, 2, weighted=False).tolist() == [[[2, 1, 1, 0]], [[1, 1, 0, 2]]]
    assert moe_spec.held(moe_spec.mass(found, 2, weighted=False)) == [0.5, 0.75, 1, 1]
    assert moe_spec.mass(found, 2, weighted=True).tolist() == [[[1, 0.25, 0.25, 0]], [[0.25, 0, 0, 1.25]]]


def test_concentration_by_hand() -> None:
    """Of the six pairs of four experts, one is in two of four tokens, where uniform selection has 4 / 6 for each."""
    assert moe_spec.concentration(text([[0, 1], [1, 0], [2, 3], [0, 2]], 4)).tolist() == pytest.approx([2 / (4 / 6)])


def test_concentration_of_uniform_selections_is_near_one() -> None:
    rng = np.random.default_rng(0)
    tokens = np.argsort(rng.random((20000, 8)), axis=1)[:, :3].tolist()
    assert moe_spec.concentration(text(tokens, 8))[0] == pytest.approx(1, abs=0.1)


def test_ratios_are_monotonic() -> None:
    found = moe_spac.scores(synthetic_trace(layers=3, experts=16, top_k=4, steps=100, drafts=3, reuse=0.8))
    assert sum(found["experts"]) == pytest.approx(1) and len(found["r_c"]) == moe_spac.UPPER
    assert all(a <= b for a, b in zip(found["r_c"][:-1], found["r_c"][1:], strict=True)), "rises with tau"
    assert all(a >= b for a, b in zip(found["r_g"][:-1], found["r_g"][1:], strict=True)), "falls with tau"


def test_ratios_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's example: 3 is hot at tau = 2, the tokens select 0, 3 and 2, 3: 1 - r_c = 2 / 4, r_g = 1 / 3."""
    trace = synthetic_trace(layers=1, experts=4, top_k=2, steps=1, drafts=1)
    trace.ids[:] = np.array([[0, 3], [2, 3]], dtype=np.uint8)

    class Known:
        scores = np.array([1, 0, 1, 3])

        def __init__(self, *_, **__) -> None: ...

        def observe_step(self, counts: np.ndarray) -> None: ...

    monkeypatch.setattr(moe_spac, "UtilityEstimator", Known)
    found = moe_spac.scores(trace)
    assert found["r_c"] == [0, 0.5, 0.5, 1] and found["r_g"] == pytest.approx([1, 1 / 3, 1 / 3, 0])
    assert found["frequency"] == pytest.approx([0, 1, np.nan, 2, np.nan], nan_ok=True)
    assert found["median"] == pytest.approx([0, 1, np.nan, 2, np.nan], nan_ok=True)
    assert found["experts"] == [0.25, 0.5, 0, 0.25, 0]


def test_spread() -> None:
    found = spread.of([[1, np.nan, np.nan], [3, 4, np.nan]])
    assert found["mean"][:2] == [2, 4] and found["low"][:2] == [1, 4] and found["high"][:2] == [3, 4]
    assert all(values[2] != values[2] for values in found.values())
    assert spread.nan_to_none({"a": [1.0, float("nan")]}) == {"a": [1.0, None]}


@pytest.mark.parametrize("script", [moe_spac, moe_spec])
def test_from_a_folder_of_traces(script, tmp_path: Path) -> None:
    for seed in (1, 2):
        trace = synthetic_trace(layers=2, experts=16, top_k=4, steps=160, drafts=2, seed=seed)
        trace.save(tmp_path / f"{seed}.trace")
    output = tmp_path / "out.json"
    done = CliRunner().invoke(script.app, [str(tmp_path), "--output", str(output)])
    assert done.exit_code == 0, done.output
    content = json.loads(output.read_text())
    assert set(content["traces"]) == {"1", "2"} and all(len(one["sha256"]) == 64 for one in content["traces"].values())
    assert content["provenance"] and content["toy_model"] is False
    for name, values in content["spread"].items():
        for low, mean, high in zip(values["low"], values["mean"], values["high"], strict=True):
            assert (low is mean is high is None) or low <= mean <= high, name
    synthetic_trace(layers=2, experts=16, top_k=4, steps=10).save(tmp_path / "short.trace")
    refused = CliRunner().invoke(script.app, [str(tmp_path / "short.trace")], env={"COLUMNS": "300"})
    assert refused.exit_code == 2 and "record" in refused.output


def test_the_tables_read_ahead_within_the_limit_of_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit reaches the simulator, with the knobs of the preset."""
    rows = [system for systems in moe_spac_tables.TABLES.values() for system in systems.values()]
    assert all(f"@extra={EXTRA}" in system.prefetch for system in rows if system.prefetch != "off")
    assert SpacConfig.parse({"prefetch": "utility"}).prefetch_share == EXTRA
    asked, real = [], moe_spac_tables.simulate
    monkeypatch.setattr(moe_spac_tables, "simulate", lambda *a, **k: asked.append(k) or real(*a, **k))
    trace, costs = synthetic_trace(layers=2, experts=16, top_k=4, steps=30, drafts=2), Costs.read("rtx4090")
    moe_spac_tables.measured([trace], moe_spac_tables.RECIPE, costs, 25.0)
    [given], knobs = asked, PRESETS["moe-spac"].knobs
    assert (given["policy"], given["balancer"]) == (knobs["policy"], knobs["cpu_experts"])
    assert given["prefetch"] == f"{knobs['prefetch']}@extra={EXTRA}"


def test_a_part_of_a_trace_has_the_choices_of_the_whole() -> None:
    trace = synthetic_trace(layers=3, experts=16, top_k=4, steps=30, drafts=2)
    assert moe_spac_tables.cut(trace, 3, 4, None) is trace
    tokens = int(trace.step_tokens[:10].sum())
    part = moe_spac_tables.cut(trace, 2, 3, tokens)
    assert (part.steps, part.facts.layers, part.facts.top_k) == (10, 2, 3) and part.step_tokens.sum() == tokens
    whole = trace.ids.reshape(30, 3, 3, 4)  # steps, layers, rows, choices
    assert (part.ids == whole[:10, :2, :, :3].reshape(-1, 3)).all()


def test_time_outside_of_experts_is_that_of_the_replay() -> None:
    """It is what steps take less where only experts cost anything."""
    trace = synthetic_trace(layers=2, experts=16, top_k=4, steps=30, drafts=2)
    costs = Costs.read("rtx4090")
    free = costs.model_copy(update={"other": 0.0, "draft": 0.0})
    took, less = (simulate(trace, trace.facts.total, each).tpot for each in (costs, free))
    assert took - less == pytest.approx(moe_spac_tables.outside(trace, costs), rel=1e-9)


def test_traces_of_two_models_are_refused(tmp_path: Path) -> None:
    for experts in (8, 16):
        synthetic_trace(layers=1, experts=experts, top_k=2, steps=3).save(tmp_path / f"{experts}.trace")
    with pytest.raises(Exception, match="different models"):
        spread.load([tmp_path])
    with pytest.raises(Exception, match="name traces"):
        spread.load([tmp_path / "8.trace", tmp_path / "8.trace"])


def test_od_moe_of_a_stacked_trace(tmp_path: Path) -> None:
    """More workers than layers are left out; more memory and a faster network make no step longer."""
    path, output = tmp_path / "a.trace", tmp_path / "od.json"
    synthetic_trace(layers=2, experts=16, top_k=2, steps=20).save(path)
    arguments = [str(path), "--layers", "4", "--share", "0.25", "--output", str(output)]
    done = CliRunner().invoke(od_moe.app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(output.read_text())
    assert found["calculated"] and found["routing"] == {"layers": 4, "experts": 16, "steps": 20}
    assert found["traces"]["a"]["layers"] == 2
    for speeds in found["workers"].values():
        assert list(speeds) == ["1", "2", "4"] and list(speeds.values()) == sorted(speeds.values())
    by_network = [speeds["4"] for speeds in found["workers"].values()]
    assert by_network == sorted(by_network) and by_network[0] < by_network[-1]
