"""Makes the last layer of a tiny checkpoint its MTP head, which drafts a further token and has experts of its own.

transformers builds no MTP heads, so a model with one layer more is written and its last layer renamed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_PER_LAYER = ("layer_types", "mlp_layer_types")  # lists in a configuration, one entry per layer
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def split_off(folder: Path, style: str) -> None:
    """Turns the last layer of the checkpoint in ``folder`` into an MTP head.

    The head sees the embedding of the last token more than the hidden state, so that some of its drafts are accepted.

    Args:
        style: how published checkpoints name the head: a key of ``_STYLES``.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text())
    last = config["num_hidden_layers"] - 1
    cut = {name: config[name][:last] for name in _PER_LAYER if config.get(name)}
    path.write_text(json.dumps(config | cut | dict.fromkeys(_COUNTS, 1) | {"num_hidden_layers": last}, indent=1))
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    prefix = f"model.layers.{last}."
    layer = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    hidden = config["hidden_size"]
    projection = 0.3 * torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(1)) / hidden**0.5
    projection[:, :hidden] += torch.eye(hidden)
    save_file(tensors | _STYLES[style](prefix, layer, projection.to(torch.bfloat16), tensors), weights)


def _as_layer(prefix: str, layer: dict, projection: torch.Tensor, others: dict) -> dict[str, torch.Tensor]:
    """DeepSeek's: a layer after the last, which repeats the embeddings and the output matrix."""
    ones = torch.ones(len(projection), dtype=torch.bfloat16)
    own = {
        "enorm.weight": ones,
        "hnorm.weight": ones.clone(),
        "eh_proj.weight": projection,
        "shared_head.norm.weight": ones.clone(),
        "shared_head.head.weight": others["lm_head.weight"].clone(),
        "embed_tokens.weight": others["model.embed_tokens.weight"].clone(),
    }
    return {prefix + name: tensor for name, tensor in (layer | own).items()}


def _apart(prefix: str, layer: dict, projection: torch.Tensor, others: dict) -> dict[str, torch.Tensor]:
    """Qwen's: under ``mtp``, with the target's embeddings and output matrix."""
    norm = torch.zeros_like if float(others["model.norm.weight"].float().mean()) < 0.5 else torch.ones_like
    scale = norm(others["model.norm.weight"])
    own = {
        "fc.weight": projection,
        "norm.weight": scale,
        "pre_fc_norm_embedding.weight": scale.clone(),
        "pre_fc_norm_hidden.weight": scale.clone(),
    }
    return {f"mtp.layers.0.{name}": t for name, t in layer.items()} | {f"mtp.{name}": t for name, t in own.items()}


_STYLES: dict[str, Callable[..., dict[str, torch.Tensor]]] = {"layer": _as_layer, "apart": _apart}
