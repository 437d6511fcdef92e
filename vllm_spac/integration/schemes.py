"""What each quant method of vLLM keeps for an expert, and which of its kernels were seen to run it from slots."""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn import Parameter

from vllm_spac.errors import UnsupportedError


@dataclass(frozen=True)
class Scheme:
    """How the experts of a quant method lie in a layer; names without ``w13_`` and ``w2_``, which all exist for both.

    Attributes:
        tensors: what each expert has for itself, first dimension the experts; a layer may lack some.
        metadata: what no kernel reads.
        kernels: names of vLLM's kernels that were seen to run it from slots; None are all modular ones.
    """

    tensors: tuple[str, ...]
    metadata: tuple[str, ...] = ()
    kernels: tuple[str, ...] | None = None


_UNQUANTISED = "UnquantizedFusedMoEMethod"
SCHEMES = {
    _UNQUANTISED: Scheme(("weight", "bias")),
    "Fp8MoEMethod": Scheme(("weight", "weight_scale_inv"), kernels=("TritonExperts",)),
    "CompressedTensorsW8A8Fp8MoEMethod": Scheme(("weight", "weight_scale"), kernels=("TritonExperts",)),
    "CompressedTensorsWNA16MoEMethod": Scheme(
        ("weight_packed", "weight_scale", "weight_zero_point"),
        metadata=("weight_shape",),
        kernels=("TritonWNA16Experts",),
    ),
    "MoeWNA16Method": Scheme(("qweight", "scales", "qzeros"), kernels=("TritonWNA16Experts",)),
}


def is_quantised(layer) -> bool:
    return type(layer.quant_method).__name__ != _UNQUANTISED


def expert_tensors(layer) -> dict[str, Parameter]:
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
    if scheme.kernels is not None and kernel.__name__ not in scheme.kernels:
        raise UnsupportedError(
            f"spac: {name}: {kernel.__name__} was never seen to run quantised experts ({kind}) from slots, "
            f"{' or '.join(scheme.kernels)} was; on a GPU add --moe-backend triton, else use an unquantised checkpoint"
        )
    return _sorted_out(layer, scheme)


def _sorted_out(layer, scheme: Scheme) -> dict[str, Parameter]:
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
