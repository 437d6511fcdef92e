"""vLLM's ``RoutedExperts`` with the experts somewhere else: same parameters, same kernel, other ids."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_spac.budget.control import BudgetedLayer
from vllm_spac.budget.routing_rule import RoutingRule
from vllm_spac.cache.residency import NOWHERE
from vllm_spac.core import TensorSpec
from vllm_spac.errors import SpacError, UnsupportedError
from vllm_spac.execution.pointers.execution import ACTIVATIONS, StreamedPool
from vllm_spac.execution.pointers.streams import capturing
from vllm_spac.execution.row_shares import Share, combine
from vllm_spac.execution.slots import ExpertPool
from vllm_spac.integration.layers import quant_schemes, triton_tiles
from vllm_spac.integration.layers.custom_ops import run_experts
from vllm_spac.integration.layers.host import LayerHost, current
from vllm_spac.integration.loading.fast_memory import MoEWidths

if TYPE_CHECKING:
    from vllm_spac.config import SpacConfig

# Whatever a kernel may read beside the weights that each call names; each is a tensor or None.
_KERNEL_READS = (
    *("w1_scale", "w2_scale", "w1_zp", "w2_zp", "w1_bias", "w2_bias"),
    *("a1_scale", "a2_scale", "a1_gscale", "a2_gscale", "g1_alphas", "g2_alphas"),
)


class ManagedExperts:
    """Mixed in front of ``RoutedExperts`` (or a subclass of it) while a managed model is built.

    Life: created on the CPU with room for all experts of the layer, which stays untouched, hence unreal,
    memory until weights arrive; packed and emptied as soon as the last weight has arrived; at the end its
    parameters are the slots of the pool.
    """

    def __init__(self, layer_name: str, *args, **kwargs) -> None:
        with torch.device("cpu"):
            super().__init__(layer_name, *args, **kwargs)
        self._staged = quant_schemes.expert_tensors(self)
        self.spac: LayerHost = current()
        self.spac_index = 0  # among the layers of its shape
        self.spac_number = 0  # among all
        self.spac_rule = RoutingRule()
        self.spac_pool: ExpertPool | StreamedPool | None = None
        self._pointers = self.spac.config.execution == "pointers"
        if quant_schemes.is_quantised(self):
            self._check_quantised(self.spac.config)
            for param in self._staged.values():
                param.data = torch.empty_like(param)  # vLLM fills scales and zero points, which makes them real memory
        if self._pointers:
            self._check_kernels()
        self._expected = {name: getattr(p, "weight_loader_numel", p.numel()) for name, p in self._staged.items()}
        self._arrived = dict.fromkeys(self._staged, 0)
        self._packed = False
        self._plain = quant_schemes.is_plain(self)
        for param in self._staged.values():
            if param.weight_loader != self.weight_loader:
                param.weight_loader = partial(self._load_through, param.weight_loader)
        self._to_kernel = self.quant_method.process_weights_after_loading
        self.quant_method.process_weights_after_loading = lambda layer: self.spac.pack(self)
        self.quant_method.requires_device_loading = False  # pack moves a part of the layer at a time instead
        self.spac.add(self)

    def _check_quantised(self, config: SpacConfig) -> None:
        method = type(self.quant_method).__name__
        if config.execution == "pointers":
            raise UnsupportedError(
                f"spac: execution=pointers cannot run the quantised experts ({method}) of {self.layer_name}; use "
                "--spac-execution slots, which loads missing experts into slots and runs vLLM's own kernel"
            )
        if config.cpu_experts != "off":
            raise UnsupportedError(
                f"spac: cpu_experts={config.cpu_experts} cannot compute the quantised experts ({method}) of "
                f"{self.layer_name}; use --spac-cpu-experts off"
            )

    def _check_kernels(self) -> None:
        """Of what our kernels compute; the shapes are ``streamed.check``'s."""
        activation = self.activation.value
        limit, alpha = self.swiglu_limit, self.swiglu_alpha
        reason = None
        if activation not in ACTIVATIONS:
            reason = f"the activation {activation}"
        elif (activation != "swigluoai" and limit) or limit not in (None, 7.0) or alpha not in (None, 1.702):
            reason = f"{activation} with limit {limit} and alpha {alpha}"
        elif self.apply_router_weight_on_input:
            reason = "router weights on the input"
        if reason is not None:
            raise UnsupportedError(
                f"spac: execution=pointers cannot run {reason} of {self.layer_name}; use --spac-execution slots, which "
                "loads missing experts into slots and runs vLLM's own kernel"
            )

    # -- loading -------------------------------------------------------------------------------------------

    def weight_loader(self, param, loaded_weight, weight_name, shard_id, expert_id, return_success=False):
        """Stage one checkpoint tensor; when it is the last of the layer, pack the layer and forget it."""
        self.spac.arrived(loaded_weight.nbytes)
        if not self._awaits(param, weight_name):
            return True if return_success else None
        success = super().weight_loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success)
        self._count(param, loaded_weight.numel())
        return success

    weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]

    def _load_through(self, loader, param, loaded_weight, weight_name, shard_id, expert_id, return_success=False):
        """Stage one checkpoint tensor through the quant method's own ``loader``.

        It gives most tensors converted to ``weight_loader``; the others, each a shard of one expert, it writes itself.
        """
        if not self._awaits(param, weight_name):  # and need not be converted
            return True if return_success else None
        before = dict(self._arrived)
        success = loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success)
        if self._arrived == before:
            self.spac.arrived(loaded_weight.nbytes)
            self._count(param, param[0].numel() // (1 if shard_id == "w2" else self.moe_config.w13_num_shards))
        return success

    def _awaits(self, param, weight_name: str) -> bool:
        """Whether what ``param`` is given is read by a kernel and not packed yet."""
        if self._name_of(param) is None:
            return False
        if self._packed:
            raise SpacError(
                f"spac: {weight_name} of {self.layer_name} came after the layer was packed, so it would be ignored: "
                "the checkpoint has a weight twice, or weights of a running engine are changed; use a checkpoint that "
                "has each weight once, or restart with the new one"
            )
        return not self.spac.is_stored(self)

    def _count(self, param, elements: int) -> None:
        """``elements`` of ``param`` were staged; packs the layer if they were the last."""
        self._arrived[self._name_of(param)] += elements
        if all(self._arrived[name] >= count for name, count in self._expected.items()):
            self.spac.pack(self)

    def _name_of(self, param) -> str | None:
        return next((name for name, staged in self._staged.items() if staged is param), None)

    @property
    def staged_bytes(self) -> int:
        """Bytes of all experts of the layer, as the checkpoint has them."""
        return sum(param.nbytes for param in self._staged.values())

    @property
    def spac_widths(self) -> MoEWidths:
        moe = self.moe_config
        return MoEWidths(self.top_k, moe.hidden_dim, moe.intermediate_size_per_partition)

    def probe(self) -> dict[str, TensorSpec]:
        """Layout of one expert as the kernel reads it; builds the layer's kernel on the way."""
        blank = {name: p.data.new_zeros((1, *p.shape[1:])) for name, p in self._staged.items()}
        packed = self._convert(blank)
        self._restore()
        if self._pointers:  # our kernels read the checkpoint's layout
            packed = self._staged
        return {name: TensorSpec(tuple(t.shape[1:]), t.dtype) for name, t in packed.items()}

    def convert(self, start: int, stop: int) -> dict[str, Tensor]:
        """Experts ``[start, stop)`` in the kernel's layout: name -> tensor of shape [stop - start, ...]."""
        raw = {name: p.data[start:stop] for name, p in self._staged.items()}
        if self._pointers:
            return raw
        if self._plain and start > 0:
            return raw
        packed = self._convert({name: t[:1] for name, t in raw.items()} if self._plain else raw)
        self._restore()
        if not self._plain:
            return packed
        self._check_plain(raw, packed)
        return raw

    def _check_plain(self, raw: dict[str, Tensor], packed: dict[str, Tensor]) -> None:
        """``SpacError`` if vLLM gave its kernel the first expert otherwise than the checkpoint has it."""
        for name, tensor in raw.items():
            ours, given = tensor[:1], packed[name].to(tensor.device)
            if ours.shape != given.shape or not torch.equal(_bits(ours), _bits(given)):
                kernel = self.quant_method.experts_cls.__name__
                raise SpacError(f"spac: {kernel} does not read {name} of {self.layer_name} as the checkpoint has it")

    def forget(self) -> None:
        """Give the staged weights back."""
        for param in self._staged.values():
            param.data = param.data.new_empty(0)
        self._packed = True

    def attach(self, pool: ExpertPool | StreamedPool) -> None:
        """Let the kernel read the slots of ``pool``: its own experts' if all have one, else any."""
        self.spac_pool = pool
        if self._pointers:
            return
        experts, index = pool.shape.experts, self.spac_index
        own = slice(index * experts, (index + 1) * experts) if pool.holds_all else slice(None)
        for name, param in self._kernel_params.items():
            param.data = pool.tensors[name][own]
        self._parameters.update(self._named_for_kernel)
        if not pool.holds_all:
            self.local_num_experts = pool.residency.slots
            if self.spac.on_cpu:
                self.global_num_experts = pool.residency.slots
        self._check_bound()

    def budgeted(self) -> BudgetedLayer:
        """The layer as the budget's control sees it; possible before it is packed."""
        return BudgetedLayer(
            self.layer_name, self.moe_config.num_experts, self.top_k, self.spac_rule, self._resident_experts
        )

    def _resident_experts(self) -> Tensor:
        if self._pointers:
            return self.spac_pool.resident(self.spac_index)
        experts = self.spac_pool.shape.experts
        keys = slice(self.spac_index * experts, (self.spac_index + 1) * experts)
        return torch.from_numpy(self.spac_pool.residency.slot_of[keys] >= 0).to(self.spac.device)

    def _convert(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run vLLM's own conversion on some of the experts; leaves the kernel built on ``_kernel_params``.

        It works expert by expert in all that ``schemes`` allows: what a whole layer would give, in parts.
        """
        device = self.spac.device
        for name, tensor in raw.items():
            param = torch.nn.Parameter(tensor.to(device), requires_grad=False)
            param.__dict__.update(self._staged[name].__dict__)
            self._parameters[name] = param
        self.quant_method.moe_kernel = self.quant_method.moe_quant_config = None  # else weights count as an update
        self._to_kernel(self)
        self._kernel_params = {name: self._parameters[name] for name in raw}
        ours = {id(param) for param in self._kernel_params.values()}
        self._named_for_kernel = {name: param for name, param in self._parameters.items() if id(param) in ours}
        return {name: param.data for name, param in self._kernel_params.items()}

    def _restore(self) -> None:
        """Loaders look parameters up by name while others are still to come: show them the staged ones."""
        for name in self._named_for_kernel:
            del self._parameters[name]  # some go by a second name
        self._parameters.update(self._staged)
        self._kernel_params = {name: _emptied(param) for name, param in self._kernel_params.items()}

    def _check_bound(self) -> None:
        """``SpacError`` if vLLM's kernel reads scales, zero points or biases that are not those of the slots."""
        config = self.quant_method.moe_kernel.fused_experts.quant_config
        slots = {param.data_ptr() for param in self._kernel_params.values()}
        for name in _KERNEL_READS:
            tensor = getattr(config, name)
            if tensor is not None and tensor.data_ptr() not in slots:
                raise SpacError(f"spac: vLLM's kernel of {self.layer_name} keeps {name} for itself, outside the slots")

    # -- running -------------------------------------------------------------------------------------------

    def spac_route(self, hidden: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """What the router chose, within the budget; called by the hooked router."""
        runtime = self.spac.runtime
        if runtime is None:
            return weights, ids
        return runtime.route(self.spac_number, hidden, logits, weights, ids)

    def forward_modular(self, x, topk_weights, topk_ids, shared_experts=None, shared_experts_input=None):
        """Routed experts for x [tokens, hidden] with weights and ids [tokens, top_k]; ids are the router's own."""
        if not torch.compiler.is_compiling():
            return self.spac_forward(x, topk_weights, topk_ids)
        out = torch.empty_like(x)
        run_experts(x, topk_weights, topk_ids, out, self.layer_name)
        return out

    def spac_forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """The layer's output [tokens, hidden]: over the table of pointers, in slots, or in slots and on the CPU."""
        pool, runtime = self.spac_pool, self.spac.runtime
        stock = not (self._pointers or self.spac.on_cpu) and pool.holds_all  # vLLM's own routing and kernels
        if capturing(x):
            if not (self._pointers or stock):
                raise SpacError(
                    f"spac: {self.layer_name} is being captured into a CUDA graph, where nothing can be loaded or "
                    "counted; add --enforce-eager"
                )
            runtime.captured()
        real = runtime.rows(len(x))
        if self._pointers:
            runtime.routed(pool, self.spac_index, topk_ids[:real], topk_weights[:real])
            return pool.run(self.spac_index, x, topk_weights, topk_ids, self.activation.value, torch.empty_like(x))
        if stock:  # nothing to wait for
            runtime.routed(pool, self.spac_index, topk_ids[:real], topk_weights[:real])
            return super().forward_modular(x, topk_weights, topk_ids)
        ids = topk_ids if self.spac.on_cpu else self.spac.exchange.to_host(topk_ids)  # waits for the router
        there = None
        if runtime.as_routed(len(x)):  # each call into torch is microseconds, in every layer of every token
            runtime.routed(pool, self.spac_index, ids, topk_weights)
            there = topk_ids
        else:
            topk_weights = topk_weights.masked_fill(topk_ids < 0, 0)
            ids = runnable(ids, real)
            runtime.routed(pool, self.spac_index, ids[:real], topk_weights[:real])
        if pool.holds_all:
            return super().forward_modular(x, topk_weights, ids)
        if (cold := pool.cold(self.spac_index, ids)) is None:
            return self.spac_in_slots(x, topk_weights, ids, there=there)
        beside, hot = Share.of(ids, cold), Share.of(ids, ~cold)
        with pool.computing(self.spac_index, beside, x, topk_weights) as computation:
            parts = [(hot, self.spac_in_slots(*hot.pick(x, topk_weights), hot.ids, computation.give_way))]
            return combine(x, [*parts, (beside, computation.result())])

    def spac_in_slots(
        self,
        x: Tensor,
        topk_weights: Tensor,
        ids: Tensor,
        loaded: Callable[[], None] | None = None,
        there: Tensor | None = None,
    ) -> Tensor:
        """What the experts ``ids`` [rows, top_k] (on the CPU) give, computed wave by wave if it must be.

        Rows are independent in the kernel, so a row's result does not depend on its wave.

        Args:
            loaded: called when a wave's experts are there and its kernel is to run.
            there: ``ids`` where ``x`` lies, if they lie there.
        """
        run, out = super().forward_modular, torch.empty_like(x)
        for wave in self.spac_pool.waves(self.spac_index, ids):
            rows = slice(wave.start, wave.stop)
            placed = self._placed(ids[rows], wave.slot_ids, None if there is None else there[rows])
            if loaded is not None:
                loaded()
            with (
                contextlib.nullcontext()
                if self.spac.on_cpu
                else triton_tiles.of_layer(self.spac_pool.shape.experts, len(x))
            ):
                part = run(x[rows], topk_weights[rows], placed)
            if len(part) == len(x):
                out = part
            else:
                out[rows] = part
        return out

    def _placed(self, ids: Tensor, slot_ids: Tensor, there: Tensor | None) -> Tensor:
        """What vLLM's kernel takes for the experts ``ids`` in the slots ``slot_ids``, both [rows, top_k] on the CPU.

        A CPU's kernel takes the slots. A GPU's sorts rows by the experts of a layer (see ``tiles``), and there may be
        more slots: it takes the layer's own ids and a map from these to slots, as if the others were another GPU's.
        """
        if self.spac.on_cpu:
            return slot_ids
        slot_of = torch.full((self.spac_pool.shape.experts,), NOWHERE, dtype=torch.int32)
        slot_of[ids.long()] = slot_ids.to(torch.int32)
        self._expert_map = self.spac.exchange.to_device(slot_of)
        return self.spac.exchange.to_device(ids) if there is None else there


def runnable(ids: Tensor, real: int) -> Tensor:
    """Experts [tokens, top_k] on the CPU that can all be run: padding needs no expert that the first row does not need.

    A padded row carries -1, which corrupts the heap in a CPU kernel, or what was routed before; what it gives is
    nobody's. A -1 in a row that counts becomes expert 0, to be run with weight 0.

    Args:
        real: rows that count, the first ones.
    """
    if real < len(ids):
        ids = torch.cat([ids[:real], ids[:1].expand(len(ids) - real, -1)])
    return ids.clamp(min=0)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _emptied(param: torch.nn.Parameter) -> torch.nn.Parameter:
    param.data = param.data.new_empty(0)
    return param
