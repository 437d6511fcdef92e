"""Same tokens as stock vLLM of requests that come, end, are aborted and preempted at any time."""

from __future__ import annotations

import json
from pathlib import Path

import forked
import pytest
from compare import METHODS, TOY

# Eight requests would use 40 blocks at once.
OPTIONS = {"dtype": "float32", "block_size": 32, "num_gpu_blocks_override": 14}
ABORTED = "3"


def run(spac: dict | None, paced: bool = False, **options) -> dict:
    """What an engine of its own said (``coming_runs``)."""
    asked = {"model": str(TOY / "target"), "spac": spac, "options": OPTIONS | options, "abort": ABORTED, "paced": paced}
    return forked.answer(forked.run([Path(__file__).with_name("coming_runs.py"), json.dumps(asked)]))


@pytest.fixture(scope="module")
def stock() -> dict[str, list[int]]:
    """Without drafts, which change no token in float32."""
    return run(None)["said"]


@pytest.mark.parametrize(("method", "paced"), [("", False), ("eagle3", False), ("eagle3", True)])
def test_same_tokens_as_stock(method: str, paced: bool, stock, tmp_path) -> None:
    """``paced``: steps leave prompts out, as those of a server do."""
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(tmp_path)}
    found = run(spac, paced, **({"speculative_config": METHODS[method]} if method else {}))
    assert (found["left_out"] > 10) is paced
    assert found["preempted"] > 0, "no request was preempted"
    assert found["stats"]["loads"] > 0, "all experts were in slots"
    assert found["said"].keys() == stock.keys()
    for name, tokens in found["said"].items():
        if name == ABORTED:
            assert len(tokens) >= 20 and tokens[:20] == stock[name][:20]
        else:
            assert tokens == stock[name] and len(tokens) == 60 + 9 * int(name)
