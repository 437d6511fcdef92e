"""Decides from ``config.json`` which kernels can run a checkpoint's quantised experts, and in how many bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum

from vllm_spac.kernels.formats import activation_of
from vllm_spac.storage.checkpoint import cpu_layouts
from vllm_spac.storage.checkpoint.quant_config import (
    EXPERTS_IN,
    GPTQ_LIKE,
    MIXED,
    MX_GROUP,
    MXFP4,
    NV_GROUP,
    NVFP4,
    expert_formats,
    group_is_fp8,
    group_is_int8,
    group_is_nvfp4,
    groups,
    has_zero_points,
    mapping,
    method,
    spares_experts,
)


class FormatKernels(Enum):
    """What runs quantised experts, which decides which it can run, and in which layout.

    Attributes:
        GPU: vLLM's Triton kernels, from slots.
        CPU: vLLM's kernels for a CPU, from slots.
        OURS: our kernels, in the checkpoint's layout: on a GPU, and on any CPU.
    """

    GPU = "gpu"
    CPU = "cpu"
    OURS = "ours"


_REMEDY = (
    "use one in FP8 (scales by block or channel), in INT4 by group (compressed-tensors, AWQ, GPTQ with sym and without "
    "desc_act), with --spac-plane pointers also in MXFP4 (GPT-OSS), NVFP4 or INT8 by channel, or an unquantised one"
)
_TABLE = "use --spac-plane table, whose kernel is ours"
IN_SLOTS = "use a checkpoint whose experts slots can hold, or an unquantised one"
_PER_TENSOR = (
    "FP8 experts with one scale per tensor, whose activations share a scale with other rows or experts: their result "
    "depends on what is computed with them"
)
_METADATA = {"weight_shape", "g_idx"}  # in checkpoints only
# Of NVFP4: scales of activations, and those of tensors, which slots have as scales of rows.
_WHOLE = {"input_scale", "input_global_scale", "weight_scale_2", "weight_global_scale"}


# Where configurations name the activation of experts; names of transformers -> vLLM's. GPT-OSS's says silu.
ACTIVATION_KEYS = ("mlp_hidden_act", "hidden_act", "hidden_activation")
_NAMES = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "swish": "silu"}
_OPENAI = "GptOss"

Capability = tuple[int, int]  # of a GPU, major and minor
_FP8_FROM: Capability = (8, 9)  # vLLM's Triton kernel multiplies in FP8


def refusal(
    quantisation: Mapping, kernels: FormatKernels | None = None, capability: Capability | None = None
) -> str | None:
    """Returns why these experts cannot be run and which can; None if these can.

    The scheme may differ from layer to layer: if one of its groups can be run, the layers themselves decide.

    Args:
        kernels: that are to run them; None: vLLM's on a GPU, or ours.
        capability: of the GPU; None: not known, and every kernel is taken to run on it.
    """
    name = method(quantisation)
    in_slots, repacked = (reasons.get(name, _unknown)(quantisation) for reasons in (_REASONS, _PACKED))
    if kernels is FormatKernels.CPU:
        reason, instead = cpu_layouts.refusal(quantisation), cpu_layouts.REMEDY if repacked else _TABLE
        return None if reason is None else f"{reason} ({name}): vLLM has no kernel for a CPU; {instead}"
    if in_slots is None and capability is not None and capability < _FP8_FROM and _is_fp8(quantisation):
        in_slots = "FP8 experts, which vLLM's Triton kernel computes from sm_{}{} on".format(*_FP8_FROM)
    reason = repacked if kernels is FormatKernels.OURS else in_slots
    if reason is None or (kernels is None and repacked is None):
        return None
    if repacked is None:
        return f"{reason} ({name}): vLLM's kernel reads no slots; use --spac-plane table, or an unquantised checkpoint"
    return f"{reason} ({name}): not supported; {_REMEDY}"


def refusal_without_amx(quantisation: Mapping) -> str:
    """Returns why vLLM's kernels cannot run these experts on a CPU without AMX, and what can."""
    ours = refusal(quantisation, FormatKernels.OURS) is None
    instead = _TABLE if ours else "use an unquantised checkpoint here"
    what = f"quantised experts ({method(quantisation)})"
    return f"{what}, for which stock vLLM has no kernel on a CPU without AMX; {instead}"


def refusal_beside(quantisation: Mapping, beside: str, amx: bool) -> str | None:
    """Returns why vLLM cannot run the other layers of a checkpoint on a CPU, and what can; None if it can.

    Layers in INT4, INT8, and FP8 by channel run on any.

    Args:
        beside: the first of their tensors that is in e4m3, as ``Checkpoint.fp8_beside``.
        amx: whether the CPU has AMX.
    """
    # in a checkpoint of compressed-tensors e4m3 is what FP8 layers' codes are, and only the scales of NVFP4 ones
    codes = beside.endswith(".weight") and not method(quantisation).startswith("modelopt")
    nvfp4 = is_nvfp4(quantisation) and not codes
    if not beside or not (nvfp4 or (_by_block(quantisation) and not amx)):
        return None
    kind, where = ("NVFP4", "a CPU") if nvfp4 else ("FP8 by block", "a CPU without AMX")
    return (
        f"layers in {kind} beside its experts ({beside}), for which vLLM has no kernel on {where}; use a checkpoint "
        "that quantises its experts alone, or one in INT4 or INT8"
    )


def activation_refusal(config: Mapping, architectures: Sequence[str] = ()) -> str | None:
    """Returns why our kernels do not compute a model's experts in any format; None if they do, or nobody says so.

    Args:
        config: content of its ``config.json``, or of the part on its language model.
        architectures: its classes in vLLM, if ``config`` does not name them.
    """
    text = mapping(config.get("text_config")) or config
    name = next((str(text[key]) for key in ACTIVATION_KEYS if text.get(key)), None)
    if name is None:
        return None
    classes = architectures or config.get("architectures") or ()
    name = "swigluoai" if any(each.startswith(_OPENAI) for each in classes) else _NAMES.get(name, name)
    limit = text.get("swiglu_limit")
    if activation_of(name, limit, None, None) is not None:
        return None
    told = f"{name} with limit {limit}" if limit else name
    return f"experts with the activation {told}, which our kernels do not compute"


def only_ours(quantisation: Mapping | None, capability: Capability | None = None) -> bool:
    """Returns whether slots cannot hold these experts on a GPU, so that only our kernels may run them there."""
    return quantisation is not None and refusal(quantisation, FormatKernels.GPU, capability) is not None


def only_ours_on_cpu(quantisation: Mapping | None, layers: int, amx: bool) -> bool:
    """Returns whether vLLM has no kernel for these experts on a CPU, and ``plane=table`` has.

    Args:
        layers: of the model, of which some may be left out.
        amx: whether the CPU has AMX, without which vLLM has none for quantised experts.
    """
    if quantisation is None or spares_experts(quantisation, layers):
        return False
    stock = amx and refusal(quantisation, FormatKernels.CPU) is None
    return not stock and refusal(quantisation, FormatKernels.OURS) is None


def flags(
    quantisation: Mapping | None,
    kernels: FormatKernels | None = None,
    capability: Capability | None = None,
    plane: str = "pointers",
) -> tuple[str, ...]:
    """Returns the options that make ``kernels`` run these experts, on each GPU that can.

    vLLM's own choice of MoE backend depends on the GPU, and on some of them it is one that routes inside its kernel or
    finds no slots. Triton's reads slots, and rounds rows to FP8 for FP8 experts, as our kernels then do. Marlin builds
    a layer whose experts our kernels read, and leaves rows as they are: of FP8 before sm_89, and where other backends
    round them to NVFP4. Of AWQ without zero points, vLLM's own loader builds a layer that our kernels do not read, and
    ``moe_wna16`` builds the one of slots.

    Args:
        quantisation: of the checkpoint; None: its experts are not quantised.
        kernels: None: vLLM's on a GPU, or ours where slots cannot hold these experts.
        capability: of the GPU; None: not known.
        plane: where our kernels run the experts.
    """
    kernels = kernels or (FormatKernels.GPU if quantisation is None else _default(quantisation))
    if kernels is FormatKernels.CPU:
        return ()
    if kernels is FormatKernels.OURS:
        return (f"--spac-plane {plane}", *_beside_ours(quantisation, capability))
    if quantisation is None:
        return ("--moe-backend triton",)
    loaded_by = (f"--quantization {name}",) if (name := loader(quantisation)) else ()
    return (*loaded_by, "--moe-backend triton")


def _beside_ours(quantisation: Mapping | None, capability: Capability | None) -> tuple[str, ...]:
    """The options of vLLM that build layers for our kernels; none where its own choice always does."""
    if quantisation is not None and method(quantisation) == "awq" and not has_zero_points(quantisation):
        return (f"--quantization {loader(quantisation)}", "--moe-backend triton")
    rounds_rows = quantisation is not None and _is_fp8(quantisation) and (capability or (0, 0)) >= _FP8_FROM
    if quantisation is None or rounds_rows:
        return ("--moe-backend triton",)
    named = method(quantisation) == MXFP4 or is_nvfp4(quantisation) or _is_fp8(quantisation)
    return ("--moe-backend marlin",) if named else ()


def _is_fp8(quantisation: Mapping) -> bool:
    return method(quantisation) == "fp8" or any(map(group_is_fp8, groups(quantisation)))


def _by_block(quantisation: Mapping) -> bool:
    """Whether FP8 weights have scales by block."""
    return bool(quantisation.get("weight_block_size")) or any(
        group_is_fp8(group) and mapping(group.get("weights")).get("strategy") == "block"
        for group in groups(quantisation)
    )


def _default(quantisation: Mapping) -> FormatKernels:
    return FormatKernels.OURS if only_ours(quantisation) else FormatKernels.GPU


def is_nvfp4(quantisation: Mapping) -> bool:
    """Returns whether experts may be in NVFP4; another group of the config may say otherwise for some."""
    if method(quantisation).startswith("modelopt"):
        return _modelopt(quantisation) is None
    return any(map(group_is_nvfp4, groups(quantisation)))


def kind(quantisation: Mapping) -> str:
    """Returns what these experts are to CPU kernels, as ``decisions.core_rates`` has it."""
    weights = [mapping(group.get("weights")) for group in groups(quantisation)]
    if method(quantisation) == MXFP4:
        return "mxfp4"
    if is_nvfp4(quantisation):
        return "nvfp4"
    if _is_fp8(quantisation):
        return "fp8-block" if _by_block(quantisation) else "fp8-channel"
    if quantisation.get("bits") == 8 or any(each.get("num_bits") == 8 for each in weights):
        return "int8"
    return "int4-zeros" if has_zero_points(quantisation) else "int4"


def loader(quantisation: Mapping) -> str | None:
    """Returns the ``--quantization`` that keeps experts as slots of a GPU need them; None: the checkpoint's own."""
    return "moe_wna16" if method(quantisation) in GPTQ_LIKE else None


def kept_bytes(
    quantisation: Mapping, name: str, shape: Sequence[int], nbytes: int, kernels: FormatKernels | None = None
) -> int:
    """Returns the bytes in a slot of tensor ``name``, which has ``nbytes`` in the checkpoint.

    Scales of FP8 and INT8 become float32 and those of GPTQ and AWQ the model's 16 bits; GPTQ has zero points and biases
    that no kernel reads; scales of MXFP4 and NVFP4 are padded to words of 4, and rows of NVFP4 have one more word.
    Our kernels read scales of INT4 in words of two, or with their zero point, and those of 8 bits in float32. Of a CPU,
    see ``cpu_layouts``.

    Args:
        kernels: None: vLLM's on a GPU, or ours where slots cannot hold these experts.
    """
    kernels = kernels or _default(quantisation)
    if kernels is FormatKernels.CPU:
        return cpu_layouts.kept_bytes(quantisation, name, shape, nbytes)
    last = name.rpartition(".")[2]
    if last in _METADATA:
        return 0
    if is_nvfp4(quantisation):
        if last in _WHOLE:
            return 0
        if last == "weight_scale" and nbytes == math.prod(shape):  # e4m3
            return math.prod(shape[:-1]) * 4 * (1 + -(-shape[-1] // 4))
    if method(quantisation) == MXFP4 and last.endswith("_scales"):
        return math.prod(shape[:-1]) * 4 * -(-shape[-1] // 4)
    of_gptq = method(quantisation) in GPTQ_LIKE
    if kernels is FormatKernels.OURS and (is_int4 := _integers(quantisation)) is not None:
        if last in ("scales", "weight_scale"):  # of GPTQ and AWQ, columns are first
            of_row, rows = (shape[-2], shape[-1]) if of_gptq else (shape[-1], math.prod(shape[:-1]))
            words = -(-of_row // 2) if is_int4 and not has_zero_points(quantisation) else of_row
            return 4 * rows * words
        return 0 if last in ("qzeros", "weight_zero_point") or (of_gptq and last == "bias") else nbytes
    if of_gptq:
        if last == "bias" or (last == "qzeros" and not has_zero_points(quantisation)):
            return 0
        return 2 * math.prod(shape) if last == "scales" else nbytes
    found = groups(quantisation)
    floats = method(quantisation) == "fp8" or any(group_is_fp8(group) or group_is_int8(group) for group in found)
    return 4 * math.prod(shape) if floats and last.startswith("weight_scale") else nbytes


def stored_bytes(quantisation: Mapping, shape: Sequence[int], kernels: FormatKernels | None = None) -> int:
    """Returns the bytes of a weight [..., rows, columns] in a slot, with its scales and zero points.

    From ``quantization_config`` alone, for one of the quantisations that ``refusal`` lets pass. GPT-OSS's weights have
    columns first. ``kernels``: as in ``kept_bytes``.
    """
    kernels = kernels or _default(quantisation)
    if kernels is FormatKernels.CPU:
        return cpu_layouts.stored_bytes(quantisation, shape)
    weights, *matrix = math.prod(shape), shape[-2], shape[-1]
    if method(quantisation) == MXFP4:
        return weights // 2 + weights // matrix[0] * 4 * -(-matrix[0] // (4 * MX_GROUP))
    if is_nvfp4(quantisation):
        return weights // 2 + weights // matrix[1] * 4 * (1 + -(-matrix[1] // (4 * NV_GROUP)))
    group = next((group for group in groups(quantisation) if _group(group) is None or group_is_int8(group)), {})
    given = mapping(group.get("weights")) or quantisation
    if method(quantisation) == "fp8" or group_is_fp8(group) or group_is_int8(group):
        block = quantisation.get("weight_block_size") or given.get("block_structure") or (1, matrix[1])
        blocks = math.prod(-(-size // step) for size, step in zip(matrix, block, strict=True))
        return weights + 4 * blocks * (weights // math.prod(matrix))
    bits = int(given.get("bits") or given.get("num_bits") or 4)
    of_row = matrix[1] // int(given.get("group_size") or 128)
    rows, zero_points = weights // matrix[1], has_zero_points(quantisation)
    if kernels is FormatKernels.OURS:
        return weights * bits // 8 + 4 * rows * (-(-of_row // 2) if bits == 4 and not zero_points else of_row)
    scales = rows * of_row
    return weights * bits // 8 + 2 * scales + (scales * bits // 8 if zero_points else 0)


def _unknown(_: Mapping) -> str:
    return "quantised experts"


def _fp8(quantisation: Mapping) -> str | None:
    if experts := quantisation.get(EXPERTS_IN):
        return f"experts in {str(experts).upper()} beside layers in FP8"
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
    group = quantisation.get("group_size") or NV_GROUP
    if algorithm == MIXED and (formats := expert_formats(quantisation)):
        return None if formats <= set(NVFP4) else f"experts in {', '.join(sorted(formats))}"
    if algorithm not in NVFP4:
        return f"experts in {algorithm}"
    return None if group == NV_GROUP else f"NVFP4 experts by {group} columns"


def _in_slots(quantisation: Mapping) -> str | None:
    return _modelopt(quantisation) or "NVFP4 experts"


def _integers(quantisation: Mapping) -> bool | None:
    """Whether experts are INT4, not integers of 8 bits by group; None: neither."""
    if method(quantisation) in GPTQ_LIKE:
        return quantisation.get("bits") == 4
    return True if any(_group(group) is None and not group_is_fp8(group) for group in groups(quantisation)) else None


def _compressed(quantisation: Mapping) -> str | None:
    reasons = [_group(group) for group in groups(quantisation)]
    return None if None in reasons else next(iter(reasons), "quantised experts")


def _compressed_packed(quantisation: Mapping) -> str | None:
    found = groups(quantisation)
    return None if any(map(group_is_int8, found)) or any(map(group_is_nvfp4, found)) else _compressed(quantisation)


def _group(group: Mapping) -> str | None:
    weights, activations = mapping(group.get("weights")), mapping(group.get("input_activations"))
    if group_is_nvfp4(group):
        return "NVFP4 experts"
    if group_is_fp8(group):
        return None if weights.get("strategy") in ("channel", "block") else _PER_TENSOR
    if activations:
        return f"experts with quantised activations ({activations.get('type')}{activations.get('num_bits')})"
    if (weights.get("type"), weights.get("num_bits"), weights.get("strategy")) != ("int", 4, "group"):
        return f"{weights.get('type')}{weights.get('num_bits')} experts by {weights.get('strategy')}"
    return "experts with activation ordering (actorder)" if weights.get("actorder") == "group" else None


_MODELOPT = ("modelopt", "modelopt_fp4")
_REASONS = {"fp8": _fp8, "compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq}
_REASONS |= dict.fromkeys(_MODELOPT, _in_slots)
_PACKED = _REASONS | {"compressed-tensors": _compressed_packed, MXFP4: lambda _: None}
_PACKED |= dict.fromkeys(_MODELOPT, _modelopt)
