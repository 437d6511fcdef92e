"""What predictors read of a layer, as one row of numbers per token: the router's input and its routing weights."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_spac.predictors.base import Seen


class LayerFeatures:
    """[h_l | m_l] of a layer: router input and routing weights, 0 for the experts that were not chosen.

    One buffer is written anew for each layer, through views that are kept: each call of torch takes a microsecond or
    two in each layer of each token.

    Args:
        width, experts: d and N.
    """

    def __init__(self, width: int, experts: int) -> None:
        self._sizes = width, experts
        self._whole = self._hidden = self._chosen = self._zeros = torch.empty(0)

    def of(self, seen: Seen) -> Tensor:
        """Returns float32 [rows, d + N] of the rows of a layer with ``hidden``, ``ids`` and ``weights``.

        It is valid until the next call.
        """
        assert seen.hidden is not None and seen.ids is not None and seen.weights is not None
        if seen.hidden.is_cuda:  # a graph refers to memory, which must not be that of another size's buffer
            chosen = seen.hidden.new_zeros(len(seen.hidden), self._sizes[1], dtype=torch.float32)
            chosen.scatter_(1, seen.ids.long(), seen.weights.float())
            return torch.cat([seen.hidden.float(), chosen], 1)
        if len(seen.hidden) != len(self._whole):
            with torch.inference_mode(False):  # buffers for calls inside and outside of it
                self._whole = torch.empty(len(seen.hidden), sum(self._sizes))
                self._hidden, self._chosen = self._whole.split(self._sizes, 1)
                self._zeros = torch.zeros(self._chosen.shape)
        self._hidden.copy_(seen.hidden)
        torch.scatter(self._zeros, 1, seen.ids.long(), seen.weights.float(), out=self._chosen)
        return self._whole
