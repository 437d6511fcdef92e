"""Multiplies a tile of x by a tile of quantised weights: one step of the K loop of ``grouped_gemm``, by format.

Weights become what ``formats`` says, rounded to x's dtype T before they are multiplied: a kernel over quantised experts
computes what it computes over dequantised ones, in the same order: by tensor cores, which pad to 16 rows for a quarter
of an instruction a weight. Sums by plain multiply-add would take one for each row, and other bits than 5 rows have.

Codes of 8 bits become float32 without the conversion instruction, which a GPU issues at a quarter of its rate: the bits
0x4B000000 | c are 2**23 + c, and subtracting 2**23 + zero is exact. Codes of 4 bits become pairs of T in one register
in the same way, by 2**7 or 2**10.
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

# PTX over registers of two numbers of 16 bits, by the type of the numbers. The compiler would compute each number by
# itself, in three times as many instructions. $0 is the result; of four bytes, $0 to $3 are those of each byte.
_INT4 = """{{ .reg .b32 a, b, c, d;
lop3.b32 a, $4, 0x00000F0F, {magic}, 0xEA;
shr.u32 b, $4, 4;
lop3.b32 b, b, 0x00000F0F, {magic}, 0xEA;
shr.u32 c, $4, 16;
lop3.b32 c, c, 0x00000F0F, {magic}, 0xEA;
shr.u32 d, $4, 20;
lop3.b32 d, d, 0x00000F0F, {magic}, 0xEA;
prmt.b32 $0, a, b, 0x2420;
prmt.b32 $1, a, b, 0x2521;
prmt.b32 $2, c, d, 0x2420;
prmt.b32 $3, c, d, 0x2521; }}"""
_E2M1_BYTE = """prmt.b32 b, a, $4, 0x{high}{byte}{byte}{byte};
shr.u32 c, b, 6;
and.b32 b, b, 0x80008000;
lop3.b32 b, c, 0x01C001C0, b, 0xEA;
fma.rn.bf16x2 ${byte}, b, wide, zero;"""
_ZERO = "mov.b32 zero, 0x80008000;"  # -0, which changes no product
_TIMES = f"""{{{{ .reg .b32 zero;
{_ZERO}
fma.rn.{{pair}} $0, $1, $2, zero; }}}}"""
_LESS = f"""{{{{ .reg .b32 a, one, zero;
mov.b32 one, {{one}};
{_ZERO}
fma.rn.{{pair}} a, $1, one, $3;
fma.rn.{{pair}} $0, a, $2, zero; }}}}"""
_ROUNDED = """{{ .reg .b32 a, b;
.reg .f32 x, y;
shl.b32 a, $1, 16;
and.b32 b, $1, 0xFFFF0000;
mov.b32 x, a;
mov.b32 y, b;
mul.rn.f32 x, x, $2;
mul.rn.f32 y, y, $2;
cvt.rn.{pair}.f32 $0, y, x; }}"""
_TYPES = {
    "bf16": {"magic": "0x43430000", "one": "0x3F803F80", "pair": "bf16x2"},
    "fp16": {"magic": "0x64640000", "one": "0x3C003C00", "pair": "f16x2"},
}
ASSEMBLY = {
    (name, kind): text.format(**words)
    for kind, words in _TYPES.items()
    for name, text in (("int4", _INT4), ("times", _TIMES), ("less", _LESS), ("rounded", _ROUNDED))
} | {
    ("native e2m1", "bf16"): "\n".join((
        "{ .reg .b8 b0, b1, b2, b3;", "mov.b32 {b0, b1, b2, b3}, $4;",
        *(f"cvt.rn.bf16x2.e2m1x2 ${byte}, b{byte};" for byte in range(4)), "}",
    )),
    ("e2m1", "bf16"): "\n".join((
        "{ .reg .b32 a, b, c, wide, zero;", "shl.b32 a, $4, 4;", "mov.b32 wide, 0x7E807E80;", _ZERO,
        *(_E2M1_BYTE.format(byte=byte, high=4 + byte) for byte in range(4)), "}",
    ))
}  # fmt: skip


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


@triton.constexpr_function
def _assembly(name: str, T: tl.dtype):
    """Returns the PTX of ``name`` for numbers of T; ``tests/kernels/test_assembly.py`` runs it over all codes."""
    return ASSEMBLY[name, str(T)]


@triton.jit
def _int4_pairs(codes: tl.tensor, T: tl.constexpr, PLAIN: tl.constexpr):
    """[...] bytes -> uint32: both nibbles as T(2**7 + nibble), or 2**10 of float16, the low nibble in the low half."""
    if PLAIN:
        wide = codes.to(tl.uint32)
        pairs = (wide & 15) | ((wide >> 4) << 16) | (0x43004300 if tl.bfloat16 == T else 0x64006400)
    else:
        pairs = tl.inline_asm_elementwise(_assembly("int4", T), "=r,=r,=r,=r,r", [codes], tl.uint32, True, 4)
    return pairs


@triton.jit
def _e2m1_pairs(codes: tl.tensor, NATIVE: tl.constexpr, PLAIN: tl.constexpr):
    """[...] bytes -> uint32: both nibbles of e2m1 as bfloat16, which holds each of them."""
    if PLAIN:
        low, high = (_e2m1(codes & 15).to(tl.uint32, bitcast=True), _e2m1(codes >> 4).to(tl.uint32, bitcast=True))
        pairs = (low >> 16) | high
    else:
        NAME: tl.constexpr = "native e2m1" if NATIVE else "e2m1"
        pairs = tl.inline_asm_elementwise(_assembly(NAME, tl.bfloat16), "=r,=r,=r,=r,r", [codes], tl.uint32, True, 4)
    return pairs


@triton.jit
def _half(pairs: tl.tensor, HIGH: tl.constexpr, T: tl.constexpr):
    return (pairs >> (16 if HIGH else 0)).to(tl.uint16).to(T, bitcast=True)


@triton.jit
def _pair(low: tl.tensor, high: tl.tensor, T: tl.constexpr):
    """float32 -> uint32: rounded to T, the first in the low half."""
    below = low.to(T).to(tl.uint16, bitcast=True).to(tl.uint32)
    return below | (high.to(T).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def _scaled_pairs(pairs: tl.tensor, scales: tl.tensor, less: tl.tensor, T: tl.constexpr, PLAIN: tl.constexpr):
    """Pairs of T, plus ``less``, which is exact, or None, times ``scales``, rounded to T; all are pairs of T.

    Not marked as pure: else the compiler plans the product by the width of what this is made of, and moves single
    numbers in each turn. Nor is ``_rounded_pairs``.
    """
    if PLAIN:
        low, high = _half(pairs, False, T).to(tl.float32), _half(pairs, True, T).to(tl.float32)
        if less is not None:
            low += _half(less, False, T).to(tl.float32)
            high += _half(less, True, T).to(tl.float32)
        low *= _half(scales, False, T).to(tl.float32)
        high *= _half(scales, True, T).to(tl.float32)
        found = _pair(low, high, T)
    elif less is None:
        found = tl.inline_asm_elementwise(_assembly("times", T), "=r,r,r", [pairs, scales], tl.uint32, False, 1)
    else:
        found = tl.inline_asm_elementwise(_assembly("less", T), "=r,r,r,r", [pairs, scales, less], tl.uint32, False, 1)
    return found


@triton.jit
def _rounded_pairs(pairs: tl.tensor, scales: tl.tensor, T: tl.constexpr, PLAIN: tl.constexpr):
    """Pairs of bfloat16 times ``scales`` of float32, in float32, rounded to pairs of T."""
    if PLAIN:
        low = _half(pairs, False, tl.bfloat16).to(tl.float32) * scales
        high = _half(pairs, True, tl.bfloat16).to(tl.float32) * scales
        found = _pair(low, high, T)
    else:
        found = tl.inline_asm_elementwise(_assembly("rounded", T), "=r,r,f", [pairs, scales], tl.uint32, False, 1)
    return found


@triton.jit
def _product(a: tl.tensor, acc: tl.tensor, pairs: tl.tensor, UPCAST: tl.constexpr):
    """acc + a W^T; ``pairs`` [K / 2, N] are neighbouring columns of a row of W, of a's dtype.

    The columns are added in their order, as over weights that are not quantised.
    """
    T: tl.constexpr = a.dtype
    both = tl.join(_half(pairs, False, T), _half(pairs, True, T))
    w = tl.reshape(tl.permute(both, (0, 2, 1)), (2 * pairs.shape[0], pairs.shape[1]))
    if UPCAST:
        a, w = a.to(tl.float32), w.to(tl.float32)
    return tl.dot(a, w, acc, input_precision="ieee")


@triton.jit
def _spread(groups: tl.tensor, GROUP: tl.constexpr):
    """[groups, N] -> [groups * GROUP / 2, N]: what all pairs of a group share."""
    COUNT: tl.constexpr = groups.shape[0]
    N: tl.constexpr = groups.shape[1]
    return tl.reshape(tl.broadcast_to(groups[:, None, :], (COUNT, GROUP // 2, N)), (COUNT * GROUP // 2, N))


@triton.jit
def _int4_scales(
    scales: tl.tensor, row: tl.tensor, wanted: tl.tensor, inside: tl.tensor, byte: tl.tensor, start: tl.tensor,
    stride: tl.tensor, columns: tl.tensor, GROUP: tl.constexpr, ZEROS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Returns words of shapes that broadcast to [K / 2, N]: a scale in the low half; with ZEROS, its zero above."""
    PER_WORD: tl.constexpr = 1 if ZEROS else 2
    if not ZEROS and BLOCK_K % (2 * GROUP if GROUP else BLOCK_K + 1) == 0:  # both halves of words, each loaded once
        COUNT: tl.constexpr = BLOCK_K // (2 * GROUP)
        at = start // (2 * GROUP) + tl.arange(0, COUNT)
        mask = wanted[None, :] & (at < tl.cdiv(columns, 2 * GROUP))[:, None]
        word = tl.load(scales + at[:, None] * stride + row[None, :], mask=mask, other=0)
        parts = word[:, None, :] >> (16 * tl.arange(0, 2))[None, :, None]
        found = _spread(tl.reshape(parts, (2 * COUNT, row.shape[0])), GROUP)
    else:
        word, group = _scale_at(scales, 2 * byte, start, row, stride, wanted, inside, columns, GROUP, PER_WORD, BLOCK_K)
        found = word if ZEROS else word >> (16 * (group % 2))
    return found


@triton.jit
def _int4(
    a: tl.tensor, acc: tl.tensor, codes: tl.tensor, scales: tl.tensor, row: tl.tensor, wanted: tl.tensor,
    inside: tl.tensor, byte: tl.tensor, start: tl.tensor, stride: tl.tensor, columns: tl.tensor,
    GROUP: tl.constexpr, ZEROS: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    T: tl.constexpr = a.dtype
    word = _int4_scales(scales, row, wanted, inside, byte, start, stride, columns, GROUP, ZEROS, BLOCK_K)
    LESS: tl.constexpr = 0xC300C300 if tl.bfloat16 == T else 0xE400E400  # -2**7, or -2**10
    if ZEROS:
        less = tl.broadcast_to((word >> 16) | (word & 0xFFFF0000) | LESS, codes.shape)
    else:
        less = tl.full(codes.shape, LESS | 0x80008, tl.uint32)
    scale = tl.broadcast_to((word & 0xFFFF) | (word << 16), codes.shape)
    return _product(a, acc, _scaled_pairs(_int4_pairs(codes, T, UPCAST), scale, less, T, UPCAST), UPCAST)


@triton.jit
def _words_of_bytes(
    scales: tl.tensor, row: tl.tensor, wanted: tl.tensor, start: tl.tensor, stride: tl.tensor, columns: tl.tensor,
    GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Returns the bytes of a tile's words of scales, [groups, N] uint32."""
    tl.static_assert(BLOCK_K % (4 * GROUP) == 0, "words of scales and tiles nest")
    COUNT: tl.constexpr = BLOCK_K // (4 * GROUP)
    at = start // (4 * GROUP) + tl.arange(0, COUNT)
    mask = wanted[None, :] & (at < tl.cdiv(columns, 4 * GROUP))[:, None]
    word = tl.load(scales + at[:, None] * stride + row[None, :], mask=mask, other=0)
    parts = word[:, None, :] >> (8 * tl.arange(0, 4))[None, :, None]
    return tl.reshape(parts, (4 * COUNT, row.shape[0])) & 255


@triton.jit
def _nvfp4(
    a: tl.tensor, acc: tl.tensor, codes: tl.tensor, scales: tl.tensor, row: tl.tensor, wanted: tl.tensor,
    start: tl.tensor, stride: tl.tensor, columns: tl.tensor,
    NATIVE: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Scales become float32 once for each group of 16 columns, 8 bytes of codes."""
    T: tl.constexpr = a.dtype
    of_row = tl.load(scales + row, mask=wanted, other=0).to(tl.float32, bitcast=True)
    parts = _words_of_bytes(scales + stride, row, wanted, start, stride, columns, 16, BLOCK_K)
    scale = _spread(_e4m3(parts) * of_row[None, :], 16)
    return _product(a, acc, _rounded_pairs(_e2m1_pairs(codes, NATIVE, UPCAST), scale, T, UPCAST), UPCAST)


@triton.jit
def _mxfp4(
    a: tl.tensor, acc: tl.tensor, codes: tl.tensor, scales: tl.tensor, row: tl.tensor, wanted: tl.tensor,
    start: tl.tensor, stride: tl.tensor, columns: tl.tensor,
    NATIVE: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Scales are powers of two from 2**-127 on, 255 is NaN; bfloat16 has each, the least as a subnormal number."""
    parts = _words_of_bytes(scales, row, wanted, start, stride, columns, 32, BLOCK_K)
    half = tl.where(parts == 0, 0x40, tl.where(parts == 255, 0x7FC0, parts << 7))
    scale = _spread(half | (half << 16), 32)
    pairs = _scaled_pairs(_e2m1_pairs(codes, NATIVE, UPCAST), scale, None, tl.bfloat16, UPCAST)
    return _product(a, acc, pairs, UPCAST)


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
    CODES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ZEROS: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, SWAP: tl.constexpr, UPCAST: tl.constexpr,
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
        NATIVE: this GPU converts e2m1.
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
        acc = _mxfp4(a, acc, raw, scales, row, wanted, start, stride, columns, NATIVE, BLOCK_K, UPCAST)
    elif CODES == "e2m1":
        acc = _nvfp4(a, acc, raw, scales, row, wanted, start, stride, columns, NATIVE, BLOCK_K, UPCAST)
    elif CODES == "int4":
        acc = _int4(a, acc, raw, scales, row, wanted, inside, k, start, stride, columns, GROUP, ZEROS, BLOCK_K, UPCAST)
    else:
        acc = _bytes(
            a, acc, raw, scales, row, wanted, inside, k, start, stride, columns, scale_of_a, CODES, GROUP, ROWS,
            BLOCK_K, SWAP, UPCAST,
        )  # fmt: skip
    return acc
