"""The model drafts for itself: its routers choose among experts in slots, while what they would choose is read.

A draft model that is the model itself is not loaded again. The target's own layers draft, over the target's KV cache,
and no draft waits for an expert. Each draft writes keys and values where the row that verifies it writes them again,
so that no text ever depends on them. vLLM's draft model reads every new token of a request first; here the target has
read them, so that the first forward has one row per request, as each further one has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_spac.errors import UnsupportedError
from vllm_spac.integration.hooks import patches
from vllm_spac.kernels.reference.cover import Chosen, where
from vllm_spac.methods.moe_spec.settings import BudgetedLayer
from vllm_spac.methods.speculating_experts.speculated import best_of

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    from vllm_spac.runtime import Runtime

_PADDING = -1  # the KV slot of a row that writes nothing
_OWN = "_spac_own"  # attribute of a drafter whose model is the target: its ``SelfDrafting``


class SelfDrafting:
    """Routes rows to the experts that are in slots, while the target drafts.

    Args:
        runtime: of the target.
        layers: those of the target in their order, whose ``resident`` names the experts that nothing waits for.
        chose: called with the number of a layer, and weights and ids [rows, k] that its router chose; or None.

    Raises:
        UnsupportedError: a layer routes by a function of its own.
    """

    def __init__(
        self,
        runtime: Runtime,
        layers: Sequence[BudgetedLayer],
        chose: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> None:
        for layer in layers:
            if layer.rule.custom:
                raise UnsupportedError(
                    f"spac: this model cannot draft for itself: {layer.name} routes by a function of its own; name "
                    "another draft model in --speculative-config"
                )
        self._runtime, self._layers, self._chose = runtime, layers, chose

    @contextlib.contextmanager
    def drafting(self) -> Iterator[None]:
        """Context of the forwards that draft."""
        self._runtime.rerouter.override = self.route
        try:
            yield
        finally:
            self._runtime.rerouter.override = None

    def route(self, number: int, hidden: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> Chosen:
        """Returns weights and ids [rows, k] that a layer runs; arguments as of ``Rerouter.route``.

        A row whose layer has fewer than k experts in slots may also choose those that its router chose.
        """
        if self._chose is not None:
            self._chose(number, weights, ids)
        layer = self._layers[number]
        assert layer.resident is not None
        held = layer.resident()
        covered = held[ids.long()].all(1)
        if covered.all():
            return weights, ids
        inside = held.expand(len(ids), -1)
        if held.sum() < layer.top_k:
            inside = inside.scatter(1, ids.long(), True)
        chosen = best_of(layer, logits, inside)
        return where(covered, (weights, ids), (chosen[0].to(weights.dtype), chosen[1].to(ids.dtype)))


def in_slots(layer: Any) -> BudgetedLayer:
    """Describes a ``ManagedExperts``; ``resident`` names the experts that are READY, not those that are being read."""

    def ready() -> Tensor:
        execution = layer.spac_execution
        experts = execution.shape.experts
        first = layer.spac_index * experts
        return torch.from_numpy(execution.residency.ready(slice(first, first + experts)))

    return replace(layer.budgeted(), resident=ready)


def install() -> None:
    """Hooks the rows that V1's drafter reads first; a second call does nothing."""
    patches.install(f"{patches.PROPOSER}.set_inputs_first_pass", _first_rows)


def drafting(drafter: Any) -> contextlib.AbstractContextManager[None]:
    """Context of what ``drafter`` drafts; of one with a model of its own, it does nothing."""
    own = getattr(drafter, _OWN, None)
    return contextlib.nullcontext() if own is None else own.drafting()


def attach(drafter: SpecDecodeBaseProposer, target: torch.nn.Module, drafts: SelfDrafting) -> None:
    """Makes ``target`` the model of ``drafter``, in place of a second copy.

    Args:
        drafts: routes rows meanwhile.

    Raises:
        UnsupportedError: its layers keep more than one kind of KV cache.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    kinds: Any = AttentionLayerBase
    found = get_layers_from_vllm_config(drafter.vllm_config, kinds)
    specs = {name: layer.get_kv_cache_spec(drafter.vllm_config) for name, layer in found.items()}
    cached = {name: spec for name, spec in specs.items() if spec is not None}
    if len({repr(spec) for spec in cached.values()}) > 1:
        raise UnsupportedError(
            "spac: this model cannot draft for itself: vLLM drafts over one kind of KV cache, and its layers have "
            "several; name another draft model in --speculative-config"
        )
    drafter.model = target
    drafter._draft_attn_layer_names = set(cached)
    setattr(drafter, _OWN, drafts)


def _first_rows(prepare: Callable):
    def prepared(self: SpecDecodeBaseProposer, *args: Any, **kwargs: Any):
        if getattr(self, _OWN, None) is None:
            return prepare(self, *args, **kwargs)
        return _sampled_last(self, **kwargs)

    return prepared


def _sampled_last(
    drafter: SpecDecodeBaseProposer,
    *,
    next_token_ids: Tensor,
    target_positions: Tensor,
    cad: CommonAttentionMetadata,
    num_rejected_tokens_gpu: Tensor | None,
    **others: Any,
) -> tuple[int, Tensor, CommonAttentionMetadata]:
    """As ``SpecDecodeBaseProposer.set_inputs_first_pass``, of the token of each request that was sampled last."""
    count = len(next_token_ids)
    last = cad.query_start_loc[1:].long() - 1
    if num_rejected_tokens_gpu is not None:
        last = last - num_rejected_tokens_gpu
        num_rejected_tokens_gpu.zero_()  # vLLM subtracts them from ``seq_lens`` later, which does not have them
    positions = target_positions[last] + 1
    known = positions < drafter.max_model_len
    positions = positions.where(known, 0)
    blocks = cad.block_table_tensor[:count].gather(1, (positions // drafter.block_size)[:, None])[:, 0]
    slots = blocks.long() * drafter.block_size + positions % drafter.block_size
    drafter.input_ids[:count] = next_token_ids
    drafter.positions[:count] = positions
    rows = drafter.arange[: count + 1]
    return (
        count,
        rows[:count],
        cad.replace(
            query_start_loc=rows,
            query_start_loc_cpu=rows.cpu(),
            seq_lens=(positions + 1).to(cad.seq_lens.dtype),
            seq_lens_cpu_upper_bound=(positions + 1).to(torch.int32).cpu(),
            num_actual_tokens=count,
            max_query_len=1,
            max_seq_len=int(positions.max()) + 1,
            slot_mapping=slots.where(known, _PADDING),
        ),
    )
