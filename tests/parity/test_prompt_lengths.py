"""Stock's tokens of prompts whose steps have just as many rows as borrow slots, one fewer, one more, and parts of them.

With ``plane=pointers``, while the CPU computes a share, experts are read ahead, ranks divide the experts, or a budget
cuts them. In float32: see ``test_pointers``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import engines
import forked
import pytest
from exactness import FLOAT32

pytestmark = pytest.mark.rest

EXPERTS, TOP_K, CHUNK = 16, 4, 128  # of the model ``qwen3_moe``; of the engine
BORROWS = 16 * EXPERTS // TOP_K  # rows of a step that borrows slots
LENGTHS = sorted(
    {1, *(rows * EXPERTS // TOP_K for rows in (15, 16, 17))}
    | {at + off for at in (BORROWS, CHUNK, CHUNK + BORROWS, 2 * CHUNK) for off in (-1, 0, 1)}
)
FEW = [1, BORROWS - 1, BORROWS, BORROWS + 1, CHUNK + BORROWS]  # where kernels are interpreted, ours or V2's
WIDE = [BORROWS - 1, BORROWS, BORROWS + 1]
if engines.V2:
    LENGTHS, WIDE = FEW, [BORROWS]
OPTIONS: dict[str, Any] = {
    **FLOAT32,
    "max_model_len": 288,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": BORROWS + 1,
    "num_gpu_blocks_override": 512,
    "enable_prefix_caching": False,
}
ALL = {"plane": "pointers", "cpu_experts": "2", "prefetch": "gate"}
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def run(checkpoint):
    def made(
        spac: dict | None, *, few: bool = False, interpreted: bool = False, graphs: bool = False, **options: Any
    ) -> dict:
        asked = {
            "model": str(checkpoint("qwen3_moe")),
            "spac": spac,
            "options": OPTIONS | options,
            "lengths": FEW if few else LENGTHS,
            "wide": [] if few else WIDE,
            "tokens": 3 if few else 6,
            "interpreted": interpreted,
            "graphs": graphs,
        }
        changes = ONE_THREAD if "tensor_parallel_size" in options else {}
        changes |= {"TRITON_INTERPRET": "1"} if interpreted else {}
        return forked.answer(forked.run([Path(__file__).with_name("length_runs.py"), json.dumps(asked)], changes))

    return made


@pytest.fixture(scope="module")
def stock(run) -> dict[str, list[list[int]]]:
    said = run(None)["said"]
    assert len({tuple(tokens) for tokens in said["together"]}) > 4, "this model says the same to everything"
    return said


def check(found: dict, expected: dict[str, list[list[int]]]) -> dict:
    """No token differs; returns what the first worker counted. Slots were borrowed, and experts read in place."""
    wrong = {name: (tokens, expected[name]) for name, tokens in found["said"].items() if tokens != expected[name]}
    assert not wrong
    for stats in found["workers"]:
        moved = stats["bytes"]
        assert moved["host staged"] > 0 and stats["misses"] > stats["loads"] > 0
    return found["workers"][0]


@pytest.mark.v2
@pytest.mark.parametrize(("slots", "graphs"), [("50%", False), ("25%", False), ("25%", True)], ids=str)
def test_same_tokens_with_cpu_share_and_reads_ahead(slots: str, graphs: bool, run, stock) -> None:
    """Of a quarter, a layer's missing experts are more than the borrowed slots: it runs in parts.

    ``graphs``: steps without prompts are replayed, between prompts that borrow what they read.
    """
    found = run({"slots": slots, **ALL}, graphs=graphs)
    stats = check(found, stock)
    assert stats["cpu_experts"] > 0 and stats["prefetches"] > 0
    assert (found["replays"] > 100) is graphs


@pytest.mark.v2
@pytest.mark.timeout(1200)
def test_same_tokens_by_the_kernels_of_a_gpu(run, stock) -> None:
    found = run({"slots": "25%", **ALL}, few=True, interpreted=True)
    few = {name: tokens for name, tokens in stock.items() if name in found["said"]}
    few = {name: [each[:3] for each in tokens] for name, tokens in few.items()}
    few["together"] = [stock["together"][LENGTHS.index(length)][:3] for length in FEW]
    stats = check(found, few)
    assert stats["cpu_experts"] + stats["cpu_late"] > 0 and stats["prefetches"] > 0


def test_a_budget_cuts_the_same_experts_wherever_they_are(run, stock) -> None:
    """A budget of all of them gives stock's tokens; half of them what an engine says that holds each expert."""
    cut = {"budget": f"{EXPERTS // 2}@when=all"}
    held = run({"slots": "100%", "plane": "pointers", **cut})
    assert held["said"] != stock
    check(run({"slots": "25%", **ALL, **cut}), held["said"])
    check(run({"slots": "25%", **ALL, "budget": f"{EXPERTS}@when=all"}), stock)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks spin while they wait: needs 2 CPUs")
def test_ranks_that_divide_the_experts_borrow_for_their_own(run, stock) -> None:
    """Rows of a step count over all ranks, and each rank borrows slots for the experts that it holds."""
    found = run({"slots": "50%", **ALL}, tensor_parallel_size=2, enable_expert_parallel=True)
    check(found, stock)
    assert [worker["experts"] for worker in found["workers"]] == [4 * EXPERTS // 2] * 2
    assert all(worker["prefetches"] > 0 for worker in found["workers"])
