"""The contract of an admission: which missed experts get slots under ``execution=pointers``, and when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.residency import Residency
from vllm_spac.core import MoEShape, Step
from vllm_spac.execution.pointers.streams import Event, Stream
from vllm_spac.execution.pointers.table import AddressTable
from vllm_spac.metrics import Counters

if TYPE_CHECKING:
    from vllm_spac.policies.base import Policy

Known = TypeVar("Known")  # by the host when a step was launched


class Kernels(NamedTuple):
    """The launches of ``vllm_spac.kernels``, or their twins.

    Attributes:
        rows_to_compile: (most rows, top_k, experts) -> numbers of rows, one for each variant that is compiled.
    """

    grouped_gemm: Callable[..., Tensor]
    admit: Callable[..., None]
    fetch: Callable[..., None]
    rows_to_compile: Callable[[int, int, int], Sequence[int]]


@dataclass(frozen=True)
class Parts:
    """What admissions work with; see ``PointerExecution``.

    Attributes:
        memory: slots, host copies and the table.
        compute, copy: the stream that runs the model, and another one.
        path: name of the store in the counters.
        step_bytes: bytes that are on their way into slots at once, at most.
    """

    shape: MoEShape
    slots: int
    policy: Policy
    memory: AddressTable
    counters: Counters
    compute: Stream
    copy: Stream
    kernels: Kernels
    path: str
    step_bytes: int


@dataclass(frozen=True)
class _Report(Generic[Known]):
    """What a step's layers wrote, on its way to the host."""

    step: Step
    staged: bool
    told: tuple[Tensor, ...]
    known: Known
    there: Event


class Admission(ABC, Generic[Known]):
    """Called between steps and in each layer, by one thread. No call but ``slots`` waits for the device.

    Attributes:
        counts: int32 [keys] on the device; each layer's launch overwrites its part with the rows that selected each
            expert.
        offline: why no engine can serve with it; empty if one can.
    """

    offline: ClassVar[str] = ""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.counts = torch.zeros(parts.shape.total, dtype=torch.int32, device=parts.memory.device)
        self._reports: deque[_Report[Known]] = deque()

    @property
    @abstractmethod
    def residency(self) -> Residency:
        """Who has a slot, as far as the host knows."""

    @abstractmethod
    def seat(self, key: int) -> int:
        """Give ``key``, which is nowhere, a free slot, to be filled before any kernel runs; returns it."""

    @abstractmethod
    def seated(self, keys: Sequence[int]) -> None:
        """The slots of these experts are filled."""

    @abstractmethod
    def begin(self, step: Step) -> None:
        """A step is about to be launched."""

    @abstractmethod
    def slots(self) -> np.ndarray:
        """int32 [keys], the slot of each expert while the step runs; NOWHERE for none. May wait for the step before."""

    def enter(self, layer: int, ids: Tensor, weights: Tensor, live: Tensor) -> None:
        """Launch what comes before the kernel of a layer; not called if staged.

        Args:
            ids, weights: as in ``PointerExecution.run``.
            live: int32 [1] on the device; pairs from this one on are padding.
        """

    def end(self, step: Step, *, staged: bool) -> None:
        """The layers of a step were launched; ``staged``: some read what they missed from buffers."""
        told = []
        for tensor in self._tells():
            told.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda))
            self.parts.compute.submit(told[-1].copy_, tensor, True)
        self._reports.append(_Report(step, staged, tuple(told), self._known(staged), self.parts.compute.record()))

    def take(self) -> None:
        """Learn what steps did, as far as the host has been told; does not wait."""
        while self._reports and self._reports[0].there.done():
            report = self._reports.popleft()
            told = [tensor.numpy() for tensor in report.told]
            missed = self._learn(told, report.known, prompts=report.step.prompts)
            if not report.staged:
                self.parts.counters.moved(f"{self.parts.path} streamed", missed * self.parts.shape.expert_bytes)
            self.parts.counters.waves += len(self.parts.shape.layers)

    def close(self) -> None:
        """Finish what is in flight."""
        self.parts.copy.close()

    def check_integrity(self) -> None:
        """Every invariant on the host; raises ``AssertionError``."""
        self.residency.check_integrity()

    @abstractmethod
    def _tells(self) -> Sequence[Tensor]:
        """What is copied to the host behind a step; ``counts`` is the first."""

    @abstractmethod
    def _known(self, staged: bool) -> Known:
        """What the host must remember for ``_learn`` of the step that was just launched."""

    @abstractmethod
    def _learn(self, told: Sequence[np.ndarray], known: Known, *, prompts: bool) -> int:
        """A step is over; returns how many experts it read where they lay. Counts hits and misses.

        Args:
            told: what ``_tells`` had when the step was over.
            prompts: some of its rows were those of prompts, and say little about the next step.
        """
