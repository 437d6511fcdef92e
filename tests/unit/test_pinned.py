"""Policy ``pinned``: which experts are pinned, and where an engine and the simulator take the counts from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_spac.config.config import SpacConfig
from vllm_spac.core import MoEShape
from vllm_spac.decisions.costs import Costs
from vllm_spac.decisions.policies.base import PolicyContext
from vllm_spac.decisions.policies.pinned import Pinned
from vllm_spac.errors import ConfigError
from vllm_spac.methods.moe_spec.calibration import CalibrationRecorder
from vllm_spac.tools.traces.simulation import build_policy, simulate
from vllm_spac.tools.traces.synthetic import synthetic_trace
from vllm_spac.tools.traces.trace_statistics import uses

COUNTS = np.array([[5, 0, 9, 1], [2, 9, 0, 7]])
FACTS = {"layers": 2, "experts": 16, "top_k": 2, "skew": 1.2, "reuse": 0.3}


def pinned(slots: int, share: float = 0.75, top_k: int = 1) -> list[int]:
    return Pinned.of(PolicyContext(slots, top_k, COUNTS), share=share).first()


def test_the_most_used_of_all_layers_are_pinned() -> None:
    assert pinned(4) == [2, 5, 7]
    assert pinned(6) == [2, 5, 7, 0]
    assert pinned(6, share=0.5) == [2, 5, 7]


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_no_such_share(share: float) -> None:
    with pytest.raises(ValueError, match="use 0 to 1"):
        Pinned(share=share)


def test_pinned_experts_are_evicted_last_and_come_back_pinned() -> None:
    policy = Pinned.of(PolicyContext(4, 1, COUNTS))  # 2, 5, 7
    for key in (5, 2, 0, 1, 3):
        policy.insert(key)
    policy.touch(0)
    assert policy.standing(8).order.tolist() == [1, 3, 0, 5, 2]
    assert policy.standing(8).kept.tolist() == [0, 0, 0, 1, 1]
    assert policy.standing(8).used.tolist() == [0, 0, 1, 0, 0, 1, 0, 1]
    assert policy.evict(4, ()) == [1, 3, 0, 5]
    for key in (5, 6):
        policy.insert(key)
    assert policy.evict(2, ()) == [6, 2]


def test_an_engine_takes_the_counts_of_its_layers(tmp_path: Path) -> None:
    """The calibration has three layers, the experts of one shape are those of two of them."""
    from vllm_spac.integration.loading import assembly

    recorder = CalibrationRecorder("f" * 32, "toy", ("a", "b", "c"), 4, 1, 2)
    for layer, expert in enumerate((3, 0, 1)):
        probs = torch.full((5, 4), 0.1)
        recorder.observe(layer, probs, torch.ones(5, 1), torch.full((5, 1), expert))
    recorder.end_text()
    recorder.result().save(tmp_path / "c.safetensors")
    config = SpacConfig.parse({"policy": f"pinned@share=0.75@calibration={tmp_path / 'c.safetensors'}"})
    policy = assembly.policy(config, MoEShape(("a", "c"), 4, 1, {}), slots=3, most_drafts=0)
    assert policy.first() == [3, 5]
    assert not assembly.policy(SpacConfig.parse({}), MoEShape(("a", "c"), 4, 1, {}), slots=3, most_drafts=0).first()


def test_the_simulator_takes_traces_and_calibrations(tmp_path: Path) -> None:
    one, two = (synthetic_trace(**FACTS, steps=40, seed=seed) for seed in (1, 2))
    one.save(tmp_path / "1.trace"), two.save(tmp_path / "2.trace")
    both = build_policy(f"pinned@trace={(str(tmp_path / '1.trace'), str(tmp_path / '2.trace'))}@share=1.0", one, 12)
    assert both.first() == np.argsort(-(uses(one) + uses(two)).ravel(), kind="stable")[:10].tolist()
    recorder = CalibrationRecorder("f" * 32, "toy", ("a", "b"), 16, 2, 2)
    for layer in range(2):
        rows = torch.from_numpy(one.ids[one.record_layer == layer].astype(np.int64))
        recorder.observe(layer, torch.full((len(rows), 16), 0.1), torch.ones(len(rows), 2), rows)
    recorder.end_text()
    recorder.result().save(tmp_path / "c.safetensors")
    assert (recorder.result().counts.numpy() == uses(one)).all()
    calibrated, traced = (build_policy(f"pinned@{name}={tmp_path / file}", two, 12).first() for name, file in FILES)
    assert calibrated == traced and len(traced) == 9


FILES = (("calibration", "c.safetensors"), ("trace", "1.trace"))


@pytest.mark.parametrize("options", [{}, {"execution": "pointers"}], ids=str)
def test_what_is_pinned_is_there_from_the_start_and_stays(tmp_path: Path, options: dict) -> None:
    costs, path = Costs.read("rtx4090"), tmp_path / "run.trace"
    for seed in range(5):
        token = synthetic_trace(layers=1, experts=32, top_k=2, steps=1, seed=seed)
        token.save(path)
        assert simulate(token, 4, costs, policy=f"pinned@trace={path}@share=1.0", **options).hits == 2
    trace = synthetic_trace(**FACTS, steps=60)
    trace.save(path)
    outcome = simulate(trace, 12, costs, policy=f"pinned@trace={path}@share=1.0", **options)
    assert outcome.hits >= np.sort(uses(trace).ravel())[-10:].sum() > 0


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ("", r"pinned@trace=FILE, or a calibration"),
        ("@trace={0}@calibration={0}", "name a trace"),
        ("@trace={0}", "is of 1 layers of 8 experts, and the replayed trace of 2 of 16"),
        ("@trace=/nowhere", "cannot be read as a routing trace"),
        ("@trace={1}@share=2", "use 0 to 1"),
        ("@trace={1}@colour=2", "pinned has no argument .colour."),
    ],
)
def test_refusals(tmp_path: Path, knobs: str, message: str) -> None:
    trace, other = synthetic_trace(**FACTS, steps=2), tmp_path / "other.trace"
    synthetic_trace(layers=1, experts=8, top_k=2, steps=2).save(other)
    trace.save(tmp_path / "same.trace")
    with pytest.raises(ConfigError, match=message):
        simulate(trace, 12, Costs.read("rtx4090"), policy="pinned" + knobs.format(other, tmp_path / "same.trace"))
