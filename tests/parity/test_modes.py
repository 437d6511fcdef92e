"""Exactness in vLLM's other modes: compiled, host store, batch of one, auto slots, fp32."""

from __future__ import annotations

import engines
import pytest
from exactness import FLOAT32, assert_same_tokens


@pytest.mark.parametrize(
    ("spac", "options"),
    [
        ({"slots": "40%", "store": "host", "policy": "lfu"}, {}),
        ({"slots": "7", "store": "host"}, {"max_num_seqs": 1}),
        ({"slots": "auto"}, {}),
        ({"slots": "25%"}, FLOAT32),
        ({"slots": "25%"}, {"max_num_batched_tokens": 256, "enable_chunked_prefill": False}),
    ],
    ids=str,
)
def test_same_tokens_as_stock(spac, options, checkpoint, tmp_path):
    if spac.get("store") != "host":
        spac = {**spac, "disk_dir": str(tmp_path)}
    model = checkpoint("qwen3_moe")
    stock, run = engines.generate(model, **options), engines.generate(model, spac, **options)
    assert_same_tokens(run, stock)
    if spac["slots"] == "auto":
        assert run.stats["slots"] == run.stats["experts"] and run.stats["store"] == "resident"


def test_steps_are_counted_by_kind(checkpoint, tmp_path):
    prompts, tokens = [[5, 6, 7] * 40], 8
    spac = {"slots": "50%", "disk_dir": str(tmp_path)}
    run = engines.generate(checkpoint("qwen3_moe"), spac, prompts=prompts, max_tokens=tokens)
    assert run.stats["steps"] == {"prefill": 2, "decode": tokens - 1}  # 120 prompt tokens, 64 a forward


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_compiled(family, checkpoint, tmp_path):
    options = {"enforce_eager": False}
    spac = {"slots": "40%", "disk_dir": str(tmp_path)}
    stock = engines.generate(checkpoint(family), **options)
    run = engines.generate(checkpoint(family), spac, **options)
    assert_same_tokens(run, stock)
    assert run.stats["misses"] > 0
