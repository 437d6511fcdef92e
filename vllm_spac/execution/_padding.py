"""Replaces ids of experts that a kernel cannot run: those of padded rows, and -1."""

from __future__ import annotations

import torch
from torch import Tensor


def runnable(ids: Tensor, real: int) -> Tensor:
    """Replaces ids that cannot be run; returns [rows, top_k] on the CPU.

    The ids of a padded row are -1, which corrupts the heap in a CPU kernel, or left over from earlier routing. They are
    replaced by those of the first row, so that padding needs no further experts; its output is not used. A -1 in a real
    row becomes expert 0, to be run with weight 0.

    Args:
        ids: [rows, top_k] on the CPU, experts.
        real: number of leading rows that belong to requests.
    """
    if real < len(ids):
        ids = torch.cat([ids[:real], ids[:1].expand(len(ids) - real, -1)])
    return ids.clamp(min=0)
