"""Sizes from ``config.json`` alone: those of the headers, for every family of the zoo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zoo

from vllm_spac.storage.checkpoint.described import described
from vllm_spac.storage.checkpoint.headers import read_checkpoint, read_config
from vllm_spac.tools.planning.architecture import Architecture


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_sizes_are_those_of_the_headers(checkpoint, family: str) -> None:
    folder = checkpoint(family)
    assert described(read_config(folder / "config.json"), folder) == read_checkpoint(folder)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_kv_cache_is_as_vllm_sizes_it(checkpoint, family: str) -> None:
    """By vLLM's own reading of the config; a window is kept by one kind of layers only."""
    from vllm.config import ModelConfig, ParallelConfig

    folder = checkpoint(family)
    model, parallel = ModelConfig(model=str(folder), dtype="bfloat16"), ParallelConfig()
    found = Architecture.of(read_config(folder / "config.json"), folder)
    values = 1 if model.use_mla else 2
    each = values * model.get_num_kv_heads(parallel) * model.get_head_size() * 2
    assert (found.layer_kv, found.hidden, found.vocabulary) == (each, model.get_hidden_size(), model.get_vocab_size())
    assert len(found.windows) == model.get_num_layers(parallel)
    full = sum(window is None for window in found.windows)
    assert set(found.windows) <= {None, 128} and found.token_bytes == each * len(found.windows)
    assert (full < len(found.windows)) == (family == "gpt_oss")


def test_a_tied_matrix_is_counted_once(checkpoint, tmp_path: Path) -> None:
    config = read_config(checkpoint("qwen3_moe") / "config.json")
    tied = described(config | {"tie_word_embeddings": True}, tmp_path)
    assert described(config, tmp_path).other_bytes - tied.other_bytes == 2 * 512 * 128
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert Architecture.of(read_config(tmp_path / "config.json"), tmp_path).tied
