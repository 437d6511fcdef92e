"""Tiny random checkpoints with quantised experts, in the layout of published ones: config, names, dtypes and shapes.

Sizes are small, and experts alone are quantised: the rest is bf16, also where published ones have it in FP8 or INT4.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, EXPERTS, LAYERS, HEADS, HEAD = 256, 128, 4, 2, 4, 64
Tensors = dict[str, Tensor]
Write = Callable[[int, int, torch.Generator], Tensors]


def _bits(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, generator=rng, dtype=torch.int32)


def _bytes(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)


def _floats(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (0.02 * torch.rand(shape, generator=rng) + 0.001).to(dtype)


def _fp8_blocks(dtype: torch.dtype) -> Write:
    """Scales for blocks of 128 x 128: bf16 in Qwen3's checkpoints, float32 in DeepSeek's."""

    def write(rows: int, columns: int, rng: torch.Generator) -> Tensors:
        blocks = -(-rows // 128), -(-columns // 128)
        codes = torch.randn(rows, columns, generator=rng).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": _floats(rng, *blocks, dtype=dtype)}

    return write


def _gptq(rows: int, columns: int, rng: torch.Generator) -> Tensors:
    groups = columns // 128
    return {
        "qweight": _bits(rng, columns // 8, rows),
        "qzeros": _bits(rng, groups, rows // 8),
        "scales": _floats(rng, groups, rows, dtype=torch.float16),
        "g_idx": (torch.arange(columns) // 128).to(torch.int32),
    }


def _awq(rows: int, columns: int, rng: torch.Generator) -> Tensors:
    groups = columns // 128
    return {
        "qweight": _bits(rng, columns, rows // 8),
        "qzeros": _bits(rng, groups, rows // 8),
        "scales": _floats(rng, groups, rows, dtype=torch.float16),
    }


def _int4(rows: int, columns: int, rng: torch.Generator) -> Tensors:
    return {
        "weight_packed": _bits(rng, rows, columns // 8),
        "weight_scale": _floats(rng, rows, columns // 32),
        "weight_shape": torch.tensor([rows, columns], dtype=torch.int32),
    }


def _nvfp4(rows: int, columns: int, rng: torch.Generator) -> Tensors:
    return {
        "weight": _bytes(rng, rows, columns // 2),
        "weight_scale": (448 * torch.rand(rows, columns // 16, generator=rng)).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(1e-4),
        "input_scale": torch.tensor(1e-3),
    }


def _compressed_nvfp4(rows: int, columns: int, rng: torch.Generator) -> Tensors:
    found = _nvfp4(rows, columns, rng)
    return {
        "weight_packed": found["weight"],
        "weight_scale": found["weight_scale"],
        "weight_global_scale": torch.tensor([1e4]),
        "input_global_scale": torch.tensor([1e3]),
    }


@dataclass(frozen=True)
class Published:
    """A published checkpoint's layout.

    Attributes:
        config: what its ``config.json`` says beside the sizes that all have.
        quantisation: its ``quantization_config``.
        expert: the tensors of a projection of so many rows and columns; None: GPT-OSS's, all experts in one.
        dense: layers before the first with experts; ``heads``: MTP layers after the last.
        beside: files beside the config.
    """

    config: dict[str, Any]
    quantisation: dict[str, Any] | None
    expert: Write | None
    dense: int = 0
    heads: int = 0
    beside: dict[str, Any] = field(default_factory=dict)


_QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER,
    "intermediate_size": 512,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER,
    "intermediate_size": 512,
    "num_key_value_heads": HEADS,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
}
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "intermediate_size": INNER,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}
_INT4_WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
_NVFP4_WEIGHTS = {
    "dynamic": False,
    "group_size": 16,
    "num_bits": 4,
    "observer": "minmax",
    "strategy": "tensor_group",
    "symmetric": True,
    "type": "float",
}
_MODELOPT_GROUP = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}


def _compressed(layout: str, weights: dict, activations: dict | None, ignore: list[str]) -> dict[str, Any]:
    group = {"input_activations": activations, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": layout,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
PUBLISHED = {
    "Qwen3-30B-A3B-FP8": Published(
        _QWEN,
        _FP8 | {"modules_to_not_convert": ["lm_head", *(f"model.layers.{n}.mlp.gate" for n in range(LAYERS))]},
        _fp8_blocks(torch.bfloat16),
    ),
    "Qwen3-30B-A3B-GPTQ-Int4": Published(
        _QWEN,
        {
            "bits": 4,
            "checkpoint_format": "gptq",
            "desc_act": False,
            "group_size": 128,
            "lm_head": False,
            "pack_dtype": "int32",
            "quant_method": "gptq",
            "sym": True,
        },
        _gptq,
    ),
    "Qwen3-30B-A3B-AWQ": Published(
        _QWEN,
        {
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": ["mlp.gate."],
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
        _awq,
    ),
    "Qwen3-30B-A3B-NVFP4 (compressed-tensors)": Published(
        _QWEN,
        _compressed(
            "nvfp4-pack-quantized",
            _NVFP4_WEIGHTS,
            _NVFP4_WEIGHTS | {"dynamic": "local"},
            ["lm_head", *(f"model.layers.{n}.mlp.gate" for n in range(LAYERS))],
        ),
        _compressed_nvfp4,
    ),
    "Qwen3-30B-A3B-NVFP4 (ModelOpt)": Published(
        _QWEN,
        {
            "config_groups": {
                "group_0": {"input_activations": _MODELOPT_GROUP, "weights": _MODELOPT_GROUP, "targets": ["Linear"]}
            },
            "ignore": ["lm_head", *(f"model.layers.{n}.mlp.gate" for n in range(LAYERS))],
            "quant_algo": "NVFP4",
            "producer": {"name": "modelopt", "version": "0.33.0"},
            "quant_method": "modelopt",
        },
        _nvfp4,
    ),
    "DeepSeek-R1-FP4 (ModelOpt, a file of its own)": Published(
        _DEEPSEEK,
        None,
        _nvfp4,
        dense=1,
        beside={
            "hf_quant_config.json": {
                "producer": {"name": "modelopt", "version": "0.23.0"},
                "quantization": {
                    "quant_algo": "NVFP4",
                    "kv_cache_quant_algo": None,
                    "group_size": 16,
                    "exclude_modules": ["*self_attn*", "lm_head", "*mlp.gate"],
                },
            }
        },
    ),
    "DeepSeek-V3": Published(
        _DEEPSEEK | {"num_nextn_predict_layers": 1}, _FP8, _fp8_blocks(torch.float32), dense=1, heads=1
    ),
    "Kimi-K2-Thinking": Published(
        _DEEPSEEK | {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1},
        _compressed(
            "pack-quantized",
            _INT4_WEIGHTS,
            None,
            ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        ),
        _int4,
        dense=1,
    ),
    "gpt-oss-20b": Published(
        _GPT_OSS,
        {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        None,
    ),
}


def write(name: str, folder: Path) -> Path:
    """Writes the checkpoint ``name`` of ``PUBLISHED`` into ``folder``, which it returns."""
    made = PUBLISHED[name]
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    } | made.config
    if made.quantisation is not None:
        config["quantization_config"] = made.quantisation
    for file, content in {"config.json": config, **made.beside}.items():
        (folder / file).write_text(json.dumps(content, indent=1))
    save_file(dict(_tensors(made)), folder / "model.safetensors")
    return folder


def _tensors(made: Published) -> Iterator[tuple[str, Tensor]]:
    rng = torch.Generator().manual_seed(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        yield name, _floats(rng, 512, HIDDEN)
    yield "model.norm.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)
    for layer in range(LAYERS + made.heads):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{norm}.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)
        for name, tensor in _attention(made, rng):
            yield f"{at}.self_attn.{name}", tensor
        if layer < made.dense:
            for name, rows, columns in _projections(512):
                yield f"{at}.mlp.{name}.weight", _floats(rng, rows, columns)
        elif made.expert is None:
            yield from _gpt_oss(at, rng)
        else:
            yield f"{at}.mlp.gate.weight", _floats(rng, EXPERTS, HIDDEN)
            for expert in range(EXPERTS):
                for name, rows, columns in _projections(INNER):
                    for last, tensor in made.expert(rows, columns, rng).items():
                        yield f"{at}.mlp.experts.{expert}.{name}.{last}", tensor
        if made.dense and layer >= made.dense:
            yield f"{at}.mlp.gate.e_score_correction_bias", torch.zeros(EXPERTS)
            for name, rows, columns in _projections(INNER):
                yield f"{at}.mlp.shared_experts.{name}.weight", _floats(rng, rows, columns)


def _projections(inner: int) -> tuple[tuple[str, int, int], ...]:
    return ("gate_proj", inner, HIDDEN), ("up_proj", inner, HIDDEN), ("down_proj", HIDDEN, inner)


def _attention(made: Published, rng: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    if made.dense:  # multi-head latent attention
        sizes = {
            "q_a_proj": (128, HIDDEN),
            "q_b_proj": (HEADS * 128, 128),
            "kv_a_proj_with_mqa": (512 + 64, HIDDEN),
            "kv_b_proj": (HEADS * 128, 512),
            "o_proj": (HIDDEN, HEADS * 64),
        }
        for name, width in (("q_a_layernorm", 128), ("kv_a_layernorm", 512)):
            yield f"{name}.weight", torch.ones(width, dtype=torch.bfloat16)
    else:
        whole, part = HEADS * HEAD, 2 * HEAD
        sizes = {"q_proj": (whole, HIDDEN), "k_proj": (part, HIDDEN), "v_proj": (part, HIDDEN)}
        sizes["o_proj"] = (HIDDEN, whole)
    for name, size in sizes.items():
        yield f"{name}.weight", _floats(rng, *size)
        if made.expert is None:
            yield f"{name}.bias", _floats(rng, size[0])
    if made.expert is None:
        yield "sinks", _floats(rng, HEADS)


def _gpt_oss(at: str, rng: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    yield f"{at}.mlp.router.weight", _floats(rng, EXPERTS, HIDDEN)
    yield f"{at}.mlp.router.bias", _floats(rng, EXPERTS)
    for name, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        groups = columns // 32
        yield f"{at}.mlp.experts.{name}_blocks", _bytes(rng, EXPERTS, rows, groups, 16)
        exponents = torch.randint(118, 124, (EXPERTS, rows, groups), generator=rng, dtype=torch.uint8)
        yield f"{at}.mlp.experts.{name}_scales", exponents
        yield f"{at}.mlp.experts.{name}_bias", _floats(rng, EXPERTS, rows)
