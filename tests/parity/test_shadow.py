"""A draft model that predicts: by its own routers (a quantised copy), or by the model's, on what its layers compute.

Stock vLLM's tokens, and experts that were named are used.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from compare import compare, copied
from exactness import FLOAT32, assert_same_tokens
from shadow_runs import TARGET, shadowed

from benchmarks.toy import quantize

LAYERS, TOP_K, DRAFTS = 6, 8, 4


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The toy model with its weights rounded to INT8, as bf16: vLLM has no INT8 experts on every CPU."""
    folder = tmp_path_factory.mktemp("copy")
    quantize.rounded_copy(TARGET, folder / "int8")
    return folder / "int8"


def drafting(model: Path | str) -> dict:
    speculation = {"method": "draft_model", "model": str(model), "num_speculative_tokens": DRAFTS}
    return FLOAT32 | {"speculative_config": speculation, "max_tokens": 32, "gpu_memory_utilization": 0.2}


def test_stock_s_tokens_and_most_reads_are_used(copy: Path, tmp_path: Path) -> None:
    options = drafting(copy)
    run, heard = shadowed(tmp_path, options)
    [stock] = compare(TARGET, [None], **options)
    assert_same_tokens(run, stock)
    assert heard["read"] * (DRAFTS + 1) == heard["rows"] * DRAFTS > 300, "all but the last draft of each request"
    assert heard["pairs"] == heard["read"] * LAYERS * TOP_K
    assert heard["right"] > 0.97 * heard["pairs"], "a shadow that is aligned is nearly always right"
    stats = run.stats
    assert stats["prefetches"] > 300 and stats["prefetch_hits"] > 0.85 * stats["prefetches"], stats
    assert stats["prefetch_failed"] == 0
    needed = stats["loads"] + stats["prefetch_hits"] - stats["prefetch_harmful"]
    assert stats["loads"] + stats["prefetches"] <= 1.1 * needed, stats


def test_the_model_s_own_routers_on_the_layers_of_a_draft_model(copy: Path, tmp_path: Path) -> None:
    """Four experts of each row, of the first layer: those of several together do not fit into the slots."""
    options = drafting(copy)
    run, heard = shadowed(tmp_path, options, prefetch="draft_gate@k=4@cutoff=1")
    [stock] = compare(TARGET, [None], **options)
    assert_same_tokens(run, stock)
    assert heard["pairs"] == heard["read"] * LAYERS * 4 > 1000
    assert heard["right"] > 0.97 * heard["pairs"], "the first four of eight: more are chosen than of all eight"
    stats = run.stats
    assert stats["prefetches"] > 100 and stats["prefetch_hits"] > 0.85 * stats["prefetches"], stats
    assert stats["prefetch_hits"] + stats["prefetch_wasted"] <= stats["prefetches"]


@pytest.mark.parametrize("prefetch", ["shadow", pytest.param("draft_gate", marks=pytest.mark.full)])
def test_the_device_reads_what_drafts_name(copy: Path, tmp_path: Path, prefetch: str) -> None:
    """Over pointers, before the step that verifies them. A request at a time: more name more than is read."""
    options = drafting(copy) | {"max_num_seqs": 1}
    knobs = {"plane": "pointers", "store": None, "disk_dir": None, "prefetch": prefetch}
    run, _ = shadowed(tmp_path, options, **knobs)
    [stock] = compare(TARGET, [None], **options)
    assert_same_tokens(run, stock)
    stats = run.stats
    assert stats["prefetches"] > 100 and stats["prefetch_hits"] > 0.5 * stats["prefetches"], stats
    unused = stats["bytes"]["host ahead"]
    assert 0 < unused <= stats["prefetch_wasted"] * stats["expert_bytes"]


@pytest.mark.full
@pytest.mark.parametrize("prefetch", ["shadow", "draft_gate"])
def test_the_model_as_its_own_draft_model_is_always_right(prefetch: str, tmp_path: Path) -> None:
    """A copy in bits, compiled, a request at a time, and with the guard, which skips drafts by the clock."""
    options = drafting(copied(TARGET)) | {"enforce_eager": False, "max_num_seqs": 1}
    run, heard = shadowed(tmp_path, options, prefetch=prefetch)
    [stock] = compare(TARGET, [None], **options)
    assert_same_tokens(run, stock)
    assert heard["right"] > 0.999 * heard["pairs"] > 1000
    assert run.stats["prefetch_hits"] > 0.9 * run.stats["prefetches"] > 100
    guarded, heard = shadowed(tmp_path, options | {"enforce_eager": True}, guard="on", prefetch=prefetch)
    assert_same_tokens(guarded, stock)


@pytest.mark.full
def test_workers_are_told_what_the_shadow_named(copy: Path, tmp_path: Path) -> None:
    options = drafting(copy) | {"max_num_seqs": 2}
    knobs = {"executor": "processes@workers=2", "store": None}
    run, heard = shadowed(tmp_path, options, **knobs)
    [stock] = compare(TARGET, [None], **options)
    assert_same_tokens(run, stock)
    assert heard["right"] > 0.97 * heard["pairs"] > 1000
    assert run.stats["prefetch_hits"] > 100, run.stats
