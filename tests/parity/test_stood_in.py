"""MoE layers of newer models, with stand-ins for what no CPU runs of them: stock's tokens over a table of pointers.

Their gates are clamped, which our kernels compute and vLLM's for a CPU does not. With V2's runner in emulated full
graphs. `make families` serves these and others over slots.
"""

from __future__ import annotations

from pathlib import Path

import engines
import pytest
import stood_in_runs

pytestmark = pytest.mark.v2
POINTERS = {"slots": "25%", "plane": "pointers"}
GRAPHS = ("DeepseekV4ForCausalLM", "MiniMaxM3SparseForCausalLM")


@pytest.mark.parametrize(
    "architecture",
    [
        "DeepseekV4ForCausalLM",  # experts by token in the first layer, biased scores of softplus, a limit
        pytest.param("MiniMaxM3SparseForCausalLM", marks=pytest.mark.full),  # another product, with a limit
        pytest.param("LongcatFlashForCausalLM", marks=pytest.mark.full),  # experts that are none
        pytest.param("KimiLinearForCausalLM", marks=pytest.mark.full),  # experts in a latent space
    ],
)
def test_stock_s_tokens_over_pointers(architecture: str, tmp_path: Path) -> None:
    if engines.V2 and architecture not in GRAPHS:
        pytest.skip("vLLM's latent attention, or a library for its recurrent layers, needs a Triton that compiles")
    options = stood_in_runs.run(architecture, tmp_path / "model", "write")
    stock = stood_in_runs.run(architecture, tmp_path / "model", None, **options)["said"]
    assert len({tuple(tokens) for tokens in stock}) > 2, "it says the same to everything"
    found = stood_in_runs.run(architecture, tmp_path / "model", POINTERS, graphs=engines.V2, **options)
    assert found["said"] == stock
    stats = found["stats"]
    assert stats["execution"] == "pointers" and stats["misses"] > 0 and stats["loads"] > 0
    assert found["replays"] > 5 if engines.V2 else stats["hits"] > 0
