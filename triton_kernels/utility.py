"""MoE-SpAc's utility estimator (Algorithm 1), one update after a verify step, in place on the device.

For every expert, with f its selections in this step and f' in the last::

    delta = f - f'
    s     = min(K, s + 1) if delta >= up;  else max(0, s - 1) if -delta >= down;  else s
    up    = (1 - lam) up   + lam |delta|   if delta > 0
    down  = (1 - lam) down + lam |delta|   if delta < 0

Boundaries belong to the expert, start at floor(gamma / 2) and are float64. As printed, they are floored after each
update (``literal``): then lam = 0.1 can only lower them, and at 0 an idle expert climbs for ever. Otherwise they stay
real, are floored for the comparison only, and never count for less than 1. Multiplication and addition are rounded
separately, as on the host: fused, a boundary could fall on the other side of an integer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit
def _utility_kernel(
    counts, last, score, up, down, n, highest, LAM: tl.constexpr, LITERAL: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    f = tl.load(counts + at, mask=mask, other=0)
    delta = f - tl.load(last + at, mask=mask, other=0)
    s = tl.load(score + at, mask=mask, other=0)
    rise = tl.load(up + at, mask=mask, other=1.0)
    fall = tl.load(down + at, mask=mask, other=1.0)
    d = delta.to(tl.float64)
    if LITERAL:
        climbs, sinks = d >= rise, -d >= fall
    else:
        # no expert moves for d = 0, also if a boundary started below 1
        climbs = (d >= tl.floor(rise)) & (delta >= 1)
        sinks = (-d >= tl.floor(fall)) & (delta <= -1)
    s = tl.where(climbs, tl.minimum(s + 1, highest), tl.where(sinks, tl.maximum(s - 1, 0), s))
    lam = tl.full((), LAM, tl.float64)
    moved = lam * tl.abs(d)
    risen = (1.0 - lam) * rise + moved
    fallen = (1.0 - lam) * fall + moved
    if LITERAL:
        risen, fallen = tl.floor(risen), tl.floor(fallen)
    else:
        risen, fallen = tl.where(risen < 1.0, 1.0, risen), tl.where(fallen < 1.0, 1.0, fallen)
    tl.store(score + at, s, mask=mask)
    tl.store(up + at, tl.where(delta > 0, risen, rise), mask=mask)
    tl.store(down + at, tl.where(delta < 0, fallen, fall), mask=mask)
    tl.store(last + at, f, mask=mask)


def update_utility(
    counts: Tensor,
    last: Tensor,
    score: Tensor,
    up: Tensor,
    down: Tensor,
    highest: int = 4,
    lam: float = 0.1,
    literal: bool = False,
) -> None:
    """One step of Algorithm 1 for any number of experts and layers; all but ``counts`` are updated in place.

    Args:
        counts: f_t, int32 of any shape, for instance [L, N].
        last: f_{t-1}, like counts; becomes f_t. Start: 0.
        score: s, like counts, 0 ... highest. Start: 0.
        up, down: the boundaries, float64 of the same shape. Start: gamma // 2.
        highest: K.
        lam: the forgetting factor, 0 ... 1.
        literal: floor the boundaries after each update, without a lower limit, as printed.
    """
    assert highest >= 1 and 0 <= lam <= 1, f"K = {highest} must be positive and lam = {lam} in [0, 1]"
    for tensor in (counts, last, score, up, down):
        dtype = torch.float64 if tensor is up or tensor is down else torch.int32
        assert tensor.shape == counts.shape and tensor.is_contiguous() and tensor.dtype == dtype
    if counts.numel():
        _utility_kernel[(triton.cdiv(counts.numel(), _BLOCK),)](
            counts, last, score, up, down, counts.numel(), highest, LAM=float(lam), LITERAL=literal, BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
