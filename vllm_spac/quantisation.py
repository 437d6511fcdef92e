"""What ``config.json`` says of a checkpoint's quantised experts: whether slots can hold them, and in how many bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

# Where multimodal models describe their language model, and what vLLM calls the quantisation in either place.
INNER_CONFIGS = ("text_config", "language_config", "llm_config", "ffn_config")
QUANTISED = ("quantization_config", "compression_config", "quant_config")

_REMEDY = "use one in FP8 (scales by block or channel), in INT4 (compressed-tensors, by group), or an unquantised one"
_PER_TENSOR = (
    "FP8 experts with one scale a tensor, whose activations share a scale with other rows or experts: their result "
    "depends on what is computed beside them"
)
_METADATA = "weight_shape"  # in checkpoints only


def parts(config: Mapping) -> Iterator[Mapping]:
    """The config itself, then those of its parts."""
    yield config
    for name in INNER_CONFIGS:
        if isinstance(config.get(name), Mapping):
            yield config[name]


def of(config: Mapping) -> Mapping | None:
    """The quantisation that a checkpoint's ``config.json`` names, or None."""
    entry = next((part[name] for part in parts(config) for name in QUANTISED if part.get(name)), None)
    return entry if entry is None or isinstance(entry, Mapping) else {"quant_method": entry}


def method(quantisation: Mapping) -> str:
    """The name of its method."""
    return str(quantisation.get("quant_method", "unnamed method"))


def refusal(quantisation: Mapping) -> str | None:
    """Which experts cannot be kept in slots, and what can; None where these can.

    The scheme may differ from layer to layer: if one of its groups can be kept, the layers themselves decide.
    """
    reason = _REASONS.get(method(quantisation), _unknown)(quantisation)
    return None if reason is None else f"{reason} ({method(quantisation)}): not supported; {_REMEDY}"


def kept_bytes(quantisation: Mapping, name: str, shape: Sequence[int], nbytes: int) -> int:
    """Bytes in a slot of the checkpoint's tensor ``name``, which has ``nbytes`` there: scales of FP8 become float32."""
    last = name.rpartition(".")[2]
    if last == _METADATA:
        return 0
    fp8 = method(quantisation) == "fp8" or any(_is_fp8(group) for group in _groups(quantisation))
    return 4 * math.prod(shape) if fp8 and last.startswith("weight_scale") else nbytes


def _unknown(_: Mapping) -> str:
    return "quantised experts"


def _fp8(quantisation: Mapping) -> str | None:
    return None if quantisation.get("weight_block_size") else _PER_TENSOR


def _compressed(quantisation: Mapping) -> str | None:
    reasons = [_group(group) for group in _groups(quantisation)]
    return None if None in reasons else next(iter(reasons), "quantised experts")


def _groups(quantisation: Mapping) -> list[Mapping]:
    return list((quantisation.get("config_groups") or {}).values())


def _group(group: Mapping) -> str | None:
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    if _is_fp8(group):
        return None if weights.get("strategy") in ("channel", "block") else _PER_TENSOR
    if activations:
        return f"experts with quantised activations ({activations.get('type')}{activations.get('num_bits')})"
    if (weights.get("type"), weights.get("num_bits"), weights.get("strategy")) != ("int", 4, "group"):
        return f"{weights.get('type')}{weights.get('num_bits')} experts by {weights.get('strategy')}"
    return "experts with activation ordering (actorder)" if weights.get("actorder") == "group" else None


def _is_fp8(group: Mapping) -> bool:
    kinds = [group.get(name) or {} for name in ("weights", "input_activations")]
    return all((kind.get("type"), kind.get("num_bits")) == ("float", 8) for kind in kinds)


_REASONS = {"fp8": _fp8, "compressed-tensors": _compressed}
