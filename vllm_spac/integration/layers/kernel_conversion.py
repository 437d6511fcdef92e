"""vLLM's own conversion of experts to the layout that its kernel reads, a part of a layer at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from vllm_spac.errors import SpacError
from vllm_spac.integration.layers import quant_schemes


class KernelConversion:
    """Of one layer.

    Args:
        staged: vLLM's parameters, whose attributes those that are converted get.

    Attributes:
        to_kernel: vLLM's conversion, as its quant method has it.
        parameters: what vLLM's kernel reads, by the names that tensors have in slots and in the store; from the first
            conversion on.
    """

    def __init__(self, layer: Any, staged: Mapping[str, Any]) -> None:
        self._layer, self._staged = layer, staged
        self.to_kernel = layer.quant_method.process_weights_after_loading
        self.parameters: dict[str, Any] = {}
        self._named_for_kernel: dict[str, Any] = {}

    def convert(self, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Converts some of the experts; afterwards the kernel is built with ``parameters``, which are empty.

        For all that ``quant_schemes`` allows, the conversion is independent per expert, so parts equal a whole layer.
        """
        layer, experts = self._layer, len(next(iter(raw.values())))
        before = {n: param for n, param in layer._parameters.items() if quant_schemes.is_of_experts(n)}
        for name, tensor in raw.items():
            param = torch.nn.Parameter(tensor.to(layer.spac.device), requires_grad=False)
            param.__dict__.update(self._staged[name].__dict__)
            layer._parameters[name] = param
        layer.quant_method.moe_kernel = layer.quant_method.moe_quant_config = None  # else vLLM treats it as an update
        with _of_experts(layer.quant_method, experts):
            self.to_kernel(layer)
        self._named_for_kernel = named = quant_schemes.kernel_parameters(layer, experts)
        staged_first = [name for name in raw if name in named] + list(named)
        once = {id(named[name]): name for name in reversed(staged_first)}
        self.parameters = {name: named[name] for name in dict.fromkeys(staged_first) if name in once.values()}
        converted = {name: param.data for name, param in self.parameters.items()}
        # The parameters of before are registered again, by whose names loaders look them up.
        for name in [name for name in layer._parameters if quant_schemes.is_of_experts(name)]:
            del layer._parameters[name]  # some have a second name, and some are the kernel's own
        layer._parameters.update(before)
        for param in self.parameters.values():
            param.data = param.data.new_empty(0)
        return converted

    def check_plain(self, raw: Mapping[str, Tensor]) -> None:
        """Raises ``SpacError`` if vLLM changes the first expert's layout or values for its kernel."""
        converted = self.convert({name: tensor[:1] for name, tensor in raw.items()})
        for name, tensor in raw.items():
            ours, given = tensor[:1], converted[name].to(tensor.device)
            if ours.shape != given.shape or not torch.equal(_bits(ours), _bits(given)):
                kernel = self._layer.quant_method.experts_cls.__name__
                raise SpacError(
                    f"spac: {kernel} does not read {name} of {self._layer.layer_name} as the checkpoint has it"
                )

    def attach(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes vLLM's kernel read ``tensors``, name -> [slots, ...], instead of the parameters it was built with.

        Raises:
            SpacError: the kernel keeps its own copy of scales, zero points or biases.
        """
        for name, param in self.parameters.items():
            param.data = tensors[name]
        self._layer._parameters.update(self._named_for_kernel)
        config = self._layer.quant_method.moe_kernel.fused_experts.quant_config
        slots = {param.data_ptr() for param in self.parameters.values()}
        for name in quant_schemes.KERNEL_READS:
            tensor = getattr(config, name)
            if tensor is not None and tensor.data_ptr() not in slots:
                raise SpacError(
                    f"spac: vLLM's kernel of {self._layer.layer_name} keeps {name} for itself, outside the slots"
                )


@contextlib.contextmanager
def _of_experts(method: Any, experts: int) -> Iterator[None]:
    """Context in which ``method`` converts that many experts; GPT-OSS's asks for as many as the layer has."""
    before = getattr(method, "num_experts", None)
    if before is None:
        yield
        return
    method.num_experts = experts
    try:
        yield
    finally:
        method.num_experts = before


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
