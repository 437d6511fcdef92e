"""Memory that nobody may read yet has all bits set: NaN in every float format, so that a premature read shows."""

from __future__ import annotations

import numpy as np
import torch

from vllm_spac.cache.residency import Placement
from vllm_spac.execution.device.borrowed_slots import LongPrompts
from vllm_spac.execution.host.slots_execution import SlotExecution


def spoil(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.uint8).fill_(0xFF)


def poison_slots(execution: SlotExecution) -> None:
    """From now on, slots until they are loaded; again after ``read_ahead``. Without host memory."""
    account = execution._loader.prefetcher.account
    placed = account.add_placement

    def poisoned(placement: Placement) -> None:
        placed(placement)
        for _, slot in placement.loads:
            for tensor in execution.tensors.values():
                spoil(tensor[slot])

    account.add_placement = poisoned


def poison_borrowed(prompts: LongPrompts) -> None:
    """From now on, borrowed slots from when their experts are evicted until they are filled."""
    moves, slot_of = prompts._borrowed._moves, prompts._admission.experts.slot_of
    evict = moves.evict

    def poisoned(keys: np.ndarray) -> None:
        for slot in slot_of[torch.from_numpy(keys)].tolist():
            for tensor in moves._slots.values():
                spoil(tensor[slot])
        evict(keys)

    moves.evict = poisoned
