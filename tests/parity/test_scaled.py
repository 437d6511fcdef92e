"""An engine of the scaled machine: paced loads and CPU experts, and stock's tokens."""

from __future__ import annotations

import os
from pathlib import Path

import engines
import pytest
from exactness import FLOAT32, assert_same_tokens

import vllm_spac
from benchmarks.scaled import ladder, watch
from benchmarks.scaled.machine import ScaledMachine

PACED = {**ladder.PACED, "cpu_kernel": ladder.WATERFILL["cpu_kernel"]}
LOAD_SECONDS = 1e-3


@pytest.fixture
def scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine is set by ``write_machine``."""
    monkeypatch.setenv("SCALED_MACHINE", str(tmp_path / "machine.json"))


def write_machine(expert_bytes: int) -> None:
    core = max(os.sched_getaffinity(0))
    found = ScaledMachine(
        machine="of a test", expert_bytes=expert_bytes, layer_seconds=1e-3, load_seconds=LOAD_SECONDS,
        cpu_seconds=1e-3, core=core,
    )  # fmt: skip
    Path(os.environ["SCALED_MACHINE"]).write_text(found.model_dump_json())


@pytest.mark.full
def test_stocks_tokens_at_the_machines_pace(scaled, checkpoint) -> None:
    model = checkpoint("qwen3_moe")
    stock = engines.generate(model, **FLOAT32)
    resident = engines.generate(model, {"slots": "100%"}, **FLOAT32)
    write_machine(resident.stats["expert_bytes"])
    with engines.engine(model, {"slots": "50%", "cpu_experts": 1, **PACED}, **FLOAT32) as llm:
        before, said = watch.counters(llm), engines.say(llm)
        after, stats = watch.counters(llm), vllm_spac.stats(llm)["workers"][0]
    assert_same_tokens(engines.Run(said, stats, "float32"), stock)
    assert stats["store"] == ladder.PACED["store"] and stats["cpu_experts"] > 0
    paced = sum(after[name] - before[name] for name in ("load_waits", "load_missed"))
    assert paced == stats["loads"] > 0, "each load has a deadline"
    assert after["cpu_waits"] + after["cpu_missed"] > before["cpu_waits"] + before["cpu_missed"]
    assert stats["stall_seconds"] > 0, "layers wait for the link"
