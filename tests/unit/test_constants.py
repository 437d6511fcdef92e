"""Constants between the bounds that their evidence sets: a result of ours, data sheets, published models, or a reason.

Where a value was reasoned and not measured, no other test tells it from one that is many times as large.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_spac.cache import transfers
from vllm_spac.cache.allowance import PAUSE, PAYS, SETTLE
from vllm_spac.cache.host_tier import INCLUSIVE_FROM
from vllm_spac.config.types import EXTRA
from vllm_spac.decisions.costs import Costs, names
from vllm_spac.execution.address_table import MAX_EXPERTS
from vllm_spac.methods.od_moe import roster
from vllm_spac.methods.od_moe.wire import MOST_BYTES
from vllm_spac.storage.checkpoint.described import described
from vllm_spac.storage.checkpoint.headers import Checkpoint
from vllm_spac.storage.checkpoint.published import published
from vllm_spac.system import host_memory
from vllm_spac.tools.selftest import kernel_checks

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H100 = json.loads((RESULTS / "gpu_h100.json").read_text())["micro"]
AHEAD = json.loads((RESULTS / "toy_ahead.json").read_text())
THREAD = 30e-6  # seconds until a thread that was asked to copy begins


def used_share(loses: bool) -> list[float]:
    """Share of reads ahead that layers used, where naming by budget missed more than naming row by row, or less."""
    by_row = {(r["predictor"], r["decisions"], r["slots"]): r["misses"] for r in AHEAD["rows"] if r["way"] == "rows"}
    return [
        r["prefetch_hits"] / r["prefetches"]
        for r in AHEAD["rows"]
        if r["way"] == "budget" and (r["misses"] > by_row[r["predictor"], r["decisions"], r["slots"]]) is loses
    ]


def in_place() -> float:
    """Share of its data sheet that an H100's link attains where kernels read host memory."""
    return H100["fetch"]["GBps_by_experts"]["32"] * 1e9 / Costs.read("h100").load.bytes_per_second


def models() -> list[Checkpoint]:
    return [described(config, Path()) for config in published().values()]


def experts() -> list[int]:
    return [each for model in models() for each in model.expert_bytes]


SLOWEST = min(Costs.read(name).load.bytes_per_second for name in names())

BOUNDS = {
    # Reads of which so few are used cost more misses than they spare; where more are, fewer.
    "reads ahead that pay": (PAYS, max(used_share(loses=True)), min(used_share(loses=False))),
    "reads ahead beyond what is needed": (EXTRA, AHEAD["extra"], AHEAD["extra"]),
    # Trying again what does not pay takes less than a hundredth of the steps, and is not put off for ever.
    "steps of a try": (SETTLE / PAUSE, 0.001, 0.01),
    # A copy that the caller makes itself ends before a thread would begin, and is not much shorter than that.
    "seconds of a copy without threads": (transfers._HAND_OFF / SLOWEST, THREAD / 8, THREAD),
    "bytes of a copy without threads": (transfers._HAND_OFF, 1, min(experts())),
    # The largest expert is sent whole, and what else a peer may make a worker hold is no more than twice that.
    "bytes of a message": (MOST_BYTES, max(experts()), 2 * max(experts())),
    # One failure may be chance; each further one is a deadline for which all rows of a step wait.
    "failures before a worker is left out": (roster._MOST_FAILURES, 2, 3),
    # A link of half its width is noted, and one that attains what the H100's does is not.
    "share of the data sheet": (kernel_checks._OF_SHEET, in_place() / 2, in_place()),
    # Of what slots and host memory hold together, experts that are in both; less would be copied more often.
    "share that is held twice": (1 / (1 + INCLUSIVE_FROM), 0.1, 0.25),
    "MADV_PAGEOUT of Linux's mman-common.h": (host_memory._MADV_PAGEOUT, 21, 21),
    "experts of a layer": (MAX_EXPERTS, max(model.experts for model in models()), 1024),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_constant_is_where_its_evidence_allows(name: str) -> None:
    value, least, most = BOUNDS[name]
    assert least <= value <= most
