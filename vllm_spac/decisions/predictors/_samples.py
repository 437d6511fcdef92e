"""Samples: what routers read and chose for the tokens of texts; predictors are fitted to them and judged by them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_spac.decisions.predictors.base import START, Guess, Predictor, PredictorInputs, Signal
from vllm_spac.errors import SpacError

_BLOCK = 512  # rows that a predictor scores at a time


@dataclass(frozen=True, eq=False)
class Samples:
    """Rows of texts in the order of the texts; L layers of N experts, k of them per row, d hidden dimensions.

    Attributes:
        ids, weights: int32 and float32 [L, rows, k], its choice and their routing weights.
    """

    starts: tuple[int, ...]  # first row of each text, ascending
    hidden: Tensor  # float [L, rows, d], input of each router
    logits: Tensor  # float32 [L, rows, N], by which a router chose: the k greatest of a row, unless it groups experts
    ids: Tensor
    weights: Tensor

    @property
    def rows(self) -> int:
        return self.hidden.shape[1]

    @property
    def layers(self) -> int:
        return len(self.hidden)

    @property
    def experts(self) -> int:
        return self.logits.shape[2]

    @property
    def top_k(self) -> int:
        return self.ids.shape[2]

    def texts(self, first: int, last: int) -> Samples:
        """Returns the texts ``[first, last)``; the tensors are views."""
        bounds = [*self.starts, self.rows]
        rows = slice(bounds[first], bounds[last])
        hidden, logits, ids, weights = (v[:, rows] for v in (self.hidden, self.logits, self.ids, self.weights))
        return Samples(tuple(start - rows.start for start in bounds[first:last]), hidden, logits, ids, weights)

    def inputs(self, layer: int, rows: slice, needs: frozenset[Signal]) -> PredictorInputs:
        """Returns what a predictor with these ``needs`` is passed about some rows."""
        future = self.ids[:, rows] if Signal.FUTURE in needs else None
        if layer == START:
            return PredictorInputs(layer, future=future)
        hidden = self.hidden[layer, rows] if Signal.ROUTER_INPUT in needs else None
        routing = Signal.ROUTING in needs
        ids, weights = (self.ids[layer, rows], self.weights[layer, rows]) if routing else (None, None)
        return PredictorInputs(layer, hidden, ids, weights, future)

    def guesses_of(self, predictor: Predictor) -> Iterator[tuple[int, slice, Guess]]:
        """Yields (layer or ``START``, rows, guess) for all that ``predictor`` guesses.

        A predictor that needs counts is asked row by row: each is a step of its own, as in decoding.
        """
        counted = Signal.COUNTS in predictor.needs
        layers = range(START, self.layers if predictor.reach else START + 1)
        for start in range(0, self.rows, 1 if counted else _BLOCK):
            rows = slice(start, min(start + (1 if counted else _BLOCK), self.rows))
            for layer in layers:
                for guess in predictor.guesses(self.inputs(layer, rows, predictor.needs)):
                    yield layer, rows, guess
            if counted:
                predictor.observe_step(self._counts(start))

    def _counts(self, row: int) -> np.ndarray:
        counts = np.zeros((self.layers, self.experts), dtype=np.int64)
        np.put_along_axis(counts, self.ids[:, row].numpy().astype(np.int64), 1, axis=1)
        return counts.ravel()


class SampleRecorder:
    """Copies what a model's routers read and choose into ``Samples`` of a fixed capacity.

    Call ``observe`` for each MoE layer of each text, and ``end_text`` after each text.

    Args:
        layers, experts, top_k, width: sizes of the model: L, N, k, d.
        rows: capacity; all memory is reserved here, and a row that does not fit is an error.
        dtype: of the router inputs.
    """

    def __init__(self, layers: int, experts: int, top_k: int, width: int, rows: int, dtype: torch.dtype) -> None:
        self.rows = 0  # of complete texts
        self._starts: list[int] = []
        self._written = [0] * layers
        self._hidden = torch.empty(layers, rows, width, dtype=dtype)
        self._logits = torch.empty(layers, rows, experts)
        self._ids = torch.empty(layers, rows, top_k, dtype=torch.int32)
        self._weights = torch.empty(layers, rows, top_k)

    @staticmethod
    def row_bytes(layers: int, experts: int, top_k: int, width: int, dtype: torch.dtype) -> int:
        """Returns the bytes that one row takes."""
        return layers * (width * dtype.itemsize + 4 * experts + 8 * top_k)

    def observe(self, layer: int, hidden: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> None:
        """Adds the next rows of a text in one layer; shapes as in ``Samples``."""
        start = self._written[layer]
        stop = start + len(hidden)
        if stop > (room := self._hidden.shape[1]):
            raise SpacError(f"spac: there is room for {room} rows of samples and no more; this is a bug")
        sources = hidden, logits, weights, ids
        for target, source in zip((self._hidden, self._logits, self._weights, self._ids), sources, strict=True):
            target[layer, start:stop].copy_(source)
        self._written[layer] = stop

    def end_text(self, tokens: int) -> Samples:
        """Ends a text of so many ``tokens`` and returns its samples, as views.

        Raises:
            SpacError: a layer ran another number of rows.
        """
        stop = self.rows + tokens
        if set(self._written) != {stop}:
            ran = sorted({written - self.rows for written in self._written})
            raise SpacError(f"spac: layers ran {ran} rows for a text of {tokens} tokens; this is a bug")
        self._starts.append(self.rows)
        self.rows = stop
        return self.result().texts(len(self._starts) - 1, len(self._starts))

    def result(self) -> Samples:
        """Returns the samples of all complete texts, as views."""
        kept = self._hidden, self._logits, self._ids, self._weights
        hidden, logits, ids, weights = (value[:, : self.rows] for value in kept)
        return Samples(tuple(self._starts), hidden, logits, ids, weights)
