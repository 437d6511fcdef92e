"""Experts on the CPU in real engines: the tokens of stock vLLM in float32, and how many of them in bfloat16.

Only the last sum of a layer is rounded otherwise than in stock. In float32 that is some 1e-7 of a logit; the two best
logits of a random model are that near once in about 1e6 tokens, and these runs have 128. bfloat16 is off by 1e-2.
"""

from __future__ import annotations

import engines
import pytest
from compare import compare


@pytest.fixture(scope="module")
def exact(checkpoint) -> engines.Run:
    return engines.generate(checkpoint("qwen3_moe"), dtype="float32")


# Policies and numbers of slots take turns, so that each is seen beside each way to divide.
@pytest.mark.parametrize(
    "spac",
    [
        {"slots": 4, "cpu_experts": 2},
        {"slots": "25%", "cpu_experts": "auto", "policy": "utility", "balancer": "threshold"},
        pytest.param({"slots": "60%", "cpu_experts": "auto"}, marks=pytest.mark.full),
        {"slots": "60%", "cpu_experts": 64, "prefetch": "utility"},
    ],
    ids=str,
)
def test_same_tokens_as_stock_in_float32(spac, exact, checkpoint):
    run = engines.generate(checkpoint("qwen3_moe"), {**spac, "store": "host"}, dtype="float32")
    assert run.tokens == exact.tokens
    assert run.stats["mode"] == "exact up to rounding"
    assert run.stats["cpu_rows"] >= run.stats["cpu_experts"] > 0
    assert spac["cpu_experts"] != 64 or run.stats["loads"] == 0, "all that is missing runs on the CPU"


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v2", "mixtral"])
def test_other_experts(family, checkpoint):
    """Biases and clamped activations; shared experts; the widest experts."""
    stock = engines.generate(checkpoint(family), dtype="float32")
    run = engines.generate(checkpoint(family), {"slots": "40%", "store": "host", "cpu_experts": 1}, dtype="float32")
    assert run.tokens == stock.tokens and run.stats["cpu_experts"] > 0


def test_agreement_in_bfloat16(checkpoint, stock):
    """Tokens until the first near-tie that rounding decides; after it, texts differ. Reported, and not nothing."""
    spac = {"slots": "25%", "store": "host", "cpu_experts": 2}
    run, same = engines.generate(checkpoint("qwen3_moe"), spac), 0
    for ours, theirs in zip(run.tokens, stock("qwen3_moe").tokens, strict=True):
        same += next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(ours))
    print(f"{same} of {sum(map(len, run.tokens))} tokens before the first difference of a text")
    assert run.stats["cpu_experts"] > 0
    assert same > len(run.tokens), "each text's first token is one forward away from stock's, and more agree"


@pytest.mark.full
def test_verify_steps(tmp_path):
    """With drafts, a trace and float32: speculation changes which rows run together, and nothing else."""
    from test_speculation import METHODS, TOY

    spac = {"slots": "25%", "store": "host", "cpu_experts": 4, "trace": str(tmp_path / "trace")}
    options = {"speculative_config": METHODS["eagle3"], "max_tokens": 16, "dtype": "float32"}
    stock, run = compare(TOY / "target", [None, spac], **options)
    assert run.tokens == stock.tokens
    assert run.stats["steps"]["verify"] > 0 and run.stats["cpu_experts"] > 0
    assert (tmp_path / "trace").stat().st_size > 0
