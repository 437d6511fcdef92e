"""Tiny random checkpoints of MoE architectures: the real configuration class, the real flags, small sizes.

An architecture is here if transformers has its model, whose checkpoints then have the published names of weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import zoo
from mtp_heads import split_off
from safetensors.torch import load_file, save_file

_SMALL = dict(
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_MOE = dict(intermediate_size=256, moe_intermediate_size=64, num_experts_per_tok=4)
# Multi-head latent attention. 512 is the only latent size that vLLM's CPU attention takes.
_MLA = dict(
    num_key_value_heads=4,
    head_dim=64,
    kv_lora_rank=512,
    q_lora_rank=64,
    qk_rope_head_dim=64,
    qk_nope_head_dim=64,
    v_head_dim=64,
)
_GROUPED = dict(n_routed_experts=16, n_shared_experts=1, n_group=4, topk_group=2)
_NO_AUX = dict(topk_method="noaux_tc", scoring_func="sigmoid")
_V4_LAYERS = dict(compress_ratios=[0, 4, 128, 4], num_hash_layers=1)
_SPARSE_ATTENTION = dict(index_topk=64, index_head_dim=128, index_n_heads=4)
_GRANITE = dict(
    intermediate_size=64,
    num_local_experts=16,
    num_experts_per_tok=4,
    embedding_multiplier=12.0,
    attention_multiplier=0.2,
    residual_multiplier=0.5,
    logits_scaling=4.0,
)
_GATED_DELTA_NET = dict(
    linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=1, linear_num_value_heads=2
)


@dataclass(frozen=True)
class Tiny:
    """How to write a tiny checkpoint.

    Attributes:
        model_type: of transformers' configuration class.
        sizes: its arguments, besides ``_SMALL``.
        family: of ``zoo``, which writes it instead.
        written: what ``config.json`` says in addition, as published checkpoints do; None: what it does not say.
        options: of ``vllm.LLM``.
        renamed: parts of weights' names that transformers writes -> those of published checkpoints.
        head: for an MTP head, how checkpoints name it (see ``mtp_heads``); ``target``: the architecture that has it.
    """

    model_type: str = ""
    sizes: dict[str, Any] = field(default_factory=dict)
    family: str = ""
    written: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    head: str = ""
    target: str = ""


TINY = {
    **{
        architecture: Tiny(family=family)
        for architecture, family in {
            "DeepseekV2ForCausalLM": "deepseek_v2",
            "Glm4MoeForCausalLM": "glm4_moe",
            "GptOssForCausalLM": "gpt_oss",
            "MixtralForCausalLM": "mixtral",
            "OlmoeForCausalLM": "olmoe",
            "PhiMoEForCausalLM": "phimoe",
            "Qwen3MoeForCausalLM": "qwen3_moe",
        }.items()
    },
    "AfmoeForCausalLM": Tiny(
        "afmoe",
        _MOE
        | dict(num_experts=16, num_shared_experts=1, num_dense_layers=1, route_scale=2.0)
        | dict(global_attn_every_n_layers=3, sliding_window=64, mup_enabled=True),
        written=dict(score_func="sigmoid", route_norm=True, n_group=1, topk_group=1),
    ),
    "AXK1ForCausalLM": Tiny("axk1", _MOE | _MLA | _GROUPED | dict(first_k_dense_replace=0)),
    "Cohere2MoeForCausalLM": Tiny(
        "cohere2_moe",
        dict(num_hidden_layers=4, intermediate_size=64, num_experts=8, num_experts_per_tok=2, num_shared_experts=1)
        | dict(first_k_dense_replace=1, prefix_dense_intermediate_size=256, sliding_window=64, logit_scale=1.0)
        | dict(expert_selection_fn="sigmoid", tie_word_embeddings=True),
    ),
    "DbrxForCausalLM": Tiny(
        "dbrx",
        dict(d_model=128, n_heads=4, n_layers=3, max_seq_len=1024)
        | dict(attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0))
        | dict(ffn_config=dict(ffn_hidden_size=64, moe_num_experts=16, moe_top_k=4)),
    ),
    "DeepseekV3ForCausalLM": Tiny(
        "deepseek_v3",
        _MOE | _MLA | _GROUPED | dict(first_k_dense_replace=1, num_nextn_predict_layers=0),
        written=_NO_AUX,
    ),
    "DeepseekV32ForCausalLM": Tiny(
        "deepseek_v32", _MOE | _MLA | _GROUPED | _SPARSE_ATTENTION | dict(first_k_dense_replace=1), written=_NO_AUX
    ),
    "DeepseekV4ForCausalLM": Tiny(
        "deepseek_v4",
        dict(num_hidden_layers=4, head_dim=512, num_key_value_heads=1, q_lora_rank=64, moe_intermediate_size=64)
        | dict(n_routed_experts=16, n_shared_experts=1, num_experts_per_tok=4, num_nextn_predict_layers=0)
        | dict(o_groups=2, o_lora_rank=64, index_n_heads=4, index_head_dim=128, index_topk=64, sliding_window=64)
        | _V4_LAYERS,
        written=_V4_LAYERS
        | dict(qk_rope_head_dim=64, topk_method="noaux_tc", scoring_func="sqrtsoftplus")
        | dict.fromkeys(("layer_types", "mlp_layer_types", "compress_rates")),
        renamed={"hc_head.hc_": "hc_head_", ".attn.norm.": ".attn.kv_norm."},
    ),
    "Ernie4_5_MoeForCausalLM": Tiny(
        "ernie4_5_moe",
        dict(intermediate_size=256, moe_intermediate_size=64, moe_k=4, moe_num_experts=16, moe_num_shared_experts=1)
        | dict(moe_layer_start_index=1),
    ),
    "ExaoneMoEForCausalLM": Tiny(
        "exaone_moe", _MOE | dict(num_experts=16, num_shared_experts=1, sliding_window=64, num_hidden_layers=4)
    ),
    "FlexOlmoForCausalLM": Tiny("flex_olmo", dict(intermediate_size=64, num_experts=16, num_experts_per_tok=4)),
    "Gemma4ForCausalLM": Tiny(
        "gemma4_text",
        dict(intermediate_size=256, enable_moe_block=True, num_experts=16, top_k_experts=4, moe_intermediate_size=64)
        | dict(global_head_dim=64, sliding_window=64, hidden_size_per_layer_input=0, tie_word_embeddings=True),
    ),
    "Glm4MoeLiteForCausalLM": Tiny(
        "glm4_moe_lite",
        _MOE | _MLA | _GROUPED | dict(n_group=1, topk_group=1),
        written=_NO_AUX | dict(first_k_dense_replace=1),
    ),
    "GlmMoeDsaForCausalLM": Tiny(
        "glm_moe_dsa", _MOE | _MLA | _GROUPED | _SPARSE_ATTENTION | dict(n_group=1, topk_group=1)
    ),
    "Glm5NextForCausalLM": Tiny(
        "glm5_next_text",
        _MOE
        | _MLA
        | _SPARSE_ATTENTION
        | dict(n_routed_experts=16, n_shared_experts=1, num_hidden_layers=4, qk_rope_head_dim=0, head_dim=0)
        | dict(linear_head_dim=32, linear_num_heads=4, index_kpool=16),
    ),
    "GraniteMoeForCausalLM": Tiny("granitemoe", _GRANITE),
    "GraniteMoeSharedForCausalLM": Tiny("granitemoeshared", _GRANITE | dict(shared_intermediate_size=64)),
    "GraniteMoeSWAForCausalLM": Tiny("granitemoe_swa", _GRANITE | dict(shared_intermediate_size=64, sliding_window=64)),
    "GraniteMoeHybridForCausalLM": Tiny(
        "granitemoehybrid",
        _GRANITE
        | dict(shared_intermediate_size=64, layer_types=["linear_attention", "full_attention", "linear_attention"])
        | dict(mamba_n_heads=8, mamba_d_state=16, mamba_chunk_size=64, position_embedding_type="rope"),
    ),
    "HunYuanMoEV1ForCausalLM": Tiny("hunyuan_v1_moe", dict(intermediate_size=64, num_experts=16, moe_topk=4)),
    "HYV3ForCausalLM": Tiny(
        "hy_v3",
        _MOE | dict(num_experts=16, num_shared_experts=1),
        written=dict(first_k_dense_replace=1, expert_hidden_dim=64),
    ),
    "HYV4ForCausalLM": Tiny("hy_v4", _MOE | _MLA | _GROUPED | _SPARSE_ATTENTION | dict(n_group=1, topk_group=1)),
    "InklingForCausalLM": Tiny(
        "inkling_text",
        _MOE
        | dict(n_routed_experts=16, n_shared_experts=1, swa_num_attention_heads=4, swa_num_key_value_heads=2)
        | dict(swa_head_dim=32, sliding_window_size=64, rel_extent=64),
    ),
    "JambaForCausalLM": Tiny(
        "jamba",
        dict(num_hidden_layers=4, intermediate_size=64, num_experts=8, num_experts_per_tok=2)
        | dict(attn_layer_period=4, attn_layer_offset=1, mamba_d_state=16, use_mamba_kernels=False),
    ),
    "KimiLinearForCausalLM": Tiny(
        "kimi_linear",
        _MOE
        | _MLA
        | dict(num_local_experts=16, n_shared_experts=1, q_lora_rank=None, linear_head_dim=32, linear_num_heads=4),
    ),
    "LagunaForCausalLM": Tiny(
        "laguna",
        _MOE
        | dict(num_experts=16, shared_expert_intermediate_size=64, sliding_window=64)
        | dict(layer_types=["full_attention", "sliding_attention", "full_attention"]),
    ),
    "Lfm2MoeForCausalLM": Tiny(
        "lfm2_moe",
        _MOE | dict(num_experts=16, num_dense_layers=1, layer_types=["conv", "full_attention", "conv"]),
    ),
    "Llama4ForCausalLM": Tiny(
        "llama4_text",
        dict(num_hidden_layers=4, intermediate_size=64, intermediate_size_mlp=256, num_local_experts=8)
        | dict(num_experts_per_tok=1, interleave_moe_layer_step=2, attention_chunk_size=128),
    ),
    "LongcatFlashForCausalLM": Tiny(
        "longcat_flash",
        _MLA
        | dict(num_layers=2, ffn_hidden_size=256, expert_ffn_hidden_size=64, moe_topk=4, n_routed_experts=16)
        | dict(zero_expert_num=4),
        written=dict(zero_expert_type="identity"),
    ),
    "MellumForCausalLM": Tiny("mellum", _MOE | dict(num_experts=16, sliding_window=64)),
    "MiMoV2FlashForCausalLM": Tiny(
        "mimo_v2_flash", _MOE | dict(n_routed_experts=16, head_dim=64, v_head_dim=32, sliding_window=64)
    ),
    "MiniMaxM2ForCausalLM": Tiny(
        "minimax_m2",
        dict(intermediate_size=64, num_local_experts=16, num_experts_per_tok=4, rotary_dim=16),
        written=dict(use_qk_norm=True, scoring_func="sigmoid", use_routing_bias=True),
    ),
    "NemotronHForCausalLM": Tiny(
        "nemotron_h",
        dict(layers_block_type=["linear_attention", "moe", "full_attention", "moe"], num_hidden_layers=4)
        | dict(intermediate_size=256, mamba_num_heads=8, mamba_head_dim=32, n_groups=1, ssm_state_size=16)
        | dict(n_routed_experts=16, n_shared_experts=1, num_experts_per_tok=4, moe_intermediate_size=64)
        | dict(moe_shared_expert_intermediate_size=64, use_mamba_kernels=False),
    ),
    "Qwen2MoeForCausalLM": Tiny("qwen2_moe", _MOE | dict(num_experts=16, shared_expert_intermediate_size=64)),
    "Qwen3NextForCausalLM": Tiny(
        "qwen3_next",
        _MOE | _GATED_DELTA_NET | dict(num_hidden_layers=4, num_experts=16, shared_expert_intermediate_size=64),
    ),
    "Qwen3_5MoeForCausalLM": Tiny(
        "qwen3_5_moe_text",
        _MOE | _GATED_DELTA_NET | dict(num_hidden_layers=4, num_experts=16, shared_expert_intermediate_size=64),
    ),
    "Qwen4ExpForCausalLM": Tiny(
        "qwen4_exp_text",
        _MOE
        | _GATED_DELTA_NET
        | dict(num_hidden_layers=4, num_experts=16, shared_expert_intermediate_size=64, hc_lowrank=32)
        | dict(indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=128, indexer_budget=64)
        | dict(indexer_compress_ratio=16),
    ),
}

_ATTENTION_LAST = dict(num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "full_attention"])
_MTP = dict(speculative_config=dict(method="mtp", num_speculative_tokens=2))
# One layer more than the target has: the last becomes the head.
TINY |= {
    head: Tiny(
        TINY[target].model_type, TINY[target].sizes | more, "", TINY[target].written, _MTP, head=style, target=target
    )
    for head, target, style, more in (
        ("DeepSeekMTPModel", "DeepseekV3ForCausalLM", "layer", {}),
        ("Glm4MoeLiteMTPModel", "Glm4MoeLiteForCausalLM", "layer", {}),
        ("ExaoneMoeMTP", "ExaoneMoEForCausalLM", "apart", {}),
        ("Qwen3NextMTP", "Qwen3NextForCausalLM", "apart", _ATTENTION_LAST),
        ("Qwen3_5MoeMTP", "Qwen3_5MoeForCausalLM", "apart", _ATTENTION_LAST),
    )
} | {
    "Glm4MoeMTPModel": Tiny(
        "glm4_moe",
        _MOE | dict(n_routed_experts=16, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.5),
        options=_MTP,
        head="layer",
        target="Glm4MoeForCausalLM",
    )
}


def write(architecture: str, folder: Path, seed: int = 0) -> dict[str, Any]:
    """Saves a tiny checkpoint of ``architecture`` in bf16 into ``folder``; returns the options of its engine.

    Weights are scaled as in ``zoo``, so that tokens vary.
    """
    tiny = TINY[architecture]
    if tiny.family:
        zoo.write(tiny.family, folder, seed)
        return tiny.options
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(tiny.model_type, **_SMALL | tiny.sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    zoo.spread(model)
    _fill_zeros(model)
    model.save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text()) | tiny.written | {"architectures": [tiny.target or architecture]}
    said = {name: value for name, value in written.items() if tiny.written.get(name, "") is not None}
    path.write_text(json.dumps(said, indent=1))
    _rename(folder / "model.safetensors", tiny.renamed)
    if tiny.head:
        split_off(folder, tiny.head)
    return tiny.options


def _rename(path: Path, names: dict[str, str]) -> None:
    if names:
        tensors = load_file(path)
        for old, new in names.items():
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        save_file(tensors, path)


def _fill_zeros(model: torch.nn.Module) -> None:
    """Gives values to what transformers leaves at zero: some routers, and in buffers the biases of their choices."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2 and not parameter.any():
                parameter.normal_(std=0.06)
        for name, buffer in model.named_buffers():
            if "bias" in name.rpartition(".")[2]:
                buffer.normal_(std=0.05)
