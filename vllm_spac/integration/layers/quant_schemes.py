"""Quantisation schemes: the tensors per expert of each quant method, and its kernels that were tested with slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import Parameter
from vllm.platforms import current_platform

from vllm_spac.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


@dataclass(frozen=True)
class Scheme:
    """Layout of the experts of a quant method. Names are without the prefixes ``w13_`` and ``w2_``; all exist for both.

    Attributes:
        tensors: tensors with one entry per expert, in the first dimension; a layer may lack some.
        metadata: tensors that no kernel reads.
        kernels: names of vLLM's kernels that can run from slots: they find an expert by the map from ids to slots,
            which other kernels ignore. Not needed for unquantised experts on a CPU, where any kernel can use slot
            numbers as expert ids. Empty: only our kernels can run these experts, which ``packed_experts`` repacks.
        whole: tensors with a number per expert or shard, which ``packed_experts`` spreads over rows.
        plain: names of the kernels that read experts in the checkpoint's layout.
    """

    tensors: tuple[str, ...]
    metadata: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ("TritonExperts",)
    plain: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


_UNQUANTISED = "UnquantizedFusedMoEMethod"
SCHEMES = {
    _UNQUANTISED: Scheme(("weight", "bias"), plain=("TritonExperts",)),
    "Fp8MoEMethod": Scheme(("weight", "weight_scale_inv")),
    "CompressedTensorsW8A8Fp8MoEMethod": Scheme(("weight", "weight_scale")),
    "CompressedTensorsWNA16MoEMethod": Scheme(
        ("weight_packed", "weight_scale", "weight_zero_point"),
        metadata=("weight_shape",),
        kernels=("TritonWNA16Experts",),
    ),
    "MoeWNA16Method": Scheme(("qweight", "scales", "qzeros"), kernels=("TritonWNA16Experts",)),
    "AutoGPTQMoEMethod": Scheme(("qweight", "scales"), metadata=("qzeros", "bias"), kernels=()),
    "AutoAWQMoEMethod": Scheme(("qweight", "scales", "qzeros"), kernels=()),
    "GptOssMxfp4MoEMethod": Scheme(("weight", "weight_scale", "bias"), kernels=()),
    "CompressedTensorsW8A8Int8MoEMethod": Scheme(("weight", "weight_scale"), kernels=()),
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
    if (scheme := SCHEMES.get(kind)) is None or not (packed or scheme.kernels):
        supported = sorted(other for other, found in SCHEMES.items() if found.kernels and other != _UNQUANTISED)
        others = "" if scheme is None else ", use --spac-execution pointers, which can"
        raise UnsupportedError(
            f"spac: {name} has quantised experts ({kind}) that the plugin does not support in slots; supported are "
            f"{', '.join(supported)}{others}, or use an unquantised checkpoint"
        )
    if kernel is not None and method.is_monolithic:
        raise UnsupportedError(
            f"spac: {name} uses a monolithic MoE backend ({kind}), which routes inside the kernel; "
            "add --moe-backend triton"
        )
    if packed:
        return _sorted_out(layer, scheme)
    if kernel is None or getattr(kernel, "requires_interleaved_w13", False):
        raise UnsupportedError(f"spac: {name}: {kernel} cannot use slots ({kind}); {_instead()}")
    known = kernel.__name__ in scheme.kernels
    if not known and not is_quantised(layer) and not current_platform.is_cpu():
        raise UnsupportedError(
            f"spac: {name}: {kernel.__name__} is not known to find experts by a map to their slots, "
            f"{' or '.join(scheme.kernels)} does; add --moe-backend triton"
        )
    if not known and is_quantised(layer):
        raise UnsupportedError(
            f"spac: {name}: {kernel.__name__} was never tested with quantised experts ({kind}) in slots, "
            f"{' or '.join(scheme.kernels)} was; {_instead()}"
        )
    return _sorted_out(layer, scheme)


def _instead() -> str:
    """What works on this platform where a kernel does not."""
    if current_platform.is_cpu():
        return "slots hold quantised experts for kernels of a GPU only: use an unquantised checkpoint on this machine"
    return "add --moe-backend triton, or use an unquantised checkpoint"


def _sorted_out(layer: RoutedExperts, scheme: Scheme) -> dict[str, Parameter]:
    found = {}
    for name, param in layer.named_parameters():
        prefix, _, rest = name.partition("_")
        if prefix not in ("w13", "w2") or rest in scheme.metadata:  # others belong to the router, e.g. correction bias
            continue
        if param.numel() == 0:  # placeholder of a tensor that no kernel reads: zero points that are all equal
            continue
        spread = is_quantised(layer) and "scale" in rest and rest not in scheme.whole
        if rest not in scheme.tensors or (spread and param.dim() < 3):
            raise UnsupportedError(
                f"spac: {layer.layer_name} has {name} {list(param.shape)}, which is not among the weights and "
                "scales by block, channel or group that exist per expert; use a checkpoint that has only those, or an "
                "unquantised one"
            )
        found[name] = param
    return found
