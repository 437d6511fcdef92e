"""The committed artefact: what makes an MoE of the dense parent. Small integers, no code.

A safetensors file with one group of tensors per model and layer:

    MODEL.LAYER.shared            uint8 [neurons / 8]            bits: neurons of the shared expert
    MODEL.LAYER.sets              uint8 [experts, neurons / 8]   bits: neurons of each routed expert
    MODEL.LAYER.router            int8 [experts, hidden]
    MODEL.LAYER.PART.left|right   int8 [out, rank], [rank, in]   weight' = weight + left right

with ``NAME.scale`` (float32) beside each int8 tensor: one scale for a row of a router and for a column of ``left`` and
``right``. A neuron that is seldom active has large entries in ``right``, so neurons cannot share a scale.
The file's metadata has a JSON object for each model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

PATH = Path(__file__).with_name("carved.safetensors")


@dataclass
class LayerChange:
    """What one layer gets: corrections to its matrices, and, of a carved layer, its experts."""

    corrections: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Matrix ("gate", "down", …) -> left [out, rank] and right [rank, in], float32."""
    shared: torch.Tensor | None = None  # int64 [shared]
    sets: torch.Tensor | None = None  # int64 [experts, size]
    router: torch.Tensor | None = None  # float32 [experts, hidden]

    def corrected(self, part: str, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` [out, in] with its correction, float32."""
        if part not in self.corrections:
            return weight.float()
        left, right = self.corrections[part]
        return (weight.double() + left.double() @ right.double()).float()


@dataclass
class ModelChange:
    """A model that is made of the dense parent: its layers (by the parent's numbers), and numbers for its config."""

    layers: dict[int, LayerChange]
    numbers: dict[str, Any]


def bits(ids: torch.Tensor, width: int) -> torch.Tensor:
    """Sets of numbers below ``width``, int64 [..., size], as bits, uint8 [..., width / 8]."""
    mask = torch.zeros(*ids.shape[:-1], width, dtype=torch.bool).scatter(-1, ids, True)
    return torch.from_numpy(np.packbits(mask.numpy(), axis=-1))


def members(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of ``bits`` for sets of one size; ascending."""
    mask = torch.from_numpy(np.unpackbits(packed.numpy(), axis=-1)).bool()
    size = int(mask.sum(-1).flatten()[0])
    return mask.nonzero()[:, -1].view(*mask.shape[:-1], size)


def quantised(values: torch.Tensor, along: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values and their scales, the largest magnitude along dimension ``along`` being 127."""
    scale = values.float().abs().amax(along, keepdim=True).clamp_min(1e-12) / 127
    return (values.float() / scale).round().clamp(-127, 127).to(torch.int8), scale


def save(models: dict[str, ModelChange], neurons: int, path: Path = PATH) -> None:
    """Writes all models to one file."""
    tensors: dict[str, torch.Tensor] = {}

    def put(name: str, values: torch.Tensor, along: int) -> None:
        pair = quantised(values, along)
        tensors[name], tensors[f"{name}.scale"] = (tensor.contiguous() for tensor in pair)

    for model, change in models.items():
        for number, layer in change.layers.items():
            prefix = f"{model}.{number}"
            if layer.sets is not None and layer.shared is not None and layer.router is not None:
                tensors[f"{prefix}.sets"] = bits(layer.sets, neurons)
                tensors[f"{prefix}.shared"] = bits(layer.shared, neurons)
                put(f"{prefix}.router", layer.router, -1)
            for part, (left, right) in layer.corrections.items():
                put(f"{prefix}.{part}.left", left, 0)
                put(f"{prefix}.{part}.right", right, 0)
    save_file(tensors, path, {name: json.dumps(change.numbers) for name, change in models.items()})


def load(path: Path = PATH) -> dict[str, ModelChange]:
    """Reads what ``save`` wrote: the models by name."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        models = {name: ModelChange({}, json.loads(numbers)) for name, numbers in metadata.items()}
        names = set(file.keys())

        def get(name: str) -> torch.Tensor:
            return file.get_tensor(name).float() * file.get_tensor(f"{name}.scale")

        for name in sorted(names):
            model, number, part, *rest = name.split(".")
            layer = models[model].layers.setdefault(int(number), LayerChange())
            if part == "sets":
                layer.sets = members(file.get_tensor(name))
            elif part == "shared":
                layer.shared = members(file.get_tensor(name))
            elif part == "router" and not rest:
                layer.router = get(name)
            elif rest == ["left"]:
                layer.corrections[part] = (get(name), get(f"{model}.{number}.{part}.right"))
    for change in models.values():
        change.layers = dict(sorted(change.layers.items()))
    return models
