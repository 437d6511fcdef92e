"""Tiny random checkpoints of the MoE families that stock vLLM serves on the CPU."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
import transformers

from vllm_spac.tools.selftest.tiny_model import prepare

_COMMON = (
    dict(vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    | dict(max_position_embeddings=1024, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
)  # fmt: skip
_FEW = dict(intermediate_size=64, num_local_experts=8, num_experts_per_tok=2)
_MANY = dict(intermediate_size=256, moe_intermediate_size=64, num_experts_per_tok=4)
_GROUPS = dict(n_routed_experts=16, first_k_dense_replace=1, n_group=1, topk_group=1, num_hidden_layers=3)


def _model(name: str, own: dict, **sizes) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(**_COMMON | own | sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for buffer, values in model.named_buffers():
        if buffer.endswith("e_score_correction_bias"):
            values.normal_(std=0.1)
    return model


FAMILIES = {
    "qwen3_moe": partial(
        _model,
        "Qwen3Moe",
        _MANY
        | dict(num_hidden_layers=4, head_dim=32, num_experts=16, norm_topk_prob=True)
        | dict(decoder_sparse_step=1, mlp_only_layers=[]),
    ),
    "olmoe": partial(
        _model,
        "Olmoe",
        dict(num_key_value_heads=4, intermediate_size=64, num_experts=16, num_experts_per_tok=4, norm_topk_prob=False),
    ),
    "mixtral": partial(_model, "Mixtral", _FEW),
    "deepseek_v2": partial(
        _model,
        "DeepseekV2",
        _MANY
        | _GROUPS
        | dict(num_key_value_heads=4, n_shared_experts=2, moe_layer_freq=1, topk_method="greedy", q_lora_rank=None)
        | dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64)  # 512: for CPU attention
        | dict(norm_topk_prob=False, routed_scaling_factor=1.0),
    ),
    "gpt_oss": partial(
        _model,
        "GptOss",
        _FEW | dict(head_dim=64, sliding_window=128, layer_types=["sliding_attention", "full_attention"]),
    ),
    "phimoe": partial(_model, "Phimoe", _FEW | dict(attention_bias=True, lm_head_bias=True)),
    # sigmoid scores, a correction bias, shared experts and a dense first layer
    "glm4_moe": partial(
        _model,
        "Glm4Moe",
        _MANY | _GROUPS | dict(head_dim=32, n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=1.5),
    ),
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
