"""Same greedy tokens as stock vLLM, for every family, store, and number of slots from the minimum to all."""

from __future__ import annotations

import engines
import pytest
import zoo
from exactness import assert_same_tokens

TOP_K = {"qwen3_moe": 4, "olmoe": 4, "mixtral": 2, "deepseek_v2": 4, "gpt_oss": 2, "phimoe": 2, "glm4_moe": 4}


@pytest.mark.parametrize("family", zoo.FAMILIES)
@pytest.mark.parametrize("spac", [{"slots": "minimum"}, {"slots": "60%", "policy": "lfu"}, {"slots": "100%"}], ids=str)
def test_same_tokens_as_stock(family, spac, checkpoint, stock, tmp_path):
    knobs = {**spac, "disk_dir": str(tmp_path), "store": "disk"}
    if spac["slots"] == "minimum":
        knobs["slots"] = TOP_K[family]
    run = engines.generate(checkpoint(family), knobs)
    assert_same_tokens(run, stock(family), family)
    assert run.stats["resident"] <= run.stats["slots"]
    if spac["slots"] == "100%":
        assert run.stats["misses"] == 0 and run.stats["hits"] > 0
    else:
        reads = run.stats["loads"] + run.stats["prefetches"]
        assert reads >= run.stats["misses"] > 0
        assert sum(run.stats["bytes"].values()) == reads * run.stats["expert_bytes"]
