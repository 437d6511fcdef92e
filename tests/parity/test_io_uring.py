"""Same greedy tokens as stock vLLM where the missed experts of a layer are read together."""

from __future__ import annotations

import pytest
from compare import METHODS, TOY, compare
from exactness import assert_same_tokens

from vllm_spac.errors import ConfigError
from vllm_spac.system.io_uring import Ring


def test_same_tokens_as_stock(tmp_path):
    """With drafts, whose steps miss most, beside reads ahead, which threads do."""
    try:
        Ring().close()
    except ConfigError as error:
        pytest.skip(str(error))
    common = {"store": "disk", "disk_dir": str(tmp_path), "guard": "off", "prefetch": "utility", "slots": "12%"}
    together = common | {"io_submit": "io_uring"}
    stock, run = compare(TOY / "target", [None, together], speculative_config=METHODS["eagle3"], max_tokens=32)
    assert_same_tokens(run, stock)
    assert run.stats["loads"] > 0 and run.stats["bytes"]["disk"] > 0
