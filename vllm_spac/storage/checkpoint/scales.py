"""Whether quantised experts have the scales that their ``quantization_config`` promises, by the headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm_spac.errors import UnsupportedError, brief
from vllm_spac.storage.checkpoint import quant_config, quantisation

_CODES = {"F8_E4M3", "I8", "U8", "I32"}  # dtypes of quantised weights
_BLOCKS = "_blocks"  # of GPT-OSS


class _Layout(NamedTuple):
    """Which scales the weights ``codes`` have.

    Attributes:
        scale: the last part of their name.
        outputs, inputs: of the matrix that share a scale, 0 for all.
        packed: inputs in an item of the codes, of AWQ outputs.
        inputs_first: of codes and scales.
    """

    codes: str
    scale: str
    outputs: int
    inputs: int
    packed: int = 1
    inputs_first: bool = False


def check_scales(quantised: Mapping, experts: Mapping[str, Mapping], where: object) -> None:
    """Compares the shapes of scales with those of their weights.

    Args:
        quantised: the ``quantization_config``; one with several groups is not checked.
        experts: header entry of each tensor of an expert, by name.

    Raises:
        UnsupportedError: a weight has no scales, or scales of another shape.
    """
    layout = _layout(quantised)
    for name, entry in experts.items():
        if entry["dtype"] not in _CODES or (found := _expected(quantised, layout, name, entry["shape"])) is None:
            continue
        scale, shape = found
        if scale not in experts:
            raise UnsupportedError(
                f"{where}: {brief(name)} has no {brief(scale)}; download or convert the checkpoint again"
            )
        if (given := list(experts[scale]["shape"])) != shape:
            raise UnsupportedError(
                f"{where}: {brief(scale)} is {given}, and {brief(name)} {list(entry['shape'])} needs {shape}; the "
                "weights do not match the quantization_config"
            )


def _expected(
    quantised: Mapping, layout: _Layout | None, name: str, shape: Sequence[int]
) -> tuple[str, list[int]] | None:
    """Returns name and shape of the scales of a weight; None for other tensors."""
    if quant_config.method(quantised) == "mxfp4":
        return (f"{name.removesuffix(_BLOCKS)}_scales", list(shape[:-1])) if name.endswith(_BLOCKS) else None
    stem, _, last = name.rpartition(".")
    if layout is None or last != layout.codes or len(shape) < 2:
        return None
    sizes = list(shape)
    if layout.inputs_first:
        sizes[-1 if quant_config.method(quantised) == "awq" else -2] *= layout.packed
        steps = layout.inputs, layout.outputs
    else:
        sizes[-1] *= layout.packed
        steps = layout.outputs, layout.inputs
    sizes[-2:] = [-(-size // step) if step else 1 for size, step in zip(sizes[-2:], steps, strict=True)]
    return f"{stem}.{layout.scale}", sizes


def _layout(quantised: Mapping) -> _Layout | None:
    """Returns how experts that can be run are laid out; None if the config does not say, or of GPT-OSS."""
    if quantisation.refusal(quantised) is not None:
        return None
    name, groups = quant_config.method(quantised), quant_config.groups(quantised)
    if name == "fp8":
        return _Layout("weight", "weight_scale_inv", *_pair(quantised.get("weight_block_size")))
    if name in ("gptq", "awq"):
        packed, group = 32 // _number(quantised.get("bits"), 4), _number(quantised.get("group_size"), 128)
        return _Layout("qweight", "scales", 1, group, packed, inputs_first=True)
    if name.startswith("modelopt") and quantisation.is_nvfp4(quantised):
        return _Layout("weight", "weight_scale", 1, 16, 2)
    if name != "compressed-tensors" or len(groups) != 1:
        return None
    weights = groups[0].get("weights") or {}
    if quantisation.is_nvfp4(quantised):
        return _Layout("weight_packed", "weight_scale", 1, 16, 2)
    if weights.get("type") == "int" and quantised.get("format") == "pack-quantized":
        packed = 32 // _number(weights.get("num_bits"), 4)
        return _Layout("weight_packed", "weight_scale", 1, _number(weights.get("group_size"), 0), packed)
    if weights.get("strategy") == "block":
        return _Layout("weight", "weight_scale", *_pair(weights.get("block_structure")))
    return _Layout("weight", "weight_scale", 1, 0) if weights.get("strategy") == "channel" else None


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) and value > 0 else default


def _pair(value: object) -> tuple[int, int]:
    """Returns the size of a block; vLLM has kernels for 128 x 128 where a config says nothing sensible."""
    first, second = value if isinstance(value, list) and len(value) == 2 else (128, 128)
    return _number(first, 128), _number(second, 128)
