"""Experts read through a table of pointers, on a real engine: the same greedy tokens as stock vLLM in float32.

On a CPU the kernels are their torch twins, which sum in another order than vLLM's kernel. In float32, logits then
differ by 1e-6 of their size, and the two best tokens were 4e-3 apart at least (qwen3_moe, all 128 tokens; the seeds are
fixed). In bfloat16, where a sum is rounded at 4e-3, a near-tie may turn: the comparison is made in float32.
"""

from __future__ import annotations

import engines
import pytest
import zoo
from compare import METHODS, TOY, compare
from exactness import FLOAT32, assert_same_tokens, first_difference

import vllm_spac
from vllm_spac.recording.trace_file import Trace

QUICK = {"qwen3_moe": ("4", "50%"), "gpt_oss": ("2",)}  # the minimum and half; and with biases, gate and up in turns
CASES = [
    *QUICK.items(),
    *(pytest.param(f, ("25%", "50%", "100%"), marks=pytest.mark.full) for f in zoo.FAMILIES),
]


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_same_tokens_as_stock(family, sizes, checkpoint):
    stock = engines.generate(checkpoint(family), **FLOAT32)
    assert len({tuple(tokens) for tokens in stock.tokens}) > 4, "this model says the same to everything"
    for slots in sizes:
        run = engines.generate(checkpoint(family), {"slots": slots, "plane": "pointers"}, **FLOAT32)
        assert_same_tokens(run, stock, slots)
        stats = run.stats
        assert stats["mode"] == "exact up to rounding", "named so: in bfloat16 a near-tie may turn"
        assert stats["hits"] > 0
        read, missed = stats["bytes"].get("host streamed", 0), stats["misses"] - stats["loads"]
        assert stats["bytes"].get("host", 0) == stats["loads"] * stats["expert_bytes"]
        if slots != "100%":  # a full chunk of prompts has 16 rows for each expert
            assert read < missed * stats["expert_bytes"] and stats["bytes"]["host staged"] > 0
        else:
            assert read == missed == 0 and "host staged" not in stats["bytes"]
        assert (stats["misses"] > 0) == (slots != "100%")
        assert stats["prefetches"] == 0 and (stats["loads"] > 0) == (slots != "100%")


@pytest.mark.full
@pytest.mark.parametrize("sizes", [("2.1%",), ("25%", "50%")], ids=str)
def test_same_tokens_as_stock_with_ngram(sizes):
    """The trained toy model: 9 of 384 experts, as good as the minimum, to half of them."""
    runs = [
        {"slots": slots, "plane": "pointers", "guard": "off"}  # which goes by the clock
        for slots in sizes
    ]
    options = {
        "prompts": engines.PROMPTS[2:5],
        "max_tokens": 32,
        "max_num_seqs": 1,
        "speculative_config": METHODS["ngram"],
    }
    stock, *spac = compare(TOY / "target", [None, *runs], **options, **FLOAT32)
    for run in spac:
        assert_same_tokens(run, stock)
        assert run.stats["steps"]["verify"] > 0 and run.stats["misses"] > 0
        assert run.stats["loads"] > 0


def _close(worker) -> None:
    worker._spac_experts().close()


def test_budgets_and_traces(checkpoint, tmp_path):
    """A budget of all experts changes nothing, half of them does; the trace has every row of every layer."""
    spac = {"slots": "50%", "plane": "pointers", "record": f"trace={tmp_path / 'run.trace'}"}
    options = {**FLOAT32, "enable_prefix_caching": False}
    with engines.engine(checkpoint("qwen3_moe"), spac, **options) as llm:

        def change(**settings):
            return llm.collective_rpc("spac_budget", args=(settings,))[0]

        exact = engines.say(llm)
        change(budget=16, coverage="substitution", when="all")
        assert first_difference(engines.say(llm), exact) is None
        change(budget=8, coverage="substitution", when="all")
        assert engines.say(llm) != exact
        stats = vllm_spac.stats(llm)["workers"][0]
        assert stats["mode"] == "lossy" and stats["budget"]["dropped_share"] > 0
        llm.collective_rpc(_close)
    assert Trace.load(tmp_path / "run.trace").steps == sum(stats["steps"].values())


@pytest.mark.full
def test_compiled(checkpoint):
    options = {**FLOAT32, "enforce_eager": False}
    stock = engines.generate(checkpoint("qwen3_moe"), **options)
    run = engines.generate(checkpoint("qwen3_moe"), {"slots": "50%", "plane": "pointers"}, **options)
    assert_same_tokens(run, stock)
    assert run.stats["misses"] > 0
