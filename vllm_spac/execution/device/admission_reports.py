"""What the layers of a step decided on the device, on its way to the host: copied after the step, applied there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.residency import NOWHERE, ReportedSlots
from vllm_spac.core import MoEShape, Step
from vllm_spac.execution.exchange import Event, Stream
from vllm_spac.kernels.types import ADMITTED, COMPUTED, HIT, LATE, STREAMED, UNUSED
from vllm_spac.recording.metrics import Counters


def with_prompts(counts: np.ndarray, sources: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Returns ``sources`` (as of ``ReportAccount.add``) of all rows of a step whose layers reported those of its first.

    Later rows take no slot, and no layer takes the slot of an expert that it or one before it uses for other rows, so
    that an expert that only they used was read from its slot if it has one at the end of the step.

    Args:
        counts: int [keys], rows that selected each expert.
        sources: of the experts that the first rows selected.
        owner: int [slots], the expert in each slot at the end.
    """
    has_slot = np.isin(np.arange(len(counts)), owner)
    return np.where((counts > 0) & (sources == UNUSED), np.where(has_slot, HIT, STREAMED), sources)


class StepCounts(NamedTuple):
    """Numbers of experts of a step: streamed, or given a slot in the layer that missed them."""

    streamed: int
    admitted: int
    computed: int  # by the CPU; ``late``: of those streamed, what the CPU was to compute
    late: int


class ReportAccount:
    """What reports say, counted: hits and loads, and who has which slot. Pure.

    Args:
        keys: number of experts of all layers.
        slots: number of slots.
        counters: ``hits``, ``misses``, ``loads`` and those of the CPU are counted here.

    Attributes:
        residency: who has which slot, as of the last report.
    """

    def __init__(self, keys: int, slots: int, counters: Counters) -> None:
        self.residency = ReportedSlots(keys, slots)
        self._counters = counters

    def add(self, counts: np.ndarray, sources: np.ndarray, owner: np.ndarray) -> StepCounts:
        """Applies the report of a finished step.

        Args:
            counts: int [keys], rows that selected each expert.
            sources: int [keys], how each was read: ``HIT``, ``STREAMED``, ``ADMITTED``, ``COMPUTED`` (by the CPU),
                ``LATE`` (streamed because the CPU was late), or not at all.
            owner: int [slots], the expert in each slot at the end of the step.
        """
        hits, admitted, computed = (np.flatnonzero(sources == source) for source in (HIT, ADMITTED, COMPUTED))
        late = int((sources == LATE).sum())
        streamed = np.flatnonzero((sources == STREAMED) | (sources == LATE))
        self._counters.hits += len(hits)
        self._counters.misses += len(streamed) + len(admitted)
        self._counters.loads += len(admitted)
        self._counters.cpu_experts += len(computed)
        self._counters.cpu_rows += int(counts[computed].sum())
        self._counters.cpu_late += late
        residency = self.residency
        changed = np.flatnonzero(owner != residency.owner)
        residency.update_owners(changed, owner[changed])
        return StepCounts(len(streamed), len(admitted), len(computed), late)


class _Report(NamedTuple):
    """What a step's layers wrote, in flight to the host."""

    step: Step
    written: Tensor
    known: np.ndarray | None  # bool [keys], experts that kept their slots in a step that has borrowed others; else None
    arrived: Event


class AdmissionReports:
    """Copies what layers write to the host, in one tensor so that it is one copy, and counts it there.

    Args:
        slots: number of slots.
        account: counts what each report says.
        compute: the stream that runs the model.
        path: name of the store in the counters.

    Attributes:
        counts, sources, decided: int32 [keys] on the device, by layers: the rows that selected each expert, how it was
            read, and ``counts`` of the pairs that slots are for.
        owner: int32 [slots], the expert in each slot; ending: int32 [keys + slots], ``decided`` and ``owner``.
        on_report: called with what each report says, if given; on_use: with what a step's rows that generate used, int
            [keys], and ``sources``.
    """

    def __init__(
        self,
        shape: MoEShape,
        slots: int,
        account: ReportAccount,
        counters: Counters,
        compute: Stream,
        path: str,
        device: torch.device,
    ) -> None:
        self._shape, self._account, self._path = shape, account, path
        self._counters, self._compute = counters, compute
        self._written = torch.zeros(3 * shape.total + slots, dtype=torch.int32, device=device)
        self.counts, self.sources, self.decided, self.owner = self._parts_of(self._written)
        self.ending = self._written[2 * shape.total :]
        self.sources.fill_(NOWHERE)
        self._tally = torch.zeros((), dtype=torch.int64, device=device)  # hits of steps that send no report
        self._under_way: deque[_Report] = deque()
        self._spare: list[Tensor] = []  # pinned, on the host, for reports to come
        self.on_report: Callable[[StepCounts], None] | None = None
        self.on_use: Callable[[np.ndarray, np.ndarray], None] | None = None

    def __len__(self) -> int:
        """Number of reports on their way."""
        return len(self._under_way)

    def _parts_of(self, written: Tensor) -> Sequence[Tensor]:
        """Returns a report's counts, sources and decided counts [keys], and the owners [slots]."""
        return written.split([*3 * [self._shape.total], len(written) - 3 * self._shape.total])

    def send(self, step: Step, known: np.ndarray | None = None) -> None:
        """Starts the copy of a report to the host.

        Args:
            known: bool [keys], experts that kept their slots in a step that has borrowed the others; None: no step has.
        """
        written = self._spare.pop() if self._spare else _pinned(self._written)
        self._compute.submit(written.copy_, self._written, True)
        self._under_way.append(_Report(step, written, known, self._compute.record()))

    def count_step(self) -> None:
        """Counts a step on the device, in place of ``send`` where each expert has its slot."""
        self._counters.waves += len(self._shape.layers)
        self._compute.submit(self._count)

    def _count(self) -> None:
        self._tally.add_(torch.count_nonzero(self.counts))

    def count(self) -> None:
        """Counts what has reached the host; for a tally it waits."""
        self.apply()
        if self._account.residency.slots == self._shape.total:
            self._counters.hits += int(self._tally.item())
            self._compute.submit(self._tally.zero_)

    def wait(self) -> None:
        """Waits for all reports and applies them."""
        if self._under_way:
            self._under_way[-1].arrived.wait()
            self.apply()

    def apply(self) -> None:
        """Applies the reports of steps that have reached the host; does not wait."""
        while self._under_way and self._under_way[0].arrived.done():
            report = self._under_way.popleft()
            missed = self._apply(report)
            self._spare.append(report.written)
            if report.known is None:
                self._counters.count_bytes(f"{self._path} streamed", missed * self._shape.expert_bytes)
            self._counters.waves += len(self._shape.layers)

    def _apply(self, report: _Report) -> int:
        """Applies the report of a finished step and counts hits and misses.

        Returns:
            Number of experts that the step read from host memory without giving them a slot.
        """
        parts = (part.numpy() for part in self._parts_of(report.written))
        counts, sources, decided, owner = parts
        generating: np.ndarray | None = decided
        if report.known is not None:
            sources = np.where(counts > 0, np.where(report.known, HIT, STREAMED), UNUSED)
            generating = None if report.step.prompts else counts
        else:
            sources = with_prompts(counts, sources, owner)
        activity = self._account.residency.activity
        if generating is not None and generating.any():
            if activity is not None:
                activity.observe(generating)
            if self.on_use is not None:
                self.on_use(generating, sources)
        counted = self._account.add(counts, sources, owner)
        self._counters.count_bytes(self._path, counted.admitted * self._shape.expert_bytes)
        if self.on_report is not None:
            self.on_report(counted)
        return counted.streamed


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
