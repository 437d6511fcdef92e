"""Torch twin of ``dequantise``: the weights that codes and scales stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import Format

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantise(kind: Format, codes: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns W [rows, columns] of ``dtype``, rounded once.

    Args:
        kind: how W is stored.
        codes: uint8, ``kind.code_shape(rows, columns)``.
        scales: ``kind.scale_shape(rows, columns)`` of ``kind.scale_dtype``; of int4, of the bits of ``dtype``.
    """
    assert codes.shape == kind.code_shape(rows, columns) and scales.shape == kind.scale_shape(rows, columns)
    scale, zero = _scales(kind, scales, rows, columns, dtype)
    return ((_values(kind, codes) - zero) * scale).to(dtype)


def _values(kind: Format, codes: Tensor) -> Tensor:
    """Returns [rows, columns] float32: the codes as numbers."""
    if kind.codes == "int8":
        return codes.view(torch.int8).float()
    if kind.codes == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    if kind.codes == "int4":
        return nibbles.float()
    table = torch.tensor(_E2M1)
    return torch.cat([table, -table])[nibbles.long()]


def _scales(kind: Format, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the scale and the zero of each weight, [rows, columns] float32."""
    zero = torch.zeros(())
    if kind.row_scales:
        found = _unpacked(scales[1:], 8, 4).to(torch.uint8).view(torch.float8_e4m3fn)
        scale = found.float() * scales[:1].view(torch.float32)
    elif kind.exponents:
        found = _unpacked(scales, 8, 4)
        scale = torch.where(found == 255, float("nan"), torch.exp2(found.double() - 127)).float()
    elif kind.codes == "int4":
        found = _unpacked(scales, 16, 2)
        if kind.zeros:
            zero = _spread(kind, found[1::2].float(), rows, columns)
            found = found[::2]
        else:
            zero += 8
        scale = found.to(torch.int16).view(dtype).float()
    else:
        scale = scales
    return _spread(kind, scale, rows, columns), zero


def _unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Splits words [n, m] int32 into their parts from the low ones on: [n * count, m] int64."""
    shifts = bits * torch.arange(count)[None, :, None]
    return ((words.long()[:, None] >> shifts) & ((1 << bits) - 1)).flatten(0, 1)


def _spread(kind: Format, values: Tensor, rows: int, columns: int) -> Tensor:
    """[groups, blocks of rows] -> [rows, columns]."""
    across = values.T.repeat_interleave(kind.rows, 0)[:rows]
    return across.repeat_interleave(kind.group or columns, 1)[:, :columns]
