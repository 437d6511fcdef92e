"""Loading of a managed layer: weights are staged as they arrive, converted to the kernel's layout, and stored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vllm_spac.core import TensorSpec
from vllm_spac.errors import SpacError, UnsupportedError
from vllm_spac.execution.base import LayerFacts
from vllm_spac.integration.hooks.model_host import current
from vllm_spac.integration.layers import quant_schemes
from vllm_spac.integration.layers.packed_experts import WeightPacking, appear_unquantised, blank
from vllm_spac.kernels.formats import Format

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts as _Layer
else:
    _Layer = object


class StagedExperts(_Layer):
    """Mixin placed before ``RoutedExperts`` while a managed model is built: moves its weights to the store.

    Life cycle: created on the CPU with parameters for this rank's part of the layer, which occupy no physical memory
    until weights are written to them; packed and emptied as soon as the last weight has arrived; finally its parameters
    are the slots.
    """

    def __init__(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            super().__init__(layer_name, *args, **kwargs)
        self.spac = current()
        self._converts = self.spac.execution.layout == "kernel"  # else experts keep the checkpoint's layout
        is_quantised = quant_schemes.is_quantised(self)
        self.spac_packing = WeightPacking.of(self) if is_quantised and not self._converts else None
        packed = self.spac_packing is not None
        # vLLM's parameters, with their loaders
        self._staged: dict[str, Any] = quant_schemes.expert_tensors(self, packed)
        self.spac_index = 0  # among the layers of its shape
        self.spac_number = 0  # among all
        quantised = type(self.quant_method).__name__ if is_quantised else None
        self._check(quantised)
        if quantised is not None:
            for param in self._staged.values():  # vLLM has filled scales and zero points: release that memory
                param.data = blank(param)
        # Which (expert, shard) of each parameter has not come yet: a rank keeps a part of a tensor that depends on its
        # kind, so that elements cannot be counted.
        shapes = {name: (len(param), len(self._shards(name))) for name, param in self._staged.items()}
        self._awaited = {name: np.ones(shape, dtype=bool) for name, shape in shapes.items()}
        self._missing = sum(awaited.size for awaited in self._awaited.values())
        self._packed = False
        self._plain = not packed and quant_schemes.is_plain(self)
        loaded: Any
        for loaded in self._staged.values():
            if loaded.weight_loader != self.weight_loader:
                loaded.weight_loader = partial(self._load_through, loaded.weight_loader)
        self._to_kernel = self.quant_method.process_weights_after_loading
        self.quant_method.process_weights_after_loading = lambda layer: self.spac.pack(self)
        self.quant_method.requires_device_loading = False  # pack moves a part of the layer at a time instead
        self.spac.add(self)

    def _check(self, quantised: str | None) -> None:
        """Raises ``UnsupportedError`` if the execution or the kernel for CPU experts cannot run this layer."""
        self.spac.execution.check_layer(
            LayerFacts(
                self.layer_name,
                self.activation.value,
                self.swiglu_limit,
                self.swiglu_alpha,
                self.apply_router_weight_on_input,
                quantised,
                self.spac_packing is not None,
            )
        )
        config, converted = self.spac.config, self.spac.execution.layout == "kernel"
        if quantised is not None and config.uses_cpu_experts and converted and not quant_schemes.is_on_cpu():
            raise UnsupportedError(
                f"spac: cpu_experts={config.cpu_experts} cannot compute the quantised experts ({quantised}) of "
                f"{self.layer_name} as vLLM's kernel for a GPU has them; use --spac-plane table, whose kernel is "
                "ours, or --spac-cpu-experts off"
            )

    # -- loading -------------------------------------------------------------------------------------------

    def weight_loader(
        self,
        param: Any,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str | None,
        expert_id: int | None,
        return_success: bool = False,
    ):
        """Stages one checkpoint tensor; after the last of the layer, packs the layer and frees the staged weights.

        GPT-OSS loads the tensors of all of this rank's experts at once, without a shard and an expert.
        """
        self.spac.arrived(loaded_weight.nbytes)
        another = expert_id is not None and self._map_global_expert_id_to_local_expert_id(expert_id) == -1
        if another:  # rank's
            return False if return_success else None
        if not self._awaits(param, weight_name):
            self._check_unread(weight_name, loaded_weight)
            return True if return_success else None
        success = super().weight_loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success)
        self._arrive(param, loaded_weight, weight_name, shard_id, expert_id)
        return success

    weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]

    def _load_through(
        self,
        loader: Callable[..., bool | None],
        param: Any,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str | None,
        expert_id: int | None,
        return_success: bool = False,
    ):
        """Stages one checkpoint tensor through the quant method's own ``loader``.

        The loader converts most tensors and passes them to ``weight_loader``; the others it writes itself.
        """
        if not self._awaits(param, weight_name):  # and need not be converted
            return True if return_success else None
        before = self._missing
        success = loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success)
        if self._missing == before:
            self.spac.arrived(loaded_weight.nbytes)
            self._arrive(param, loaded_weight, weight_name, shard_id, expert_id)
        return success

    def _awaits(self, param: Any, weight_name: str) -> bool:
        """Whether a kernel reads ``param`` and its layer is not packed yet."""
        if self._name_of(param) is None:
            return False
        if self._packed:
            raise SpacError(
                f"spac: {weight_name} of {self.layer_name} came after the layer was packed, so it would be ignored: "
                "the checkpoint has a weight twice, or weights of a running engine are changed; use a checkpoint that "
                "has each weight once, or restart with the new one"
            )
        return not self.spac.is_stored(self)

    def _check_unread(self, weight_name: str, loaded_weight: Tensor) -> None:
        """Raises ``UnsupportedError`` for a bias that vLLM's kernel would add and ours does not get."""
        ours = self.spac_packing is not None and weight_name.endswith("bias") and not self.spac.is_stored(self)
        if ours and bool(loaded_weight.any()):
            raise UnsupportedError(
                f"spac: plane=pointers cannot add {weight_name} of {self.layer_name}, a bias in a model that has "
                "none; add --quantization moe_wna16, which leaves it out"
            )

    def _shards(self, name: str) -> tuple[str, ...]:
        if name.startswith("w2"):
            return ("w2",)
        return ("w1", "w3") if self.moe_config.w13_num_shards == 2 else ("w1",)

    def _arrive(
        self, param: Any, loaded_weight: Tensor, weight_name: str, shard_id: str | None, expert_id: int | None
    ) -> None:
        """A tensor of ``param`` was staged; packs the layer if it was the last that this rank awaits.

        Raises:
            SpacError: it was staged before.
        """
        name = self._name_of(param)
        assert name is not None
        shards = self._shards(name)
        known = shard_id in shards  # GPT-OSS's own loader takes both shards of one expert, in three dimensions
        experts, whose = slice(None), ""
        if expert_id is not None:
            whose = f" of expert {expert_id}"
            if not (known and loaded_weight.dim() == 3):  # as vLLM's loader
                local = self._map_global_expert_id_to_local_expert_id(expert_id)
                assert local != -1
                experts = slice(local, local + 1)
        columns = slice(shards.index(shard_id), shards.index(shard_id) + 1) if known else slice(None)
        awaited = self._awaited[name][experts, columns]
        if not awaited.all():
            raise SpacError(
                f"spac: {weight_name}{whose} of {self.layer_name} came twice; use a checkpoint that has each weight "
                "once"
            )
        awaited[:] = False
        self._missing -= awaited.size
        if self._missing == 0:
            self.spac.pack(self)

    def _name_of(self, param: Any) -> str | None:
        return next((name for name, staged in self._staged.items() if staged is param), None)

    @property
    def spac_kernel_parameters(self) -> Mapping[str, Any]:
        """What vLLM's kernel reads, by the names that tensors have in slots and in the store; once it is built."""
        return self._kernel_params

    @property
    def staged_bytes(self) -> int:
        """Bytes of this rank's experts of the layer in the checkpoint's layout."""
        return sum(param.nbytes for param in self._staged.values())

    @property
    def spac_packed(self) -> Format | None:
        """How the experts are stored for our kernels, known from ``probe`` on; None if they are not repacked."""
        return None if self.spac_packing is None else self.spac_packing.kind

    def probe(self) -> dict[str, TensorSpec]:
        """Layout of one expert as the kernel reads it; as a side effect builds the layer's kernel, if vLLM's runs."""
        if self.spac_packing is not None:
            one = {name: torch.ones_like(p.data[:1]) for name, p in self._staged.items()}  # scales of 0 are refused
            appear_unquantised(self.quant_method)
            return {n: TensorSpec(tuple(t.shape[1:]), t.dtype) for n, t in self.spac_packing(one).items()}
        packed = self._convert({name: p.data.new_zeros((1, *p.shape[1:])) for name, p in self._staged.items()})
        self._restore()
        read = packed if self._converts else self._staged
        return {name: TensorSpec(tuple(t.shape[1:]), t.dtype) for name, t in read.items()}

    def convert(self, start: int, stop: int) -> dict[str, Tensor]:
        """Experts ``[start, stop)`` in the kernel's layout: name -> tensor of shape [stop - start, ...]."""
        raw = {name: p.data[start:stop] for name, p in self._staged.items()}
        if self.spac_packing is not None:
            return self.spac_packing(raw)
        if not self._converts or (self._plain and start > 0):
            return raw
        packed = self._convert({name: t[:1] for name, t in raw.items()} if self._plain else raw)
        self._restore()
        if not self._plain:
            return packed
        self._check_plain(raw, packed)
        return raw

    def _check_plain(self, raw: dict[str, Tensor], packed: dict[str, Tensor]) -> None:
        """Raises ``SpacError`` if vLLM changed the first expert's layout or values for its kernel."""
        for name, tensor in raw.items():
            ours, given = tensor[:1], packed[name].to(tensor.device)
            if ours.shape != given.shape or not torch.equal(_bits(ours), _bits(given)):
                kernel = self.quant_method.experts_cls.__name__
                raise SpacError(f"spac: {kernel} does not read {name} of {self.layer_name} as the checkpoint has it")

    def forget(self) -> None:
        """Frees the staged weights."""
        for param in self._staged.values():
            param.data = param.data.new_empty(0)
        self._packed = True

    def _bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes vLLM's kernel read ``tensors``, name -> [slots, ...], instead of the parameters it was built with.

        Raises:
            SpacError: the kernel keeps its own copy of scales, zero points or biases.
        """
        for name, param in self._kernel_params.items():
            param.data = tensors[name]
        self._parameters.update(self._named_for_kernel)
        self._check_bound()

    def _convert(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        """Runs vLLM's own conversion on some of the experts; afterwards the kernel is built with ``_kernel_params``.

        For all that ``quant_schemes`` allows, the conversion is independent per expert, so parts equal a whole layer.
        """
        device, experts = self.spac.device, len(next(iter(raw.values())))
        self._before = {n: param for n, param in self._parameters.items() if quant_schemes.is_of_experts(n)}
        for name, tensor in raw.items():
            param = torch.nn.Parameter(tensor.to(device), requires_grad=False)
            param.__dict__.update(self._staged[name].__dict__)
            self._parameters[name] = param
        self.quant_method.moe_kernel = self.quant_method.moe_quant_config = None  # else vLLM treats it as an update
        with _of_experts(self.quant_method, experts):
            self._to_kernel(self)
        self._named_for_kernel = quant_schemes.kernel_parameters(self, experts)
        staged_first = [name for name in raw if name in self._named_for_kernel] + list(self._named_for_kernel)
        once = {id(self._named_for_kernel[name]): name for name in reversed(staged_first)}
        self._kernel_params = {n: self._named_for_kernel[n] for n in dict.fromkeys(staged_first) if n in once.values()}
        return {name: param.data for name, param in self._kernel_params.items()}

    def _restore(self) -> None:
        """Registers the parameters of before again under their names, by which loaders look them up."""
        for name in [name for name in self._parameters if quant_schemes.is_of_experts(name)]:
            del self._parameters[name]  # some have a second name, and some are the kernel's own
        self._parameters.update(self._before)
        self._kernel_params = {name: _emptied(param) for name, param in self._kernel_params.items()}

    def _check_bound(self) -> None:
        """Raises ``SpacError`` if vLLM's kernel reads scales, zero points or biases other than those of the slots."""
        config = self.quant_method.moe_kernel.fused_experts.quant_config
        slots = {param.data_ptr() for param in self._kernel_params.values()}
        for name in quant_schemes.KERNEL_READS:
            tensor = getattr(config, name)
            if tensor is not None and tensor.data_ptr() not in slots:
                raise SpacError(f"spac: vLLM's kernel of {self.layer_name} keeps {name} for itself, outside the slots")


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


def _emptied(param: torch.nn.Parameter) -> torch.nn.Parameter:
    param.data = param.data.new_empty(0)
    return param
