"""Same greedy tokens as stock vLLM with speculative decoding, on the trained toy model and its drafts."""

from __future__ import annotations

import pytest
from compare import METHODS, TOY, compare, copied
from exactness import assert_same_tokens


@pytest.mark.parametrize("method", METHODS)
def test_same_tokens_as_stock(method, tmp_path):
    # Without the guard every step has stock's shape: where kernels round by shape (AMX), so do near-ties.
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(tmp_path), "policy": "lfu", "guard": "off"}
    stock, run = compare(TOY / "target", [None, spac], speculative_config=METHODS[method], max_tokens=32)
    assert_same_tokens(run, stock)
    assert run.stats["steps"]["verify"] > 0, "nothing was verified, so nothing was tested"
    assert run.stats["misses"] > 0 and run.stats["hits"] > 0


def test_same_tokens_whatever_the_guard_decides(tmp_path):
    """In float32, whose rounding by shape is far below any gap between the toy's best two tokens."""
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(tmp_path)}
    stock, run = compare(
        TOY / "target", [None, spac], speculative_config=METHODS["eagle3"], max_tokens=48, dtype="float32"
    )
    assert_same_tokens(run, stock)
    assert len(run.stats["guard"]["steps"]) > 1, "one draft length only, so nothing was decided"


def test_a_budget_that_no_step_exceeds_changes_nothing(tmp_path):
    """One request at a time, of five rows in a verify step: 40 of 64 experts at most; votes weigh rows at will."""
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(tmp_path), "guard": "off"}
    bound = {"budget": 5 * 8, "budget_votes": "path"}
    options = {"speculative_config": METHODS["eagle3"], "max_tokens": 32, "max_num_seqs": 1}
    stock, run = compare(TOY / "target", [None, spac | bound], **options)
    assert_same_tokens(run, stock)
    counted = run.stats["budget"]
    assert run.stats["mode"] == "lossy" and counted["rows"] > 500, "nothing was under the budget"
    assert (counted["dropped_weight"], counted["emptied"], counted["unweighted"]) == (0, 0, 0)


def test_a_moe_draft_stays_stock(tmp_path):
    """A copy of the target drafts: every draft is accepted, and the draft's experts are not managed."""
    draft = {"method": "draft_model", "model": copied(TOY / "target"), "num_speculative_tokens": 3}
    spac = {"slots": "50%", "store": "disk", "disk_dir": str(tmp_path), "guard": "off"}
    stock, run = compare(TOY / "target", [None, spac], speculative_config=draft, max_tokens=16)
    assert_same_tokens(run, stock)
    assert run.stats["experts"] == 6 * 64
