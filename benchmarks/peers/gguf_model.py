"""Writes a checkpoint as GGUF with the same weights: as bf16 or float32; norms and routers always as float32.
Experts may be Q4_0.

llama.cpp's own converter needs its source tree; this one needs the package ``gguf``. One tensor, or one layer's experts
of one kind, is in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from safetensors import safe_open

from benchmarks.common import PlanError
from benchmarks.peers import int4
from vllm_spac.system.files import replacing

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
_NORMED = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_SHARED = {f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_FLOAT32 = ("norm", "ffn_gate_inp")  # as llama.cpp's converter stores them
_CONTROL, _NORMAL = 3, 1  # types of tokens


@dataclass(frozen=True)
class Family:
    """An architecture of vLLM as one of llama.cpp whose graph computes the same.

    Attributes:
        layer: tensors of a layer besides its routed experts: the checkpoint's name -> that in the file.
        needs: what ``config.json`` must say, since the graph computes nothing else; what it does not say is right.
    """

    name: str  # llama.cpp's
    layer: dict[str, str]
    experts: str  # what ``config.json`` calls the number of routed experts
    needs: dict[str, Any]
    paired: bool = False  # whether the graph rotates neighbours, where vLLM rotates halves of a head


_QWEN = {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True, "rope_scaling": None}
_DEEPSEEK = {"first_k_dense_replace": 0, "moe_layer_freq": 1, "scoring_func": "softmax", "rope_scaling": None}
FAMILIES = {
    "Qwen3MoeForCausalLM": Family("qwen3moe", _LAYER | _NORMED, "num_experts", _QWEN),
    # bailingmoe renormalises the weights of the top-k if told to; llama.cpp's own ``deepseek`` never does.
    "DeepseekForCausalLM": Family("bailingmoe", _LAYER | _SHARED, "n_routed_experts", _DEEPSEEK, paired=True),
}


class UnsupportedModelError(PlanError):
    """The checkpoint cannot be written as GGUF by this script."""


@dataclass(frozen=True)
class Part:
    """A tensor of the GGUF file: its name, shape, whether it is always float32, how it is read, and whose it is."""

    name: str
    shape: tuple[int, ...]
    float32: bool
    read: Callable[[], torch.Tensor]
    of_experts: bool = False


def convert(
    model: Path, output: Path, dtype: torch.dtype = torch.bfloat16, progress: bool = True, four_bits: bool = False
) -> None:
    """Writes the checkpoint in the folder ``model`` to ``output``, atomically, with weights of ``dtype``.

    ``four_bits``: its experts in Q4_0, as ``int4.write`` rounds them.

    Raises:
        UnsupportedModelError: it is none of ``FAMILIES`` in bf16, or has tensors that this script does not know.
    """
    try:
        import gguf
    except ImportError as error:
        raise PlanError(f"{error}: pip install 'vllm-spac[peers]'") from error

    config = json.loads((model / "config.json").read_text())
    family = _family(model, config)
    types = {torch.float32: gguf.GGMLQuantizationType.F32, torch.bfloat16: gguf.GGMLQuantizationType.BF16}
    with ExitStack() as files, replacing(output) as partial:
        parts = list(_parts(model, config, family, files))
        writer = gguf.GGUFWriter(partial, family.name)
        _add_settings(writer, config, family, model.name)
        _add_tokenizer(writer, json.loads((model / "tokenizer.json").read_text()), config)
        for part in parts:
            written = torch.float32 if part.float32 else dtype
            size, kind = int(np.prod(part.shape)) * written.itemsize, types[written]
            if four_bits and part.of_experts:
                size, kind = int(np.prod(part.shape)) // int4.GROUP * int4.BLOCK, gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), size, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for part in track(parts, f"Writing {output.name}", disable=not progress):
            tensor = part.read()
            if tensor.dtype != torch.bfloat16:
                raise UnsupportedModelError(f"{part.name} is {tensor.dtype}; this script reads bf16 checkpoints")
            if four_bits and part.of_experts:
                tensor = int4.q4_0(tensor)
            else:
                tensor = tensor.to(torch.float32 if part.float32 else dtype)
            writer.write_tensor_data(tensor.contiguous().view(torch.uint8).numpy())
        writer.close()


def paired(rows: torch.Tensor, head: int) -> torch.Tensor:
    """Returns rows [heads * head, hidden] of q or k so that those that are rotated together are neighbours.

    vLLM rotates row i of a head with row i + head/2, llama.cpp's ``norm`` type row 2 i with row 2 i + 1.
    """
    return rows.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).reshape(rows.shape)


def _family(model: Path, config: dict[str, Any]) -> Family:
    family = FAMILIES.get((config.get("architectures") or ["no architecture"])[0])
    if family is None:
        found = ", ".join(config.get("architectures") or ["no architecture"])
        raise UnsupportedModelError(f"{model} is {found}; this script writes {' and '.join(FAMILIES)}")
    for name, value in family.needs.items():
        if (found := config.get(name, value)) not in (value, None):
            raise UnsupportedModelError(f"{model} has {name} {found}; llama.cpp's {family.name} computes {value} only")
    return family


def _parts(model: Path, config: dict[str, Any], family: Family, files: ExitStack) -> Iterator[Part]:
    """Describes all tensors; ``files`` closes what they are read from."""
    opened = [files.enter_context(safe_open(path, "pt")) for path in _files(model)]
    where = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in where.items()}

    def read(name: str) -> torch.Tensor:
        return where[name].get_tensor(name)

    def part(source: str, target: str) -> Part:
        name = f"{source}.weight"
        if name not in shapes:
            raise UnsupportedModelError(f"{model} has no {name}")
        seen.add(name)
        pairs = family.paired and target.endswith(("attn_q", "attn_k"))
        return Part(
            f"{target}.weight",
            shapes[name],
            any(word in target for word in _FLOAT32),
            lambda: paired(read(name), _head(config)) if pairs else read(name),
        )

    def experts(layer: int, source: str, target: str) -> Part:
        names = [f"model.layers.{layer}.mlp.experts.{i}.{source}.weight" for i in range(config[family.experts])]
        seen.update(names)
        shape = (len(names), *shapes[names[0]])
        name = f"blk.{layer}.{target}.weight"
        return Part(name, shape, False, lambda: torch.stack([read(name) for name in names]), of_experts=True)

    seen: set[str] = set()
    tied = config.get("tie_word_embeddings", False)
    yield from (part(source, target) for source, target in _MODEL.items() if not (tied and source == "lm_head"))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield from (part(prefix + source, f"blk.{layer}.{target}") for source, target in family.layer.items())
        yield from (experts(layer, source, target) for source, target in _EXPERTS.items())
    unknown = sorted(set(shapes) - seen)
    if unknown:
        raise UnsupportedModelError(f"{model} has tensors that this script does not know, such as {unknown[0]}")


def _files(model: Path) -> list[Path]:
    index = model / "model.safetensors.index.json"
    if not index.exists():
        return [model / "model.safetensors"]
    return [model / file for file in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def _head(config: dict[str, Any]) -> int:
    """Returns the size of a head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _add_settings(writer: Any, config: dict[str, Any], family: Family, name: str) -> None:
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_name(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(_head(config))
    writer.add_value_length(_head(config))
    writer.add_rope_dimension_count(_head(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(theta)
    writer.add_expert_count(config[family.experts])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    if "n_shared_experts" in config:
        writer.add_leading_dense_block_count(0)
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config.get("routed_scaling_factor", 1.0))


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
