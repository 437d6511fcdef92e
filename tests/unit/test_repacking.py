"""Repacked experts stand for the weights that the checkpoint's own definition gives, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from vllm_spac.kernels.reference.dequantise import dequantise

from vllm_spac.errors import UnsupportedError
from vllm_spac.storage.checkpoint import repacking
from vllm_spac.storage.checkpoint.repacking import Repacked

EXPERTS = 2
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # OCP Microscaling Formats v1.0, table 5


def weights(found: Repacked, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """[E, rows, columns], by the kernels' twin."""
    experts = zip(found.codes, found.scales, strict=True)
    return torch.stack([dequantise(found.kind, *expert, rows, columns, dtype) for expert in experts])


def same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found.view(torch.int16), expected.view(torch.int16))


def random(shape: tuple[int, ...], most: int, seed: int) -> Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))


def scales(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(7)) * 0.02 + 0.001).to(dtype)


def packed(values: Tensor, order: tuple[int, ...], bits: int = 4) -> Tensor:
    """[..., n] -> int32 [..., n * bits / 32]; value ``order[i]`` of each word gets the i-th lowest place."""
    words = values.long().unflatten(-1, (-1, len(order)))[..., list(order)]
    word = sum(words[..., place] << (bits * place) for place in range(len(order)))
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def scaled(values: Tensor, zero: Tensor | int, scale: Tensor, group: int) -> Tensor:
    """(value - zero) * scale in float64, rounded once; values [E, N, K], scale and zero [E, N, K / group]."""
    wide = scale.double().repeat_interleave(group, 2)
    offset = zero.double().repeat_interleave(group, 2) if isinstance(zero, Tensor) else zero
    return ((values.double() - offset) * wide).to(scale.dtype)


ORDER, AWQ = tuple(range(8)), (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ: awq/utils/packing_utils.py, AWQ_ORDER
SIZES = given(
    st.integers(1, 5), st.integers(1, 5), st.sampled_from([32, 64]), st.sampled_from([torch.bfloat16, torch.float16])
)
few = settings(max_examples=examples(15), deadline=None)


def int4(rows: int, groups: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [E, N, K], zero points and scales [E, N, K / group]; N is 8 rows each."""
    shape = (EXPERTS, 8 * rows, groups)
    return random((EXPERTS, 8 * rows, groups * group), 16, 1), random(shape, 16, 2), scales(shape, dtype)


def compressed_tensors(codes: Tensor, zeros: Tensor | None, scale: Tensor) -> dict[str, Tensor]:
    found = {"weight_packed": packed(codes, ORDER), "weight_scale": scale}
    return found if zeros is None else found | {"weight_zero_point": packed(zeros.mT, ORDER).mT}


def test_compressed_tensors_by_their_library():
    """Its own packing, unpacking and rule, independent of ours."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers", reason="comes with vLLM")
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    codes, zeros, scale = int4(3, 4, 32, torch.bfloat16)
    signed, points = (codes - 8).to(torch.int8), (zeros - 8).to(torch.int8)
    tensors = {
        "weight_packed": torch.stack([helpers.pack_to_int32(expert, 4) for expert in signed]),
        "weight_scale": scale,
        "weight_zero_point": torch.stack([helpers.pack_to_int32(expert, 4, packed_dim=0) for expert in points]),
    }
    found = weights(repacking.compressed(tensors, 4, 32), *codes.shape[1:], torch.bfloat16)
    for expert in range(EXPERTS):
        expected = dequantize(signed[expert], scale[expert], points[expert])
        assert same(found[expert], expected)


@few
@SIZES
def test_gptq(rows, groups, group, dtype):
    """K-first, 8 columns to a word; AutoGPTQ: qlinear_cuda_old.py, ``pack``."""
    codes, _, scale = int4(rows, groups, group, dtype)
    tensors = {"qweight": packed(codes, ORDER).mT, "scales": scale.mT}
    found = repacking.gptq(tensors, 4, group)
    assert same(weights(found, *codes.shape[1:], dtype), scaled(codes, 8, scale, group))
    wide = random(codes.shape, 256, 3)
    found = repacking.gptq({"qweight": packed(wide, tuple(range(4)), 8).mT, "scales": scale.mT}, 8, group)
    assert same(weights(found, *codes.shape[1:], dtype), scaled(wide, 128, scale, group))


@few
@SIZES
def test_awq(rows, groups, group, dtype):
    """K-first, 8 rows to a word in AWQ's order; zero points likewise."""
    codes, zeros, scale = int4(rows, groups, group, dtype)
    tensors = {"qweight": packed(codes.mT, AWQ), "qzeros": packed(zeros.mT, AWQ), "scales": scale.mT}
    found = repacking.awq(tensors, group)
    assert same(weights(found, *codes.shape[1:], dtype), scaled(codes, zeros, scale, group))


@few
@SIZES
def test_what_moe_wna16_loads(rows, groups, group, dtype):
    codes, zeros, scale = int4(rows, groups, group, dtype)
    tensors = {
        "qweight": (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8),
        "qzeros": (zeros[:, ::2] | zeros[:, 1::2] << 4).to(torch.uint8),
        "scales": scale,
    }
    found = repacking.wna16(tensors, 4, group)
    assert same(weights(found, *codes.shape[1:], dtype), scaled(codes, zeros, scale, group))
    wide = random(codes.shape, 256, 3)
    found = repacking.wna16({"qweight": wide.to(torch.uint8), "scales": scale}, 8, group)
    assert same(weights(found, *codes.shape[1:], dtype), scaled(wide, 128, scale, group))


def test_one_scale_for_a_row():
    codes, _, scale = int4(2, 1, 96, torch.bfloat16)
    found = repacking.compressed(compressed_tensors(codes, None, scale), 4, 0)
    assert found.kind.group == 0
    assert same(weights(found, *codes.shape[1:], torch.bfloat16), scaled(codes, 8, scale, 96))


@pytest.mark.parametrize("columns", [32, 128, 288])
def test_mxfp4(columns):
    """Every code and every finite exponent whose weights are no subnormal numbers; 288 columns end inside a word."""
    codes = random((EXPERTS, 6, columns), 16, 1)
    exponents = random((EXPERTS, 6, columns // 32), 250, 2) + 2
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    expected = table[codes] * torch.exp2(exponents.double() - 127).repeat_interleave(32, 2)
    tensors = {
        "weight": (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8),
        "weight_scale": exponents.to(torch.uint8),
    }
    assert same(weights(repacking.mxfp4(tensors), 6, columns, torch.bfloat16), expected.to(torch.bfloat16))


def nvfp4(rows: int, columns: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [E, N, K], e4m3 scales [E, N, K / 16], scales of tensors [E, parts]; all finite e4m3 there are."""
    codes = random((EXPERTS, rows, columns), 16, 1)
    bytes_ = random((EXPERTS, rows, columns // 16), 127, 2).to(torch.uint8)
    whole = torch.rand(EXPERTS, parts, generator=torch.Generator().manual_seed(3)) / 2688 + 1e-5
    return codes, bytes_.view(torch.float8_e4m3fn), whole


@pytest.mark.parametrize("columns", [16, 64, 272])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_nvfp4(layout, parts, columns):
    """272 columns end inside a word; gate and up have tensors' scales of their own."""
    codes, scale, whole = nvfp4(6, columns, parts)
    halves = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    if layout == "modelopt":
        tensors = {"weight": halves, "weight_scale": scale, "weight_scale_2": whole}
    else:
        tensors = {"weight_packed": halves, "weight_scale": scale, "weight_global_scale": 1 / whole}
        whole = 1 / (1 / whole)
    tensors = {n: t[:, 0] if n.startswith("weight_scale_2") and parts == 1 else t for n, t in tensors.items()}
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    wide = (scale.float() * whole.repeat_interleave(6 // parts, 1)[..., None]).repeat_interleave(16, 2)
    found = repacking.nvfp4(tensors)
    assert found.scales.nbytes % 16 == 0 and found.codes.data_ptr() == halves.data_ptr()
    for dtype in (torch.bfloat16, torch.float16):
        assert same(weights(found, 6, columns, dtype), (table[codes] * wide).to(dtype))


def test_nvfp4_by_the_library_of_compressed_tensors():
    """Its own packing and unpacking, independent of ours."""
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers", reason="comes with vLLM")
    codes, scale, whole = nvfp4(4, 64, 1)
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])[codes]
    halves = torch.stack([helpers.pack_fp4_to_uint8(expert) for expert in values])
    found = repacking.nvfp4({"weight_packed": halves, "weight_scale": scale, "weight_global_scale": 1 / whole})
    expected = torch.stack([helpers.unpack_fp4_from_uint8(e, 4, 64, torch.float32) for e in halves]) * (
        scale.float() * (1 / (1 / whole))[..., None]
    ).repeat_interleave(16, 2)
    assert same(weights(found, 4, 64, torch.bfloat16), expected.bfloat16())


def one_nvfp4(**changes: Tensor) -> Mapping[str, Tensor]:
    return {
        "weight": torch.zeros(1, 8, 16, dtype=torch.uint8),
        "weight_scale": torch.ones(1, 8, 2).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.ones(1),
        **changes,
    }


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("block", [None, (8, 16)], ids=["channel", "block"])
def test_float_scales(dtype, block):
    weight = random((EXPERTS, 32, 48), 120, 1).to(torch.uint8).view(dtype)
    rows, columns = block or (1, 48)
    scale = scales((EXPERTS, 32 // rows, 48 // columns), torch.float32)
    wide = scale.repeat_interleave(rows, 1).repeat_interleave(columns, 2)
    name = "weight_scale" if block is None else "weight_scale_inv"
    found = repacking.scaled({"weight": weight, name: scale}, block, 2)
    assert same(weights(found, 32, 48, torch.bfloat16), (weight.float() * wide).bfloat16())


def without_reciprocal() -> Mapping[str, Tensor]:
    tensors = dict(one_nvfp4(weight_global_scale=torch.zeros(1)))
    del tensors["weight_scale_2"]
    return tensors


def fp8(value: float) -> Mapping[str, Tensor]:
    weight = torch.full((1, 8, 16), value).to(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale": torch.ones(1, 8, 1)}


@pytest.mark.parametrize(
    ("repack", "named"),
    [
        (lambda: repacking.scaled(fp8(float("nan")), None, 2), "no numbers"),
        (lambda: repacking.scaled(fp8(1.0), (8, 16), 2), "mix gate and up"),
        (lambda: repacking.scaled(fp8(1.0), (4, 16), 2), r"\[8, 16\] have scales of \[8, 1\]"),
        (lambda: repacking.compressed(compressed_tensors(*int4(1, 2, 32, torch.float16)), 4, 64), "64 columns"),
        (
            lambda: repacking.nvfp4(one_nvfp4(weight_scale=torch.ones(1, 8, 1).to(torch.float8_e4m3fn))),
            r"\[8, 32\] in NVFP4 have scales of \[8, 1\], not one for each 16 columns",
        ),
        (
            lambda: repacking.nvfp4(
                one_nvfp4(weight_scale=torch.full((1, 8, 2), float("nan")).to(torch.float8_e4m3fn))
            ),
            "no numbers",
        ),
        (lambda: repacking.nvfp4(one_nvfp4(weight_scale_2=torch.tensor([-1.0]))), "no numbers"),
        (lambda: repacking.nvfp4(one_nvfp4(weight_scale_2=torch.tensor([float("inf")]))), "no numbers"),
        (lambda: repacking.nvfp4(without_reciprocal()), "no numbers"),
    ],
    ids=["NaN", "blocks", "scales", "group", "NVFP4 by 32", "NVFP4 NaN", "negative", "infinite", "no reciprocal"],
)
def test_what_contradicts_itself_is_refused(repack, named):
    with pytest.raises(UnsupportedError, match=named):
        repack()
