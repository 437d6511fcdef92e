"""Torch twin of ``grouped_gemm``, and ``moe``, the ground truth for both: naive loops in float64."""

from __future__ import annotations

import ctypes
import math
from typing import Literal

import torch
from torch import Tensor

from ..formats import ACTIVATIONS, Format
from ..types import ADMITTED, HIT, Early, Fills, Pieces, Quantised
from .combine import combine
from .dequantise import dequantise
from .fetch import with_early
from .route import routed

Activation = Literal["silu", "gelu", "gelu_tanh", "swigluoai", "silu_clamped", "swigluoai_uninterleave"]

_ALPHA = 1.702  # of both swigluoai
LIMITS = {"swigluoai": 7.0, "swigluoai_uninterleave": 7.0, "silu_clamped": 10.0}


def moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: Activation = "silu",
) -> Tensor:
    """Computes the routed experts of one MoE layer, one token and one expert at a time, summed in the order of top-k.

    Args:
        x: [tokens, hidden].
        w13: [experts, 2 * intermediate, hidden]; rows in the order that ``gate_up`` splits.
        w2: [experts, hidden, intermediate].
        topk_weights: [tokens, top_k].
        topk_ids: [tokens, top_k], each an index into the experts; one may occur twice in a row.
        b13: [experts, 2 * intermediate] or None.
        b2: [experts, hidden] or None.
        activation: one of ``formats.ACTIVATIONS``.

    Returns:
        [tokens, hidden] in float64, whatever the dtype of the inputs: rounding is left to the caller.
    """
    x, w13, w2, topk_weights = x.double(), w13.double(), w2.double(), topk_weights.double()
    out = torch.zeros_like(x)
    for token, (weights, ids) in enumerate(zip(topk_weights, topk_ids.tolist(), strict=True)):
        for weight, expert in zip(weights, ids, strict=True):
            hidden = w13[expert] @ x[token]
            if b13 is not None:
                hidden = hidden + b13[expert].double()
            result = w2[expert] @ activate(hidden, activation)
            if b2 is not None:
                result = result + b2[expert].double()
            out[token] += weight * result
    return out


def gate_up(hidden: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Splits [..., 2 * intermediate] into gate and up: two halves, but interleaved for ``swigluoai``."""
    if activation in ACTIVATIONS and activation != "swigluoai":
        half = hidden.shape[-1] // 2
        return hidden[..., :half], hidden[..., half:]
    if activation == "swigluoai":
        return hidden[..., ::2], hidden[..., 1::2]
    raise ValueError(f"activation {activation!r} is not known; use one of {', '.join(ACTIVATIONS)}")


def activate(hidden: Tensor, activation: Activation, rounded: torch.dtype | None = None) -> Tensor:
    """[..., 2 * intermediate] -> [..., intermediate]; act(gate) goes through ``rounded`` before it multiplies up."""
    gate, up = gate_up(hidden, activation)
    if (limit := LIMITS.get(activation)) is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "swigluoai":
        return gate * torch.sigmoid(_ALPHA * gate) * (up + 1)
    if activation == "swigluoai_uninterleave":
        acted, up = gate * torch.sigmoid(_ALPHA * gate), up + 1
    elif activation in ("silu", "silu_clamped"):
        acted = gate * torch.sigmoid(gate)
    elif activation == "gelu":
        acted = 0.5 * gate * (1 + torch.erf(gate * math.sqrt(0.5)))
    else:
        acted = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return (acted if rounded is None else acted.to(rounded).to(acted.dtype)) * up


def grouped_gemm(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    intermediate: int,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: Activation = "silu",
    out: Tensor | None = None,
    tile: object = None,
    counts: Tensor | None = None,
    live: Tensor | None = None,
    quantised: Quantised | None = None,
    pieces: Pieces | None = None,
    fills: Fills | None = None,
    early: tuple[int, Early] | None = None,
) -> Tensor:
    """Twin of ``grouped_gemm.grouped_gemm``: the addresses are the CPU's, ``tile`` is ignored."""
    (rows, d), k, dtype = x.shape, topk_ids.shape[1], x.dtype
    kind, s13, s2 = (None, None, None) if quantised is None else quantised
    ids, weights = routed(topk_ids, topk_weights, len(w13), live), topk_weights.flatten()
    if counts is not None:
        counts.copy_(torch.bincount(ids + 1, minlength=len(w13) + 1)[1:])
    fused = kind is not None and kind.fused and activation == "silu"
    y = torch.zeros(rows * k, d, dtype=dtype) if pieces is None else pieces.y
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        here13, here2 = w13, w2
        if fills is not None and fills.sources[expert] == ADMITTED:
            _fill(fills, (w13, w2, b13, b2, s13, s2), expert, (d, intermediate), dtype, kind)
        if early is not None and fills is not None and fills.sources[expert] != HIT:
            kept = _early(early, (w13, w2), expert, (d, intermediate), dtype, kind, activation)
            here13, here2 = (torch.full_like(w13, each.data_ptr()) for each in kept)
            if fills.sources[expert] == ADMITTED:
                for each, table in zip(kept, (w13, w2), strict=True):
                    ctypes.memmove(int(table[expert]), each.data_ptr(), each.nbytes)
        pairs = (ids == expert).nonzero().flatten()
        of_rows = rounded_rows(x[pairs // k], kind)
        hidden = of_rows @ _matrix(here13, s13, expert, 2 * intermediate, d, dtype, kind).float().T
        if b13 is not None:
            hidden += _at(b13, expert, (2 * intermediate,), dtype)
        h = activate(hidden.to(dtype).float(), activation, None if fused else dtype)
        h = rounded_rows(h if fused else h.to(dtype), kind, fused)
        result = h @ _matrix(here2, s2, expert, d, intermediate, dtype, kind).float().T
        if b2 is not None:
            result += _at(b2, expert, (d,), dtype)
        y[pairs] = (result * weights[pairs, None]).to(dtype)
    if pieces is not None:
        if pieces.ids is None:
            return torch.empty_like(x) if out is None else out
        topk_ids = pieces.ids
    out = torch.empty_like(x) if out is None else out
    combine(y.view(rows, k, d), topk_weights, topk_ids, len(w13), out, live)
    return out


def _fill(
    fills: Fills,
    tables: tuple[Tensor | None, ...],
    expert: int,
    size: tuple[int, int],
    dtype: torch.dtype,
    kind: Format | None,
) -> None:
    """Copies an expert from host memory to where ``tables`` have it; ``size``: (d, intermediate)."""
    d, ff = size
    shapes: list[tuple[int, ...]] = [(2 * ff, d), (d, ff), (2 * ff,), (d,)]
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    if kind is not None:
        sizes[:2] = [math.prod(kind.code_shape(*shape)) for shape in ((2 * ff, d), (d, ff))]
        sizes += [math.prod(kind.scale_shape(*shape)) * 4 for shape in ((2 * ff, d), (d, ff))]
    for source, target, nbytes in zip(fills[1:], tables, [*sizes, 0, 0][:6], strict=True):
        if source is not None and target is not None:
            ctypes.memmove(int(target[expert]), int(source[expert]), nbytes)


def _early(
    early: tuple[int, Early],
    tables: tuple[Tensor, Tensor],
    expert: int,
    size: tuple[int, int],
    dtype: torch.dtype,
    kind: Format | None,
    activation: str,
) -> list[Tensor]:
    """Returns uint8 [bytes], W13 and W2 of an expert; parts that were read early are from there."""
    first, parts = early
    d, ff = size
    row13, row2 = (width * dtype.itemsize if kind is None else kind.code_shape(1, width)[-1] for width in (d, ff))
    sizes, interleaved = (ff, d, row13, row2), activation == "swigluoai"
    return [
        with_early(first + expert, parts, table, expert, matrix, sizes, interleaved)
        for matrix, table in enumerate(tables)
    ]


def rounded_rows(values: Tensor, kind: Format | None, fused: bool = False) -> Tensor:
    """[M, K] -> float32, what is multiplied: rounded to e4m3 if the format says so; ``fused``: with the activation."""
    if kind is None or kind.activations is None:
        return values.float()
    columns = values.shape[1]
    group = kind.activations or columns
    parts = torch.nn.functional.pad(values.float(), (0, -columns % group)).unflatten(1, (-1, group))
    largest = parts.abs().amax(-1, keepdim=True)
    if fused or kind.activations == 0:
        scale = (largest / 448).clamp(min=1 / (448 * 512))
        codes = parts / scale
    else:
        scale = largest.clamp(min=1e-10) / 448
        codes = parts * (1 / scale)
    return (codes.to(torch.float8_e4m3fn).float() * scale).flatten(1)[:, :columns]


def _matrix(
    table: Tensor, scales: Tensor | None, expert: int, rows: int, columns: int, dtype: torch.dtype, kind: Format | None
) -> Tensor:
    """Returns an expert's weights [rows, columns]."""
    if kind is None or scales is None:
        return _at(table, expert, (rows, columns), dtype)
    codes = _at(table, expert, kind.code_shape(rows, columns), torch.uint8)
    of_codes = _at(scales, expert, kind.scale_shape(rows, columns), kind.scale_dtype)
    return dequantise(kind, codes, of_codes, rows, columns, kind.weight_dtype(dtype))


def _at(table: Tensor, expert: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns the tensor at address ``table[expert]``."""
    size = math.prod(shape) * dtype.itemsize
    memory = (ctypes.c_byte * size).from_address(int(table[expert]))
    return torch.frombuffer(memory, dtype=dtype).view(shape)
