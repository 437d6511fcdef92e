"""The routing of a step's layers, kept until it ends: who is told which expert was selected how often."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.residency import ExpertActivity
from vllm_spac.core import NOT_RUN, MoEShape, selected
from vllm_spac.recording.metrics import Counters

_COUNT_BATCH = 1024  # forwards of layers whose routing is kept before it is counted
_COUNT_PAIRS = 4 << 20  # (row, expert) pairs kept: 16 MiB of ids, possibly in GPU memory


class StepRouting:
    """The routing of some forwards of layers.

    Args:
        shape: the layers and experts.
        partly: some ids are -1: experts that this process does not hold. They are not counted.

    Attributes:
        pairs: (row, expert) pairs kept.
    """

    def __init__(self, shape: MoEShape, partly: bool = False) -> None:
        self._shape, self._partly = shape, partly
        self._kept: list[tuple[int, Tensor]] = []
        self.pairs = 0

    def __len__(self) -> int:
        """Number of forwards of layers."""
        return len(self._kept)

    def add(self, layer: int, ids: Tensor, partly: bool = False) -> None:
        """Keeps the routing of a layer's rows, ids [rows, top_k]; ``partly``: from now on, some may be -1."""
        self._kept.append((layer, ids))
        self._partly = self._partly or partly
        self.pairs += ids.numel()

    def reset(self) -> None:
        self._kept.clear()
        self.pairs = 0

    def distinct(self) -> int:
        """Returns the sum over forwards of the number of distinct experts."""
        experts = torch.cat([ids.flatten() for _, ids in self._kept]).cpu().numpy()
        forward = np.repeat(np.arange(len(self._kept)), [ids.numel() for _, ids in self._kept])
        keys = experts + forward * self._shape.experts
        return len(np.unique(keys[experts >= 0] if self._partly else keys))

    def uses(self) -> np.ndarray:
        """Returns int64 [keys]: rows that selected each expert, padding included."""
        counts = np.zeros(self._shape.total, dtype=np.int64)
        by_layer = counts.reshape(-1, self._shape.experts)
        for layer, ids in self._kept:
            by_layer[layer] += self._sums(ids.cpu().numpy().ravel(), None)
        return counts

    def count_hits(self, counters: Counters, activity: ExpertActivity | None) -> None:
        """Counts forwards whose experts all had their slots, and forgets them; many at once, since it waits for ids."""
        if not self._kept:
            return
        if activity is not None:
            activity.observe(self.uses())
        counters.hits += self.distinct()
        counters.waves += len(self._kept)
        self.reset()

    @property
    def many(self) -> bool:
        """Whether ``count_hits`` is due."""
        return len(self._kept) >= _COUNT_BATCH or self.pairs >= _COUNT_PAIRS

    def counts(self, rows: Sequence[slice], weights: Sequence[float] | None = None) -> np.ndarray | None:
        """Returns how many of ``rows`` selected each expert, as in ``Policy.observe``; None if there are none.

        The caller leaves out prefill rows, which predict little about the next token.

        Args:
            weights: of the rows one after another; None: each counts 1.
        """
        if not rows:
            return None
        counts = np.full(self._shape.total, NOT_RUN, dtype=np.int64 if weights is None else np.float64)
        each = None if weights is None else np.repeat(weights, self._shape.top_k)
        by_layer = counts.reshape(-1, self._shape.experts)
        for layer, ids in self._kept:
            found = ids.numpy()
            chosen = found[rows[0]] if len(rows) == 1 else np.concatenate([found[part] for part in rows])
            by_layer[layer] = by_layer[layer].clip(0) + self._sums(chosen.ravel(), each)
        return counts

    def selected(self, rows: slice) -> np.ndarray | None:
        """Returns bool [rows, keys], the experts that each of ``rows``, the last ones of a step, selected.

        None where a layer ran some rows of the step alone, as an expert worker's layers do.
        """
        if any(len(ids) != rows.stop for _, ids in self._kept):
            return None
        found = ((layer, ids.numpy()[rows]) for layer, ids in self._kept)
        return selected(found, len(self._shape.layers), self._shape.experts)

    def _sums(self, experts: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
        if self._partly:
            own = experts >= 0
            experts, weights = experts[own], None if weights is None else weights[own]
        return np.bincount(experts, weights, minlength=self._shape.experts)
