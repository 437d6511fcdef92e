"""The KV cache of a request: what vLLM's own layers say, once they are built, and what is known before, agree."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import from_vllm
import pytest
import tiny_models
import torch

from vllm_spac.integration.loading import fast_memory
from vllm_spac.storage.checkpoint.kv_layers import Steps
from vllm_spac.tools.planning.architecture import Architecture

CONTEXT, ROWS = 1000, 256


class Family(NamedTuple):
    """What a model's layers keep of a request, by vLLM's specs of them."""

    specs: dict[str, int]  # layers of each class of specs
    # What is known before layers exist is at most so much more: of smaller blocks than are assumed; of layers that are
    # all counted with the largest head. A plan reads the smaller heads in ``config.json``.
    known: float = 1.0
    planned: float = 1.0


FAMILIES = {
    "Qwen3MoeForCausalLM": Family({"FullAttentionSpec": 4}),
    "GptOssForCausalLM": Family({"FullAttentionSpec": 1, "SlidingWindowSpec": 1}),
    "AfmoeForCausalLM": Family({"FullAttentionSpec": 1, "SlidingWindowSpec": 2}),
    "Gemma4ForCausalLM": Family({"FullAttentionSpec": 1, "SlidingWindowSpec": 2}, known=1.25),
    "Llama4ForCausalLM": Family({"FullAttentionSpec": 1, "ChunkedLocalAttentionSpec": 3}),
    "DeepseekV3ForCausalLM": Family({"MLAAttentionSpec": 3}, known=1.1, planned=1.1),
    "Qwen3NextForCausalLM": Family({"FullAttentionSpec": 1, "MambaSpec": 3}),
    "JambaForCausalLM": Family({"FullAttentionSpec": 1, "MambaSpec": 3}),
    "GraniteMoeHybridForCausalLM": Family({"FullAttentionSpec": 1, "MambaSpec": 2}),
    "Lfm2MoeForCausalLM": Family({"FullAttentionSpec": 1, "MambaSpec": 2}),
}


@contextlib.contextmanager
def engine(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("VLLM_PLUGINS", "")
    options = tiny_models.write(name, folder)
    sizes = dict(max_model_len=CONTEXT, max_num_batched_tokens=ROWS, max_num_seqs=4, enable_prefix_caching=True)
    with from_vllm.built(folder, options | sizes) as (config, _):
        yield config


def specs_of(config: Any) -> dict[str, int]:
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    kinds = [type(spec).__name__ for spec in get_kv_cache_spec(config).values()]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def suffices(config: Any, nbytes: int) -> bool:
    """Whether vLLM starts with a KV cache of this size, by its own check; after ``fast_memory.built`` of a copy."""
    from vllm.platforms import current_platform
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    current_platform.update_block_size_for_backend(config)
    config.cache_config.kv_cache_layout = config.cache_config.kv_cache_layout or "LBHNC"
    try:
        get_kv_cache_configs(config, [get_kv_cache_spec(config)], [nbytes])
    except ValueError as error:
        assert "max seq len" in str(error)
        return False
    return True


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_request_takes_is_what_vllm_reserves(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES[name]
    with engine(name, tmp_path, monkeypatch) as config:
        assert specs_of(config) == dict(sorted(family.specs.items()))
        before = dict(vars(config.cache_config)), config.model_config.max_model_len
        wanted, known = fast_memory.built(config), fast_memory.by_config(config)
        shorter = fast_memory.built(config, CONTEXT // 2)
        assert (dict(vars(config.cache_config)), config.model_config.max_model_len) == before, "asked of copies"
        steps = Steps(CONTEXT, config.max_in_flight_tokens, on_cpu=True)
        planned = Architecture.of(json.loads((tmp_path / "config.json").read_text()), tmp_path).blocks(steps)
        for found, factor in ((known, family.known), (planned, family.planned)):
            assert wanted.request_bytes <= found.request_bytes <= factor * wanted.request_bytes
            assert found == wanted or factor > 1
        assert 0 < shorter.number < wanted.number and shorter.nbytes == wanted.nbytes
        least = fast_memory.one_request(config)
        assert least is not None and least <= wanted.request_bytes
        assert suffices(config, wanted.pool_bytes(1)) and not suffices(config, wanted.pool_bytes(1) - wanted.nbytes)


def test_sparse_attention_keeps_keys_of_its_indexer_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM builds DeepSeek V3.2 on a GPU only: its indexers' caches stand here beside the layers of V3."""
    with engine("DeepseekV3ForCausalLM", tmp_path, monkeypatch) as config:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

        without = fast_memory.built(config)
        with set_current_vllm_config(config):
            for layer in range(3):
                DeepseekV32IndexerCache(132, torch.uint8, f"indexer.{layer}", config.cache_config)
        said = {"index_topk": 64, "index_head_dim": 128, "index_n_heads": 4}
        for field, value in said.items():
            setattr(config.model_config.hf_text_config, field, value)
        wanted, known = fast_memory.built(config), fast_memory.by_config(config)
        assert wanted.request_bytes / without.request_bytes == 1 + 132 / (576 * 2)
        assert wanted.request_bytes <= known.request_bytes < 1.1 * wanted.request_bytes
        assert suffices(config, wanted.pool_bytes(1)) and not suffices(config, wanted.pool_bytes(1) - wanted.nbytes)
        content = json.loads((tmp_path / "config.json").read_text()) | said
        assert Architecture.of(content, tmp_path).token_bytes == 3 * (576 * 2 + 132)
        third = Architecture.of(content | {"index_topk_freq": 3}, tmp_path)
        assert third.token_bytes == 3 * 576 * 2 + 2 * 132, "layers that share another's choice have none"
