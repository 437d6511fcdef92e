"""What predictors read of a layer, one row of numbers per token, and how their maps are fitted.

A row is the router's input and its routing weights. Maps are fitted by ridge regression in closed form, or by gradient
steps towards a router's distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vllm_spac.decisions.predictors.base import Seen


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


_BATCH = 512  # rows of a gradient step


def ridge(inputs: Tensor, targets: Tensor, strength: float = 1e-2) -> Tensor:
    """Returns W [f, n], the least squares solution of ``inputs @ W = targets`` with a penalty.

    Minimises ||X W - Y||^2 + s ||W||^2, s = ``strength`` * rows * the mean variance of the columns of X. Before the
    fit the mean of each row of Y is subtracted: adding a constant to all scores of a row changes no ranking.

    Args:
        inputs: float [rows, f] (X).
        targets: float [rows, n] (Y).
    """
    targets = targets - targets.mean(1, keepdim=True)
    gram = inputs.T @ inputs
    gram.diagonal().add_(penalty(inputs, strength))
    return torch.linalg.solve(gram, inputs.T @ targets)


def penalty(inputs: Tensor, strength: float) -> float:
    """Returns s of ``ridge``."""
    return max(strength * len(inputs) * float(inputs.var(0, unbiased=False).mean()), 1e-12)


def distil(
    parameters: Sequence[Tensor],
    logits: Callable[[Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    steps: int,
    rate: float,
    seed: int,
) -> None:
    """Minimises the KL divergence from a router's distribution to that of ``logits``, with Adam.

    Args:
        parameters: float tensors that ``logits`` computes with; changed in place.
        logits: [rows, f] -> [rows, N].
        inputs, targets: [rows, f] and the router's logits [rows, N].
        rate: learning rate at the beginning; it falls linearly.
    """
    generator = torch.Generator().manual_seed(seed)
    wanted = targets.softmax(-1)
    with torch.enable_grad():
        for parameter in parameters:
            parameter.requires_grad_()
        optimiser = torch.optim.Adam(parameters, rate)
        for step in range(steps):
            optimiser.param_groups[0]["lr"] = rate * (1 - step / steps)
            batch = torch.randint(len(inputs), (min(_BATCH, len(inputs)),), generator=generator)
            loss = -(wanted[batch] * logits(inputs[batch]).log_softmax(-1)).sum(-1).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    for parameter in parameters:
        parameter.requires_grad_(False)
