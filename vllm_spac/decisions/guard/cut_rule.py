"""Which drafts of a step are worth their experts, where they are: on the device, without a wait. Pure.

The rule is that of ``chooser``: a draft that is accepted, with all of its path, with probability r saves ``gain``
seconds, and one that is rejected takes ``loss``. The first n drafts of a request are kept, for the n that saves most:
r gain - (1 - r) loss, summed over them. A parent comes before its children, so that no draft is kept without its path.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from vllm_spac.decisions.guard.odds import CERTAIN, FARTHEST


class CutNumbers(NamedTuple):
    """What was fitted on the host; float64, on the device.

    Attributes:
        slope, places, requests: how likely a draft is accepted given that its parent is, as of ``Odds.terms``: a
            number, [D] and [R].
    """

    slope: Tensor
    gain: Tensor  # seconds that an accepted draft saves, less than 0 if it takes more than it saves
    loss: Tensor  # seconds that a rejected one takes, at least 0
    places: Tensor
    requests: Tensor
    most: Tensor  # drafts that a request may keep, [R]

    @classmethod
    def unpacked(cls, packed: Tensor, requests: int) -> Self:
        """Views of ``packed``, float64 [3 + D + 2 R]."""
        slope, gain, loss = packed[:3].unbind()
        return cls(slope, gain, loss, *packed[3:].split([len(packed) - 3 - 2 * requests, requests, requests]))


def pack(odds: tuple[float, np.ndarray, np.ndarray], gain: float, loss: float, most: np.ndarray) -> np.ndarray:
    """Returns ``CutNumbers`` as one array, so that they are one copy; ``odds`` as of ``Odds.terms``."""
    slope, places, requests = odds
    return np.concatenate([[slope, gain, loss], places, requests, most], dtype=np.float64)


def kept(numbers: CutNumbers, chances: Tensor, tree: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Returns how many of its first drafts each request keeps, int64 [R].

    Args:
        chances: the drafter's probability of each draft given its parent, [R, n]; NaN where it has none.
        tree: what each draft follows, int64 [R, n]: 0 the request's last token, i the i-th draft, less for what is no
            draft; and how many drafts precede it on its path, int64 [R, n]. None: chains.
    """
    total = _saved(numbers, chances, tree).cumsum(1)
    best = total.amax(1, keepdim=True).clamp(min=0.0)
    number = torch.arange(1, chances.shape[1] + 1, device=chances.device)
    return ((total >= best) * number).amax(1)


def along(own: Tensor, parents: Tensor | None, levels: int) -> Tensor:
    """Returns the product of each draft's number and of those that it follows, [R, n].

    Args:
        own: [R, n]; that of what is no draft counts as 0.
        parents: what each draft follows, as of ``kept``; None: chains.
        levels: of the deepest tree.
    """
    if parents is None:
        return own.cumprod(1)
    found = own = own.masked_fill(parents < 0, 0.0)
    for _ in range(levels):  # one level more is right after each
        before = torch.cat([torch.ones_like(found[:, :1]), found], 1)
        found = own * before.gather(1, parents.clamp(min=0))
    return found


def _saved(numbers: CutNumbers, chances: Tensor, tree: tuple[Tensor, Tensor] | None) -> Tensor:
    """Seconds that each draft saves, [R, n]; -inf for those that a request must not keep."""
    count = chances.shape[1]
    sure = chances.to(numbers.places.dtype).nan_to_num(0.5).logit(CERTAIN)
    at = numbers.places[:count] if tree is None else numbers.places[tree[1].clamp(0, len(numbers.places) - 1)]
    accepted = (numbers.slope * sure + at + numbers.requests[:, None]).clamp(-FARTHEST, FARTHEST).sigmoid()
    reached = along(accepted, None if tree is None else tree[0], len(numbers.places))
    saved = reached * numbers.gain - (1 - reached) * numbers.loss
    beyond = torch.arange(count, device=chances.device) >= numbers.most[:, None]
    return saved.masked_fill(beyond, -torch.inf)
