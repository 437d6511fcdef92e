"""Experts loaded into slots for our kernel (``plane=table``), on real engines: stock's greedy tokens in float32.

On a CPU the kernel is compiled C, which sums in another order than vLLM's.
"""

from __future__ import annotations

import engines
import pytest
import zoo
from compare import TOY, compare
from exactness import FLOAT32, assert_same_tokens

from vllm_spac.cpu_kernels._library import missing

# What only the host decides, which pointers refuse: a disk with host memory before it and reads ahead by use; the CPU's
# share; and the fewest slots, in waves.
QUICK = [
    {"slots": "25%", "host_memory": "8MiB", "prefetch": "utility"},
    {"slots": "25%", "store": "host", "cpu_experts": "2"},
]
MORE = [{"slots": "2k"}, {"slots": "100%"}, {"slots": "50%", "store": "host", "cpu_experts": "auto"}]


def knobs(given: list[dict]) -> list[dict]:
    return [{"plane": "table", "guard": "off"} | each for each in given]


def check(stock: engines.Run, runs: list[engines.Run], given: list[dict]) -> None:
    for run, each in zip(runs, given, strict=True):
        assert_same_tokens(run, stock, each)
        assert run.stats["mode"] == "exact up to rounding" and run.stats["execution"] == "table"
        assert (run.stats["misses"] > 0) == (each["slots"] != "100%")


@pytest.mark.skipif(bool(missing()), reason=missing())  # the CPU's share needs it
@pytest.mark.parametrize("given", [QUICK, pytest.param(MORE, marks=pytest.mark.full)], ids=["quick", "more"])
def test_same_tokens_as_stock(given):
    stock, *runs = compare(TOY / "target", [None, *knobs(given)], max_tokens=16, **FLOAT32)
    check(stock, runs, given)
    assert given is MORE or runs[1].stats["cpu_experts"] > 0


@pytest.mark.full
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_every_family(family, checkpoint):
    """Biases, gates in turns, shared experts, sigmoid scores."""
    stock = engines.generate(checkpoint(family), **FLOAT32)
    for slots in ("50%", "100%"):
        run = engines.generate(checkpoint(family), {"plane": "table", "slots": slots}, **FLOAT32)
        assert_same_tokens(run, stock, slots)
