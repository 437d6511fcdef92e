"""Decides from ``config.json`` which kernels can run a checkpoint's quantised experts, and in how many bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

# Where multimodal models describe their language model, and what vLLM calls the quantisation in either place.
INNER_CONFIGS = ("text_config", "language_config", "llm_config", "ffn_config")
QUANTISED = ("quantization_config", "compression_config", "quant_config")

_REMEDY = (
    "use one in FP8 (scales by block or channel), in INT4 by group (compressed-tensors, AWQ, GPTQ with sym and without "
    "desc_act), with --spac-execution pointers also in MXFP4 (GPT-OSS), NVFP4 or INT8 by channel, or an unquantised one"
)
_PER_TENSOR = (
    "FP8 experts with one scale per tensor, whose activations share a scale with other rows or experts: their result "
    "depends on what is computed with them"
)
_METADATA = {"weight_shape", "g_idx"}  # in checkpoints only
# Of NVFP4: scales of activations, and those of tensors, which slots have as scales of rows.
_WHOLE = {"input_scale", "input_global_scale", "weight_scale_2", "weight_global_scale"}
_NVFP4 = ("NVFP4", "W4A16_NVFP4")  # of ModelOpt
_NV_GROUP, _MX_GROUP = 16, 32
_MXFP4 = "mxfp4"  # of GPT-OSS
_WNA16 = ("gptq", "awq")  # read by vLLM's moe_wna16; vLLM's own methods for them use Marlin


def parts(config: Mapping) -> Iterator[Mapping]:
    """Yields the config itself, then its nested model configs."""
    yield config
    for name in INNER_CONFIGS:
        if isinstance(config.get(name), Mapping):
            yield config[name]


def of(config: Mapping) -> Mapping | None:
    """Returns the quantisation that a checkpoint's ``config.json`` names, or None."""
    entry = next((part[name] for part in parts(config) for name in QUANTISED if part.get(name)), None)
    if entry is not None and not isinstance(entry, Mapping):
        return {"quant_method": entry}
    inner = _mapping(_mapping(entry).get("quantization"))
    if "quant_algo" in inner:  # ModelOpt's own file, hf_quant_config.json
        return {"quant_method": "modelopt", **inner, "ignore": inner.get("exclude_modules") or []}
    return entry


def method(quantisation: Mapping) -> str:
    """Returns the name of the quantisation method."""
    return str(quantisation.get("quant_method", "unnamed method"))


def refusal(quantisation: Mapping, packed: bool | None = None) -> str | None:
    """Returns why these experts cannot be run and which can; None if these can.

    The scheme may differ from layer to layer: if one of its groups can be run, the layers themselves decide.

    Args:
        quantisation: of the checkpoint.
        packed: whether our kernels are to run them, which read repacked experts, or vLLM's; None: either.
    """
    name = method(quantisation)
    in_slots, repacked = (reasons.get(name, _unknown)(quantisation) for reasons in (_REASONS, _PACKED))
    reason = repacked if packed else in_slots
    if reason is None or (packed is None and repacked is None):
        return None
    if repacked is None:
        return f"{reason} ({name}): not supported in slots; use --spac-execution pointers, or an unquantised checkpoint"
    return f"{reason} ({name}): not supported; {_REMEDY}"


def spares_experts(quantisation: Mapping, layers: int) -> bool:
    """Returns whether the experts of no layer are quantised."""
    return all(excluded(quantisation, f"model.layers.{layer}.mlp.experts.0.gate_proj") for layer in range(layers))


def cpu_refusal(quantisation: Mapping, *, amx: bool) -> str:
    """Returns why a CPU cannot run these experts from slots, and what can; ``amx``: the CPU has it."""
    where = f"serve it on a GPU with {' '.join(flags(quantisation))}"
    if not amx:
        return (
            f"quantised experts ({method(quantisation)}), for which stock vLLM has no kernel on a CPU without AMX; "
            f"use an unquantised checkpoint here, or {where}"
        )
    return (
        f"quantised experts ({method(quantisation)}), whose kernels for a CPU were never tested in slots; use an "
        f"unquantised checkpoint here, or {where}"
    )


def only_packed(quantisation: Mapping) -> bool:
    """Returns whether slots cannot hold these experts, so that only our kernels may run them."""
    return refusal(quantisation, packed=False) is not None


def flags(quantisation: Mapping, packed: bool | None = None) -> tuple[str, ...]:
    """Returns the options that run these experts: of vLLM, which select its Triton kernels, or our kernels.

    Marlin leaves activations as they are, as our kernels do, where other kernels of vLLM quantise them to NVFP4.

    Args:
        quantisation: of the checkpoint.
        packed: for our kernels; None: where slots cannot hold these experts.
    """
    if only_packed(quantisation) if packed is None else packed:
        marlin = ("--moe-backend marlin",) if is_nvfp4(quantisation) else ()
        return ("--spac-execution pointers", *marlin)
    loaded_by = (f"--quantization {name}",) if (name := loader(quantisation)) else ()
    return (*loaded_by, "--moe-backend triton")


def is_nvfp4(quantisation: Mapping) -> bool:
    """Returns whether experts may be in NVFP4; another group of the config may say otherwise for some."""
    if method(quantisation).startswith("modelopt"):
        return _modelopt(quantisation) is None
    return any(map(_is_nvfp4, _groups(quantisation)))


def loader(quantisation: Mapping) -> str | None:
    """Returns the ``--quantization`` that keeps experts as slots need them; None if it is the checkpoint's own."""
    return "moe_wna16" if method(quantisation) in _WNA16 else None


def kept_bytes(quantisation: Mapping, name: str, shape: Sequence[int], nbytes: int, packed: bool | None = None) -> int:
    """Returns the bytes in a slot of tensor ``name``, which has ``nbytes`` in the checkpoint.

    Scales of FP8 and INT8 become float32 and those of GPTQ and AWQ the model's 16 bits; GPTQ has zero points and biases
    that no kernel reads; scales of MXFP4 and NVFP4 are padded to words of 4, and rows of NVFP4 have one more word.
    Our kernels read scales of INT4 in words of two, or with their zero point, and those of 8 bits in float32.

    Args:
        quantisation: of the checkpoint.
        name, shape, nbytes: of the tensor.
        packed: for our kernels; None: where slots cannot hold these experts.
    """
    packed = only_packed(quantisation) if packed is None else packed
    last = name.rpartition(".")[2]
    if last in _METADATA:
        return 0
    if is_nvfp4(quantisation):
        if last in _WHOLE:
            return 0
        if last == "weight_scale" and nbytes == math.prod(shape):  # e4m3
            return math.prod(shape[:-1]) * 4 * (1 + -(-shape[-1] // 4))
    if method(quantisation) == _MXFP4 and last.endswith("_scales"):
        return math.prod(shape[:-1]) * 4 * -(-shape[-1] // 4)
    of_gptq = method(quantisation) in _WNA16
    if packed and (is_int4 := _integers(quantisation)) is not None:
        if last in ("scales", "weight_scale"):  # of GPTQ and AWQ, columns are first
            groups, rows = (shape[-2], shape[-1]) if of_gptq else (shape[-1], math.prod(shape[:-1]))
            words = -(-groups // 2) if is_int4 and not _has_zero_points(quantisation) else groups
            return 4 * rows * words
        return 0 if last in ("qzeros", "weight_zero_point") or (of_gptq and last == "bias") else nbytes
    if of_gptq:
        if last == "bias" or (last == "qzeros" and not _has_zero_points(quantisation)):
            return 0
        return 2 * math.prod(shape) if last == "scales" else nbytes
    floats = method(quantisation) == "fp8" or any(_is_fp8(group) or _is_int8(group) for group in _groups(quantisation))
    return 4 * math.prod(shape) if floats and last.startswith("weight_scale") else nbytes


def stored_bytes(quantisation: Mapping, shape: Sequence[int], packed: bool | None = None) -> int:
    """Returns the bytes of a weight [..., rows, columns] in a slot, with its scales and zero points.

    From ``quantization_config`` alone, for one of the quantisations that ``refusal`` lets pass. GPT-OSS's weights have
    columns first. ``packed``: as in ``kept_bytes``.
    """
    packed = only_packed(quantisation) if packed is None else packed
    weights, *matrix = math.prod(shape), shape[-2], shape[-1]
    if method(quantisation) == _MXFP4:
        return weights // 2 + weights // matrix[0] * 4 * -(-matrix[0] // (4 * _MX_GROUP))
    if is_nvfp4(quantisation):
        return weights // 2 + weights // matrix[1] * 4 * (1 + -(-matrix[1] // (4 * _NV_GROUP)))
    group = next((group for group in _groups(quantisation) if _group(group) is None or _is_int8(group)), {})
    given = _mapping(group.get("weights")) or quantisation
    if method(quantisation) == "fp8" or _is_fp8(group) or _is_int8(group):
        block = quantisation.get("weight_block_size") or given.get("block_structure") or (1, matrix[1])
        blocks = math.prod(-(-size // step) for size, step in zip(matrix, block, strict=True))
        return weights + 4 * blocks * (weights // math.prod(matrix))
    bits = int(given.get("bits") or given.get("num_bits") or 4)
    of_row = matrix[1] // int(given.get("group_size") or 128)
    rows, zero_points = weights // matrix[1], _has_zero_points(quantisation)
    if packed:
        return weights * bits // 8 + 4 * rows * (-(-of_row // 2) if bits == 4 and not zero_points else of_row)
    groups = rows * of_row
    return weights * bits // 8 + 2 * groups + (groups * bits // 8 if zero_points else 0)


def excluded(quantisation: Mapping, name: str) -> bool:
    """Returns whether the module ``name`` stays unquantised."""
    if method(quantisation) == _MXFP4 and ("experts" not in name or name.endswith("bias")):
        return True
    names = [*(quantisation.get("modules_to_not_convert") or ()), *(quantisation.get("ignore") or ())]
    return any(_matches(entry, name) for entry in map(str, ("lm_head", "embed_tokens", *names)))


def _matches(entry: str, name: str) -> bool:
    """Whether a module that is left out names ``name``: compressed-tensors' pattern, ModelOpt's wildcard, or a part."""
    if entry.startswith("re:"):
        return bool(re.match(entry[3:], name))
    return fnmatchcase(name, entry) if "*" in entry else entry in name


def _unknown(_: Mapping) -> str:
    return "quantised experts"


def _fp8(quantisation: Mapping) -> str | None:
    return None if quantisation.get("weight_block_size") else _PER_TENSOR


def _gptq(quantisation: Mapping) -> str | None:
    bits, group = quantisation.get("bits"), quantisation.get("group_size")
    if bits not in (4, 8):
        return f"experts of {bits} bits"
    if group == -1:
        return "experts with one scale per channel (group_size=-1)"
    if quantisation.get("desc_act"):
        return "experts with activation ordering (desc_act)"
    return "experts with zero points (sym=false), which vLLM does not load" if not quantisation.get("sym") else None


def _awq(quantisation: Mapping) -> str | None:
    bits, group = quantisation.get("bits"), quantisation.get("group_size")
    if bits != 4:
        return f"experts of {bits} bits"
    return "experts with one scale per channel (group_size=-1)" if group == -1 else None


def _modelopt(quantisation: Mapping) -> str | None:
    algorithm = str(quantisation.get("quant_algo", "an unnamed format")).upper()
    group = quantisation.get("group_size") or _NV_GROUP
    if algorithm not in _NVFP4:
        return f"experts in {algorithm}"
    return None if group == _NV_GROUP else f"NVFP4 experts by {group} columns"


def _in_slots(quantisation: Mapping) -> str | None:
    return _modelopt(quantisation) or "NVFP4 experts"


def _has_zero_points(quantisation: Mapping) -> bool:
    if method(quantisation) in _WNA16:
        return bool(quantisation.get("zero_point")) if method(quantisation) == "awq" else not quantisation.get("sym")
    return any(_mapping(group.get("weights")).get("symmetric") is False for group in _groups(quantisation))


def _integers(quantisation: Mapping) -> bool | None:
    """Whether experts are INT4, not integers of 8 bits by group; None: neither."""
    if method(quantisation) in _WNA16:
        return quantisation.get("bits") == 4
    return True if any(_group(group) is None and not _is_fp8(group) for group in _groups(quantisation)) else None


def _compressed(quantisation: Mapping) -> str | None:
    reasons = [_group(group) for group in _groups(quantisation)]
    return None if None in reasons else next(iter(reasons), "quantised experts")


def _compressed_packed(quantisation: Mapping) -> str | None:
    found = _groups(quantisation)
    return None if any(map(_is_int8, found)) or any(map(_is_nvfp4, found)) else _compressed(quantisation)


def _groups(quantisation: Mapping) -> list[Mapping]:
    return list(map(_mapping, _mapping(quantisation.get("config_groups")).values()))


def _group(group: Mapping) -> str | None:
    weights, activations = _mapping(group.get("weights")), _mapping(group.get("input_activations"))
    if _is_nvfp4(group):
        return "NVFP4 experts"
    if _is_fp8(group):
        return None if weights.get("strategy") in ("channel", "block") else _PER_TENSOR
    if activations:
        return f"experts with quantised activations ({activations.get('type')}{activations.get('num_bits')})"
    if (weights.get("type"), weights.get("num_bits"), weights.get("strategy")) != ("int", 4, "group"):
        return f"{weights.get('type')}{weights.get('num_bits')} experts by {weights.get('strategy')}"
    return "experts with activation ordering (actorder)" if weights.get("actorder") == "group" else None


def _mapping(value: object) -> Mapping:
    """Returns ``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def _is_fp8(group: Mapping) -> bool:
    kinds = [_mapping(group.get(name)) for name in ("weights", "input_activations")]
    return all((kind.get("type"), kind.get("num_bits")) == ("float", 8) for kind in kinds)


def _is_int8(group: Mapping) -> bool:
    """Whether weights are INT8 by channel, multiplied by INT8 rows."""
    weights, activations = _mapping(group.get("weights")), _mapping(group.get("input_activations"))
    kinds = [(kind.get("type"), kind.get("num_bits"), kind.get("strategy")) for kind in (weights, activations)]
    return kinds == [("int", 8, "channel"), ("int", 8, "token")]


def _is_nvfp4(group: Mapping) -> bool:
    """Whether weights are in NVFP4; activations may be quantised, too."""
    weights = _mapping(group.get("weights"))
    given = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"), weights.get("group_size"))
    return given == ("float", 4, "tensor_group", _NV_GROUP)


_MODELOPT = ("modelopt", "modelopt_fp4")
_REASONS = {"fp8": _fp8, "compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq}
_REASONS |= dict.fromkeys(_MODELOPT, _in_slots)
_PACKED = _REASONS | {"compressed-tensors": _compressed_packed, _MXFP4: lambda _: None}
_PACKED |= dict.fromkeys(_MODELOPT, _modelopt)
