"""Same greedy tokens as stock vLLM with speculative decoding, on the trained toy model and its drafts."""

from __future__ import annotations

import engines
import forked
import pytest
from compare import METHODS, TOY, compare, program
from exactness import assert_same_tokens

from vllm_spac.integration.hooks import patches


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


def test_same_tokens_without_any_row_that_can_be_switched_off(tmp_path):
    """Its guard is left out, and all else that only such a name gives; stock is that of the test above."""
    options = {"speculative_config": METHODS["eagle3"], "max_tokens": 48, "dtype": "float32"}
    [stock] = compare(TOY / "target", [None], **options)
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(tmp_path)}
    off = [patch.target for patch in patches.PATCHES if patch.loses]
    changes = {patches.WITHOUT: ",".join(off), "VLLM_LOGGING_LEVEL": "INFO"}
    done = forked.run(program(TOY / "target", spac, **options), changes)
    run = engines.Run(**forked.answer(done))
    assert_same_tokens(run, stock)
    assert run.stats["steps"]["verify"] > 0 and run.stats["misses"] > 0 and "guard" not in run.stats
    said = done.stdout + done.stderr
    for sentence in {patch.loses for patch in patches.PATCHES if patch.loses}:
        assert f": {sentence}" in said, "the log names what is lost"
    assert f"guard=on has no effect here: {patches.WITHOUT} switches off" in said


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
    """The target drafting for itself: every draft is accepted, and the draft's experts are not managed."""
    draft = {"method": "draft_model", "model": str(TOY / "target"), "num_speculative_tokens": 3}
    spac = {"slots": "50%", "store": "disk", "disk_dir": str(tmp_path), "guard": "off"}
    stock, run = compare(TOY / "target", [None, spac], speculative_config=draft, max_tokens=16)
    assert_same_tokens(run, stock)
    assert run.stats["experts"] == 6 * 64
