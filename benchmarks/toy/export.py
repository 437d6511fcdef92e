"""Writes toy networks as Hugging Face checkpoints that stock vLLM loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from nets import NORM_EPS, ROPE_THETA, CausalLM, Shape
from safetensors.torch import load_file, save_file
from torch import Tensor

MAX_POSITIONS = 1024


def common_config(shape: Shape) -> dict:
    return {
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "rope_theta": ROPE_THETA,
        "dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": shape.vocab,
    }


def moe_config(shape: Shape) -> dict:
    return common_config(shape) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "intermediate_size": shape.intermediate * shape.top_k,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.intermediate,
        "norm_topk_prob": True,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "tie_word_embeddings": False,
    }


def write_checkpoint(folder: Path, config: dict, tensors: dict[str, Tensor]) -> None:
    """Writes ``config.json`` and ``model.safetensors`` (floating point as bf16)."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: (v.to(torch.bfloat16) if v.is_floating_point() else v).contiguous() for k, v in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


def named(model: CausalLM) -> dict[str, Tensor]:
    """Returns the state dict under Hugging Face's names; stacked experts are split one by one."""
    tensors = {}
    for name, value in model.state_dict().items():
        key = name if name.startswith("lm_head") else f"model.{name}"
        if name.endswith("mlp.w13"):
            for expert, (gate, up) in enumerate(v.chunk(2) for v in value):
                tensors[key.replace("w13", f"experts.{expert}.gate_proj.weight")] = gate
                tensors[key.replace("w13", f"experts.{expert}.up_proj.weight")] = up
        elif name.endswith("mlp.w2"):
            for expert, down in enumerate(value):
                tensors[key.replace("w2", f"experts.{expert}.down_proj.weight")] = down
        else:
            tensors[key] = value
    return tensors


def write_moe(model: CausalLM, folder: Path) -> None:
    write_checkpoint(folder, moe_config(model.shape), named(model))


def load_moe(folder: Path) -> CausalLM:
    """Loads the network of a folder that ``write_moe`` wrote, in float32."""
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        experts=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate=config["moe_intermediate_size"],
    )
    tensors = {k.removeprefix("model."): v.float() for k, v in load_file(folder / "model.safetensors").items()}
    for layer in range(shape.layers):
        mlp = f"layers.{layer}.mlp."
        parts = {
            kind: [tensors.pop(f"{mlp}experts.{e}.{kind}_proj.weight") for e in range(shape.experts)]
            for kind in ("gate", "up", "down")
        }
        tensors[mlp + "w13"] = torch.stack([torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)])
        tensors[mlp + "w2"] = torch.stack(parts["down"])
    model = CausalLM(shape)
    model.load_state_dict(tensors)
    return model


def write_dense(model: CausalLM, folder: Path) -> None:
    config = common_config(model.shape) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "intermediate_size": model.shape.intermediate,
        "tie_word_embeddings": True,
    }
    tensors = named(model)
    del tensors["lm_head.weight"]
    write_checkpoint(folder, config, tensors)


def write_tokenizer(folder: Path, end_of_text: str, source: Path | None = None) -> None:
    """Writes ``tokenizer_config.json``, and ``tokenizer.json`` copied from ``source`` if given."""
    if source is not None:
        shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end_of_text,
        "pad_token": end_of_text,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }}{{ '\\n' }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
