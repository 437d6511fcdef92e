"""A head that drafts some of the target's tokens only, as published EAGLE-3 heads do (``d2t``): chains and trees."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from compare import METHODS, TOY, compare
from exactness import FLOAT32, assert_same_tokens
from safetensors.torch import load_file, save_file

TOKENS = 48
EXACT = {"slots": "25%", "store": "host"}
TREE = {"tree": 16, "guard": "off"}
HEAD = {name: value for name, value in METHODS["eagle3"].items() if name != "num_speculative_tokens"}
BATCH = FLOAT32 | {"max_num_batched_tokens": 256, "block_size": 32, "num_gpu_blocks_override": None}


def drafter(folder: Path, mapped: bool = True) -> str:
    """Writes the toy's head with two thirds of its output rows, so that a row's number is no token's.

    Args:
        mapped: whether ``d2t`` says which tokens the rows are of.
    """
    every = torch.arange(json.loads((TOY / "eagle3" / "config.json").read_text())["vocab_size"])
    ids = every[every % 3 != 0]
    shutil.copytree(TOY / "eagle3", folder, ignore=shutil.ignore_patterns("*.xz"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][ids].contiguous()
    tensors["d2t"] = (ids - torch.arange(len(ids))) * mapped
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"draft_vocab_size": len(ids)}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def stock():
    """What the target says without drafts."""
    [run] = compare(TOY / "target", [None], max_tokens=TOKENS, **FLOAT32)
    return run


def test_chains_that_a_chooser_cuts(stock, tmp_path: Path) -> None:
    drafts = METHODS["eagle3"] | {"model": drafter(tmp_path / "head")}
    [run] = compare(TOY / "target", [EXACT], max_tokens=TOKENS, speculative_config=drafts, **FLOAT32)
    assert_same_tokens(run, stock)
    assert run.stats["steps"]["verify"] > 0 and len(run.stats["guard"]["steps"]) > 1, "nothing was decided"


def test_trees(stock, tmp_path: Path) -> None:
    """And without the map, the row of a token taken for the token, far less is accepted."""
    accepted = []
    for mapped in (True, False):
        drafts = HEAD | {"model": drafter(tmp_path / str(mapped), mapped)}
        [run] = compare(TOY / "target", [EXACT | TREE], max_tokens=TOKENS, speculative_config=drafts, **BATCH)
        assert_same_tokens(run, stock)
        accepted.append(sum(int(tokens) * count for tokens, count in run.stats["tree_accepted"].items()))
    assert accepted[0] > 100 and accepted[1] < 0.3 * accepted[0], accepted
