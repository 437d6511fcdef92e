"""Our grouped GEMM over tables of addresses: which layers it computes, its launches for a device, and a call of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.execution.address_table import ALIGNMENT
from vllm_spac.execution.admission import Kernels
from vllm_spac.execution.base import LayerFacts, refusal
from vllm_spac.kernels.types import Quantised

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")  # what the kernels compute
MAX_EXPERTS = 1024  # per layer; the limit of the kernels' routing
_TENSORS = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")
_SCALES = ("w13_scale", "w2_scale")


def check_layer(execution: str, layer: LayerFacts) -> None:
    """Refuses a layer that the kernels do not compute; raises as ``Execution.check_layer``."""
    if layer.quantised is not None and not layer.packed:
        raise refusal(execution, f"the quantised experts ({layer.quantised}) of {layer.name}")
    reason = None
    if layer.activation not in ACTIVATIONS:
        reason = f"the activation {layer.activation}"
    elif (layer.activation != "swigluoai" and layer.limit) or (
        layer.limit not in (None, 7.0) or layer.alpha not in (None, 1.702)
    ):
        reason = f"{layer.activation} with limit {layer.limit} and alpha {layer.alpha}"
    elif layer.weighs_input:
        reason = "router weights on the input"
    if reason is not None:
        raise refusal(execution, f"{reason} of {layer.name}")


def check_shape(execution: str, shape: MoEShape) -> None:
    """Refuses experts that the kernels cannot read; raises as ``Execution.check_shape``."""
    d, ff = sizes(shape)
    gated = (2 * ff, d) if shape.packed is None else shape.packed.code_shape(2 * ff, d)
    odd = [name for name, spec in shape.tensors.items() if spec.nbytes % ALIGNMENT]
    reason = None
    scales = () if shape.packed is None else _SCALES
    if set(shape.tensors) not in ({*_TENSORS[:2], *scales}, {*_TENSORS, *scales}):
        reason = f"experts of {', '.join(sorted(shape.tensors))}"
    elif shape.tensors["w13_weight"].shape != gated:
        reason = f"experts whose activation has no gate (w13 is {list(shape.tensors['w13_weight'].shape)})"
    elif odd:
        reason = f"experts whose {odd[0]} is no multiple of {ALIGNMENT} bytes"
    elif shape.experts > MAX_EXPERTS:
        reason = f"layers of more than {MAX_EXPERTS} experts"
    elif 2 * ff * d >= 2**31:
        reason = "experts of 2**31 weights and more"
    if reason is not None:
        raise refusal(execution, reason)


def sizes(shape: MoEShape) -> tuple[int, int]:
    """Returns (d, ff)."""
    d, stored = shape.tensors["w2_weight"].shape
    return d, stored * (1 if shape.packed is None else shape.packed.per_byte)


def grouped_gemm_over(
    kernels: Kernels,
    shape: MoEShape,
    tables: Mapping[str, Tensor],
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    activation: str,
    out: Tensor,
    *,
    counts: Tensor | None = None,
    live: Tensor | None = None,
) -> Tensor:
    """Computes the routed experts of one layer; returns ``out``.

    Args:
        kernels: the launches.
        shape: of the experts.
        tables: by the names of ``shape.tensors``: int64 [experts], the address of each.
        x, weights, ids, activation, out, counts, live: as of ``kernels.grouped_gemm``.
    """
    (_, ff), (w13, w2, b13, b2) = sizes(shape), map(tables.get, _TENSORS)
    quantised = None if shape.packed is None else Quantised(shape.packed, *(tables[name] for name in _SCALES))
    return kernels.grouped_gemm(
        x, w13, w2, weights, ids, ff, b13, b2, activation, out=out, counts=counts, live=live, quantised=quantised
    )


def kernels_for(device: torch.device) -> Kernels:
    """Returns the launches for ``device``."""
    return _twins() if device.type == "cpu" else _launches()


def _twins() -> Kernels:
    from vllm_spac.kernels.reference.admit import admit
    from vllm_spac.kernels.reference.fetch import fetch
    from vllm_spac.kernels.reference.grouped_gemm import grouped_gemm

    return Kernels(grouped_gemm, admit, fetch, lambda *_: ())


def _launches() -> Kernels:
    from vllm_spac.kernels.admit import admit
    from vllm_spac.kernels.fetch import fetch
    from vllm_spac.kernels.grouped_gemm import grouped_gemm, rows_to_compile

    return Kernels(grouped_gemm, admit, fetch, rows_to_compile)
