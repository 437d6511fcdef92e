"""What a predictor on the device names, brought to the host: with a layer's routing, or while drafts are made."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from vllm_spac.cache.named import PredictedExperts
from vllm_spac.decisions.predictors.base import START, PredictorInputs
from vllm_spac.execution.base import Rows
from vllm_spac.execution.exchange import Exchange, Sent
from vllm_spac.execution.host.slot_layers import SlotLayers
from vllm_spac.execution.row_shares import predictor_rows


class DeviceNames:
    """Called by the forward thread.

    Args:
        exchange: copies to the host; None: routers and predictors are on the host.
        layers: whose prefetcher asks the predictor, and hears of its names.
    """

    def __init__(self, exchange: Exchange | None, layers: SlotLayers) -> None:
        self._exchange, self._layers = exchange, layers
        self._asked: list[PredictedExperts] = []  # of the step, not on the host yet
        self._sent: deque[tuple[Sent, list[PredictedExperts]]] = deque()  # of drafts

    def draft(self, drafted: PredictorInputs) -> None:
        """The drafter has read tokens: reads what the predictor names of them, on a device as soon as it arrives."""
        if self._exchange is None:
            self._layers.loader.prefetcher.draft(drafted)
        elif names := self._layers.loader.prefetcher.ask(drafted):
            self._sent.append((self._exchange.send(_tensors(names)), names))
            self.receive_drafts()

    def receive_drafts(self) -> None:
        """Passes on the newest names of drafts that have arrived, which include the older ones."""
        newest = None
        while self._sent and self._sent[0][0].arrived.done():
            newest = self._sent.popleft()
        if newest is not None:
            sent, names = newest
            tensors = iter(sent.tensors)
            self._layers.loader.prefetcher.draft(None, [each.arrived(tensors) for each in names])

    def begin_step(self) -> None:
        """Asks what the start of a step names; its layers bring more than drafts that have not arrived."""
        self._sent.clear()
        self._asked = self._layers.ask(START) if self._exchange is not None and self._layers.observes_layers else []

    def to_host(
        self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, rows: Rows, *, asks: bool
    ) -> tuple[Tensor, list[PredictedExperts]]:
        """Returns ``ids`` on the CPU, and what the predictor named; waits once, for the router.

        Args:
            layer, x, weights, ids, rows: as in ``Execution.forward``.
            asks: whether the predictor is asked of this layer.
        """
        if self._exchange is None:
            return ids, []
        asked, self._asked = self._asked, []
        if asks:
            real = slice(rows.real)
            read = x[real], ids[real], weights[real]
            if rows.cut:
                read = predictor_rows(*read)
            elif not rows.as_routed:
                read = read[0], read[1].clamp(min=0), read[2].masked_fill(read[1] < 0, 0)
            asked += self._layers.ask(layer, *read)
        chosen, *arrived = self._exchange.all_to_host([ids, *_tensors(asked)])
        tensors = iter(arrived)
        return chosen, [each.arrived(tensors) for each in asked]


def _tensors(names: Sequence[PredictedExperts]) -> list[Tensor]:
    return [tensor for each in names for tensor in each.tensors]
