"""Memory that nobody may read yet has all bits set: NaN in every float format, so that a premature read shows."""

from __future__ import annotations

import numpy as np
import torch

from vllm_spac.cache.residency import Placement
from vllm_spac.execution.device.staging import ExpertBuffers
from vllm_spac.execution.host.slots_execution import SlotExecution


def spoil(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.uint8).fill_(0xFF)


def poison_slots(execution: SlotExecution) -> None:
    """From now on, slots until they are loaded; again after ``read_ahead``. Without host memory."""
    account = execution._loader.prefetcher.account
    placed = account.place

    def poisoned(placement: Placement) -> None:
        placed(placement)
        for _, slot in placement.loads:
            for tensor in execution.tensors.values():
                spoil(tensor[slot])

    account.place = poisoned


def poison_buffers(buffers: ExpertBuffers) -> None:
    """From now on, staging buffers until they are filled."""
    fill = buffers.fill

    def poisoned(buffer: int, layer: int, missing: np.ndarray) -> None:
        for tensor in buffers._tensors[buffer].values():
            spoil(tensor)
        fill(buffer, layer, missing)

    buffers.fill = poisoned
