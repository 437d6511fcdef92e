"""Multiplies a tile of x by a tile of quantised weights: one step of the K loop of ``grouped_gemm``, by format.

Weights become what ``formats`` says, rounded to x's dtype T before they are multiplied: a kernel over quantised experts
computes what it computes over dequantised ones. Codes become float32 without the conversion instruction, which a GPU
issues at a quarter of its rate: the bits 0x4B000000 | c are 2**23 + c, and subtracting 2**23 + zero is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

_MAGIC_BITS = tl.constexpr(0x4B000000)  # 2**23 in float32
_MAGIC = tl.constexpr(8388608.0)
_E4M3 = tl.constexpr(1.329227995784916e36)  # 2**120: e4m3's bits in place of float32's are as much too small
_E2M1 = tl.constexpr(8.507059173023462e37)  # 2**126: e2m1's bits in place of float32's are as much too small
_MOST_E4M3 = tl.constexpr(448.0)
_LEAST = tl.constexpr(1e-10)  # of what vLLM takes as the largest of a group of x
_LEAST_SCALE = tl.constexpr(1 / (448.0 * 512.0))  # of a whole row, and of a group of h
_UNIT = tl.constexpr(0x7F7F7F7F)  # four exponents of 2**0


@triton.jit
def _integers(codes: tl.tensor, zero: tl.tensor):
    """[...] integers of at most 23 bits -> codes - zero in float32, exact."""
    return (codes.to(tl.uint32) | _MAGIC_BITS).to(tl.float32, bitcast=True) - (zero + _MAGIC)


@triton.jit
def _e4m3(codes: tl.tensor):
    """[...] bytes of e4m3 -> float32, exact; subnormal numbers too, NaN excepted."""
    bits = ((codes & 127).to(tl.uint32) << 20) | ((codes & 128).to(tl.uint32) << 24)
    return bits.to(tl.float32, bitcast=True) * _E4M3


@triton.jit
def _e2m1(codes: tl.tensor):
    """[...] nibbles of e2m1 -> float32, exact: 0.5 is a subnormal number before it is multiplied."""
    wide = codes.to(tl.uint32)
    bits = ((wide & 7) << 22) | ((wide & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * _E2M1


@triton.jit
def scale_of_row(largest: tl.tensor, BOUNDED: tl.constexpr):
    """Returns the scale of values of which ``largest`` is the largest, as vLLM's kernels do.

    BOUNDED: no scale is smaller than the least that is safe; else no largest value is.
    """
    if BOUNDED:
        scale = tl.maximum(tl.math.div_rn(largest, _MOST_E4M3), _LEAST_SCALE)
    else:
        scale = tl.math.div_rn(tl.maximum(largest, _LEAST), _MOST_E4M3)
    return scale


@triton.jit
def row_scale(at: tl.tensor, live: tl.tensor, columns: tl.tensor, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Returns the scale of each whole row, [M]. ``at``: pointers to its first BLOCK_K columns."""
    largest = tl.zeros((at.shape[0],), tl.float32)
    k = tl.arange(0, BLOCK_K)
    for start in range(0, columns, BLOCK_K):
        mask = live[:, None]
        if not EVEN_K:
            mask = mask & (k < columns - start)[None, :]
        values = tl.load(at + start, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(values), 1))
    return scale_of_row(largest, True)


@triton.jit
def quantise(a: tl.tensor, scale: tl.tensor, INVERTED: tl.constexpr):
    """[M, K], scales [M] -> codes of e4m3 in the type of ``a``, which holds each of them.

    INVERTED: numbers are multiplied by 1 / scale, not divided by it. Numbers of 16 bits are often ties, so that this
    moves some code of every other row of 2048.

    A number is rounded to 3 bits behind its first one, or to a multiple of 2**-9 if it is less than 2**-6: adding 1.5
    times the power of two that leaves just these bits rounds to nearest even, and subtracting it is exact.
    """
    if INVERTED:
        values = a.to(tl.float32) * tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    else:
        values = tl.math.div_rn(a.to(tl.float32), tl.broadcast_to(scale[:, None], a.shape))
    exponent = tl.maximum((values.to(tl.int32, bitcast=True) >> 23) & 255, 121)
    wide = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return ((values + wide) - wide).to(a.dtype)


@triton.jit
def _scale_at(
    scales: tl.tensor, k: tl.tensor, start: tl.tensor, across: tl.tensor, stride: tl.tensor, wanted: tl.tensor,
    inside: tl.tensor, columns: tl.tensor, GROUP: tl.constexpr, PER_WORD: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Returns the words of scales of columns ``start + k`` and their groups, of shapes that broadcast to [K, N].

    Each word is loaded once if words and tiles nest.
    """
    WORD: tl.constexpr = GROUP * PER_WORD  # columns
    K: tl.constexpr = k.shape[0]
    if WORD == 0 or WORD % BLOCK_K == 0:
        at = start // WORD if WORD else 0
        word = tl.load(scales + at * stride + across, mask=wanted, other=0)[None, :]
    elif BLOCK_K % WORD == 0:
        COUNT: tl.constexpr = BLOCK_K // WORD
        N: tl.constexpr = across.shape[0]
        at = start // WORD + tl.arange(0, COUNT)
        mask = wanted[None, :] & (at < tl.cdiv(columns, WORD))[:, None]
        word = tl.load(scales + at[:, None] * stride + across[None, :], mask=mask, other=0)
        word = tl.reshape(tl.broadcast_to(word[:, None, :], (COUNT, K // COUNT, N)), (K, N))
    else:
        at = ((start + k) // WORD)[:, None]
        word = tl.load(scales + at * stride + across[None, :], mask=inside, other=0)
    if GROUP == 0 or GROUP % BLOCK_K == 0:
        group = start // GROUP if GROUP else 0
    else:
        group = ((start + k) // GROUP)[:, None]
    return word, group


@triton.jit
def _halves(
    a: tl.tensor, acc: tl.tensor, low: tl.tensor, high: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Even and odd columns apart, so that the nibbles of a byte need not be put beside each other."""
    even, odd = tl.split(tl.reshape(a, (BLOCK_M, BLOCK_K // 2, 2)))
    if UPCAST:
        even, odd, low, high = even.to(tl.float32), odd.to(tl.float32), low.to(tl.float32), high.to(tl.float32)
    acc = tl.dot(even, low, acc, input_precision="ieee")
    return tl.dot(odd, high, acc, input_precision="ieee")


@triton.jit
def _int4(
    a: tl.tensor, acc: tl.tensor, codes: tl.tensor, scales: tl.tensor, row: tl.tensor, wanted: tl.tensor,
    inside: tl.tensor, byte: tl.tensor, start: tl.tensor, stride: tl.tensor, columns: tl.tensor,
    GROUP: tl.constexpr, ZEROS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    T: tl.constexpr = a.dtype
    PER_WORD: tl.constexpr = 1 if ZEROS else 2
    word, group = _scale_at(scales, 2 * byte, start, row, stride, wanted, inside, columns, GROUP, PER_WORD, BLOCK_K)
    if ZEROS:
        zero = (word >> 16).to(tl.float32)
        bits = word
    else:
        zero = 8.0
        bits = word >> (16 * (group % 2))
    scale = bits.to(tl.uint16).to(T, bitcast=True).to(tl.float32)
    low = (_integers(codes & 15, zero) * scale).to(T)
    high = (_integers(codes >> 4, zero) * scale).to(T)
    return _halves(a, acc, low, high, BLOCK_M, BLOCK_K, UPCAST)


@triton.jit
def _nvfp4(
    a: tl.tensor, acc: tl.tensor, codes: tl.tensor, scales: tl.tensor, row: tl.tensor, wanted: tl.tensor,
    start: tl.tensor, stride: tl.tensor, columns: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Scales become float32 once for each group of 16 columns, 8 bytes of codes."""
    tl.static_assert(BLOCK_K % 64 == 0, "words of scales and tiles nest")
    T: tl.constexpr = a.dtype
    N: tl.constexpr = row.shape[0]
    COUNT: tl.constexpr = BLOCK_K // 64
    at = start // 64 + tl.arange(0, COUNT)
    mask = wanted[None, :] & (at < tl.cdiv(columns, 64))[:, None]
    word = tl.load(scales + (1 + at)[:, None] * stride + row[None, :], mask=mask, other=0)
    of_row = tl.load(scales + row, mask=wanted, other=0).to(tl.float32, bitcast=True)
    parts = word[:, None, :] >> (8 * tl.arange(0, 4))[None, :, None]
    scale = _e4m3(tl.reshape(parts, (4 * COUNT, N)) & 255) * of_row[None, :]
    scale = tl.reshape(tl.broadcast_to(scale[:, None, :], (4 * COUNT, 8, N)), (BLOCK_K // 2, N))
    low = (_e2m1(codes) * scale).to(T)
    high = (_e2m1(codes >> 4) * scale).to(T)
    return _halves(a, acc, low, high, BLOCK_M, BLOCK_K, UPCAST)


@triton.jit
def _mxfp4(
    a: tl.tensor, acc: tl.tensor, codes: tl.tensor, scales: tl.tensor, row: tl.tensor, wanted: tl.tensor,
    start: tl.tensor, stride: tl.tensor, columns: tl.tensor, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A word holds the exponents of 128 columns; Triton decodes by table or in hardware."""
    COUNT: tl.constexpr = BLOCK_K // 128
    N: tl.constexpr = row.shape[0]
    at = start // 128 + tl.arange(0, COUNT)
    mask = wanted[:, None] & (at < tl.cdiv(columns, 128))[None, :]
    word = tl.load(scales + at[None, :] * stride + row[:, None], mask=mask, other=_UNIT)
    parts = (word[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]) & 255
    exponents = tl.reshape(parts, (N, 4 * COUNT)).to(tl.uint8)
    return tl.dot_scaled(a, None, "bf16", codes, exponents, "e2m1", acc)


@triton.jit
def _bytes(
    a: tl.tensor, acc: tl.tensor, codes: tl.tensor, scales: tl.tensor, row: tl.tensor, wanted: tl.tensor,
    inside: tl.tensor, k: tl.tensor, start: tl.tensor, stride: tl.tensor, columns: tl.tensor,
    scale_of_a: tl.tensor, CODES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """With ``scale_of_a`` [M], a has codes, and the scales of both multiply sums as in vLLM's kernel: of a group its
    own, of whole rows the whole one, see ``scaled``."""
    T: tl.constexpr = a.dtype
    if CODES == "int8":
        values = _integers(codes ^ 128, 128.0)
    elif codes.dtype == tl.uint8:  # before sm_89
        values = _e4m3(codes)
    else:
        values = codes.to(tl.float32)
    if scale_of_a is not None and codes.dtype == tl.float8e4nv:
        a, w = a.to(tl.float8e4nv), codes
    elif scale_of_a is not None:
        w = values.to(T)
    else:
        scale, group = _scale_at(scales, k, start, row // ROWS, stride, wanted, inside, columns, GROUP, 1, BLOCK_K)
        w = (values * scale).to(T)
    if UPCAST:
        a, w = a.to(tl.float32), w.to(tl.float32)
    if scale_of_a is None or GROUP == 0:
        if SWAP:
            acc = tl.dot(tl.trans(w), tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, w, acc, input_precision="ieee")
    else:
        tl.static_assert(GROUP % BLOCK_K == 0, "a tile has one scale of each row")
        scale, group = _scale_at(scales, k, start, row // ROWS, stride, wanted, inside, columns, GROUP, 1, BLOCK_K)
        if SWAP:
            product = tl.dot(tl.trans(w), tl.trans(a), input_precision="ieee")
            acc += product * tl.trans(scale) * scale_of_a[None, :]
        else:
            acc += tl.dot(a, w, input_precision="ieee") * scale_of_a[:, None] * scale
    return acc


@triton.jit
def scaled(acc: tl.tensor, scale_of_a: tl.tensor, scales: tl.tensor, row: tl.tensor, wanted: tl.tensor):
    """Sums of the codes of whole rows of a and W, [M, N] -> what they stand for."""
    return acc * scale_of_a[:, None] * tl.load(scales + row, mask=wanted, other=0.0)[None, :]


@triton.jit
def multiply(
    a: tl.tensor, acc: tl.tensor, codes: tl.tensor, scales: tl.tensor, row: tl.tensor, wanted: tl.tensor,
    start: tl.tensor, rows: tl.tensor, columns: tl.tensor, scale_of_a: tl.tensor,
    CODES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, SWAP: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Returns acc + a W[row, start : start + BLOCK_K]^T, float32 [M, N].

    Args:
        a: [M, BLOCK_K] of 16 bits, zero where the columns end.
        acc: [M, N] float32.
        codes, scales: pointers to an expert's tensors; of ``e4m3`` the codes may be float8e4nv.
        row, wanted: [N] rows of W, and which of them are read.
        start: first column of the tile, a multiple of BLOCK_K.
        rows, columns: of W.
        scale_of_a: [M] float32 of a's codes, see ``quantise``; None: a has numbers.
        CODES, GROUP, ROWS, ZEROS: as in ``formats.Format``.
        EVEN_K: BLOCK_K divides ``columns``.
        WIDE: a row of codes is a multiple of 16 bytes.
        SWAP: acc and what is returned are [N, M], of codes of bytes: 64 rows of W fill the instruction of an sm_90 that
            few rows of a do not, and vLLM multiplies so there.
        UPCAST: the interpreter cannot multiply bfloat16.
    """
    PACKED: tl.constexpr = 2 if CODES == "e2m1" or CODES == "int4" else 1
    stride = tl.cdiv(tl.cdiv(rows, ROWS), 4) * 4
    k = tl.arange(0, BLOCK_K // PACKED)
    length = columns // PACKED
    if WIDE:
        length = tl.multiple_of(length, 16)
    inside = wanted[None, :]
    if not EVEN_K:
        inside = inside & (k < length - start // PACKED)[:, None]
    raw = tl.load(codes + row[None, :] * length + (start // PACKED + k)[:, None], mask=inside, other=0.0)
    if CODES == "e2m1" and GROUP == 32:
        acc = _mxfp4(a, acc, raw, scales, row, wanted, start, stride, columns, BLOCK_K)
    elif CODES == "e2m1":
        acc = _nvfp4(a, acc, raw, scales, row, wanted, start, stride, columns, BLOCK_M, BLOCK_K, UPCAST)
    elif CODES == "int4":
        acc = _int4(
            a, acc, raw, scales, row, wanted, inside, k, start, stride, columns, GROUP, ZEROS, BLOCK_M, BLOCK_K, UPCAST
        )
    else:
        acc = _bytes(
            a, acc, raw, scales, row, wanted, inside, k, start, stride, columns, scale_of_a, CODES, GROUP, ROWS,
            BLOCK_K, SWAP, UPCAST,
        )  # fmt: skip
    return acc
