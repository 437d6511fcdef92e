"""A copy of a checkpoint whose experts have 4 bits, in groups of 32: as compressed-tensors, and as GGUF's Q4_0.

Both have the same codes and scales, which bfloat16 and float16 represent alike. Everything else stays as it is.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

GROUP, ZERO = 32, 8
BLOCK = 2 + GROUP // 2  # bytes of a group in Q4_0: a scale in float16, then codes i and i + 16 in a byte
_SMALLEST = 2.0**-14  # of float16's normal numbers
_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
_ENTRY = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
    "ignore": ["re:.*self_attn.*", "re:.*mlp.gate$", "re:.*shared_expert.*", "lm_head"],
}


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [..., K] -> (codes 0 ... 15, uint8 [..., K / 32, 32], scales bfloat16 [..., K / 32])."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7).clamp(min=_SMALLEST).bfloat16()
    return (groups / scales.float()[..., None] + ZERO).round().clamp(0, 15).byte(), scales


def q4_0(weight: Tensor) -> Tensor:
    """weight [..., K] -> blocks, uint8 [..., K / 32 * 18]."""
    codes, scales = rounded(weight)
    low, high = codes.split(GROUP // 2, -1)
    return torch.cat([scales.half()[..., None].view(torch.uint8), low | high << 4], -1).flatten(-2)


def write(model: Path, target: Path) -> None:
    """Writes the copy of ``model``, a shard at a time."""
    target.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for shard in sorted(model.glob("*.safetensors")):
        tensors: dict[str, Tensor] = {}
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                if ".experts." not in name:
                    tensors[name] = tensor
                    continue
                stem, (codes, scales) = name.removesuffix("weight"), rounded(tensor)
                nibbles = codes.flatten(1).unflatten(1, (-1, 8)).int() << (4 * torch.arange(8, dtype=torch.int32))
                tensors[f"{stem}weight_packed"] = nibbles.sum(-1, dtype=torch.int32)
                tensors[f"{stem}weight_scale"] = scales
                tensors[f"{stem}weight_shape"] = torch.tensor(tensor.shape)
        save_file(tensors, target / shard.name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, shard.name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for path in model.glob("*.json"):
        if not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
    config = json.loads((model / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": _ENTRY}))
