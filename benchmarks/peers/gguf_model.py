"""Writes a Qwen3-MoE checkpoint as GGUF, with the same weights: bf16 stays bf16, norms and routers become float32.

llama.cpp's own converter needs its source tree; this one needs the package ``gguf``. One tensor, or one layer's experts
of one kind, is in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from safetensors import safe_open

from vllm_spac.system.files import replacing

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_FLOAT32 = ("norm", "ffn_gate_inp")  # as llama.cpp's converter stores them
_CONTROL, _NORMAL = 3, 1  # types of tokens


class UnsupportedModelError(ValueError):
    """The checkpoint cannot be written as GGUF by this script."""


@dataclass(frozen=True)
class Part:
    """A tensor of the GGUF file: its name, shape, whether it becomes float32, and how it is read."""

    name: str
    shape: tuple[int, ...]
    float32: bool
    read: Callable[[], torch.Tensor]


def convert(model: Path, output: Path, progress: bool = True) -> None:
    """Writes the checkpoint in the folder ``model`` to ``output``, atomically.

    Raises:
        UnsupportedModelError: it is no Qwen3-MoE in bf16, or has tensors that this script does not know.
    """
    import gguf

    config = json.loads((model / "config.json").read_text())
    if config.get("model_type") != "qwen3_moe" or config.get("mlp_only_layers"):
        raise UnsupportedModelError(f"{model} is no Qwen3-MoE whose layers all have experts")
    parts = list(_parts(model, config))
    with replacing(output) as partial:
        writer = gguf.GGUFWriter(partial, "qwen3moe")
        _add_settings(writer, config, model.name)
        _add_tokenizer(writer, json.loads((model / "tokenizer.json").read_text()), config)
        types = {True: gguf.GGMLQuantizationType.F32, False: gguf.GGMLQuantizationType.BF16}
        for part in parts:
            size = int(np.prod(part.shape)) * (4 if part.float32 else 2)
            writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), size, raw_dtype=types[part.float32])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for part in track(parts, f"Writing {output.name}", disable=not progress):
            tensor = part.read()
            if tensor.dtype != torch.bfloat16:
                raise UnsupportedModelError(f"{part.name} is {tensor.dtype}; this script writes bf16 checkpoints")
            tensor = tensor.float() if part.float32 else tensor
            writer.write_tensor_data(tensor.contiguous().view(torch.uint8).numpy())
        writer.close()


def _parts(model: Path, config: dict[str, Any]) -> Iterator[Part]:
    files = _files(model)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(set(files.values())):
        with safe_open(path, "pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    def read(name: str) -> torch.Tensor:
        with safe_open(files[name], "pt") as file:
            return file.get_tensor(name)

    def part(source: str, target: str) -> Part:
        name = f"{source}.weight"
        if name not in shapes:
            raise UnsupportedModelError(f"{model} has no {name}")
        seen.add(name)
        return Part(f"{target}.weight", shapes[name], any(word in target for word in _FLOAT32), lambda: read(name))

    def experts(layer: int, source: str, target: str) -> Part:
        names = [f"model.layers.{layer}.mlp.experts.{i}.{source}.weight" for i in range(config["num_experts"])]
        seen.update(names)
        shape = (len(names), *shapes[names[0]])
        return Part(f"blk.{layer}.{target}.weight", shape, False, lambda: torch.stack([read(name) for name in names]))

    seen: set[str] = set()
    tied = config.get("tie_word_embeddings", False)
    yield from (part(source, target) for source, target in _MODEL.items() if not (tied and source == "lm_head"))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield from (part(prefix + source, f"blk.{layer}.{target}") for source, target in _LAYER.items())
        yield from (experts(layer, source, target) for source, target in _EXPERTS.items())
    unknown = sorted(set(shapes) - seen)
    if unknown:
        raise UnsupportedModelError(f"{model} has tensors that this script does not know, such as {unknown[0]}")


def _files(model: Path) -> dict[str, Path]:
    """Returns the file of each tensor."""
    index = model / "model.safetensors.index.json"
    if index.exists():
        return {name: model / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    with safe_open(model / "model.safetensors", "pt") as file:
        return dict.fromkeys(file.keys(), model / "model.safetensors")


def _add_settings(writer: Any, config: dict[str, Any], name: str) -> None:
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_name(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(theta)
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Adds a byte-level BPE; the comparison sends token ids, so nothing is tokenised with it."""
    ids = dict(tokenizer["model"]["vocab"])
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    names = {number: text for text, number in (ids | special).items()}
    tokens = [names.get(number, f"[unused {number}]") for number in range(config["vocab_size"])]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if text in special else _NORMAL for text in tokens])
    writer.add_token_merges(merges)
    for add, name in ((writer.add_bos_token_id, "bos_token_id"), (writer.add_eos_token_id, "eos_token_id")):
        if isinstance(config.get(name), int):
            add(config[name])
    writer.add_add_bos_token(False)
