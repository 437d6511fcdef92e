"""MoE layers whose experts are codes and scales, beside the weights that they stand for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import moe_layers
import torch
from moe_layers import EMPTY, Layer, table
from torch import Tensor
from vllm_spac.kernels.formats import Format
from vllm_spac.kernels.reference.dequantise import dequantise
from vllm_spac.kernels.types import Quantised

FORMATS = {
    "mxfp4": Format("e2m1", 32),
    "nvfp4": Format("e2m1", 16),
    "int4": Format("int4", 128),
    "int4 by 32": Format("int4", 32),
    "int4 by 64": Format("int4", 64),
    "int4, zero points": Format("int4", 128, zeros=True),
    "int4 by 32, zero points": Format("int4", 32, zeros=True),
    "int4 by channel": Format("int4"),
    "int8 by channel": Format("int8"),
    "int8 by 64": Format("int8", 64),
    "fp8 by block": Format("e4m3", 128, 128),
    "fp8 by channel": Format("e4m3"),
}


def matrix(kind: Format, rows: int, columns: int, dtype: torch.dtype, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random codes and scales; weights of the order of 1."""
    codes = torch.randint(0, 256, kind.code_shape(rows, columns), dtype=torch.uint8, generator=rng)
    shape = kind.scale_shape(rows, columns)
    if kind.codes == "e4m3":
        codes = torch.where((codes & 127) == 127, 0, codes)
    if kind.row_scales:
        parts = torch.randint(0, 127, (*shape, 4), dtype=torch.uint8, generator=rng)  # of e4m3, subnormal ones too
        words = parts.view(torch.int32).squeeze(-1)
        words[0] = ((torch.rand(shape[1], generator=rng) + 0.5) / 448).view(torch.int32)
        return codes, words
    if kind.codes == "e2m1":
        parts = torch.randint(123, 128, (*shape, 4), dtype=torch.uint8, generator=rng)
        return codes, parts.view(torch.int32).squeeze(-1)
    size = {"int4": 0.3, "int8": 0.02, "e4m3": 0.01}[kind.codes]

    def floats(*lengths: int) -> Tensor:
        return size * (torch.rand(lengths, generator=rng) + 0.2)

    if kind.codes != "int4":
        return codes, floats(*shape)
    if not kind.zeros:
        return codes, floats(*shape, 2).to(dtype).view(torch.int32).squeeze(-1)
    zeros = torch.randint(0, 16, shape, dtype=torch.int16, generator=rng)
    return codes, torch.stack([floats(*shape).to(dtype).view(torch.int16), zeros], -1).view(torch.int32).squeeze(-1)


@dataclass
class QuantisedLayer:
    """A layer twice: ``plain`` has the dequantised weights, the others are what the kernels are given."""

    kind: Format
    plain: Layer
    codes13: list[Tensor]
    codes2: list[Tensor]
    scales13: list[Tensor]
    scales2: list[Tensor]

    def call(self, function, **options) -> Tensor:
        """``function`` is ``grouped_gemm`` or its twin."""
        given = replace(self.plain, w13=self.codes13, w2=self.codes2)
        tables = given.tables()
        quantised = Quantised(self.kind, table(self.scales13), table(self.scales2))
        return function(
            given.x, tables["w13"], tables["w2"], given.weights, given.ids, self.plain.intermediate, tables["b13"],
            tables["b2"], given.activation, quantised=quantised, **options,
        )  # fmt: skip

    def to(self, device: str) -> QuantisedLayer:
        parts = {
            name: [part.to(device) for part in getattr(self, name)]
            for name in ("codes13", "codes2", "scales13", "scales2")
        }
        return QuantisedLayer(self.kind, self.plain.to(device), **parts)


def make(kind: Format, rows: int, d: int, ff: int, dtype: torch.dtype = torch.bfloat16, **options) -> QuantisedLayer:
    """As ``moe_layers.make``; the poisoned expert's codes and scales have all bits set."""
    plain = moe_layers.make(rows, d, ff, dtype, **options)
    rng = torch.Generator().manual_seed(rows + d)
    parts: dict[str, list[Tensor]] = {"codes13": [], "codes2": [], "scales13": [], "scales2": []}
    for expert in range(len(plain.w13)):
        for name, weights, size in (("13", plain.w13, (2 * ff, d)), ("2", plain.w2, (d, ff))):
            codes, scales = matrix(kind, *size, dtype, rng)
            if expert == EMPTY:
                codes, scales = (part.view(torch.uint8).fill_(255).view(part.dtype) for part in (codes, scales))
            else:
                weights[expert] = dequantise(kind, codes, scales, *size, dtype)
            parts[f"codes{name}"].append(codes)
            parts[f"scales{name}"].append(scales)
    scaled = (plain.x / d**0.5).to(dtype)  # so that gate and up are of the order of 3
    return QuantisedLayer(kind, replace(plain, x=scaled), **parts)
