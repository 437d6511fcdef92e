"""Experts that have slots for good, since host memory has no room for them: stock's tokens, and what they take."""

from __future__ import annotations

import engines
import pytest
from exactness import FLOAT32, assert_same_tokens

from vllm_spac.integration.loading import assembly, packing
from vllm_spac.storage import host


@pytest.mark.parametrize("knobs", [{}, {"cpu_experts": "2"}], ids=["", "cpu"])
def test_same_tokens_as_stock(knobs, checkpoint, monkeypatch) -> None:
    """Half of the experts have slots, a third of these for good."""
    stock = engines.generate(checkpoint("qwen3_moe"), **FLOAT32)
    plain = engines.generate(checkpoint("qwen3_moe"), {"slots": "50%", "plane": "pointers", **knobs}, **FLOAT32)
    experts, nbytes = plain.stats["experts"], plain.stats["expert_bytes"]
    count = experts // 6
    room = (experts - count) * nbytes + assembly.HOST_RESERVE
    for module in (packing, host):
        monkeypatch.setattr(module, "available_host_bytes", lambda: room + nbytes // 2)
    run = engines.generate(checkpoint("qwen3_moe"), {"slots": "50%", "plane": "pointers", **knobs}, **FLOAT32)
    assert_same_tokens(run, stock)
    stats = run.stats
    assert (stats["settled"], plain.stats["settled"]) == (count, 0)
    assert stats["slots"] == plain.stats["slots"] == stats["resident"]
    assert sum(stats["host_bytes"].values()) < sum(plain.stats["host_bytes"].values())
    assert stats["hits"] > 0 and stats["loads"] > 0 and stats["misses"] > plain.stats["misses"] * 0.9
