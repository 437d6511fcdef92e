"""Experts loaded into slots for our kernel (``kernel=table``), on real engines: stock's greedy tokens in float32.

On a CPU the kernel is its torch twin, which sums in another order than vLLM's; see ``test_pointers``.
"""

from __future__ import annotations

import engines
import pytest
import zoo
from compare import METHODS, TOY, compare
from exactness import FLOAT32, assert_same_tokens

# What only the host decides, which pointers refuse: a disk with host memory before it and reads ahead by use; the CPU's
# share; and the fewest slots, in waves.
QUICK = [
    {"slots": "25%", "host_memory": "8MiB", "prefetch": "utility"},
    {"slots": "25%", "store": "host", "cpu_experts": "2"},
]
MORE = [{"slots": "2k"}, {"slots": "100%"}, {"slots": "50%", "store": "host", "cpu_experts": "auto"}]


def knobs(given: list[dict]) -> list[dict]:
    return [{"kernel": "table", "guard": "off"} | each for each in given]


def check(stock: engines.Run, runs: list[engines.Run], given: list[dict]) -> None:
    for run, each in zip(runs, given, strict=True):
        assert_same_tokens(run, stock, each)
        assert run.stats["mode"] == "exact up to rounding" and run.stats["execution"] == "table"
        assert (run.stats["misses"] > 0) == (each["slots"] != "100%")


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
        run = engines.generate(checkpoint(family), {"kernel": "table", "slots": slots}, **FLOAT32)
        assert_same_tokens(run, stock, slots)


@pytest.mark.full
def test_ranked_over_a_tree_and_shared_with_the_cpu():
    """A draft tree of 16, a budget of all experts by the votes of paths, the CPU's share, a quarter in slots."""
    every = {
        "tree": 16,
        "slots": "25%",
        "store": "host",
        "cpu_experts": "2",
        "budget": 64,
        "budget_votes": "path@alpha=0.5",
    }
    options = {"prompts": engines.PROMPTS[2:5], "max_tokens": 24, "max_num_seqs": 1}
    drafted = {name: value for name, value in METHODS["eagle3"].items() if name != "num_speculative_tokens"}
    (stock,) = compare(TOY / "target", [None], **options, **FLOAT32)
    runs = compare(
        TOY / "target", knobs([every, every | {"budget": 16}]), speculative_config=drafted, **options, **FLOAT32
    )
    assert_same_tokens(runs[0], stock, every)
    assert runs[0].stats["cpu_experts"] > 0 and runs[1].tokens != stock.tokens
