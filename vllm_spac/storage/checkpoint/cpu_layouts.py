"""Quantised experts in vLLM's kernels for a CPU: which they run, and how many bytes a tensor has in their layout.

Each kernel has a layout of its own, which vLLM makes expert by expert while it loads. MXFP4 and FP8 have the bytes of
the checkpoint, with biases and scales of FP8 in float32. INT8 has 4 more bytes per output. INT4 is in tiles of 32
outputs by one group, each with 4 more bytes per output, and has zero points for symmetric checkpoints, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from vllm_spac.storage.checkpoint.quant_config import (
    GPTQ_LIKE,
    MX_GROUP,
    MXFP4,
    group_is_fp8,
    group_is_int8,
    groups,
    mapping,
    method,
)

REMEDY = (
    "use one in FP8 by blocks of 128 x 128, INT8 by channel, INT4 by group (compressed-tensors with symmetric groups "
    "of 64 or more, AWQ with zero points, GPTQ with sym and without desc_act) or MXFP4 (GPT-OSS), or an unquantised one"
)
_BLOCK = [128, 128]
_SMALLEST_GROUP = 64  # of compressed-tensors; vLLM's kernel takes smaller ones from GPTQ and AWQ only
_UNREAD = {"weight_shape", "g_idx", "qzeros", "weight_zero_point"}  # zero points are counted with their scales
# Of INT4, per output and group: a scale in float32, a zero point in int8, and the sum of its codes in int32.
_OF_GROUP = 4 + 1 + 4
_OF_OUTPUT = 4  # of INT8: the sum of its codes in int32


def refusal(quantisation: Mapping) -> str | None:
    """Returns the experts that these kernels cannot run, in words; None if they can run those of some layers."""
    name = method(quantisation)
    if name == MXFP4:
        return None
    if name == "fp8":
        return _blocks(quantisation.get("weight_block_size"))
    if name in GPTQ_LIKE:
        return _integers(quantisation)
    if name == "compressed-tensors":
        reasons = [_group(group) for group in groups(quantisation)]
        return None if None in reasons else next(iter(reasons), "quantised experts")
    return "quantised experts"


def kept_bytes(quantisation: Mapping, name: str, shape: Sequence[int], nbytes: int) -> int:
    """Returns the bytes in a slot of tensor ``name``, which has ``nbytes`` in the checkpoint."""
    last = name.rpartition(".")[2]
    if method(quantisation) == MXFP4:
        return 2 * nbytes if last.endswith("_bias") else nbytes
    if last in _UNREAD or (last == "bias" and method(quantisation) in GPTQ_LIKE):
        return 0
    if _is_int4(quantisation):
        return _OF_GROUP * math.prod(shape) if last in ("scales", "weight_scale") else nbytes
    if last.startswith("weight_scale"):
        return 4 * math.prod(shape)
    return nbytes + _OF_OUTPUT * math.prod(shape[:-1]) if last == "weight" and _is_int8(quantisation) else nbytes


def stored_bytes(quantisation: Mapping, shape: Sequence[int]) -> int:
    """Returns the bytes of a weight [..., outputs, inputs] in a slot with its scales; GPT-OSS's has inputs first."""
    weights, outputs, inputs = math.prod(shape), shape[-2], shape[-1]
    if method(quantisation) == MXFP4:
        return weights // 2 + weights // MX_GROUP
    if _is_int4(quantisation):
        given = next((mapping(group.get("weights")) for group in groups(quantisation)), quantisation)
        return weights // 2 + _OF_GROUP * (weights // int(given.get("group_size") or 128))
    if _is_int8(quantisation):
        return weights + (_OF_OUTPUT + 4) * (weights // inputs)
    blocks = -(-outputs // _BLOCK[0]) * -(-inputs // _BLOCK[1])
    return weights + 4 * blocks * (weights // (outputs * inputs))


def _is_int8(quantisation: Mapping) -> bool:
    return any(map(group_is_int8, groups(quantisation)))


def _is_int4(quantisation: Mapping) -> bool:
    found = groups(quantisation)
    return method(quantisation) in GPTQ_LIKE or any(
        _group(group) is None and not (group_is_fp8(group) or group_is_int8(group)) for group in found
    )


def _blocks(shape: object) -> str | None:
    if not shape:
        return "FP8 experts without scales by block"
    return None if shape == _BLOCK else f"FP8 experts by blocks of {shape}"


def _integers(quantisation: Mapping) -> str | None:
    """Of GPTQ and AWQ."""
    bits, group = quantisation.get("bits"), quantisation.get("group_size")
    if bits != 4:
        return f"experts of {bits} bits"
    if group == -1:
        return "experts with one scale per channel (group_size=-1)"
    if method(quantisation) == "awq":
        return None if quantisation.get("zero_point") else "AWQ experts without zero points"
    if quantisation.get("desc_act"):
        return "experts with activation ordering (desc_act)"
    return None if quantisation.get("sym") else "experts with zero points (sym=false), which vLLM does not load"


def _group(group: Mapping) -> str | None:
    weights, activations = mapping(group.get("weights")), mapping(group.get("input_activations"))
    if group_is_fp8(group):
        return _blocks(weights.get("block_structure"))
    if group_is_int8(group):
        return None
    if activations:
        return f"experts with quantised activations ({activations.get('type')}{activations.get('num_bits')})"
    if (weights.get("type"), weights.get("num_bits"), weights.get("strategy")) != ("int", 4, "group"):
        return f"{weights.get('type')}{weights.get('num_bits')} experts by {weights.get('strategy')}"
    if weights.get("symmetric") is False:
        return "INT4 experts with zero points in compressed-tensors"
    if weights.get("actorder") == "group":
        return "experts with activation ordering (actorder)"
    size = weights.get("group_size")
    return None if isinstance(size, int) and size >= _SMALLEST_GROUP else f"INT4 experts by groups of {size}"
