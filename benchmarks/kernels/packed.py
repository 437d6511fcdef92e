"""Quantised experts for ``run.py``: random codes and scales of each format, and the weights that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm_spac.kernels.formats import Format
from vllm_spac.kernels.reference.dequantise import dequantise
from vllm_spac.kernels.types import Quantised

FORMATS = {
    "mxfp4": Format("e2m1", 32),
    "nvfp4": Format("e2m1", 16),
    "int4": Format("int4", 128),
    "int4-zeros": Format("int4", 128, zeros=True),
    "int8": Format("int8"),
    "fp8": Format("e4m3", 128, 128),
}
DISTINCT = 4  # experts; the others are copies of them in memory of their own


def matrix(kind: Format, rows: int, columns: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random codes and scales of W [rows, columns] on the CPU; weights of the order of ``columns ** -0.5``."""
    codes = torch.randint(0, 256, kind.code_shape(rows, columns), dtype=torch.uint8, generator=rng)
    shape = kind.scale_shape(rows, columns)
    size = columns**-0.5 / {"e2m1": 3.0, "int4": 4.6, "int8": 74.0, "e4m3": 130.0}[kind.codes]
    floats = size * (0.75 + 0.5 * torch.rand(shape, generator=rng))
    if kind.codes == "e4m3":
        codes = torch.where((codes & 127) == 127, 0, codes)  # NaN
    if kind.row_scales:
        parts = torch.randint(48, 64, (*shape, 4), dtype=torch.uint8, generator=rng)  # e4m3 from 0.5 to 1.9
        words = parts.view(torch.int32).squeeze(-1)
        words[0] = floats[0].view(torch.int32)
        return codes, words
    if kind.exponents:
        exponent = 127 + round(float(torch.tensor(size).log2()))
        parts = torch.randint(exponent - 1, exponent + 2, (*shape, 4), dtype=torch.uint8, generator=rng)
        return codes, parts.view(torch.int32).squeeze(-1)
    if kind.codes != "int4":
        return codes, floats
    halves = floats.bfloat16().view(torch.int16)
    second = torch.full_like(halves, 8) if kind.zeros else halves
    return codes, torch.stack([halves, second], -1).view(torch.int32).squeeze(-1)


@dataclass(frozen=True)
class Packed:
    """A layer's experts as the kernels read them.

    Attributes:
        kind: how they are stored.
        stored: codes and scales of w13, codes and scales of w2, [experts, ...].
        plain: w13 and w2 [DISTINCT, ...] bfloat16; expert e is that of e % DISTINCT.
    """

    kind: Format
    stored: tuple[Tensor, ...]
    plain: tuple[Tensor, Tensor]

    @classmethod
    def make(cls, kind: Format, hidden: int, intermediate: int, experts: int, device: str) -> Packed:
        """Makes random experts on ``device``."""
        rng = torch.Generator().manual_seed(0)
        stored, plain = [], []
        for rows, columns in ((2 * intermediate, hidden), (hidden, intermediate)):
            parts = [matrix(kind, rows, columns, rng) for _ in range(DISTINCT)]
            weights = [dequantise(kind, *part, rows, columns, torch.bfloat16) for part in parts]
            plain.append(torch.stack(weights).to(device))
            stored += [torch.stack([part[i] for part in parts]).to(device) for i in range(2)]
        which = torch.arange(experts, device=device) % DISTINCT
        return cls(kind, tuple(tensor[which] for tensor in stored), (plain[0], plain[1]))

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert as it is stored."""
        return sum(tensor[0].nbytes for tensor in self.stored)

    def call(
        self, given: Any, intermediate: int, stored: tuple[Tensor, ...], addresses: Callable[[Tensor], Tensor]
    ) -> Callable[[], Tensor]:
        """Returns a call of the kernel over ``stored``, which may be in pinned memory.

        Args:
            given: x, weights and ids.
            intermediate: width of an expert.
            stored: as the attribute.
            addresses: of the experts in a tensor, int64 [experts] on the device.
        """
        from vllm_spac.kernels.grouped_gemm import grouped_gemm

        w13, s13, w2, s2 = map(addresses, stored)
        quantised = Quantised(self.kind, s13, s2)
        return lambda: grouped_gemm(given.x, w13, w2, given.weights, given.ids, intermediate, quantised=quantised)

    def call_plain(self, given: Any, intermediate: int, addresses: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        """Returns a call of the kernel over dequantised weights, with the tile of quantised ones."""
        from vllm_spac.kernels.grouped_gemm import grouped_gemm
        from vllm_spac.kernels.tiles import tile_for

        experts, tile = len(self.stored[0]), tile_for(len(given.x), quantised=True)
        w13, w2 = (addresses(weight).repeat(-(-experts // DISTINCT))[:experts].contiguous() for weight in self.plain)
        return lambda: grouped_gemm(given.x, w13, w2, given.weights, given.ids, intermediate, tile=tile)
