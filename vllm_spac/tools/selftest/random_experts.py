"""Random experts in each format that the kernels read, and the weights that they stand for.

For what compares or times the kernels: ``vllm-spac check --engines`` and ``benchmarks/kernels``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_spac.kernels.formats import Format
from vllm_spac.kernels.reference.dequantise import dequantise
from vllm_spac.kernels.reference.grouped_gemm import grouped_gemm as twin
from vllm_spac.kernels.types import ADMITTED, HIT, Fills, Quantised

FORMATS = {
    "mxfp4": Format("e2m1", 32),
    "nvfp4": Format("e2m1", 16),
    "int4": Format("int4", 128),
    "int4-zeros": Format("int4", 128, zeros=True),
    "int8": Format("int8"),
    "fp8": Format("e4m3", 128, 128),
    "fp8-rows": Format("e4m3", 128, 128, activations=128),
}
DISTINCT = 4  # experts; the others are copies of them in memory of their own

GroupedGemm = Callable[..., Tensor]  # ``vllm_spac.kernels.grouped_gemm.grouped_gemm``, or its twin


def addresses(weight: Tensor, device: Any = "cuda") -> Tensor:
    """Returns [experts] int64 on ``device``; with unified addressing, pinned memory has one address for both sides."""
    step = weight.stride(0) * weight.element_size()
    return torch.tensor([weight.data_ptr() + index * step for index in range(len(weight))], device=device)


@dataclass(frozen=True)
class RoutedRows:
    """x [M, d] bfloat16, router weights [M, k] float32 and expert ids [M, k] int32, on one device."""

    x: Tensor
    weights: Tensor
    ids: Tensor

    @classmethod
    def make(cls, rows: int, hidden: int, experts: int, top_k: int, device: Any = "cuda") -> RoutedRows:
        """Makes rows with ``top_k`` random experts each: more distinct experts than a trained router would select."""
        rng = torch.Generator().manual_seed(rows)
        ids = torch.stack([torch.randperm(experts, generator=rng)[:top_k] for _ in range(rows)])
        weights = torch.softmax(torch.randn(rows, top_k, generator=rng), -1)
        x = torch.randn(rows, hidden, generator=rng).bfloat16()
        return cls(x.to(device), weights.to(device), ids.int().to(device))


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
class RandomExperts:
    """A layer's experts as the kernels read them."""

    kind: Format | None  # how they are quantised; None: bfloat16
    stored: tuple[Tensor, ...]  # w13 and w2 [experts, ...]; quantised, codes and scales of w13, then of w2
    # w13 [DISTINCT, 2 * ff, d] and w2 [DISTINCT, d, ff] bfloat16; expert e is that of e % DISTINCT
    plain: tuple[Tensor, Tensor]

    @classmethod
    def make(cls, kind: Format | None, hidden: int, intermediate: int, experts: int, device: Any) -> RandomExperts:
        """Makes random experts on ``device``."""
        rng = torch.Generator().manual_seed(0)
        stored, plain = [], []
        for rows, columns in ((2 * intermediate, hidden), (hidden, intermediate)):
            if kind is None:
                weights = torch.randn(DISTINCT, rows, columns, generator=rng).div_(columns**0.5).bfloat16().to(device)
                stored.append(weights)
            else:
                parts = [matrix(kind, rows, columns, rng) for _ in range(DISTINCT)]
                weights = torch.stack([dequantise(kind, *part, rows, columns, torch.bfloat16) for part in parts])
                stored += [torch.stack([part[i] for part in parts]).to(device) for i in range(2)]
            plain.append(weights.to(device))
        which = torch.arange(experts, device=device) % DISTINCT
        return cls(kind, tuple(tensor[which] for tensor in stored), (plain[0], plain[1]))

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert as it is stored."""
        return sum(tensor[0].nbytes for tensor in self.stored)

    def call(
        self, kernel: GroupedGemm, rows: RoutedRows, stored: tuple[Tensor, ...] | None = None
    ) -> Callable[[], Tensor]:
        """Returns a call of ``kernel`` over the experts, or over ``stored``, a copy of them in pinned memory."""
        tables = [addresses(tensor, rows.x.device) for tensor in stored or self.stored]
        if self.kind is None:
            return lambda: kernel(rows.x, *tables, rows.weights, rows.ids, self.plain[1].shape[2])
        w13, s13, w2, s2 = tables
        quantised = Quantised(self.kind, s13, s2)
        return lambda: kernel(rows.x, w13, w2, rows.weights, rows.ids, self.plain[1].shape[2], quantised=quantised)

    def call_filling(
        self, kernel: GroupedGemm, rows: RoutedRows, hosts: tuple[Tensor, ...], hits: Tensor
    ) -> tuple[Callable[[], Tensor], tuple[Tensor, ...]]:
        """Returns a call of ``kernel`` that copies what it selects into slots first, and the slots, as ``stored``.

        Args:
            hosts: copies of the experts in memory that the device addresses.
            hits: [experts] bool, which slots have their expert; the others hold zeros.
        """
        device = rows.x.device
        slots = tuple(torch.zeros_like(tensor) for tensor in self.stored)
        for slot, tensor in zip(slots, self.stored, strict=True):
            slot[hits] = tensor[hits]
        sources = torch.where(hits, HIT, ADMITTED).to(device, torch.int32)
        ours, theirs = ([addresses(tensor, device) for tensor in tensors] for tensors in (slots, hosts))
        ff = self.plain[1].shape[2]
        if self.kind is None:
            fills = Fills(sources, *theirs)
            return lambda: kernel(rows.x, *ours, rows.weights, rows.ids, ff, fills=fills), slots
        (w13, s13, w2, s2), (from13, from_s13, from2, from_s2) = ours, theirs
        fills, quantised = Fills(sources, from13, from2, None, None, from_s13, from_s2), Quantised(self.kind, s13, s2)
        return lambda: kernel(rows.x, w13, w2, rows.weights, rows.ids, ff, quantised=quantised, fills=fills), slots

    def call_plain(self, kernel: GroupedGemm, rows: RoutedRows, **options: Any) -> Callable[[], Tensor]:
        """Returns a call of ``kernel`` over dequantised weights."""
        count = len(self.stored[0])
        tables = [
            addresses(weight, rows.x.device).repeat(-(-count // DISTINCT))[:count].contiguous() for weight in self.plain
        ]
        return lambda: kernel(rows.x, *tables, rows.weights, rows.ids, self.plain[1].shape[2], **options)

    def expected(self, rows: RoutedRows) -> Tensor:
        """Returns [M, d] float32, computed on the CPU with no rounding between.

        Where the format rounds rows, the kernel's twin computes it: such a rounding of another number moves a sum.
        """
        if self.kind is not None and self.kind.activations is not None:
            there = RoutedRows(rows.x.cpu(), rows.weights.cpu(), rows.ids.cpu())
            return self.call(twin, there, tuple(tensor.cpu() for tensor in self.stored))().float()
        x, weights, ids = rows.x.cpu().float(), rows.weights.cpu(), rows.ids.cpu().long()
        out = torch.zeros_like(x)
        for number in range(DISTINCT):
            w13, w2 = (weight[number].cpu().float() for weight in self.plain)
            gate, up = (x @ w13.T).chunk(2, -1)
            share = (weights * (ids % DISTINCT == number)).sum(-1, keepdim=True)
            out += share * ((torch.nn.functional.silu(gate) * up) @ w2.T)
        return out
