"""Engines that serve with components from outside the package, those of ``tests/contracts/outside.py``: stock's tokens.

In float32, because CPU experts and pointers are exact up to rounding. The budget leaves 1e-9 of the mass: none is cut.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import engines
import pytest
from exactness import FLOAT32, assert_same_tokens

import vllm_spac

FOLDER = str(Path(__file__).parents[1] / "contracts")
IN_SLOTS = {
    "policy": "outside:Fifo",
    "store": "outside:Blocks",
    "prefetch": "outside:Same",
    "cpu_experts": "outside:EverySecond",
    "cpu_kernel": "outside:RowByRow",
    "budget": f"{1 - 1e-9}@ranking=outside:Loudest@when=all",
}
OVER_POINTERS = {"plane": "pointers", "store": "outside:Blocks", "policy": "outside:Fifo"}


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module can be imported, here and in a worker's process."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    yield
    sys.modules.pop("outside", None)


def _calls(worker) -> dict[str, int]:
    import outside

    return dict(outside.CALLS)


def serve(model, spac: dict) -> tuple[engines.Run, dict, dict]:
    """(what an engine said, calls before it served, calls in the end)."""
    with engines.engine(model, spac, **FLOAT32) as llm:
        (before,) = llm.collective_rpc(_calls)
        tokens = engines.say(llm)
        (after,) = llm.collective_rpc(_calls)
        return engines.Run(tokens, vllm_spac.stats(llm)["workers"][0], "float32"), before, after


@pytest.fixture(scope="module")
def exact(checkpoint) -> engines.Run:
    return engines.generate(checkpoint("qwen3_moe"), **FLOAT32)


@pytest.mark.parametrize(
    ("spac", "called"),
    [
        (IN_SLOTS, {"policy", "store", "predictor", "balancer", "executor", "ranking"}),
        (OVER_POINTERS, {"policy"}),
    ],
    ids=["slots", "pointers"],
)
def test_same_tokens_as_stock(spac, called, outside, exact, checkpoint):
    run, before, after = serve(checkpoint("qwen3_moe"), {"slots": "50%", **spac})
    assert_same_tokens(run, exact)
    assert {name for name, count in after.items() if count > before.get(name, 0)} == called
    stats = run.stats
    assert (stats["store"], stats["execution"]) == (spac["store"], "pointers" if "plane" in spac else "slots")
    assert stats["hits"] > 0 and stats["misses"] > 0
    assert stats["mode"] == ("lossy" if "budget" in spac else "exact up to rounding")
    assert stats["budget"]["dropped_share"] == 0
