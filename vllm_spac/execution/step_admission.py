"""Admission between steps, one step late: copies run concurrently with kernels, which until then read host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from vllm_spac.cache.residency import NOWHERE, Residency
from vllm_spac.core import Step
from vllm_spac.execution.admission import Admission, Parts
from vllm_spac.execution.moves import Move, Planner, Pointers, StepMover, most_moves


class BetweenSteps(Admission[np.ndarray]):
    """Moves experts between steps, under the protocol of ``protocol.py``.

    A layer launches nothing but its kernel; a missed expert that moves into a slot crosses PCIe twice.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        pointers = Pointers(parts.shape.total, parts.slots, parts.policy)
        self.planner = Planner(pointers, most_moves(parts.step_bytes, parts.shape.expert_bytes), parts.counters)
        self.mover = StepMover(pointers, parts.memory, parts.compute, parts.copy)

    @property
    def residency(self) -> Residency:
        return self.mover.pointers.residency

    def seat(self, key: int) -> int:
        return self.mover.pointers.placed(key).slot

    def seated(self, keys: Sequence[int]) -> None:
        slots = self.residency.slot_of[list(keys)].tolist()
        self.mover.pointers.arrived([Move(*pair) for pair in zip(keys, slots, strict=True)])
        self.parts.compute.submit(self.parts.memory.point, keys, slots)

    def begin(self, step: Step) -> None:
        """Points to the experts that have arrived, and starts the moves that pay."""
        for move in self.mover.arrive():
            self.planner.moved_in(move.key)
            self.parts.counters.moved(f"{self.parts.path} ahead", self.parts.shape.expert_bytes)
        self.take()
        self.mover.begin(self.planner.choose())

    def slots(self) -> np.ndarray:
        return self.mover.pointers.at

    def close(self) -> None:
        self.mover.close()

    def check_integrity(self) -> None:
        self.mover.pointers.check_integrity()

    def _tells(self) -> Sequence[Tensor]:
        return [self.counts]

    def _known(self, staged: bool) -> np.ndarray:
        """Returns bool [keys], experts whose pointer is at a slot while the step runs."""
        return self.slots() != NOWHERE

    def _learn(self, told: Sequence[np.ndarray], known: np.ndarray, *, prompts: bool) -> int:
        return self.planner.learn(told[0], known, prompts=prompts)
