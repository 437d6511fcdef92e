"""A model that is its own draft model: stock vLLM's tokens, no second copy, and drafts that wait for no expert."""

from __future__ import annotations

from pathlib import Path

import engines
import pytest
from compare import compare
from exactness import FLOAT32, assert_same_tokens
from shadow_runs import TARGET, shadowed

LAYERS, DRAFTS = 6, 4
# Each prompt twice, a few at a time, so that the later ones find keys and values of the first in the cache.
ASKED = FLOAT32 | {"prompts": [*engines.PROMPTS, *engines.PROMPTS], "max_tokens": 24, "max_num_seqs": 3}
CACHED = {"enable_prefix_caching": True}


def own(model: Path | str) -> dict:
    return {"speculative_config": {"method": "draft_model", "model": str(model), "num_speculative_tokens": DRAFTS}}


def slots(folder: Path, **knobs) -> dict:
    return {"slots": "25%", "store": "disk", "disk_dir": str(folder), "guard": "off"} | knobs


@pytest.mark.skipif(engines.V2, reason="a model drafts for itself with V1's runner only")
def test_stock_s_tokens_from_one_copy_of_the_model(tmp_path: Path) -> None:
    """What its routers would choose is read meanwhile; several requests, prompts in chunks, and shared prefixes."""
    [stock] = compare(TARGET, [None], **ASKED, **CACHED)
    run, heard = shadowed(tmp_path, ASKED | CACHED | own(TARGET))
    assert_same_tokens(run, stock)
    # 73 to 76 % in six runs, by what had been read in time; one in eight by chance.
    assert heard["right"] > 0.6 * heard["pairs"] > 1000, "mostly, drafts name the experts that their tokens need"
    assert run.stats["prefetch_hits"] > 500, run.stats
    steps, emitted = run.stats["waves"] / LAYERS, sum(map(len, run.tokens))
    assert steps < 0.6 * emitted / 3 + 2 * len(run.tokens), "drafts were accepted"


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": False},
        {"max_num_seqs": 8, "num_gpu_blocks_override": 40},
        {"async_scheduling": True},
    ],
    ids=["compiled", "preempted", "in advance"],
)
def test_stock_s_tokens_however_it_is_scheduled(options: dict, tmp_path: Path) -> None:
    [stock] = compare(TARGET, [None], **ASKED | options)
    [run, guarded] = compare(
        TARGET, [slots(tmp_path), slots(tmp_path, guard="on", prefetch="shadow")], **ASKED | options | own(TARGET)
    )
    assert_same_tokens(run, stock)
    assert_same_tokens(guarded, stock)


@pytest.mark.full
@pytest.mark.parametrize("knobs", [{"slots": "2k"}, {"slots": "100%"}, {"plane": "table"}, {"cpu_experts": "auto"}])
def test_stock_s_tokens_whatever_is_in_slots(knobs: dict, tmp_path: Path) -> None:
    """With fewer experts than a row needs, of one layer or all; with a kernel of our own, and with the CPU's share."""
    store = {"store": "host", "disk_dir": None} if "cpu_experts" in knobs else {}
    [stock] = compare(TARGET, [None], **ASKED)
    [run] = compare(TARGET, [slots(tmp_path, **store, **knobs)], **ASKED | own(TARGET))
    assert_same_tokens(run, stock)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "mixtral"])
def test_stock_s_tokens_of_other_families(family: str, tmp_path: Path, checkpoint) -> None:
    """Softmax with and without renormalisation, and few large experts."""
    model = checkpoint(family)
    [stock] = compare(model, [None], **ASKED)
    [run] = compare(model, [slots(tmp_path)], **ASKED | own(model))
    assert_same_tokens(run, stock)
