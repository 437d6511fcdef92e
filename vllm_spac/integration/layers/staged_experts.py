"""Loading of a managed layer: weights are staged as they arrive, converted to the kernel's layout, and stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from vllm_spac.integration.layers.built_for_ours import built_for_ours
from vllm_spac.integration.layers.kernel_conversion import KernelConversion
from vllm_spac.integration.layers.packed_experts import WeightPacking, blank, remove_scales
from vllm_spac.kernels.formats import Format

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts as _Layer
else:
    _Layer = object


class AwaitedShards:
    """Which (expert, shard) of each parameter has not come yet.

    A rank keeps a part of a tensor that depends on its kind, so that elements cannot be counted.

    Attributes:
        missing: how many there are.
    """

    def __init__(self, staged: Mapping[str, Any], split: bool) -> None:
        self._split = split  # w13 comes in two
        self._awaited = {name: np.ones((len(p), len(self._shards(name))), dtype=bool) for name, p in staged.items()}
        self.missing = sum(awaited.size for awaited in self._awaited.values())

    def _shards(self, name: str) -> tuple[str, ...]:
        if name.startswith("w2"):
            return ("w2",)
        return ("w1", "w3") if self._split else ("w1",)

    def has(self, name: str, shard: str | None) -> bool:
        """Whether the parameter comes in such shards."""
        return shard in self._shards(name)

    def arrive(self, name: str, shard: str | None, expert: int | None) -> bool:
        """Shards of a parameter have come, None: all of them; of one expert or all. Returns whether they were awaited.

        ``expert``: as this rank numbers it.
        """
        experts = slice(None) if expert is None else slice(expert, expert + 1)
        column = None if shard is None else self._shards(name).index(shard)
        awaited = self._awaited[name][experts, slice(None) if column is None else slice(column, column + 1)]
        if not awaited.all():
            return False
        awaited[:] = False
        self.missing -= awaited.size
        return True


class StagedExperts(_Layer):
    """Mixin placed before ``RoutedExperts`` while a managed model is built: moves its weights to the store.

    Life cycle: created on the CPU with parameters for this rank's part of the layer, which occupy no physical memory
    until weights are written to them; packed and emptied as soon as the last weight has arrived; finally its parameters
    are the slots.
    """

    def __init__(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"), built_for_ours(current()):
            super().__init__(layer_name, *args, **kwargs)
        self.spac = current()
        is_quantised = quant_schemes.is_quantised(self)
        self.spac_packing = WeightPacking.of(self) if is_quantised and self.spac.execution.repacks else None
        packed = self.spac_packing is not None
        # else experts keep the checkpoint's layout
        self._converts = self.spac.execution.layout == "kernel" and not packed
        # vLLM's parameters, with their loaders
        self._staged: dict[str, Any] = quant_schemes.expert_tensors(self, packed)
        self.spac_index = 0  # among the layers of its shape
        self.spac_number = 0  # among all
        quantised = type(self.quant_method).__name__ if is_quantised else None
        self._check(quantised)
        if quantised is not None:
            for param in self._staged.values():  # vLLM has filled scales and zero points: release that memory
                param.data = blank(param)
        self._awaited = AwaitedShards(self._staged, self.moe_config.w13_num_shards == 2)
        self._packed = False
        self._plain = not packed and quant_schemes.is_plain(self)
        loaded: Any
        for loaded in self._staged.values():
            if loaded.weight_loader != self.weight_loader:
                loaded.weight_loader = partial(self._load_through, loaded.weight_loader)
        self.spac_conversion = KernelConversion(self, self._staged)
        self.quant_method.process_weights_after_loading = lambda layer: self.spac.pack(self)
        self.quant_method.requires_device_loading = False  # pack moves a part of the layer at a time instead
        self.spac.add(self)

    def _check(self, quantised: str | None) -> None:
        """Raises ``UnsupportedError`` if the execution or the kernel for CPU experts cannot run this layer."""
        activation = self.activation.value, self.swiglu_limit, self.swiglu_alpha, self.swiglu_beta
        kept = quantised, self.spac_packing is not None
        facts = LayerFacts(self.layer_name, *activation, self.apply_router_weight_on_input, *kept)
        self.spac.execution.check_layer(facts)
        config, converted = self.spac.config, self.spac.execution.layout == "kernel"
        if quantised is not None and config.cpu_experts != "off" and converted and not quant_schemes.is_on_cpu():
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
        if _is_of_another_rank(self, expert_id):
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
        """Stages one tensor through the quant method's own ``loader``, which passes most on to ``weight_loader``."""
        if _is_of_another_rank(self, expert_id):
            self.spac.arrived(loaded_weight.nbytes)
            return False if return_success else None
        if not self._awaits(param, weight_name):  # and need not be converted
            return True if return_success else None
        before = self._awaited.missing
        success = loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success)
        if self._awaited.missing == before:
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

    def _arrive(
        self, param: Any, loaded_weight: Tensor, weight_name: str, shard_id: str | None, expert_id: int | None
    ) -> None:
        """A tensor of ``param`` was staged; packs the layer if it was the last that this rank awaits.

        Raises:
            SpacError: it was staged before.
        """
        name = self._name_of(param)
        assert name is not None
        known = self._awaited.has(name, shard_id)
        expert, whose = None, "" if expert_id is None else f" of expert {expert_id}"
        # GPT-OSS's own loader takes both shards of one expert, in three dimensions; else as vLLM's loader.
        if expert_id is not None and not (known and loaded_weight.dim() == 3):
            expert = self._map_global_expert_id_to_local_expert_id(expert_id)
            assert expert != -1
        if not self._awaited.arrive(name, shard_id if known else None, expert):
            raise SpacError(
                f"spac: {weight_name}{whose} of {self.layer_name} came twice; use a checkpoint that has each weight "
                "once"
            )
        if self._awaited.missing == 0:
            self.spac.pack(self)

    def _name_of(self, param: Any) -> str | None:
        return next((name for name, staged in self._staged.items() if staged is param), None)

    @property
    def spac_kernel_parameters(self) -> Mapping[str, Any]:
        """What vLLM's kernel reads, by the names that tensors have in slots and in the store; once it is built."""
        return self.spac_conversion.parameters

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
            remove_scales(self.quant_method)
            return {n: TensorSpec(tuple(t.shape[1:]), t.dtype) for n, t in self.spac_packing(one).items()}
        blanks = {name: p.data.new_zeros((1, *p.shape[1:])) for name, p in self._staged.items()}
        packed = self.spac_conversion.convert(blanks)
        read = packed if self._converts else self._staged
        return {name: TensorSpec(tuple(t.shape[1:]), t.dtype) for name, t in read.items()}

    def convert(self, start: int, stop: int) -> dict[str, Tensor]:
        """Experts ``[start, stop)`` in the kernel's layout: name -> tensor of shape [stop - start, ...]."""
        raw = {name: p.data[start:stop] for name, p in self._staged.items()}
        if self.spac_packing is not None:
            return self.spac_packing(raw)
        if self._converts and not self._plain:
            return self.spac_conversion.convert(raw)
        if self._converts and start == 0:
            self.spac_conversion.check_plain(raw)
        return raw

    def drop(self) -> None:
        """Frees the staged weights."""
        for param in self._staged.values():
            param.data = param.data.new_empty(0)
        self._packed = True


def _is_of_another_rank(layer: StagedExperts, expert: int | None) -> bool:
    """Whether a tensor of ``expert``, as the model numbers it, is not this rank's; None: of all experts."""
    return expert is not None and layer._map_global_expert_id_to_local_expert_id(expert) == -1
