"""The checkpoints for stock vLLM, made of the dense parent and the artefacts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from benchmarks.real.artefact import Experts, Head, ModelChange

HEAD_NAMES = {
    "embedding_norm": "input_layernorm",
    "hidden_norm": "hidden_norm",
    "ffn_norm": "post_attention_layernorm",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write_target(dense: Path, change: ModelChange, folder: Path) -> None:
    """The MoE for vLLM's ``DeepseekForCausalLM``: Llama's attention, a shared expert, softmax over the top-k.

    That class does not tie embeddings, so the checkpoint has them twice; without ``lm_head.weight`` all logits are NaN.
    """
    old = load_file(dense / "model.safetensors")
    new = {name: weight for name, weight in old.items() if ".mlp." not in name}
    new["lm_head.weight"] = old["model.embed_tokens.weight"].clone()
    for number, layer in enumerate(change.layers):
        new |= _moe(old, number, layer, change.numbers["top_k"])
    experts, size = change.layers[0].sets.shape
    numbers = {
        "architectures": ["DeepseekForCausalLM"],
        "tie_word_embeddings": False,
        "moe_intermediate_size": size,
        "n_routed_experts": experts,
        "n_shared_experts": -(-len(change.layers[0].shared) // size),
        "num_experts_per_tok": change.numbers["top_k"],
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "scoring_func": "softmax",
        "routed_scaling_factor": 1.0,
    }
    write_checkpoint(new, dense, numbers, folder)


def _moe(old: dict[str, torch.Tensor], number: int, layer: Experts, top_k: int) -> dict[str, torch.Tensor]:
    prefix = f"model.layers.{number}.mlp."
    gate, up, down = (old[f"{prefix}{part}_proj.weight"].float() for part in ("gate", "up", "down"))
    down = layer.corrected(down)
    new = {f"{prefix}gate.weight": layer.router}
    # vLLM cuts a shared expert that is no multiple of the routed size, so it is padded by neurons of zeros.
    pad = -len(layer.shared) % layer.sets.shape[1]
    new[f"{prefix}shared_experts.gate_proj.weight"] = F.pad(gate[layer.shared], (0, 0, 0, pad))
    new[f"{prefix}shared_experts.up_proj.weight"] = F.pad(up[layer.shared], (0, 0, 0, pad))
    new[f"{prefix}shared_experts.down_proj.weight"] = F.pad(down[:, layer.shared], (0, pad))
    for expert, ids in enumerate(layer.sets):
        new[f"{prefix}experts.{expert}.gate_proj.weight"] = gate[ids]
        new[f"{prefix}experts.{expert}.up_proj.weight"] = up[ids]
        # The weights of the top-k sum to 1, those of the carved FFN to k.
        new[f"{prefix}experts.{expert}.down_proj.weight"] = down[:, ids] * top_k
    return {name: weight.to(torch.bfloat16).contiguous() for name, weight in new.items()}


def write_eagle(dense: Path, head: Head, vocabulary: torch.Tensor, folder: Path) -> None:
    """The EAGLE-3 head for vLLM's ``LlamaForCausalLMEagle3``, which takes the embeddings of the target.

    Its output rows are those of the target for the tokens of ``vocabulary``, int64 [drafted], ascending, with what
    the head adds to them. As published heads do, ``d2t`` adds to the number of a row what makes it the token's.
    """
    shape = json.loads((dense / "config.json").read_text())
    keys = shape["hidden_size"] // shape["num_attention_heads"] * shape["num_key_value_heads"]
    weights = dict(head.weights)
    q, k, v = weights.pop("qkv").split([shape["hidden_size"], keys, keys])
    fc_norms = weights.pop("fc_norms")
    added = weights.pop("rows_left") @ weights.pop("rows_right") if "rows_left" in weights else torch.zeros(())
    new = {"fc.weight": weights.pop("fc"), "norm.weight": weights.pop("norm")}
    new |= {f"fc_norm.{i}.weight": norm for i, norm in enumerate(fc_norms)}
    new |= {f"midlayer.self_attn.{part}_proj.weight": weight for part, weight in zip("qkv", (q, k, v), strict=True)}
    new |= {f"midlayer.{HEAD_NAMES[name]}.weight": weight for name, weight in weights.items()}
    rows = load_file(dense / "model.safetensors")["model.embed_tokens.weight"][vocabulary]
    new["lm_head.weight"] = rows.float() + added
    tensors = {name: weight.to(torch.bfloat16).contiguous() for name, weight in new.items()}
    tensors["d2t"] = vocabulary - torch.arange(len(vocabulary))
    numbers = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "tie_word_embeddings": False,
        "num_hidden_layers": 1,
        "intermediate_size": len(head.weights["gate"]),
        "draft_vocab_size": len(vocabulary),
        "fc_norm": True,
        "eagle_aux_hidden_state_layer_ids": head.numbers["depths"],
    }
    write_checkpoint(tensors, dense, numbers, folder)


def write_checkpoint(tensors: dict[str, torch.Tensor], dense: Path, numbers: dict[str, Any], folder: Path) -> None:
    """Writes ``tensors`` with the dense parent's config, changed by ``numbers``, and its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((dense / "config.json").read_text()) | numbers
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in TOKENIZER:
        shutil.copy(dense / name, folder / name)
