"""Tiny random checkpoints of the MoE families that stock vLLM serves on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from vllm_spac.tools.selftest.tiny_model import prepare

_COMMON = dict(
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def _qwen3_moe(**sizes):
    own = dict(
        num_hidden_layers=4,
        intermediate_size=256,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_COMMON | own | sizes))


def _olmoe():
    config = transformers.OlmoeConfig(
        **{**_COMMON, "num_key_value_heads": 4},
        intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=False,
    )
    return transformers.OlmoeForCausalLM(config)


def _mixtral():
    config = transformers.MixtralConfig(**_COMMON, intermediate_size=64, num_local_experts=8, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def _deepseek_v2(**sizes):
    own = dict(
        num_key_value_heads=4,
        num_hidden_layers=3,
        intermediate_size=256,
        moe_intermediate_size=64,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_shared_experts=2,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        kv_lora_rank=512,  # the only latent size that vLLM's CPU attention takes
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
    )
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**_COMMON | own | sizes))


def _gpt_oss(**sizes):
    own = dict(
        head_dim=64,
        intermediate_size=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"],
    )
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**_COMMON | own | sizes))


def _phimoe():
    sizes = dict(intermediate_size=64, num_local_experts=8, num_experts_per_tok=2)
    config = transformers.PhimoeConfig(**_COMMON, **sizes, attention_bias=True, lm_head_bias=True)
    return transformers.PhimoeForCausalLM(config)


def _glm4_moe():
    """Sigmoid scores, a correction bias, shared experts and a dense first layer."""
    config = transformers.Glm4MoeConfig(
        **{**_COMMON, "num_hidden_layers": 3},
        intermediate_size=256,
        moe_intermediate_size=64,
        head_dim=32,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=4,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
    )
    model = transformers.Glm4MoeForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    return model


FAMILIES = {
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "mixtral": _mixtral,
    "deepseek_v2": _deepseek_v2,
    "gpt_oss": _gpt_oss,
    "phimoe": _phimoe,
    "glm4_moe": _glm4_moe,
}

# vLLM's own class; Hugging Face's name goes to vLLM's Transformers backend, which has no fused experts to replace.
ARCHITECTURES = {"phimoe": "PhiMoEForCausalLM"}


def write(family: str, folder: Path, seed: int = 0) -> Path:
    """Save a seeded random checkpoint of ``family`` into ``folder`` (bf16) and return it."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().to(torch.bfloat16)
    prepare(model)
    model.save_pretrained(folder)
    if family in ARCHITECTURES:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [ARCHITECTURES[family]]}))
    return folder
