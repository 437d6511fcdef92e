"""The last stages of a layer: its experts are loaded into slots, wave by wave, and a kernel runs them there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.residency import NOWHERE
from vllm_spac.execution.base import LayerKernel
from vllm_spac.execution.exchange import Exchange
from vllm_spac.execution.host.localised import Routed
from vllm_spac.execution.host.slot_layers import SlotLayers
from vllm_spac.execution.row_shares import typed_like
from vllm_spac.recording.metrics import Counters


@dataclass(frozen=True)
class Wave:
    """Rows of a forward whose experts are all resident."""

    rows: slice | Tensor  # a slice, or int64 [wave] on the CPU, ascending
    slot_ids: Tensor  # slot numbers in place of experts, with the shape and dtype of the rows' routed ids


def by_expert(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    kernel: LayerKernel,
    waves: Callable[[Tensor], Iterator[Wave]],
    loaded: Callable[[], None] | None = None,
) -> Tensor:
    """Returns what ``kernel`` returns for all rows at once, to the bit, see ``LayerKernel.by_expert``.

    The pairs of a row and an expert are sorted by expert, and divided between experts: each wave has all rows of its
    experts, in their order. The results of a row are then added as the kernel does.

    Args:
        x: [rows, hidden].
        weights: [rows, top_k].
        ids: [rows, top_k], experts of the layer.
        kernel: takes slots.
        waves: makes the experts of pairs [rows * top_k, 1] resident, wave by wave; one has all pairs of its experts.
        loaded: called when a wave's experts are resident, before its kernel runs.
    """
    assert kernel.takes_slots
    top_k, flat, shares = ids.shape[1], ids.flatten(), weights.flatten()
    order = flat.argsort(stable=True)
    parts = x.new_empty(len(flat), x.shape[1])
    for wave in waves(flat[order][:, None]):
        pairs = order[wave.rows]
        if loaded is not None:
            loaded()
        parts[pairs] = kernel(x[pairs // top_k], shares[pairs][:, None], wave.slot_ids)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for choice in parts.view(len(x), top_k, -1).unbind(1):
        out += choice
    return out.to(x.dtype)


class SlotRunner:
    """Called by the forward thread.

    Args:
        layers: makes experts resident.
        exchange: copies to the device; needed by kernels that take no slots.
        local_of: as in ``Execution``.
        elsewhere: the slot that a kernel's map has for experts which no row uses.
    """

    def __init__(self, layers: SlotLayers, exchange: Exchange | None, local_of: Tensor | None, elsewhere: int) -> None:
        self._layers, self._exchange, self._elsewhere = layers, exchange, elsewhere
        self._of_model = layers.experts if local_of is None else len(local_of)
        # This process's experts by their numbers, as the model numbers them; None: the same.
        self._held = None if local_of is None else local_of.argsort(stable=True)[-layers.experts :]

    def run(
        self,
        layer: int,
        routed: Routed,
        kernel: LayerKernel,
        counters: Counters | None,
        loaded: Callable[[], None] | None = None,
    ) -> Tensor:
        """Computes a layer's experts from their slots, in several waves if there are too few; returns [rows, hidden].

        What is computed together in a wave changes no result: whole rows, or all rows of an expert, see
        ``LayerKernel.by_expert``.

        Args:
            layer: number of the layer.
            counters: as of ``waves``.
            loaded: called when a wave's experts are resident, before its kernel runs.

        Raises:
            StoreError: as ``waves``.
        """
        routed = routed if kernel.takes_slots else routed._replace(on_device=self._on_device(routed))
        x, ids = routed.x, routed.ids
        if (together := self._layers.together(layer, ids.numpy(), counters)) is not None:
            slots, pinned = together
            try:
                if loaded is not None:
                    loaded()
                return self._launch(kernel, routed, typed_like(slots, ids), len(x))
            finally:
                if pinned:
                    self._layers.release(pinned)
        if kernel.by_expert and len(np.unique(ids)) > self._layers.loader.residency.slots:
            return by_expert(x, routed.weights, ids, kernel, partial(self.waves, layer, counters=counters), loaded)
        out = torch.empty_like(x)
        for wave in self.waves(layer, ids, counters):
            rows = wave.rows if kernel.takes_slots or isinstance(wave.rows, slice) else self._to_device(wave.rows)
            if loaded is not None:
                loaded()
            on_device = None if routed.on_device is None else routed.on_device[rows]
            part = Routed(x[rows], routed.weights[rows], ids[wave.rows], on_device)
            out[rows] = self._launch(kernel, part, wave.slot_ids, len(x))
        return out

    def waves(self, layer: int, ids: Tensor, counters: Counters | None) -> Iterator[Wave]:
        """Makes the routed experts of a layer resident, wave by wave.

        A wave's experts are pinned until the next wave is requested. There is one wave unless the rows need more
        experts than there are slots; every row is in exactly one wave.

        Args:
            layer: number of the layer.
            ids: experts of shape [rows, top_k] on the CPU, each in ``[0, experts)``.
            counters: as of ``SlotLayers.waves``.

        Raises:
            StoreError: an expert could not be loaded; nothing was computed with it.
        """
        routed, first = ids.numpy(), layer * self._layers.experts
        table = self._layers.loader.residency.slot_of[first : first + self._layers.experts]
        with contextlib.closing(self._layers.waves(layer, routed, counters)) as waves:
            for rows, _ in waves:
                wave = rows if isinstance(rows, slice) else torch.from_numpy(rows)
                yield Wave(wave, typed_like(table[routed[rows]], ids))

    def _launch(self, kernel: LayerKernel, routed: Routed, slot_ids: Tensor, rows: int) -> Tensor:
        """Runs ``kernel`` on rows whose experts are in ``slot_ids`` [rows, top_k]; the whole forward has ``rows``."""
        if kernel.takes_slots:
            return kernel(routed.x, routed.weights, slot_ids)
        assert routed.on_device is not None
        slot_of = self._to_device(self._map(routed.ids, slot_ids))
        return kernel(routed.x, routed.weights, routed.on_device, slot_of, rows)

    def _on_device(self, routed: Routed) -> Tensor:
        ids, of_model = routed.ids, routed.of_model
        if routed.on_device is not None:
            return routed.on_device
        if of_model is None:
            of_model = ids if self._held is None else self._held[ids.long()].to(ids.dtype)
        return self._to_device(of_model)

    def _map(self, ids: Tensor, slot_ids: Tensor) -> Tensor:
        """Returns int32 [experts of the model] on the CPU: the slots ``slot_ids`` of the experts ``ids``, both [rows,
        top_k]; NOWHERE for others that may be another process's, else ``elsewhere``."""
        experts, elsewhere = ids.numpy(), self._elsewhere
        if self._held is not None:
            experts, elsewhere = self._held.numpy()[experts], NOWHERE
        slot_of = np.full(self._of_model, elsewhere, dtype=np.int32)  # numpy: in every layer of every step
        slot_of[experts] = slot_ids.numpy()
        return torch.from_numpy(slot_of)

    def _to_device(self, tensor: Tensor) -> Tensor:
        assert self._exchange is not None
        return self._exchange.to_device(tensor)
