"""How quantised experts are stored for ``grouped_gemm``, shared by the kernel, its torch twin and the host. No Triton.

A matrix of weights W [N, K] of an expert is two tensors: codes, and scales by groups of columns. Dequantised to the
dtype T of x, which is what the kernel multiplies::

    W[n, k] = T(float32(code[n, k] - zero[n, k / group]) * scale[n / rows, k / group])      rounded to T once

| codes | uint8 | scales: 4 bytes each, [words, N / rows rounded up to 4] |
|---|---|---|
| ``e2m1`` by 32, MXFP4 | [N, K / 2], the low nibble is the even k | int32: e8m0 of 4 groups, low byte first |
| ``e2m1`` by 16, NVFP4 | as above | int32: first the row's scale in float32; then e4m3 of 4 groups, low byte first |
| ``int4`` | [N, K / 2], as above; zero = 8 | int32: T's bits of the scales of 2 groups, low half first |
| ``int4``, ``zeros`` | [N, K / 2], as above | int32: T's bits of a scale, and its zero << 16 |
| ``int8`` | [N, K], two's complement; zero = 0 | float32 |
| ``e4m3`` | [N, K], no NaN; zero = 0 | float32 |

With ``activations`` rows of x are codes and scales as well, and no weight is rounded to T::

    scale[m, k / group] = max |x[m, k]| of the group / 448          code = e4m3(x[m, k] / scale)
    y[m, n] = sum over groups of (sum of code[m, k] code[n, k]) scale[m, group] scale[n / rows, group]

h as x; with ``fused`` it is not rounded to T before. No scale of a whole row, nor of such an h, is less than
1 / (448 * 512). Of other groups no largest number is less than 1e-10, and x[m, k] is multiplied by 1 / scale instead.
All this is as vLLM 0.33's kernels do it.

Of NVFP4 a scale is float32(e4m3 * the row's scale), rounded once; a row's scale is that of its tensor, so that gate and
up may have different ones.

Scales are transposed, so that the rows of a tile are neighbours in memory, and packed, so that each is loaded in
4 bytes: the least that a GPU copies asynchronously.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

# What the kernels compute. Limits are fixed by the models that have them: GPT-OSS; DeepSeek-V4 and GLM-5.3; MiniMax-M3,
# whose product is that of GPT-OSS over two halves, with act(gate) rounded.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai", "silu_clamped", "swigluoai_uninterleave")
_OPENAI = (7.0, 1.702, 1.0)
_CLAMPED = {"silu": (10.0, 1.0, 0.0), "swigluoai": _OPENAI, "swigluoai_uninterleave": _OPENAI}

Codes = Literal["e2m1", "int4", "int8", "e4m3"]
MX_GROUP = 32  # columns that share an exponent in all OCP microscaling formats
NV_GROUP = 16  # columns that share an e4m3 scale in NVFP4
_PER_WORD = 4  # scales are padded to multiples of 4 words, 16 bytes


@dataclass(frozen=True)
class Format:
    """The layout of an expert's weights; see the module."""

    codes: Codes  # what a weight is
    group: int = 0  # columns that share a scale, 0 for all
    rows: int = 1  # rows that share a scale
    zeros: bool = False  # each scale has a zero point, only with ``int4``
    activations: int | None = None  # with ``e4m3``: columns of a row of x that share a scale, 0 for all; None: no codes

    def __post_init__(self) -> None:
        assert self.codes in ("e2m1", "int4", "int8", "e4m3") and self.group >= 0 and self.rows >= 1
        assert self.codes != "e2m1" or self.group in (MX_GROUP, NV_GROUP), "e2m1 has scales by 32 or 16 columns"
        assert self.per_byte == 1 or (self.rows == 1 and self.group % 2 == 0), "both weights of a byte share a scale"
        assert not self.zeros or self.codes == "int4"
        assert self.activations is None or (self.codes == "e4m3" and self.activations == self.group)

    @property
    def per_byte(self) -> int:
        """Weights per byte of codes."""
        return 2 if self.codes in ("e2m1", "int4") else 1

    @property
    def exponents(self) -> bool:
        """Whether scales are powers of two: MXFP4."""
        return self.codes == "e2m1" and self.group == MX_GROUP

    @property
    def row_scales(self) -> bool:
        """Whether rows have scales beside those of groups: NVFP4."""
        return self.codes == "e2m1" and self.group == NV_GROUP

    @property
    def fused(self) -> bool:
        """Whether vLLM rounds silu(gate) * up to e4m3 at once: by blocks of 128 x 128."""
        return self.codes == "e4m3" and self.activations == self.rows == 128

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the tensor of scales."""
        import torch  # plans, which need no torch, read the rest

        return torch.int32 if self.per_byte == 2 else torch.float32

    def weight_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns what weights are rounded to before rows of ``dtype`` are multiplied by them."""
        import torch

        return dtype if self.activations is None else torch.float32

    @property
    def groups_per_word(self) -> int:
        """Groups of columns whose scales share a word."""
        return 4 if self.codes == "e2m1" else 2 if self.codes == "int4" and not self.zeros else 1

    def groups(self, columns: int) -> int:
        """Returns the groups of a row of so many columns."""
        return -(-columns // self.group) if self.group else 1

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns the shape of the scales of W [rows, columns]."""
        words, across = -(-self.groups(columns) // self.groups_per_word), -(-rows // self.rows)
        return self.row_scales + words, -(-across // _PER_WORD) * _PER_WORD

    def code_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns the shape of the codes of W [rows, columns]."""
        return rows, columns // self.per_byte

    def describe(self) -> str:
        """Returns a few words for messages, such as ``int4 by 128 columns with zero points``."""
        block = f"{self.rows} rows x " if self.rows > 1 else ""
        by = f"by {block}{self.group} columns" if self.group else "by channel"
        more = " with zero points" if self.zeros else "" if self.activations is None else ", rows in e4m3 too"
        return f"{self.codes} {by}{more}"


def activation_of(name: str, limit: float | None, alpha: float | None, beta: float | None) -> str | None:
    """Returns which of ``ACTIVATIONS`` is vLLM's activation ``name`` with these parameters; None: none of them.

    Args:
        limit, alpha, beta: as of vLLM's layer of experts; None where it has none, or leaves it to the kernel.
    """
    given = (limit or None, alpha, beta)
    if name in ("silu", "gelu", "gelu_tanh") and given[0] is None:
        return name if given[1:] in ((None, None), (1.0, 0.0)) else None
    fits = all(value in (None, fixed) for value, fixed in zip(given, _CLAMPED.get(name, ()), strict=False))
    return ("silu_clamped" if name == "silu" else name) if name in _CLAMPED and fits else None
