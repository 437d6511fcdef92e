"""The KV cache of a plan is as large as vLLM takes it to be, from vLLM's own groups of layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_spac.decisions.costs import Costs
from vllm_spac.storage.checkpoint.published import find_model, published
from vllm_spac.tools.planning.planned_machine import PlannedMachine
from vllm_spac.tools.planning.planned_memory import Load, kv_bytes, rows
from vllm_spac.tools.planning.planned_model import ServedModel

QWEN3_NEXT = published()["Qwen/Qwen3-Next-80B-A3B-Instruct"]
# As published: ai21labs/Jamba-v0.1, ibm-granite/granite-4.0-h-small, nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B and
# LiquidAI/LFM2-8B-A1B; what their KV cache does not depend on is left out.
JAMBA = {
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
    "torch_dtype": "bfloat16",
}
GRANITE = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "hidden_size": 4096,
    "intermediate_size": 768,
    "layer_types": ["attention" if place in (5, 15, 25, 35) else "mamba" for place in range(40)],
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "shared_intermediate_size": 1536,
    "vocab_size": 100352,
    "torch_dtype": "bfloat16",
}
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "conv_kernel": 4,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_groups": 8,
    "n_routed_experts": 128,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "ssm_state_size": 128,
    "vocab_size": 131072,
    "torch_dtype": "bfloat16",
}
LFM2 = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "conv_L_cache": 3,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": ["full_attention" if place in (2, 6, 10, 14, 18, 21) else "conv" for place in range(24)],
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1792,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
    "torch_dtype": "bfloat16",
}
MODELS = {
    **{
        name: published()[name]
        for name in (
            "Qwen/Qwen3-30B-A3B",
            "mistralai/Mixtral-8x7B-Instruct-v0.1",
            "deepseek-ai/DeepSeek-V2-Lite-Chat",
            "openai/gpt-oss-20b",
        )
    },
    "windows everywhere": published()["mistralai/Mixtral-8x7B-Instruct-v0.1"] | {"sliding_window": 1024},
    "more windows than not": published()["openai/gpt-oss-20b"]
    | {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4},
    "Qwen3-Next": QWEN3_NEXT,
    "states in float32, as Qwen3.5 asks for": QWEN3_NEXT | {"mamba_ssm_dtype": "float32"},
    "Jamba": JAMBA,
    "Granite 4": GRANITE,
    "Nemotron 3": NEMOTRON,
    "LFM2": LFM2,
}
CPU = PlannedMachine("cpu", Costs.read("rtx4090"), 0, 64 << 30)
GPU = PlannedMachine("gpu", Costs.read("rtx4090"), 24 << 30, 64 << 30)
_BLOCK_GPU = 16  # tokens, of FlashAttention


def by_vllm(name: str, folder: Path, load: Load, on_gpu: bool, in_flight: int) -> int:
    """The bytes that vLLM wants for one request after another, and the block that it holds back."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core import kv_cache_utils

    drafts = {"method": "ngram", "num_speculative_tokens": load.drafts, "prompt_lookup_max": 4} if load.drafts else None
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=load.context,
        max_num_batched_tokens=in_flight,
        async_scheduling=False,
        mamba_ssm_cache_dtype="float32" if _is_wide(MODELS[name]) or not on_gpu else "bfloat16",
        block_size=_BLOCK_GPU if on_gpu else None,
        speculative_config=drafts,
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBNHC"  # as FlashAttention's; the engine's core would choose it
    specs = layers(config)
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    each = kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups)
    return load.concurrency * each + kv_cache_utils._pool_bytes_per_block(config, groups)


def _backend(on_gpu: bool) -> type:
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    class WithBlocksOfFlashAttention(CPUAttentionBackend):
        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list:
            return [MultipleOf(_BLOCK_GPU)]

    return WithBlocksOfFlashAttention if on_gpu else CPUAttentionBackend


def _is_wide(config: dict) -> bool:
    """Whether vLLM keeps states in float32: Nemotron's where its config says nothing."""
    return "mamba_ssm_dtype" in config or config["model_type"] == "nemotron_h"


def layers(config: Any) -> dict[str, Any]:
    """What each layer of the model would tell vLLM of its cache, by vLLM's reading of the config."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

    model, text = config.model_config, config.model_config.hf_text_config
    if model.is_hybrid:
        from vllm.platforms import current_platform

        backend = _backend(on_gpu=config.cache_config.block_size == _BLOCK_GPU)
        current_platform._find_non_ssm_backends = lambda _: [backend]  # no layer is built here
        current_platform._align_hybrid_block_size(config, backend)
        del current_platform._find_non_ssm_backends
    heads = model.get_num_kv_heads(config.parallel_config)
    sizes = {"num_kv_heads": heads, "head_size": model.get_head_size(), "dtype": torch.bfloat16}
    sizes["block_size"] = config.cache_config.block_size
    everywhere = "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"
    kinds = getattr(text, "layer_types", None) or [everywhere] * text.num_hidden_layers
    found: dict[str, Any] = {}
    for place, kind in enumerate(kinds):
        if kind in ("moe", "mlp"):
            continue
        if kind in ("linear_attention", "mamba", "conv"):
            kind_of_model, _ = ModelRegistry.resolve_model_cls(model.architectures, model_config=model)
            spec: Any = MambaSpec(
                shapes=kind_of_model.get_mamba_state_shape_from_config(config),
                dtypes=kind_of_model.get_mamba_state_dtype_from_config(config),
                block_size=config.cache_config.block_size,
                page_size_padded=config.cache_config.mamba_page_size_padded,
                mamba_cache_mode=config.cache_config.mamba_cache_mode,
                num_speculative_blocks=config.num_speculative_tokens,
                num_prefill_checkpoint_blocks=int(text.model_type in ("granitemoehybrid", "nemotron_h")),  # Mamba 2
            )
        elif model.use_mla:
            spec = MLAAttentionSpec(**sizes)
        elif kind == "sliding_attention" or (
            getattr(text, "sliding_window", None) and not getattr(text, "layer_types", None)
        ):
            spec = SlidingWindowSpec(**sizes, sliding_window=text.sliding_window)
        else:
            spec = FullAttentionSpec(**sizes)
        found[f"layers.{place}"] = spec
    return found


@pytest.mark.parametrize("machine", [CPU, GPU], ids=lambda machine: machine.name)
@pytest.mark.parametrize("name", MODELS)
def test_the_kv_cache_is_what_vllm_wants(
    name: str, machine: PlannedMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the blocks, which are taken to be as large as those of any attention backend."""
    monkeypatch.setenv("VLLM_PLUGINS", "")
    config = {key: value for key, value in MODELS[name].items() if key != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ServedModel.of(find_model(str(tmp_path)), "slots", on_cpu=machine is CPU)
    for load in (Load(4096, 1), Load(16000, 3), *([Load(4096, 1, drafts=4)] if machine is GPU else [])):
        in_flight = rows(model, machine, load) * (2 if machine is GPU else 1)  # on a GPU vLLM schedules a step ahead
        wanted = by_vllm(name, tmp_path, load, machine is GPU, in_flight)
        found = kv_bytes(model, machine, load)
        assert wanted <= found < 1.1 * wanted, load
        assert found == wanted or name.startswith("deepseek") or machine is GPU, "blocks of 128 tokens"
