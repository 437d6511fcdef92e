"""Random experts of every format that the compiled kernels read, and what the torch twin of a GPU makes of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from vllm_spac.kernels.formats import Format
from vllm_spac.kernels.reference.grouped_gemm import grouped_gemm
from vllm_spac.kernels.types import Quantised

from vllm_spac.core import MoEShape, TensorSpec

EXPERTS, TOP_K = 5, 3
FORMATS = {
    "plain": None,
    "int4": Format("int4", 128),
    "int4 by 64": Format("int4", 64),
    "int4 by 32": Format("int4", 32),
    "int4 by 16": Format("int4", 16),
    "int4 by 48": Format("int4", 48),
    "int4 by row": Format("int4"),
    "zeros": Format("int4", 128, zeros=True),
    "zeros by 32": Format("int4", 32, zeros=True),
    "zeros by 16": Format("int4", 16, zeros=True),
    "int8": Format("int8"),
    "int8 by 64": Format("int8", 64),
    "fp8": Format("e4m3"),
    "fp8 by block": Format("e4m3", 128, 128),
    "fp8, rows too": Format("e4m3", activations=0),
    "fp8 by block, rows too": Format("e4m3", 128, 128, activations=128),
    "mxfp4": Format("e2m1", 32),
    "nvfp4": Format("e2m1", 16),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def packed(kind: Format, rows: int, columns: int, dtype: torch.dtype, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random codes and scales of EXPERTS matrices, whose products stay small."""

    def integers(least: int, most: int, *shape: int) -> Tensor:
        return torch.randint(least, most, (EXPERTS, *shape), generator=rng)

    codes = integers(0, 256, *kind.code_shape(rows, columns)).byte()
    shape = kind.scale_shape(rows, columns)
    if kind.codes == "e2m1":
        words = integers(118, 125, *shape, 4) if kind.exponents else integers(0x28, 0x40, *shape, 4)
        scales = words.byte().view(torch.int32).squeeze(-1)
        if kind.row_scales:
            scales[:, 0] = (integers(1, 3, shape[1]) / 100.0).view(torch.int32)
        return codes, scales
    if kind.codes == "int4":
        halves = (integers(1, 3, *shape, 2) / 100.0).to(dtype).view(torch.int16)
        if kind.zeros:
            zeros = integers(0, 18, *shape)
            halves[..., 1] = zeros.masked_fill_(zeros == 17, 99)  # which no packer writes
        return codes, halves.view(torch.int32).squeeze(-1)
    if kind.codes == "e4m3":
        codes[codes & 127 == 127] = 0
    return codes, integers(1, 3, *shape) / 1000.0


class Case:
    """Experts, in the tensors of a store and in the tables of the twin."""

    def __init__(
        self, kind: Format | None, hidden: int, intermediate: int, dtype: torch.dtype, activation: str, biased: bool
    ) -> None:
        rng = torch.Generator().manual_seed(hidden)
        self.kind, self.hidden, self.intermediate, self.dtype = kind, hidden, intermediate, dtype
        self.activation, self.rng = activation, rng
        self.experts: dict[str, Tensor] = {}
        for name, rows, columns in (("w13", 2 * intermediate, hidden), ("w2", hidden, intermediate)):
            if kind is None:
                weights = torch.randn(EXPERTS, rows, columns, generator=rng) / columns**0.5
                self.experts[f"{name}_weight"] = weights.to(dtype)
            else:
                tensors = packed(kind, rows, columns, dtype, rng)
                self.experts[f"{name}_weight"], self.experts[f"{name}_scale"] = tensors
            if biased:
                self.experts[f"{name}_bias"] = (torch.randn(EXPERTS, rows, generator=rng) / 4).to(dtype)
        specs = {name: TensorSpec(tuple(t.shape[1:]), t.dtype) for name, t in self.experts.items()}
        self.shape = MoEShape(("layer",), EXPERTS, TOP_K, specs, kind)

    def request(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random (x, weights, ids), with padding, weights of 0 and experts that occur twice in a row."""
        weights = torch.rand(rows, TOP_K, generator=self.rng)
        weights[torch.rand(weights.shape, generator=self.rng) < 0.2] = 0
        ids = torch.randint(-1, EXPERTS, weights.shape, generator=self.rng, dtype=torch.int32)
        return torch.randn(rows, self.hidden, generator=self.rng).to(self.dtype), weights, ids

    def twin(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        tables = {name: torch.tensor([part.data_ptr() for part in t]) for name, t in self.experts.items()}
        quantised = None if self.kind is None else Quantised(self.kind, tables["w13_scale"], tables["w2_scale"])
        biases = tables.get("w13_bias"), tables.get("w2_bias")
        return grouped_gemm(
            x, tables["w13_weight"], tables["w2_weight"], weights, ids, self.intermediate, *biases, self.activation,
            out=torch.empty(x.shape, dtype=torch.float32), quantised=quantised,
        )  # fmt: skip

    def check(self, found: Tensor, expected: Tensor) -> None:
        """Both are of the same request, in float32."""
        # Of more rows, too: a few small sums may cancel, and what is rounded are their terms.
        size = float(torch.cat([expected, self.twin(*self.request(32))]).abs().max())
        off = float((found - expected).abs().max()) if len(expected) else 0.0
        # Values are rounded to dtype where sums in another order may fall to the other side, four times; the twin's
        # weights are too. Rows of FP8 have a step of 1/8 there, of one value among all that are summed.
        step = 1 / 16 if self.kind is not None and self.kind.activations is not None else torch.finfo(self.dtype).eps
        least = torch.finfo(self.dtype).tiny * torch.finfo(self.dtype).eps * self.intermediate  # h may be subnormal
        assert off <= (8 * step + self.hidden * torch.finfo(torch.float32).eps) * size + least


def cases() -> Iterator[pytest.param]:
    for name, kind in FORMATS.items():
        for dtype in DTYPES:
            if kind is None or kind.codes != "int4" or dtype != torch.float32:  # whose scales have 16 bits
                yield pytest.param(kind, dtype, id=f"{name}, {str(dtype)[6:]}")
