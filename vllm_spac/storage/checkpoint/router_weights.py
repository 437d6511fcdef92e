"""Reads the routers of a checkpoint and the norms before them; an engine's own may be packed for its kernels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_spac.errors import UnsupportedError

_GATES = ("gate", "router", "router.layer")
_NORMS = ("post_attention_layernorm", "pre_feedforward_layernorm", "ffn_norm")
_LAYER = re.compile(r"(?P<block>.*?\b(?:layers|blocks|h)\.\d+)\.(?P<moe>.+?)\.experts$")


def read(folder: Path, layers: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Reads the router and the norm of each of ``layers``, by the names that checkpoints usually give them.

    Args:
        layers: names of vLLM's MoE layers, e.g. ``model.layers.0.mlp.experts``.

    Returns:
        float32 weights [L, N, d] and biases [L, N] (0 where the checkpoint has none) of the routers, and weights [L, d]
        of the norms.

    Raises:
        UnsupportedError: a tensor is not there, has another shape than those of other layers, or cannot be read.
    """
    try:
        tensors = _Tensors(folder)
        found = [_of_layer(tensors, name) for name in layers]
        weights, biases, norms = (torch.stack(parts) for parts in zip(*found, strict=True))
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise UnsupportedError(f"the routers of {folder} cannot be read: {error}") from error
    return weights, biases, norms


class _Tensors:
    """The tensors of all files of a folder by name."""

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(str(path), framework="pt") as file:
                self._file_of |= dict.fromkeys(file.keys(), path)

    def find(self, names: Sequence[str]) -> Tensor | None:
        """Returns the first of ``names`` that is there, in float32; a prefix in the checkpoint may differ."""
        for name in names:
            short = name.removeprefix("model.").removeprefix("language_model.")
            for there in (name, short, f"model.{short}", f"language_model.model.{short}"):
                if there in self._file_of:
                    with safe_open(str(self._file_of[there]), framework="pt") as file:
                        return file.get_tensor(there).float()
        return None


def _of_layer(tensors: _Tensors, name: str) -> tuple[Tensor, Tensor, Tensor]:
    match = _LAYER.match(name)
    if match is None:
        raise ValueError(f"{name} is not named as a layer's experts")
    block, moe = match["block"], match["moe"]
    weight = tensors.find([f"{block}.{moe}.{gate}.weight" for gate in _GATES])
    norm = tensors.find([f"{block}.{name}.weight" for name in _NORMS])
    if weight is None or norm is None:
        raise ValueError(f"it has no {'router' if weight is None else 'norm'} for {name} under a known name")
    bias = tensors.find([f"{block}.{moe}.{gate}.bias" for gate in _GATES])
    if weight.ndim != 2 or norm.shape != weight.shape[1:] or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"router and norm of {name} do not fit one another")
    return weight, torch.zeros(len(weight)) if bias is None else bias, norm
