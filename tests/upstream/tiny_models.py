"""Tiny random checkpoints of MoE architectures: the real configuration class, the real flags, small sizes.

Where transformers has the model, its checkpoints have the published names of weights. Those of the others are written
from the model that vLLM builds (``from_vllm``), with the names that vLLM's loader takes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import from_vllm
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
_DENSE_FIRST = ["dense", "sparse", "sparse"]
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
_KIMI_LAYERS = dict(kda_layers=[1, 3], full_attn_layers=[2], num_heads=4, head_dim=32, short_conv_kernel_size=4)
_NUMBERED = {  # of experts, and not of shared ones
    f".experts.{expert}.{old}.": f".experts.{expert}.{new}."
    for expert in range(16)
    for old, new in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))
}
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
        renamed: parts of weights' names that transformers writes, or that vLLM uses -> those of published checkpoints.
        transposed: published with the matrices of all experts transposed, as transformers stored them when it came out.
        stacked: published with one tensor of all experts of a layer, under the layer's name.
        built: written from the model that vLLM builds; ``sizes`` are then what ``config.json`` says.
        wrapper: a language model with what sees and hears: its sizes are in ``text_config``.
        head: for an MTP head, how checkpoints name it (see ``mtp_heads``); ``target``: the architecture that has it.
        head_names: as ``renamed``, of a head that vLLM builds.
    """

    model_type: str = ""
    sizes: dict[str, Any] = field(default_factory=dict)
    family: str = ""
    written: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    transposed: bool = False
    stacked: bool = False
    built: bool = False
    wrapper: bool = False
    head: str = ""
    target: str = ""
    head_names: dict[str, str] = field(default_factory=dict)


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
        "deepseek_v32",
        _MOE | _MLA | _GROUPED | _SPARSE_ATTENTION | _NO_AUX | dict(first_k_dense_replace=1),
        built=True,
    ),
    "DeepseekV4ForCausalLM": Tiny(
        "deepseek_v4",
        dict(num_hidden_layers=4, head_dim=512, num_key_value_heads=1, q_lora_rank=64, moe_intermediate_size=64)
        | dict(n_routed_experts=16, n_shared_experts=1, num_experts_per_tok=4, num_nextn_predict_layers=0)
        | dict(o_groups=2, o_lora_rank=64, index_n_heads=4, index_head_dim=128, index_topk=64, sliding_window=64)
        | dict(num_hash_layers=1, qk_rope_head_dim=64, topk_method="noaux_tc", scoring_func="sqrtsoftplus")
        | dict(swiglu_limit=10.0, routed_scaling_factor=1.5, expert_dtype="bf16", hidden_act="silu")
        | dict(hc_mult=4, hc_eps=1e-6, hc_sinkhorn_iters=3, rms_norm_eps=1e-6, norm_topk_prob=True),
        built=True,
        renamed={"lm_head.": "head.", ".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3."},
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
        written=dict(global_head_dim=64),
    ),
    "Glm4MoeLiteForCausalLM": Tiny(
        "glm4_moe_lite",
        _MOE | _MLA | _GROUPED | dict(n_group=1, topk_group=1),
        written=_NO_AUX | dict(first_k_dense_replace=1),
    ),
    "GlmMoeDsaForCausalLM": Tiny(
        "glm_moe_dsa",
        _MOE
        | _MLA
        | _GROUPED
        | _SPARSE_ATTENTION
        | _NO_AUX
        | dict(n_group=1, topk_group=1, mlp_layer_types=_DENSE_FIRST, first_k_dense_replace=1),
        built=True,
    ),
    "Glm5NextForCausalLM": Tiny(
        "glm5_next_text",
        _MOE
        | _MLA
        | _SPARSE_ATTENTION
        | dict(n_routed_experts=16, n_shared_experts=1, num_hidden_layers=4, qk_rope_head_dim=0, head_dim=0)
        | dict(linear_head_dim=32, linear_num_heads=4, index_kpool=16, swiglu_limit=10.0)
        | dict(mhc=True, hc_mult=4, hc_eps=1e-6, hc_sinkhorn_iters=3, n_group=1, topk_group=1, norm_topk_prob=True)
        | dict(routed_scaling_factor=2.5, mla_use_nope=True, mlp_layer_types=["dense"] + 3 * ["sparse"])
        | _NO_AUX,
        built=True,
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
        written=dict(first_k_dense_replace=1, expert_hidden_dim=64, route_norm=True, qk_norm=True),
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
        | dict(num_experts=16, num_experts_per_token=4, num_shared_experts=1, q_lora_rank=None, mla_use_nope=True)
        | dict(routed_expert_hidden_size=64, latent_moe_use_norm=True, routed_scaling_factor=2.5)
        | dict(linear_attn_config=_KIMI_LAYERS, hidden_act="silu", first_k_dense_replace=1),
        built=True,
        renamed=_NUMBERED,
    ),
    "LagunaForCausalLM": Tiny(
        "laguna",
        _MOE
        | dict(num_experts=16, shared_expert_intermediate_size=64, sliding_window=64)
        | dict(layer_types=["full_attention", "sliding_attention", "full_attention"]),
    ),
    "Lfm2MoeForCausalLM": Tiny(
        "lfm2_moe", _MOE | dict(num_experts=16, num_dense_layers=1, layer_types=["conv", "full_attention", "conv"])
    ),
    "Llama4ForCausalLM": Tiny(
        "llama4_text",
        dict(num_hidden_layers=4, intermediate_size=64, intermediate_size_mlp=256, num_local_experts=8)
        | dict(num_experts_per_tok=1, interleave_moe_layer_step=2, attention_chunk_size=128),
    ),
    "MellumForCausalLM": Tiny("mellum", _MOE | dict(num_experts=16, sliding_window=64)),
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
        | dict(num_hidden_layers=4, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=32)
        | dict(shared_expert_intermediate_size=64, hc_lowrank=32)
        | dict(indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=128, indexer_budget=64)
        | dict(indexer_compress_ratio=16, output_gate_type="silu"),
    ),
}

_ROPE = dict(rope_theta=10000.0, rope_parameters=dict(rope_type="default", rope_theta=10000.0))
_COMMON = _ROPE | dict(hidden_act="silu", rms_norm_eps=1e-6, attention_bias=False, norm_topk_prob=True)
_BAILING = (
    _MOE
    | _COMMON
    | dict(num_experts=16, num_shared_experts=1, first_k_dense_replace=1, embedding_dropout=0.0, use_bias=False)
    | dict(use_qkv_bias=False, norm_head=False, routed_scaling_factor=2.5, use_qk_norm=True, use_rmsnorm=True)
)
_BIASED = dict(
    moe_router_enable_expert_bias=True, score_function="sigmoid", router_dtype="fp32", n_group=4, topk_group=2
)
_STEP_SLIDING = dict(attention_type="sliding_attention", num_attention_heads=4, num_attention_groups=2, head_dim=32)
_PANGU_NAMES = {".gate.e_score_correction_bias": ".e_score_correction_bias"}
_PANGU = _MOE | _COMMON | dict(n_routed_experts=16, n_shared_experts=1, first_k_dense_replace=1, bias=False)
_MIMO = (
    _MOE
    | _COMMON
    | dict(n_routed_experts=16, head_dim=64, v_head_dim=32, swa_head_dim=64, swa_v_head_dim=32, sliding_window=64)
    | dict(num_key_value_heads=2, swa_num_key_value_heads=2, swa_num_attention_heads=4, sliding_window_size=64)
    | dict(hybrid_layer_pattern=[0, 1, 0], moe_layer_freq=[0, 1, 1], layernorm_epsilon=1e-6, n_group=1, topk_group=1)
    | dict(add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False, partial_rotary_factor=0.5)
    | dict(swa_rope_theta=10000.0, scoring_func="sigmoid", topk_method="noaux_tc", routed_scaling_factor=1.0)
)
TINY |= {
    "BailingMoeForCausalLM": Tiny("bailing_moe", _BAILING | dict(use_qk_norm=False, head_dim=None), built=True),
    "BailingMoeV2ForCausalLM": Tiny(
        "bailing_moe_v2",
        _BAILING | _BIASED | dict(partial_rotary_factor=0.5, moe_shared_expert_intermediate_size=64),
        built=True,
    ),
    "BailingMoeV2_5ForCausalLM": Tiny(
        "bailing_hybrid",
        _BAILING
        | _BIASED
        | _MLA
        | dict(layer_group_size=2, num_hidden_layers=4, head_dim=32, group_norm_size=4)
        | dict(moe_shared_expert_intermediate_size=64, rope_interleave=True),
        built=True,
    ),
    "BailingMoeV3ForCausalLM": Tiny(
        "bailing_hybrid",
        _BAILING
        | _BIASED
        | _MLA
        | dict(layer_group_size=2, num_hidden_layers=4, head_dim=32, short_conv_kernel_size=4)
        | dict(moe_shared_expert_intermediate_size=64),
        built=True,
    ),
    "SarvamMoEForCausalLM": Tiny("sarvam_moe", _BAILING | _BIASED, built=True),
    "SarvamMLAForCausalLM": Tiny(
        "sarvam_mla",
        _BAILING | _BIASED | _MLA | dict(q_lora_rank=None, head_dim=576, moe_shared_expert_intermediate_size=64),
        built=True,
    ),
    "Param2MoEForCausalLM": Tiny(
        "param2moe",
        _BAILING | _BIASED | dict(rope_scaling=None, moe_shared_expert_intermediate_size=64),
        built=True,
        renamed={
            ".self_attn.qkv_proj.": ".attention.query_key_value.",
            ".self_attn.o_proj.": ".attention.dense.",
            ".self_attn.q_layernorm.": ".attention.query_layernorm.",
            ".self_attn.k_layernorm.": ".attention.key_layernorm.",
            ".gate.e_score_correction_bias": ".gate.expert_bias",
            "embed_tokens.": "word_embeddings.",
        },
    ),
    "DeepseekForCausalLM": Tiny(
        "deepseek",
        _MOE
        | _COMMON
        | dict(n_routed_experts=16, n_shared_experts=2, first_k_dense_replace=1, moe_layer_freq=1, head_dim=None)
        | dict(num_key_value_heads=4, norm_topk_prob=False, scoring_func="softmax", routed_scaling_factor=1.0),
        built=True,
    ),
    "ExaoneMoeForCausalLM": Tiny(
        "exaone_moe", _MOE | dict(num_experts=16, num_shared_experts=1, sliding_window=64, num_hidden_layers=4)
    ),
    "PanguProMoEV2ForCausalLM": Tiny(
        "PanguProMoE",
        _PANGU | dict(router_enable_expert_bias=True, routed_scaling_factor=2.5),
        built=True,
        renamed=_PANGU_NAMES,
    ),
    "PanguUltraMoEForCausalLM": Tiny(
        "pangu_ultra_moe",
        _PANGU | _MLA | dict(sandwich_norm=True, routed_scaling_factor=2.5, router_enable_expert_bias=True),
        built=True,
        renamed=_PANGU_NAMES,
    ),
    "MiMoV2FlashForCausalLM": Tiny("mimo_v2_flash", _MIMO, built=True),
    "MiMoV2ForCausalLM": Tiny("mimo_v2", _MIMO, built=True),
    "MiniCPMForCausalLM": Tiny(
        "minicpm",
        _COMMON
        | dict(intermediate_size=64, num_experts=8, num_experts_per_tok=2, scale_emb=1.0, dim_model_base=128)
        | dict(scale_depth=1.4),
        built=True,
    ),
    "K2HorizonForCausalLM": Tiny(
        "k2_horizon",
        _MOE
        | _COMMON
        | dict(num_experts=16, num_shared_experts=1, rope_head_dim=16, query_key_norm=True, layernorm_num_groups=1)
        | dict(
            router_score_func="sigmoid", router_scaling_factor=2.5, moe_gate_bias=True, attention_gate_func="softplus"
        )
        | dict(mova_num_experts=0, mova_num_experts_per_tok=0, decoder_sparse_step=1, mlp_only_layers=[0]),
        built=True,
    ),
    "Step3p5ForCausalLM": Tiny(
        "step3p5",
        _COMMON
        | dict(intermediate_size=256, num_attention_groups=2, moe_intermediate_size=64, moe_num_experts=16, moe_top_k=4)
        | dict(use_moe=True, share_expert_dim=64, share_expert_dims=64, moe_layers_enum="1,2", sliding_window=64)
        | dict(layer_types=["full_attention", "sliding_attention", "full_attention"], use_head_wise_attn_gate=True)
        | dict(moe_router_activation="sigmoid", moe_router_scaling_factor=2.0, rope_theta=[10000.0] * 3)
        | dict(partial_rotary_factors=[0.5, 1.0, 0.5], use_rope_layers=[], rope_parameters=None)
        | dict(attention_other_setting=_STEP_SLIDING, use_moe_router_bias=True, need_fp32_gate=True)
        | dict(norm_expert_weight=True, swiglu_limits=[], swiglu_limits_shared=[]),
        built=True,
        renamed={".moe.share_expert.": ".share_expert."},
    ),
    "Step3TextForCausalLM": Tiny(
        "step3_text",
        _COMMON
        | dict(intermediate_size=256, num_attention_groups=1, moe_intermediate_size=64, moe_num_experts=16, moe_top_k=4)
        | dict(share_expert_dim=64, share_q_dim=64, moe_layers_enum="1,2", max_position_embedding=1024),
        stacked=True,
        built=True,
    ),
    "LongcatFlashForCausalLM": Tiny(
        "longcat_flash",
        _MLA
        | _COMMON
        | dict(num_layers=2, num_hidden_layers=2, ffn_hidden_size=256, expert_ffn_hidden_size=64, moe_topk=4)
        | dict(n_routed_experts=16, zero_expert_num=4, zero_expert_type="identity", intermediate_size=256)
        | dict(mla_scale_q_lora=True, mla_scale_kv_lora=True, routed_scaling_factor=2.0, router_bias=False)
        | dict(moe_intermediate_size=64),
        built=True,
    ),
}

# Language models within wrappers for images, video and sound, which ``language_model_only`` leaves out.
_TEXT_ONLY = dict(language_model_only=True)
_MROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[6, 5, 5]))
_QWEN_MOE = _MOE | dict(num_experts=16, norm_topk_prob=True)
_QWEN_NEXT = _QWEN_MOE | _GATED_DELTA_NET | dict(num_hidden_layers=4, shared_expert_intermediate_size=64)
_EYE = dict(
    depth=2, hidden_size=64, intermediate_size=128, num_heads=4, out_hidden_size=128, num_position_embeddings=64
)
_DEEPSTACK = dict(deepstack_visual_indexes=[0, 1])
_SIGLIP = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
_TOKENS = dict(image_token_id=500, video_token_id=501, vision_start_token_id=502, vision_end_token_id=503)
_GEMMA = TINY["Gemma4ForCausalLM"].sizes


def _wrapper(model_type: str, text: dict, vision: dict, transposed: bool = False, **more: Any) -> Tiny:
    sizes = dict(text_config=_SMALL | text, vision_config=vision) | more
    return Tiny(model_type, sizes, options=_TEXT_ONLY, wrapper=True, transposed=transposed)


TINY |= {
    "Qwen3VLMoeForConditionalGeneration": _wrapper(
        "qwen3_vl_moe", _QWEN_MOE | _MROPE, _EYE | _DEEPSTACK, transposed=True, **_TOKENS
    ),
    "Qwen3OmniMoeForConditionalGeneration": Tiny(
        "qwen3_omni_moe",
        dict(
            thinker_config=dict(
                text_config=_SMALL | _QWEN_MOE | _MROPE | dict(model_type="qwen3_omni_moe_text"),
                vision_config=_EYE | _DEEPSTACK | dict(image_size=64, apply_vit_abs_pos_embed=True),
                audio_config=dict(encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=64, d_model=64)
                | dict(output_dim=128, downsample_hidden_size=32),
                audio_token_id=504,
            )
            | _TOKENS,
            enable_audio_output=False,
        ),
        options=_TEXT_ONLY,
        built=True,
        wrapper=True,
    ),
    "Qwen3_5MoeForConditionalGeneration": _wrapper("qwen3_5_moe", _QWEN_NEXT, _EYE, **_TOKENS),
    "Qwen4ExpForConditionalGeneration": _wrapper("qwen4_exp", TINY["Qwen4ExpForCausalLM"].sizes, _EYE, **_TOKENS),
    "AriaForConditionalGeneration": _wrapper(
        "aria",
        dict(intermediate_size=64, moe_num_experts=16, moe_topk=4, moe_num_shared_experts=1),
        _SIGLIP | dict(model_type="idefics3_vision", image_size=28, patch_size=14),
        image_token_index=500,
        projector_patch_to_query_dict={"4": 4},
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": _wrapper(
        "ernie4_5_vl_moe",
        dict(intermediate_size=256, moe_intermediate_size=[64, 64], moe_k=4, moe_num_experts=16)
        | dict(moe_num_shared_experts=1)
        | dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[6, 6, 4])),
        dict(depth=1, hidden_size=64, embed_dim=64, intermediate_size=128, num_heads=4, mlp_ratio=2),
        image_token_id=500,
        video_token_id=501,
    ),
    "Gemma4ForConditionalGeneration": _wrapper(
        "gemma4",
        _GEMMA,
        _SIGLIP | dict(num_key_value_heads=4, head_dim=16),
        image_token_id=500,
        tie_word_embeddings=True,
    ),
    "DiffusionGemmaForBlockDiffusion": _wrapper("diffusion_gemma", _GEMMA, {}, tie_word_embeddings=True),
    "Glm4vMoeForConditionalGeneration": _wrapper(
        "glm4v_moe",
        _MOE
        | dict(
            n_routed_experts=16, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, use_qk_norm=False
        )
        | dict(
            rope_parameters=dict(
                rope_type="default", rope_theta=10000.0, mrope_section=[4, 2, 2], partial_rotary_factor=0.5
            )
        ),
        dict(depth=1, hidden_size=64, intermediate_size=128, num_heads=4, out_hidden_size=128),
        image_token_id=500,
        video_token_id=501,
    ),
    "Llama4ForConditionalGeneration": _wrapper(
        "llama4",
        TINY["Llama4ForCausalLM"].sizes,
        _SIGLIP
        | dict(image_size=28, patch_size=14, vision_output_dim=64, projector_input_dim=64, projector_output_dim=64),
        image_token_index=500,
    ),
    "MiniMaxM3SparseForConditionalGeneration": _wrapper(
        "minimax_m3_vl",
        dict(intermediate_size=64, dense_intermediate_size=256, shared_intermediate_size=64, num_local_experts=16)
        | dict(num_experts_per_tok=4, head_dim=128, num_hidden_layers=4, rotary_dim=64),
        _SIGLIP | dict(image_size=28),
    ),
    "Glm5NextForConditionalGeneration": _wrapper("glm5_next", TINY["Glm5NextForCausalLM"].sizes, {}),
}

_QWEN_EYE = _EYE | dict(in_channels=3, patch_size=16, spatial_merge_size=2, temporal_patch_size=2, hidden_act="gelu")


def _built_wrapper(
    model_type: str, text: dict, vision: dict, renamed: dict[str, str] | None = None, **more: Any
) -> Tiny:
    sizes = dict(text_config=_SMALL | text, vision_config=vision) | more
    return Tiny(model_type, sizes, options=_TEXT_ONLY, built=True, wrapper=True, renamed=renamed or {})


_FOPE = dict(rope_type="default", rope_theta=10000.0, fope_init_factor=0.5, fope_sep_head=True, num_inv_freq=None)
_QWEN_TEXT = _QWEN_NEXT | dict(model_type="qwen3_5_moe_text")
TINY |= {
    "InternS1ProForConditionalGeneration": _built_wrapper(
        "interns1_pro",
        _QWEN_MOE
        | _COMMON
        | dict(model_type="interns1_pro_text", decoder_sparse_step=1, mlp_only_layers=[])
        | dict(router_n_groups=4, rope_parameters=_FOPE, rope_scaling=_FOPE),
        _QWEN_EYE | _DEEPSTACK,
        **_TOKENS,
    ),
    "InternS2PreviewForConditionalGeneration": _built_wrapper(
        "intern_s2_preview", _QWEN_TEXT, _QWEN_EYE | _DEEPSTACK, **_TOKENS
    ),
    "InternS2MobiusForConditionalGeneration": _built_wrapper(
        "interns2_mobius", _QWEN_TEXT | dict(num_blocks=2, layer_scale=True), _QWEN_EYE | _DEEPSTACK, **_TOKENS
    ),
    "KimiVLForConditionalGeneration": _built_wrapper(
        "kimi_vl",
        TINY["DeepseekV3ForCausalLM"].sizes | _NO_AUX | dict(model_type="deepseek_v3", rope_theta=10000.0),
        _SIGLIP | dict(patch_size=14, init_pos_emb_height=4, init_pos_emb_width=4, merge_kernel_size=[2, 2]),
    ),
    "KimiK25ForConditionalGeneration": _built_wrapper(
        "kimi_k25",
        TINY["DeepseekV3ForCausalLM"].sizes | _NO_AUX | dict(model_type="deepseek_v3"),
        _SIGLIP | dict(pos_emb_height=4, pos_emb_width=4),
        projection_hidden_size=64,
        image_token_id=500,
        tie_word_embeddings=False,
    ),
    "TransformersMoEForCausalLM": Tiny(
        "qwen3_moe", _QWEN_MOE, options=dict(model_impl="transformers"), target="Qwen3MoeForCausalLM"
    ),
    "TransformersMultiModalMoEForCausalLM": Tiny(
        "qwen3_vl_moe",
        TINY["Qwen3VLMoeForConditionalGeneration"].sizes,
        options=_TEXT_ONLY | dict(model_impl="transformers"),
        transposed=True,
        wrapper=True,
        target="Qwen3VLMoeForConditionalGeneration",
    ),
}

_MISTRAL_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate.": "gate.",
    "mlp.shared_experts": "shared_experts",
    "mlp.experts": "experts",
    "mlp.": "feed_forward.",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
TINY["MistralLarge3ForCausalLM"] = Tiny(
    "deepseek_v3",
    TINY["DeepseekV3ForCausalLM"].sizes | dict(n_group=1, topk_group=1, scoring_func="softmax"),
    built=True,
    renamed=_MISTRAL_NAMES,
)

_M3 = TINY["MiniMaxM3SparseForConditionalGeneration"].sizes["text_config"]
TINY["MiniMaxM3SparseForCausalLM"] = Tiny(
    "minimax_m3_text",
    _M3
    | dict(rope_theta=10000.0, rms_norm_eps=1e-6, hidden_act="swigluoai", swiglu_alpha=1.702, swiglu_limit=7.0)
    | dict(swiglu_beta=1.0, n_shared_experts=1, scoring_func="sigmoid", use_routing_bias=True)
    | dict(routed_scaling_factor=2.0, moe_layer_freq=[0, 1, 1, 1]),
    built=True,
    renamed=_NUMBERED,
)

_DENSE_LAST = dict(mlp_layer_types=["dense", "sparse", "sparse", "dense"])
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
        ("ExaoneMoeMTP", "ExaoneMoEForCausalLM", "apart", _DENSE_LAST),
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
# Heads of models that are written from what vLLM builds. vLLM keeps the head's layer apart within its layers.
_BLOCK = {".mtp_block.": "."}
_ERNIE_HEAD = {
    f"layers.3.mtp_{part}.": f"mtp_{part}.0." for part in ("emb_norm", "hidden_norm", "linear_proj", "block")
}
TINY |= {
    head: Tiny(
        TINY[target].model_type,
        TINY[target].sizes | dict(num_nextn_predict_layers=1) | more,
        options=_MTP,
        built=True,
        renamed=TINY[target].renamed,
        target=target,
        head_names=names,
    )
    for head, target, names, more in (
        (
            "HYV3MTPModel",
            "HYV3ForCausalLM",
            _BLOCK,
            dict(first_k_dense_replace=1, expert_hidden_dim=64, route_norm=True, qk_norm=True),
        ),
        (
            "OpenPanguMTPModel",
            "PanguUltraMoEForCausalLM",
            _BLOCK | {"model.embed_tokens.": "model.layers.3.embed_tokens."},
            {},
        ),
        ("ErnieMTPModel", "Ernie4_5_MoeForCausalLM", _ERNIE_HEAD, {}),
        ("MiMoV2MTPModel", "MiMoV2FlashForCausalLM", {}, {}),
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
    if tiny.built:
        return _build(architecture, tiny, folder, seed)
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(tiny.model_type, **({} if tiny.wrapper else _SMALL) | tiny.sizes)
    builder = transformers.AutoModelForImageTextToText if tiny.wrapper else transformers.AutoModelForCausalLM
    model = builder.from_config(config).to(torch.bfloat16)
    zoo.prepare(model)
    _fill_zeros(model)
    model.save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text()) | tiny.written | {"architectures": [tiny.target or architecture]}
    said = {name: value for name, value in written.items() if tiny.written.get(name, "") is not None}
    path.write_text(json.dumps(said, indent=1))
    _rename(folder / "model.safetensors", tiny.renamed)
    if tiny.transposed:
        _transpose_experts(folder / "model.safetensors")
    if tiny.head:
        split_off(folder, tiny.head)
    return tiny.options


def _build(architecture: str, tiny: Tiny, folder: Path, seed: int) -> dict[str, Any]:
    named = {"model_type": tiny.model_type, "architectures": [tiny.target or architecture], "dtype": "bfloat16"}
    config = ({} if tiny.wrapper else _SMALL) | tiny.sizes | named
    known = from_vllm.knows(tiny.model_type)
    options = tiny.options if known else tiny.options | {"trust_remote_code": True}
    from_vllm.write_config(folder, config, known)
    from_vllm.write_weights(folder, options, tiny.renamed, tiny.head_names, seed)
    if tiny.stacked:
        _stack_experts(folder / "model.safetensors")
    return options


def _rename(path: Path, names: dict[str, str]) -> None:
    if names:
        tensors = load_file(path)
        for old, new in names.items():
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        save_file(tensors, path)


def _transpose_experts(path: Path) -> None:
    tensors = load_file(path)
    merged = {name: tensor for name, tensor in tensors.items() if "experts." in name and tensor.ndim == 3}
    save_file(tensors | {name: tensor.mT.contiguous() for name, tensor in merged.items()}, path)


def _stack_experts(path: Path) -> None:
    tensors = load_file(path)
    stacked: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]):
        if (match := re.fullmatch(r"(.*\.)experts\.\d+\.(.*)", name)) is not None:
            stacked.setdefault(match[1] + match[2], []).append(tensors.pop(name))
    save_file(tensors | {name: torch.stack(experts) for name, experts in stacked.items()}, path)


def _fill_zeros(model: torch.nn.Module) -> None:
    """Gives values to what transformers leaves at zero: some routers, and in buffers the biases of their choices."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2 and not parameter.any():
                parameter.normal_(std=0.06)
        for name, buffer in model.named_buffers():
            if "bias" in name.rpartition(".")[2]:
                buffer.normal_(std=0.05)
