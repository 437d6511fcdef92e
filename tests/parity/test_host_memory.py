"""Same greedy tokens as stock vLLM with three tiers: slots, host memory and disk."""

from __future__ import annotations

import pytest
from compare import METHODS, TOY, compare
from exactness import assert_same_tokens

from vllm_spac.config.config import SpacConfig
from vllm_spac.errors import ConfigError
from vllm_spac.integration.loading import assembly
from vllm_spac.storage.checkpoint.headers import read_checkpoint

EXPERTS = sum(read_checkpoint(TOY / "target").layer_bytes.values())


@pytest.mark.parametrize("prefetch", [pytest.param("off", marks=pytest.mark.full), "utility"])
def test_same_tokens_as_stock(prefetch, tmp_path):
    """Little host memory, exclusive of the slots, and much of it, inclusive; with drafts, whose steps miss most."""
    common = {"store": "disk", "disk_dir": str(tmp_path), "guard": "off", "prefetch": prefetch}
    little = {**common, "slots": "25%", "host_memory": int(0.3 * EXPERTS)}
    much = {**common, "slots": "12%", "host_memory": int(0.6 * EXPERTS)}
    stock, *runs = compare(TOY / "target", [None, little, much], speculative_config=METHODS["eagle3"], max_tokens=32)
    for run in runs:
        assert_same_tokens(run, stock)
        assert 0 < run.stats["host_loads"] < run.stats["loads"], "a tier was not used, so nothing was tested"
        assert run.stats["bytes"]["host"] > 0 and run.stats["bytes"]["disk"] > 0
    assert sum(runs[0].stats["bytes"].values()) == runs[0].stats["expert_bytes"] * (
        runs[0].stats["loads"] + runs[0].stats["prefetches"]
    )


def test_more_than_there_is_is_refused_with_what_can_be_given(monkeypatch):
    monkeypatch.setattr(assembly, "available_host_bytes", lambda: 2 << 30)
    config = SpacConfig.parse({"host_memory": "8GiB"})
    with pytest.raises(ConfigError, match="needs 8.00 GiB, and 2.00 GiB are available.*at most .* 1024MiB"):
        assembly.check_host_memory(config, 100 << 30)
    assembly.check_host_memory(config, 1 << 30)  # all experts of the model fit
