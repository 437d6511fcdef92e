"""The committed artefacts: what makes an MoE of the dense parent, and its EAGLE-3 head. Small integers, no code.

``carved.safetensors`` has one group of tensors per model and layer:

    MODEL.LAYER.shared            uint8 [neurons / 8]            bits: neurons of the shared expert
    MODEL.LAYER.sets              uint8 [experts, neurons / 8]   bits: neurons of each routed expert
    MODEL.LAYER.router            int8 [experts, hidden]
    MODEL.LAYER.down.left|right   int8 [out, rank], [rank, in]   down' = down + left right

with ``NAME.scale`` (float32) beside each int8 tensor: one scale for a row of a router and for a column of ``left`` and
``right``. A neuron that is seldom active has large entries in ``right``, so neurons cannot share a scale.
The file's metadata has a JSON object for each model.

``eagle3.safetensors`` has the head's matrices, int8 [out, in] with a scale for each row, and its norms, bfloat16. Its
embeddings are the target's, and so are its output rows, but for ``rows_left @ rows_right``: those of the tokens that
``draft_vocabulary.bits`` has a bit for, most significant bit first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

TARGET = "target"  # the model that the artefact makes
PATH = Path(__file__).with_name("carved.safetensors")
HEAD = Path(__file__).with_name("eagle3.safetensors")
VOCABULARY = Path(__file__).with_name("draft_vocabulary.bits")


@dataclass
class Experts:
    """What one layer gets: its experts, and a correction to its down projection."""

    shared: torch.Tensor  # int64 [shared]
    sets: torch.Tensor  # int64 [experts, size]
    router: torch.Tensor  # float32 [experts, hidden]
    left: torch.Tensor  # float32 [hidden, rank]
    right: torch.Tensor  # float32 [rank, neurons]

    @property
    def neurons(self) -> int:
        return self.right.shape[1]

    def corrected(self, down: torch.Tensor) -> torch.Tensor:
        """``down`` [hidden, neurons] with its correction, float32; the same on every machine."""
        return (down.double() + self.left.double() @ self.right.double()).float()


@dataclass
class ModelChange:
    """A model that is made of the dense parent: its layers, and numbers for its config and of its making."""

    layers: list[Experts]
    numbers: dict[str, Any]


@dataclass
class Head:
    """A drafter: its matrices and norms by the names of ``fit/eagle.py``, float32, and numbers."""

    weights: dict[str, torch.Tensor]
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


def load(path: Path = PATH) -> dict[str, ModelChange]:
    """Reads an artefact: the models by name."""
    models = {}
    with safe_open(path, "pt") as file:
        names = set(file.keys())

        def get(name: str) -> torch.Tensor:
            return file.get_tensor(name).float() * file.get_tensor(f"{name}.scale")

        for model, numbers in file.metadata().items():
            layers: list[Experts] = []
            while (prefix := f"{model}.{len(layers)}") + ".sets" in names:
                shared, sets = (members(file.get_tensor(f"{prefix}.{part}")) for part in ("shared", "sets"))
                parts = (get(f"{prefix}.{part}") for part in ("router", "down.left", "down.right"))
                layers.append(Experts(shared, sets, *parts))
            models[model] = ModelChange(layers, json.loads(numbers))
    return models


def save_head(head: Head, path: Path = HEAD) -> None:
    """Writes the head."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in head.weights.items():
        if "norm" in name:
            tensors[name] = weight.to(torch.bfloat16)
        else:
            tensors[name], tensors[f"{name}.scale"] = quantised(weight, -1)
    save_file(tensors, path, {"head": json.dumps(head.numbers)})


def load_head(path: Path = HEAD) -> Head:
    """Reads what ``save_head`` wrote."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in sorted(set(file.keys()))}
        numbers = json.loads(file.metadata()["head"])
    weights = {
        name: weight.float() * tensors.get(f"{name}.scale", torch.ones(()))
        for name, weight in sorted(tensors.items())
        if not name.endswith(".scale")
    }
    return Head(weights, numbers)


def save_vocabulary(ids: torch.Tensor, tokens: int, path: Path = VOCABULARY) -> None:
    """Writes which of the target's ``tokens`` the head drafts; ids int64 [drafted]."""
    path.write_bytes(bits(ids, tokens).numpy().tobytes())


def load_vocabulary(path: Path = VOCABULARY) -> torch.Tensor:
    """Reads what ``save_vocabulary`` wrote: int64 [drafted], ascending."""
    return members(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8))
