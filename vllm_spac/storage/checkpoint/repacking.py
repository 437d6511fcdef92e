"""Repacks quantised experts from a checkpoint's layout into what ``vllm_spac.kernels`` read: no value changes.

A function for each layout takes the tensors of one projection of E experts, w13 (gate and up) or w2, by the names that
vLLM's parameters have without the projection: [E, N, K] for N outputs and K inputs, packed where the layout packs. If
N comes first, codes are used as they are; GPTQ and AWQ have columns first and are turned. ``bits`` are 4 or 8, and
``group`` is the columns that share a scale, 0 for all.

``kernels.formats`` says what comes out. ``UnsupportedError``: shapes contradict the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_spac.errors import UnsupportedError
from vllm_spac.kernels.formats import MX_GROUP, NV_GROUP, Format

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of an int32 that has column i
_UNIT = 127  # the e8m0 exponent of 1


class Repacked(NamedTuple):
    """One projection of E experts."""

    kind: Format
    codes: Tensor  # uint8 [E, *kind.code_shape(N, K)]
    scales: Tensor  # [E, *kind.scale_shape(N, K)] of ``kind.scale_dtype``


def compressed(tensors: Mapping[str, Tensor], bits: int, group: int) -> Repacked:
    """``pack-quantized`` of compressed-tensors, unsigned with zero 2 ** (bits - 1) unless there are zero points.

    Args:
        tensors: ``weight_packed`` int32 [E, N, K / 8], [E, N, K / 4] of 8 bits; ``weight_scale`` [E, N, K / group];
            maybe ``weight_zero_point`` int32 [E, N / 8, K / group].
    """
    zeros = tensors.get("weight_zero_point")
    zeros = None if zeros is None else _nibbles(zeros.transpose(1, 2)).transpose(1, 2)
    return _integers(
        tensors["weight_packed"].contiguous().view(torch.uint8), tensors["weight_scale"], zeros, bits, group
    )


def wna16(tensors: Mapping[str, Tensor], bits: int, group: int) -> Repacked:
    """What the loader of vLLM's ``moe_wna16`` makes of GPTQ and AWQ.

    Args:
        tensors: ``qweight`` uint8 [E, N, K / 2], [E, N, K] of 8 bits; ``scales`` [E, N, K / group]; maybe ``qzeros``
            uint8 [E, N / 2, K / group].
    """
    zeros = tensors.get("qzeros")
    zeros = None if zeros is None else torch.stack([zeros & 15, zeros >> 4], 2).flatten(1, 2)
    return _integers(tensors["qweight"], tensors["scales"], zeros, bits, group)


def gptq(tensors: Mapping[str, Tensor], bits: int, group: int) -> Repacked:
    """GPTQ without zero points.

    Args:
        tensors: ``qweight`` int32 [E, K / 8, N], [E, K / 4, N] of 8 bits; ``scales`` [E, K / group, N].
    """
    codes = tensors["qweight"].transpose(1, 2).contiguous().view(torch.uint8)
    return _integers(codes, tensors["scales"].transpose(1, 2), None, bits, group)


def awq(tensors: Mapping[str, Tensor], group: int) -> Repacked:
    """AWQ, which has zero points.

    Args:
        tensors: ``qweight`` int32 [E, K, N / 8], nibbles in AWQ's order; ``scales`` [E, K / group, N]; ``qzeros`` int32
            [E, K / group, N / 8].
    """
    order = list(_AWQ_ORDER)

    def rows_first(packed: Tensor) -> Tensor:
        return _nibbles(packed).unflatten(2, (-1, 8))[..., order].flatten(2).transpose(1, 2)

    weights = rows_first(tensors["qweight"])
    codes = weights[..., ::2] | (weights[..., 1::2] << 4)
    return _integers(codes, tensors["scales"].transpose(1, 2), rows_first(tensors["qzeros"]), 4, group)


def mxfp4(tensors: Mapping[str, Tensor]) -> Repacked:
    """MXFP4 of GPT-OSS: ``weight`` uint8 [E, N, K / 2], ``weight_scale`` uint8 [E, N, K / 32], e8m0."""
    exponents = tensors["weight_scale"].transpose(1, 2)
    return Repacked(Format("e2m1", MX_GROUP), tensors["weight"], _words(exponents, 4, _UNIT))


def nvfp4(tensors: Mapping[str, Tensor]) -> Repacked:
    """NVFP4: e2m1 values, an e4m3 scale for each 16 columns, and a float32 scale for each tensor.

    Args:
        tensors: ``weight`` (ModelOpt) or ``weight_packed`` (compressed-tensors) uint8 [E, N, K / 2]; ``weight_scale``
            float8_e4m3fn [E, N, K / 16]; the scale of each tensor, of gate and up [E, 2], of w2 [E]: float32
            ``weight_scale_2`` (ModelOpt), or ``weight_global_scale`` (compressed-tensors), its reciprocal.

    Raises:
        UnsupportedError: shapes contradict the group, or a scale is no number, negative or infinite.
    """
    weight = next(tensors[name] for name in ("weight", "weight_packed") if name in tensors)
    of_tensor, scale = tensors.get("weight_scale_2"), tensors["weight_scale"]
    if of_tensor is None:
        of_tensor = 1.0 / tensors["weight_global_scale"]
    (count, rows, half), of_tensor = weight.shape, of_tensor.float().view(len(weight), -1)
    if scale.shape != (count, rows, half * 2 // NV_GROUP):
        raise UnsupportedError(
            f"spac: experts of {[rows, half * 2]} in NVFP4 have scales of {list(scale.shape[1:])}, not one for each "
            f"{NV_GROUP} columns"
        )
    codes = scale.view(torch.uint8)
    if bool(((codes & 127) == 127).any()) or not bool((of_tensor.isfinite() & (of_tensor >= 0)).all()):
        raise UnsupportedError("spac: experts in NVFP4 have scales that are no numbers; the checkpoint is damaged")
    of_rows = of_tensor.repeat_interleave(rows // of_tensor.shape[1], 1)
    words = _words(codes.transpose(1, 2), 4, 0)
    return Repacked(
        Format("e2m1", NV_GROUP), weight, torch.cat([_floats(of_rows[:, None]).view(torch.int32), words], 1)
    )


def scaled(
    tensors: Mapping[str, Tensor], block: tuple[int, int] | None, parts: int, activations: int | None = None
) -> Repacked:
    """INT8 or FP8 with float scales.

    Args:
        tensors: ``weight`` int8 or float8_e4m3fn [E, N, K]; ``weight_scale`` or ``weight_scale_inv``: by channel
            [E, N, 1], else one for each block of (rows, columns).
        block: size of a block, None by channel.
        parts: of N that blocks do not cross: 2 for gate and up.

    Raises:
        UnsupportedError: a block holds rows of gate and up, or a weight is no number.
    """
    weight = tensors["weight"]
    scale = next(tensors[name] for name in ("weight_scale", "weight_scale_inv") if name in tensors)
    rows, columns = block or (1, 0)
    if weight.shape[1] // parts % rows:
        raise UnsupportedError(
            f"spac: experts of {weight.shape[1] // parts} rows have blocks of {rows}, which mix gate and up"
        )
    codes = weight.view(torch.uint8)
    is_fp8 = weight.dtype == torch.float8_e4m3fn
    if is_fp8 and bool(((codes & 127) == 127).any()):
        raise UnsupportedError("spac: experts in FP8 have weights that are no numbers; the checkpoint is damaged")
    kind = Format("e4m3" if is_fp8 else "int8", columns, rows, activations=activations)
    expected = -(-weight.shape[1] // rows), kind.groups(weight.shape[2])
    if scale.shape[1:] != expected:
        raise UnsupportedError(f"spac: experts of {list(weight.shape[1:])} have scales of {list(scale.shape[1:])}")
    return Repacked(kind, codes, _floats(scale.transpose(1, 2)))


def _integers(codes: Tensor, scale: Tensor, zeros: Tensor | None, bits: int, group: int) -> Repacked:
    """codes uint8 [E, N, bytes], scale and zeros [E, N, groups]."""
    columns, groups = codes.shape[2] * 8 // bits, scale.shape[2]
    if columns != groups * (group or columns):
        raise UnsupportedError(f"spac: experts of {columns} columns have {groups} scales by {group or 'channel'}")
    if bits == 8:
        assert zeros is None
        return Repacked(Format("int8", group), codes ^ 128, _floats(scale.transpose(1, 2)))
    halves = scale.transpose(1, 2).contiguous().view(torch.int16)
    if zeros is None:
        return Repacked(Format("int4", group), codes, _words(halves, 2, 0))
    points = torch.stack([halves, zeros.transpose(1, 2).to(torch.int16)], 2).flatten(1, 2)
    return Repacked(Format("int4", group, zeros=True), codes, _words(points, 2, 0))


def _nibbles(packed: Tensor) -> Tensor:
    """int32 [..., n] -> uint8 [..., 8 n], low nibbles first."""
    found = packed.contiguous().view(torch.uint8)
    return torch.stack([found & 15, found >> 4], -1).flatten(-2)


def _words(values: Tensor, count: int, filler: int) -> Tensor:
    """[E, groups, N] of so many to a word -> int32 [E, words, N rounded up to 4], the first group lowest."""
    filled = pad(values, (0, -values.shape[2] % 4, 0, -values.shape[1] % count), value=filler)
    return filled.unflatten(1, (-1, count)).movedim(2, 3).contiguous().view(torch.int32).squeeze(3)


def _floats(scale: Tensor) -> Tensor:
    """[E, groups, N] -> float32, N rounded up to 4."""
    return pad(scale.float(), (0, -scale.shape[2] % 4)).contiguous()
