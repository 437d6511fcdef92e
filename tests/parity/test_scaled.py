"""An engine of the scaled machine: paced loads and CPU experts, and stock's tokens."""

from __future__ import annotations

import os
from pathlib import Path

import engines
import pytest
from exactness import FLOAT32, assert_same_tokens

import vllm_spac

FOLDER = str(Path(__file__).parents[2] / "benchmarks" / "scaled")
PACED = {"store": "tiers:PacedStore", "io_threads": 2, "cpu_kernel": "executors:PacedExperts"}
LOAD_SECONDS = 1e-3


@pytest.fixture
def scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The components can be imported, and their machine is set by ``write_machine``."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("SCALED_MACHINE", str(tmp_path / "machine.json"))


def write_machine(expert_bytes: int) -> None:
    from machine import ScaledMachine

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
        from watch import counters

        before, said = counters(llm), engines.say(llm)
        after, stats = counters(llm), vllm_spac.stats(llm)["workers"][0]
    assert_same_tokens(engines.Run(said, stats, "float32"), stock)
    assert stats["store"] == "tiers:PacedStore" and stats["cpu_experts"] > 0
    paced = sum(after[name] - before[name] for name in ("load_waits", "load_missed"))
    assert paced == stats["loads"] > 0, "each load has a deadline"
    assert after["cpu_waits"] + after["cpu_missed"] > before["cpu_waits"] + before["cpu_missed"]
    assert stats["stall_seconds"] > 0, "layers wait for the link"
