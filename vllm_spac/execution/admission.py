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
from vllm_spac.execution.address_table import AddressTable
from vllm_spac.execution.exchange import Event, Stream
from vllm_spac.recording.metrics import Counters

if TYPE_CHECKING:
    from vllm_spac.decisions.policies.base import Policy

DEFAULT = "layer"

Known = TypeVar("Known")  # by the host when a step was launched


class Kernels(NamedTuple):
    """The launches of ``vllm_spac.kernels``, or their torch twins.

    Attributes:
        rows_to_compile: (most rows, top_k, experts, whether quantised) -> numbers of rows, one for each variant that is
            compiled.
    """

    grouped_gemm: Callable[..., Tensor]
    admit: Callable[..., None]
    fetch: Callable[..., None]
    rows_to_compile: Callable[[int, int, int, bool], Sequence[int]]


@dataclass(frozen=True)
class Parts:
    """Objects that admissions share with their ``PointerExecution``.

    Attributes:
        memory: slots, host copies and the table.
        compute, copy: the stream that runs the model, and one for copies.
        path: name of the store in the counters.
        step_bytes: maximum bytes in flight into slots.
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
    """What a step's layers wrote, in flight to the host."""

    step: Step
    staged: bool
    told: tuple[Tensor, ...]
    known: Known
    there: Event


class Admission(ABC, Generic[Known]):
    """Assigns slots to missed experts. Called between steps and in each layer, by one thread.

    No call except ``slots`` waits for the device.

    Attributes:
        counts: int32 [keys] on the device; each layer's launch overwrites its part with the rows that selected each
            expert.
        offline: why no engine can serve with it; empty if one can.
        looks_ahead: it can give slots to experts of a layer before its router has chosen.
    """

    offline: ClassVar[str] = ""
    looks_ahead: ClassVar[bool] = False

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.counts = torch.zeros(parts.shape.total, dtype=torch.int32, device=parts.memory.device)
        self._reports: deque[_Report[Known]] = deque()

    @property
    @abstractmethod
    def residency(self) -> Residency:
        """Which expert has which slot, as last reported to the host."""

    @abstractmethod
    def seat(self, key: int) -> int:
        """Assigns a free slot to ``key``, which has none, to be filled before any kernel runs; returns it."""

    @abstractmethod
    def seated(self, keys: Sequence[int]) -> None:
        """Called when the slots of these experts have been filled."""

    @abstractmethod
    def begin(self, step: Step) -> None:
        """Called before a step is launched."""

    @abstractmethod
    def slots(self) -> np.ndarray:
        """Returns int32 [keys], the slot of each expert in the step; NOWHERE for none. May wait for earlier steps."""

    def enter(self, layer: int, ids: Tensor, weights: Tensor, live: Tensor) -> None:
        """Launches what precedes the kernel of a layer; not called for staged layers.

        Args:
            ids, weights: as in ``PointerExecution.run``.
            live: int32 [1] on the device; pairs from this one on are padding.
        """

    def read_ahead(self, extra: float, prefetch: str) -> None:
        """``ahead`` may be called from now on; before any step, if it ``looks_ahead``.

        Args:
            extra: as in ``Allowance``.
            prefetch: the predictor's name, for the log.
        """
        raise NotImplementedError

    @property
    def ahead_left(self) -> int:
        """How many more experts may be read ahead of need; as of the last report."""
        return 0

    def ahead(self, layer: int, ids: Tensor, live: Tensor) -> None:
        """Launches what gives slots to ``ids`` before the layer runs, on the calling stream; see ``lookahead``.

        Args:
            layer: the layer after one that was entered.
            ids: int32 [rows, top_k], experts of ``layer``.
            live: as in ``enter``.
        """
        raise NotImplementedError

    def end(self, step: Step, *, staged: bool) -> None:
        """Called after the layers of a step were launched; starts the copy of its report to the host.

        Args:
            step: the step.
            staged: whether some layers read their missing experts from buffers.
        """
        told = []
        for tensor in self._tells():
            told.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda))
            self.parts.compute.submit(told[-1].copy_, tensor, True)
        self._reports.append(_Report(step, staged, tuple(told), self._known(staged), self.parts.compute.record()))

    def take(self) -> None:
        """Applies the reports of steps that have reached the host; does not wait."""
        while self._reports and self._reports[0].there.done():
            report = self._reports.popleft()
            told = [tensor.numpy() for tensor in report.told]
            missed = self._learn(told, report.known, prompts=report.step.prompts)
            if not report.staged:
                self.parts.counters.moved(f"{self.parts.path} streamed", missed * self.parts.shape.expert_bytes)
            self.parts.counters.waves += len(self.parts.shape.layers)

    def close(self) -> None:
        """Finishes the copies in flight."""
        self.parts.copy.close()

    def check_integrity(self) -> None:
        """Checks every invariant on the host; raises ``AssertionError``."""
        self.residency.check_integrity()

    @abstractmethod
    def _tells(self) -> Sequence[Tensor]:
        """Returns the tensors that are copied to the host after a step; ``counts`` is the first."""

    @abstractmethod
    def _known(self, staged: bool) -> Known:
        """Returns what the host must keep for ``_learn`` of the step that was just launched."""

    @abstractmethod
    def _learn(self, told: Sequence[np.ndarray], known: Known, *, prompts: bool) -> int:
        """Applies the report of a finished step and counts hits and misses.

        Args:
            told: the tensors of ``_tells`` at the end of the step.
            known: what ``_known`` returned for the step.
            prompts: whether the step had prefill rows, which predict little about the next step.

        Returns:
            Number of experts that the step read from host memory without giving them a slot.
        """
