"""``prefetch=auto`` over slots, without an engine: what it measures or reads from a profile, and what follows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from vllm_spac import components
from vllm_spac.config.config import SpacConfig
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.decisions.predictor_file import Identity, PredictorFile, kinds
from vllm_spac.decisions.predictors._trained import Sizes
from vllm_spac.decisions.predictors.base import Signal
from vllm_spac.execution.slots_execution import SlotExecution
from vllm_spac.integration.loading import ahead
from vllm_spac.storage.memory import MemoryStore

SHAPE = MoEShape(("0", "1"), 16, 4, {"w": TensorSpec((8,), torch.float32)})
PROFILE = {
    "format": "spac-profile-1",
    "name": "here",
    "provenance": {"how": "measured", "source": "a test", "expert_bytes": SHAPE.expert_bytes, "store": "disk"},
    "fast": {"bytes_per_second": 32000.0},
    "load": {"bytes_per_second": 32000.0},
    "cpu": {"bytes_per_second": 1.0},
    "other": 0.001,
}


class Kernel:
    activation, takes_slots, by_expert = "silu", True, False

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, slot_of=None, rows: int = 0) -> Tensor:
        return x.clone()


def execution(slots: int) -> SlotExecution:
    store = MemoryStore(SHAPE, "")
    for key in range(SHAPE.total):
        store.put(key, {"w": torch.full((8,), float(key))})
    policy, tensors = components.build("policies", "lru"), {"w": torch.zeros(slots, 8)}
    made = SlotExecution(SHAPE, slots, policy, store, tensors, io_threads=1, path="memory")
    list(made.fill())
    return made


@pytest.fixture
def slots() -> Iterator[SlotExecution]:
    with closing(execution(8)) as made:
        yield made


LAYER = SimpleNamespace(
    moe_config=SimpleNamespace(hidden_dim=8, in_dtype=torch.float32),
    spac=SimpleNamespace(device=torch.device("cpu")),
    spac_index=0,
    spac_kernel=Kernel(),
)


def file() -> PredictorFile:
    """``gate`` is right more often than ``frequency``."""
    sizes = Sizes(2, 16, 4, 8, 1, 1)
    tensors = {
        name: {part: torch.zeros(shape, dtype=dtype) for part, (dtype, shape) in kinds()[name].specs(sizes).items()}
        for name in ("frequency", "gate")
    }
    recall = {"frequency": {"step": [(0.3, 0.4)] * 2}, "gate": {"1": [None, (0.9, 0.95)]}}
    return PredictorFile(Identity("f", "m", SHAPE.layers), sizes, 1, tensors, {}, recall)


def config(**more) -> SpacConfig:
    return SpacConfig.parse({"prefetch": "auto", "predictor_file": "/x"} | more)


def test_it_reads_ahead_by_the_best_predictor(slots: SlotExecution, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "fast_seconds", lambda *given: 0.001)
    monkeypatch.setattr(ahead, "load_seconds", lambda *given: 0.002)
    assert slots.looks_at == frozenset()
    choice = ahead.choose_for(config(), slots, LAYER, file(), "disk", "")
    assert choice.predictor == "gate" and slots.looks_at == {Signal.ROUTER_INPUT}
    settings = slots._loader.prefetcher._settings
    assert (settings.prefetch, settings.extra, settings.stops) == ("gate", 0.1, True)
    assert choice.why == (  # 8 experts of a row, 3/4 of them without a slot; nothing is known of layer 0
        "recall 0.45; 8 ms of computing and 12 ms of loads per step (of experts, measured now) promise 1.22x, "
        "1.67x if always right"
    )


def test_nothing_is_read_ahead_where_it_cannot_pay(slots: SlotExecution, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "fast_seconds", lambda *given: 0.00001)
    monkeypatch.setattr(ahead, "load_seconds", lambda *given: 0.002)
    choice = ahead.choose_for(config(), slots, LAYER, file(), "disk", "")
    assert choice.predictor is None and slots.looks_at == frozenset()
    assert "1.00x with gate, recall 0.45" in choice.why


def test_costs_are_measured_over_the_engines_own_experts(slots: SlotExecution) -> None:
    before = slots.counters.snapshot()
    costs = ahead._costs(config(), slots, LAYER, "disk")
    assert costs.compute > 0 and costs.loads > 0
    assert slots.counters.snapshot() == before and not slots.residency.pinned
    slots.residency.check_integrity()


def test_a_profile_of_another_machine_is_not_used_and_that_is_said(slots: SlotExecution, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(PROFILE))
    costs = ahead._costs(config(profile=str(tmp_path / "p.json")), slots, LAYER, "disk")
    assert "measured now, because the profile" in costs.origin and "run vllm-spac profile" in costs.origin


def test_a_profile_of_this_machine_is(slots: SlotExecution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead.Costs, "_check_machine", lambda *given: None)
    monkeypatch.setattr(ahead, "ExpertSize", SimpleNamespace(of=lambda nbytes: SimpleNamespace(nbytes=nbytes)))
    (tmp_path / "p.json").write_text(json.dumps(PROFILE))
    costs = ahead._costs(config(profile=str(tmp_path / "p.json")), slots, LAYER, "disk")
    assert costs.compute == pytest.approx(8 * 0.001 + 0.001) and costs.loads == pytest.approx(8 * 0.75 * 0.001)
    assert costs.origin == f" ({tmp_path / 'p.json'})"
    assert (
        "measured now, because" in ahead._costs(config(profile=str(tmp_path / "p.json")), slots, LAYER, "host").origin
    )


def test_nothing_is_measured_where_every_expert_has_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ahead, "fast_seconds")
    with closing(execution(SHAPE.total)) as made:
        assert (
            ahead.choose_for(config(), made, LAYER, file(), "disk", "").describe()
            == "auto (off: every expert has a slot)"
        )
