"""What each quant method of vLLM keeps for an expert, and which of its kernels were seen to run it from slots."""

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
    """How the experts of a quant method lie in a layer; names without ``w13_`` and ``w2_``, which all exist for both.

    Attributes:
        tensors: what each expert has for itself, first dimension the experts; a layer may lack some.
        metadata: what no kernel reads.
        kernels: names of vLLM's kernels that run it from slots: that find an expert by the map from ids to slots, which
            others ignore. Unquantised experts on a CPU need none, any kernel takes slots for experts there.
        plain: names of those that read experts as the checkpoint has them.
    """

    tensors: tuple[str, ...]
    metadata: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ("TritonExperts",)
    plain: tuple[str, ...] = ()


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
}


def is_quantised(layer: RoutedExperts) -> bool:
    return type(layer.quant_method).__name__ != _UNQUANTISED


def is_plain(layer: RoutedExperts) -> bool:
    """Whether the kernel of ``layer`` reads experts as the checkpoint has them, so that nothing is to be converted."""
    return layer.quant_method.experts_cls.__name__ in SCHEMES[type(layer.quant_method).__name__].plain


def expert_tensors(layer: RoutedExperts) -> dict[str, Parameter]:
    """The parameters of ``layer`` [experts, ...] that each expert has for itself, by name.

    Raises:
        UnsupportedError: the layer's experts cannot be run from slots; says what helps.
    """
    method, name = layer.quant_method, layer.layer_name
    kind, kernel = type(method).__name__, getattr(method, "experts_cls", None)
    if (scheme := SCHEMES.get(kind)) is None:
        raise UnsupportedError(
            f"spac: {name} has quantised experts ({kind}) that the plugin does not know; known are "
            f"{', '.join(sorted(SCHEMES.keys() - {_UNQUANTISED}))}, or use an unquantised checkpoint"
        )
    if kernel is not None and method.is_monolithic:
        raise UnsupportedError(
            f"spac: {name} uses a monolithic MoE backend ({kind}), which routes inside the kernel; "
            "add --moe-backend triton"
        )
    if kernel is None or getattr(kernel, "requires_interleaved_w13", False):
        raise UnsupportedError(
            f"spac: {name}: {kernel} keeps no slots ({kind}); on a GPU add --moe-backend triton, else use an "
            "unquantised checkpoint"
        )
    known = kernel.__name__ in scheme.kernels
    if not known and not is_quantised(layer) and not current_platform.is_cpu():
        raise UnsupportedError(
            f"spac: {name}: {kernel.__name__} is not known to find experts by a map to their slots, "
            f"{' or '.join(scheme.kernels)} does; add --moe-backend triton"
        )
    if not known and is_quantised(layer):
        raise UnsupportedError(
            f"spac: {name}: {kernel.__name__} was never seen to run quantised experts ({kind}) from slots, "
            f"{' or '.join(scheme.kernels)} was; on a GPU add --moe-backend triton, else use an unquantised checkpoint"
        )
    return _sorted_out(layer, scheme)


def _sorted_out(layer: RoutedExperts, scheme: Scheme) -> dict[str, Parameter]:
    found = {}
    for name, param in layer.named_parameters():
        prefix, _, rest = name.partition("_")
        if prefix not in ("w13", "w2") or rest in scheme.metadata:  # others are the router's: a correction bias, say
            continue
        if param.numel() == 0:  # stands for what the checkpoint has and no kernel reads: zero points that are all equal
            continue
        if rest not in scheme.tensors or (is_quantised(layer) and "scale" in rest and param.dim() < 3):
            raise UnsupportedError(
                f"spac: {layer.layer_name} has {name} {list(param.shape)}, which is not among the weights and "
                "scales by block, channel or group that each expert has for itself; use a checkpoint "
                "that has only those, or an unquantised one"
            )
        found[name] = param
    return found
