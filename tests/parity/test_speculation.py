"""Same greedy tokens as stock vLLM with speculative decoding, on the trained toy model and its drafts."""

from __future__ import annotations

import json
from pathlib import Path

import engines
import forked
import pytest
import torch
from compare import METHODS, TOY, compare, copied, program
from exactness import assert_same_tokens
from safetensors.torch import save_file

from vllm_spac.integration.hooks import patches


@pytest.mark.v2
@pytest.mark.parametrize("method", METHODS)
def test_same_tokens_as_stock(method, tmp_path):
    # Without the guard every step has stock's shape: where kernels round by shape (AMX), so do near-ties.
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(tmp_path), "policy": "lfu", "guard": "off"}
    stock, run = compare(TOY / "target", [None, spac], speculative_config=METHODS[method], max_tokens=32)
    assert_same_tokens(run, stock)
    assert run.stats["steps"]["verify"] > 0, "nothing was verified, so nothing was tested"
    assert run.stats["misses"] > 0 and run.stats["hits"] > 0


@pytest.mark.v2
def test_same_tokens_whatever_the_guard_decides(tmp_path):
    """In float32, whose rounding by shape is far below any gap between the toy's best two tokens."""
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(tmp_path)}
    stock, run = compare(
        TOY / "target", [None, spac], speculative_config=METHODS["eagle3"], max_tokens=48, dtype="float32"
    )
    assert_same_tokens(run, stock)
    assert len(run.stats["guard"]["steps"]) > 1, "one draft length only, so nothing was decided"


def test_same_tokens_with_n_grams_in_place_of_a_heads_drafts(tmp_path):
    """Several requests at once, of which some repeat themselves; steps are shorter in drafts made, never in tokens."""
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(tmp_path)}
    options = {"speculative_config": METHODS["eagle3"], "max_tokens": 48, "dtype": "float32"}
    stock, run, plain = compare(TOY / "target", [None, spac | {"guard": "on@lookups=on"}, spac], **options)
    assert_same_tokens(run, stock)
    assert_same_tokens(plain, stock)
    assert run.stats["guard"]["looked_up"] > 0, "no n-gram was found, so nothing was tested"
    assert plain.stats["guard"]["looked_up"] == 0


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
    bound = {"budget": f"{5 * 8}@votes=path"}
    options = {"speculative_config": METHODS["eagle3"], "max_tokens": 32, "max_num_seqs": 1}
    stock, run = compare(TOY / "target", [None, spac | bound], **options)
    assert_same_tokens(run, stock)
    counted = run.stats["budget"]
    assert run.stats["mode"] == "lossy" and counted["rows"] > 500, "nothing was under the budget"
    assert (counted["dropped_weight"], counted["emptied"], counted["unweighted"]) == (0, 0, 0)


DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "intermediate_size": 512,
    "dflash_config": {"mask_token_id": 2047, "target_layer_ids": [1, 3, 5]},
}
_COPIED = "hidden_size head_dim num_attention_heads num_key_value_heads vocab_size max_position_embeddings rms_norm_eps"


def dflash(folder: Path) -> None:
    """Writes a random DFlash drafter of one layer for the toy: it drafts its tokens in one forward."""
    target = json.loads((TOY / "target" / "config.json").read_text())
    config = DFLASH | {name: target[name] for name in _COPIED.split()} | {"rope_theta": 1e4, "hidden_act": "silu"}
    d, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config["head_dim"] * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    sizes = {"fc": (d, 3 * d), "layers.0.self_attn.q_proj": (queries, d), "layers.0.self_attn.o_proj": (d, queries)}
    sizes |= {f"layers.0.self_attn.{name}_proj": (keys, d) for name in "kv"} | {"layers.0.mlp.down_proj": (d, inner)}
    sizes |= {f"layers.0.mlp.{name}_proj": (inner, d) for name in ("gate", "up")}
    ones = {
        name: d for name in ("hidden_norm", "norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    }
    ones |= {f"layers.0.self_attn.{name}_norm": config["head_dim"] for name in "qk"}
    torch.manual_seed(0)
    tensors = {f"{name}.weight": 0.05 * torch.randn(size) for name, size in sizes.items()}
    save_file(
        tensors | {f"{name}.weight": torch.ones(size) for name, size in ones.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))


def test_a_dflash_drafter_is_served(tmp_path):
    """Drafts of one parallel forward, with the guard, which drafts none and some."""
    dflash(tmp_path)
    drafter = {"method": "dflash", "model": str(tmp_path), "num_speculative_tokens": 4}
    options = {"speculative_config": drafter, "max_tokens": 32, "dtype": "float32"}
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(tmp_path / "packed")}
    stock, run = compare(TOY / "target", [None, spac], **options)
    assert_same_tokens(run, stock)
    assert run.stats["steps"]["verify"] > 0
    assert engines.V2 or len(run.stats["guard"]["steps"]) > 1  # V2's guard was not tried with these


PAIRS = """
class Pairs:
    def __init__(self, vllm_config):
        pass

    def propose(self, sampled, lengths, tokens, slot_mappings=None):
        return [tokens[i, lengths[i] - 2 : lengths[i]].tolist() * 2 if new else [] for i, new in enumerate(sampled)]

    def load_model(self, *args):
        pass
"""


@pytest.mark.skipif(engines.V2, reason="vLLM's V2 runner has no drafters of the user's")
def test_drafts_that_the_plugin_knows_nothing_of_are_verified_as_stock_does(tmp_path):
    """A class of the user's: the guard leaves it alone, and it is asked in each step."""
    (tmp_path / "spac_pairs.py").write_text(PAIRS)
    drafter = {"method": "custom_class", "model": "spac_pairs.Pairs", "num_speculative_tokens": 4}
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(tmp_path / "packed")}
    stock, run = (
        engines.Run(
            **forked.answer(
                forked.run(
                    program(TOY / "target", each, speculative_config=drafter, max_tokens=32, dtype="float32"),
                    {"PYTHONPATH": str(tmp_path)},
                )
            )
        )
        for each in (None, spac)
    )
    assert_same_tokens(run, stock)
    steps = run.stats["steps"]
    assert "guard" not in run.stats and "decode" not in steps and sum(steps.values()) < 32 * len(stock.tokens)


def test_a_moe_draft_stays_stock(tmp_path):
    """A copy of the target drafts: every draft is accepted, and the draft's experts are not managed."""
    draft = {"method": "draft_model", "model": copied(TOY / "target"), "num_speculative_tokens": 3}
    spac = {"slots": "50%", "store": "disk", "disk_dir": str(tmp_path), "guard": "off"}
    stock, run = compare(TOY / "target", [None, spac], speculative_config=draft, max_tokens=16)
    assert_same_tokens(run, stock)
    assert run.stats["experts"] == 6 * 64
