"""Quantisation schemes: the tensors per expert of each quant method, and its kernels that were tested with slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import Parameter
from vllm.platforms import current_platform

from vllm_spac.errors import SpacError, UnsupportedError

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

# What a kernel may read in addition to the weights that are passed to each call; each is a tensor or None.
KERNEL_READS = (
    *("w1_scale", "w2_scale", "w1_zp", "w2_zp", "w1_bias", "w2_bias"),
    *("a1_scale", "a2_scale", "a1_gscale", "a2_gscale", "g1_alphas", "g2_alphas"),
)


@dataclass(frozen=True)
class Scheme:
    """Layout of the experts of a quant method. Names are without the prefixes ``w13_`` and ``w2_``; all exist for both.

    Attributes:
        kernels: names of vLLM's kernels for a GPU that can run from slots: they find an expert by the map from ids to
            slots, which other kernels ignore.
        on_cpu: names of its kernels for a CPU that can run from slots, in a layout of their own; any kernel of a CPU
            can use slot numbers as expert ids, and runs unquantised experts. Without either, only our kernels can run
            these experts, which ``packed_experts`` repacks.
    """

    tensors: tuple[str, ...]  # tensors with one entry per expert, in the first dimension; a layer may lack some
    metadata: tuple[str, ...] = ()  # tensors that no kernel reads
    kernels: tuple[str, ...] = ("TritonExperts",)
    on_cpu: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()  # of ``metadata``, what vLLM reads to make the layout of a kernel for a CPU
    plain: tuple[str, ...] = ()  # names of the kernels that read experts in the checkpoint's layout
    whole: tuple[str, ...] = ()  # tensors with a number per expert or shard, which ``packed_experts`` spreads over rows


_UNQUANTISED = "UnquantizedFusedMoEMethod"
SCHEMES = {
    _UNQUANTISED: Scheme(("weight", "bias"), plain=("TritonExperts",)),
    "Fp8MoEMethod": Scheme(("weight", "weight_scale_inv"), on_cpu=("CPUExpertsFp8",)),
    "CompressedTensorsW8A8Fp8MoEMethod": Scheme(("weight", "weight_scale"), on_cpu=("CPUExpertsFp8",)),
    "CompressedTensorsWNA16MoEMethod": Scheme(
        ("weight_packed", "weight_scale", "weight_zero_point"),
        metadata=("weight_shape",),
        kernels=("TritonWNA16Experts",),
        on_cpu=("CPUExpertsInt4",),
    ),
    "MoeWNA16Method": Scheme(("qweight", "scales", "qzeros"), kernels=("TritonWNA16Experts",)),
    "AutoGPTQMoEMethod": Scheme(
        ("qweight", "scales"),
        metadata=("qzeros", "bias"),
        kernels=(),
        on_cpu=("CPUExpertsInt4",),
        converted=("qzeros",),
    ),
    "AutoAWQMoEMethod": Scheme(("qweight", "scales", "qzeros"), kernels=(), on_cpu=("CPUExpertsInt4",)),
    "GptOssMxfp4MoEMethod": Scheme(("weight", "weight_scale", "bias"), kernels=(), on_cpu=("CPUExpertsMxfp4",)),
    "CompressedTensorsW8A8Int8MoEMethod": Scheme(("weight", "weight_scale"), kernels=(), on_cpu=("CPUExpertsInt8",)),
    "ModelOptNvFp4FusedMoE": Scheme(
        ("weight", "weight_scale", "weight_scale_2"),
        metadata=("input_scale",),
        kernels=(),
        whole=("weight_scale_2",),
    ),
    "CompressedTensorsW4A4Nvfp4MoEMethod": Scheme(
        ("weight_packed", "weight_scale", "weight_global_scale"),
        metadata=("input_global_scale",),
        kernels=(),
        whole=("weight_global_scale",),
    ),
}


# Kernels that compute what a row gets from an expert from that expert's rows alone, round it, and add a row's results
# in float32 in the order of its ids. A forward may be divided between experts without any change to the result, but not
# between rows: CPUExpertsFp8 takes another path where an expert has more than four.
_BY_EXPERT = frozenset({"CPUExpertsFp8", "CPUExpertsInt8", "CPUExpertsInt4", "CPUExpertsMxfp4"})


def is_by_expert(layer: RoutedExperts) -> bool:
    """Whether the kernel of ``layer`` computes each expert on its own, see ``LayerKernel.by_expert``."""
    return getattr(layer.quant_method, "experts_cls", type).__name__ in _BY_EXPERT


def is_quantised(layer: RoutedExperts) -> bool:
    return type(layer.quant_method).__name__ != _UNQUANTISED


def is_plain(layer: RoutedExperts) -> bool:
    """Whether the kernel of ``layer`` reads experts in the checkpoint's layout, so that no conversion is needed."""
    return layer.quant_method.experts_cls.__name__ in SCHEMES[type(layer.quant_method).__name__].plain


def expert_tensors(layer: RoutedExperts, packed: bool = False) -> dict[str, Parameter]:
    """The parameters of ``layer`` with one entry per expert, [experts, ...], by name.

    Args:
        layer: the layer.
        packed: its experts are repacked for our kernels, so that vLLM's does not matter.

    Raises:
        UnsupportedError: the layer's experts cannot be run; names what helps.
    """
    method, name = layer.quant_method, layer.layer_name
    kind, kernel = type(method).__name__, getattr(method, "experts_cls", None)
    scheme, on_cpu = SCHEMES.get(kind), is_on_cpu()
    if scheme is None or (is_quantised(layer) and not (packed or _in_slots(scheme, on_cpu))):
        known = sorted(n for n, found in SCHEMES.items() if _in_slots(found, on_cpu) and n != _UNQUANTISED)
        others = "" if scheme is None else ", use --spac-plane pointers, which can"
        raise UnsupportedError(
            f"spac: {name} has quantised experts ({kind}) that the plugin does not support in slots; supported are "
            f"{', '.join(known)}{others}, or use an unquantised checkpoint"
        )
    if kernel is not None and method.is_monolithic:
        raise UnsupportedError(
            f"spac: {name} uses a monolithic MoE backend ({kind}), which routes inside the kernel; "
            f"add --moe-backend {'marlin' if packed else 'triton'}"
        )
    if packed:
        return _sorted_out(layer, scheme)
    if kernel is None or getattr(kernel, "requires_interleaved_w13", False):
        raise UnsupportedError(f"spac: {name}: {kernel} cannot use slots ({kind}); {_instead()}")
    can = _in_slots(scheme, on_cpu)
    if kernel.__name__ not in can and not is_quantised(layer) and not on_cpu:
        raise UnsupportedError(
            f"spac: {name}: {kernel.__name__} is not known to find experts by a map to their slots, "
            f"{' or '.join(can)} does; add --moe-backend triton"
        )
    if kernel.__name__ not in can and is_quantised(layer):
        raise UnsupportedError(
            f"spac: {name}: {kernel.__name__} was never tested with quantised experts ({kind}) in slots, "
            f"{' or '.join(can)} was; {_instead()}"
        )
    return _sorted_out(layer, scheme, scheme.converted if on_cpu else ())


def is_on_cpu() -> bool:
    """Whether kernels run on a CPU, which finds experts by slot numbers instead of a map."""
    return current_platform.is_cpu()


def _in_slots(scheme: Scheme, on_cpu: bool) -> tuple[str, ...]:
    """The kernels of this platform that run quantised experts from slots."""
    return scheme.on_cpu if on_cpu else scheme.kernels


def _instead() -> str:
    """What works on this platform where a kernel does not."""
    if is_on_cpu():
        return "use another quantisation (vllm-spac check says which), or an unquantised checkpoint"
    return "add --moe-backend triton, or use an unquantised checkpoint"


def is_of_experts(name: str) -> bool:
    """Whether a parameter has one entry per expert; others belong to the router, e.g. correction bias."""
    return name.partition("_")[0] in ("w13", "w2")


def kernel_parameters(layer: RoutedExperts, experts: int) -> dict[str, Parameter]:
    """The parameters of ``layer`` that its kernel reads, with one entry per expert; some have two names.

    Of a layer that vLLM has converted for its kernel, which may drop parameters and add some of its own.

    Raises:
        SpacError: one does not have ``experts`` entries.
    """
    metadata = SCHEMES[type(layer.quant_method).__name__].metadata
    found: dict[str, Parameter] = {}
    for name, param in layer._parameters.items():
        if param is None or not is_of_experts(name) or param.numel() == 0:
            continue
        if name.partition("_")[2] in metadata and not _is_read(layer, param):
            continue
        if len(param) != experts:
            raise SpacError(f"spac: {name} of {layer.layer_name} is {list(param.shape)} for {experts} experts")
        found[name] = param
    return found


def _is_read(layer: RoutedExperts, param: Parameter) -> bool:
    """Whether the kernel of ``layer`` keeps ``param``, e.g. zero points."""
    config = layer.quant_method.moe_kernel.fused_experts.quant_config
    return any(getattr(config, name) is param for name in KERNEL_READS)


def _sorted_out(layer: RoutedExperts, scheme: Scheme, converted: tuple[str, ...] = ()) -> dict[str, Parameter]:
    found = {}
    for name, param in layer.named_parameters():
        rest = name.partition("_")[2]
        if not is_of_experts(name) or (rest in scheme.metadata and rest not in converted):
            continue
        if param.numel() == 0:  # placeholder of a tensor that no kernel reads: zero points that are all equal
            continue
        spread = is_quantised(layer) and "scale" in rest and rest not in scheme.whole
        if rest not in (*scheme.tensors, *converted) or (spread and param.dim() < 3):
            raise UnsupportedError(
                f"spac: {layer.layer_name} has {name} {list(param.shape)}, which is not among the weights and "
                "scales by block, channel or group that exist per expert; use a checkpoint that has only those, or an "
                "unquantised one"
            )
        found[name] = param
    return found
