"""What the layers of a step decided on the device, on its way to the host: copied after the step, applied there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.allowance import Allowance, Depths, PauseNotice
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
    """Numbers of experts of a step: streamed, given a slot in the layer that missed them, or ahead of it."""

    streamed: int
    admitted: int
    ahead: int
    computed: int  # by the CPU; ``late``: of those streamed, what the CPU was to compute
    late: int
    judged: tuple[int, int] | None  # as ``Allowance.end_step`` returns it


class ReportAccount:
    """What reports say, counted: hits and loads, who has which slot, and what became of reads ahead. Pure.

    Args:
        keys: number of experts of all layers; ``experts``: of each layer.
        slots: number of slots.
        counters: ``hits``, ``misses``, ``loads`` and those of prefetches and of the CPU are counted here.

    Attributes:
        residency: who has which slot, as of the last report.
        allowance: limits reads ahead of need that the device decides, if there are any; ``depths``: under a budget,
            besides.
    """

    def __init__(self, keys: int, experts: int, slots: int, counters: Counters) -> None:
        self._experts = experts
        self.residency = ReportedSlots(keys, slots)
        self._counters = counters
        self.allowance: Allowance | None = None
        self.depths: Depths | None = None
        self._unused: set[int] = set()  # read ahead, and no layer has used them
        self._displaced: dict[int, int] = {}  # evicted for an expert that was read ahead and is not used yet, and that

    def read_of(self, bounds: Sequence[int] | None) -> list[int]:
        """Returns how many names of each layer are read, the likeliest first; ``bounds``: as of ``Step``."""
        if bounds is None or self.depths is None:
            return [self._experts] * (len(self.residency.slot_of) // self._experts)
        return np.minimum(bounds, self.depths.depths).tolist()

    def add(
        self,
        counts: np.ndarray,
        sources: np.ndarray,
        owner: np.ndarray,
        guessed: np.ndarray | None = None,
        places: np.ndarray | None = None,
        *,
        between: bool = False,
    ) -> StepCounts:
        """Applies the report of a finished step.

        Args:
            counts: int [keys], rows that selected each expert.
            sources: int [keys], how each was read: ``HIT``, ``STREAMED``, ``ADMITTED``, ``COMPUTED`` (by the CPU),
                ``LATE`` (streamed because the CPU was late), or not at all.
            owner: int [slots], the expert in each slot at the end of the step.
            guessed: int [keys], ``ADMITTED`` for the experts that got a slot before their layer; None without guesses.
            places: int [keys], under a budget, the place of each name among those of its layer that might have taken a
                slot on offer; -1: not named.
            between: it is no step: slots were given away between two, and nothing was used.
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
        ahead = np.zeros(0, dtype=np.int64) if guessed is None else np.flatnonzero(guessed == ADMITTED)
        victims = residency.owner[changed]
        for_guesses = np.isin(owner[changed], ahead)
        displaced = dict(zip(victims[for_guesses].tolist(), owner[changed][for_guesses].tolist(), strict=True))
        outside = residency.slot_of == NOWHERE  # when the step began
        residency.update_owners(changed, owner[changed])
        missed, judged = np.concatenate([streamed, admitted, computed]), None
        if self.allowance is not None:
            self._judge(self.allowance, counts, missed.tolist(), ahead.tolist(), displaced)
            judged = None if between else self.allowance.end_step()
        if self.depths is not None and guessed is not None and places is not None:
            self.depths.end_step(np.where(outside, places, -1), counts > 0)
        return StepCounts(len(streamed), len(admitted), len(ahead), len(computed), late, judged)

    def _judge(
        self, allowance: Allowance, counts: np.ndarray, missed: list[int], ahead: list[int], displaced: dict[int, int]
    ) -> None:
        """Counts what became of reads ahead, after a step that missed ``missed`` and read ``ahead``.

        ``displaced``: experts whose slots were taken for some of these, and for which.
        """
        again = self._unused.intersection(ahead)
        self._unused.update(ahead)
        self._displaced |= displaced
        used = {key for key in self._unused if counts[key] > 0}
        harm = sum(self._early(self._displaced[key], key, used) for key in missed if key in self._displaced)
        wasted = {key for key in self._unused - used if self.residency.slot_of[key] == NOWHERE}
        self._unused -= used | wasted
        gone = set(missed)
        self._displaced = {
            victim: key for victim, key in self._displaced.items() if key in self._unused and victim not in gone
        }
        counters = self._counters
        counters.prefetches += len(ahead)
        counters.prefetch_hits += len(used)
        counters.prefetch_wasted += len(wasted) + len(again)  # evicted unused, and read once more
        counters.prefetch_harmful += harm
        allowance.add_misses(len(missed), harm)
        allowance.add_reads(len(ahead))
        allowance.add_uses(len(used))

    def _early(self, key: int, victim: int, used: set[int]) -> bool:
        """Whether a step needed ``victim`` before it used ``key``, which was read into its slot, or instead of it."""
        return key not in used or victim // self._experts <= key // self._experts


class _Report(NamedTuple):
    """What a step's layers wrote, in flight to the host; or what drafts were given between steps."""

    step: Step | None  # None between steps
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
        guesses, places: int32 [keys], by what names experts ahead of need; owner: int32 [slots], by both.
        ending: int32 [keys + slots], ``decided`` and ``owner``.
        pauses: logs when reads ahead pause; None: there are none, and no guesses.
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
        self._written = torch.zeros(5 * shape.total + slots, dtype=torch.int32, device=device)
        self.counts, self.sources, self.guesses, self.places, self.decided, self.owner = self._parts_of(self._written)
        self._named = self._written[2 * shape.total : 4 * shape.total].fill_(UNUSED)  # guesses and places
        self.ending = self._written[4 * shape.total :]
        self.sources.fill_(NOWHERE)
        self._tally = torch.zeros((), dtype=torch.int64, device=device)  # hits of steps that send no report
        self._under_way: deque[_Report] = deque()
        self._spare: list[Tensor] = []  # pinned, on the host, for reports to come
        self.pauses: PauseNotice | None = None
        self.on_report: Callable[[StepCounts], None] | None = None
        self.on_use: Callable[[np.ndarray, np.ndarray], None] | None = None

    def __len__(self) -> int:
        """Number of reports on their way."""
        return len(self._under_way)

    def _parts_of(self, written: Tensor) -> Sequence[Tensor]:
        """Returns a report's counts, sources, guesses, places and decided counts [keys], and the owners [slots]."""
        return written.split([*5 * [self._shape.total], len(written) - 5 * self._shape.total])

    def send(self, step: Step | None, known: np.ndarray | None = None, wanted: Tensor | None = None) -> None:
        """Starts the copy of a report to the host.

        Args:
            step: None between steps.
            known: bool [keys], experts that kept their slots in a step that has borrowed the others; None: no step has.
            wanted: bool [keys] on the device, experts that might have taken a slot; the places of others are left out.
        """
        if self.pauses is not None and wanted is not None:
            self._compute.submit(self._leave_out, wanted)
        written = self._spare.pop() if self._spare else _pinned(self._written)
        self._compute.submit(written.copy_, self._written, True)
        self._under_way.append(_Report(step, written, known, self._compute.record()))
        if self.pauses is not None:
            self._compute.submit(self._named.fill_, UNUSED)

    def _leave_out(self, wanted: Tensor) -> None:
        self.places.masked_fill_(~wanted, UNUSED)

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
            if report.step is None:
                continue
            if report.known is None:
                self._counters.count_bytes(f"{self._path} streamed", missed * self._shape.expert_bytes)
            self._counters.waves += len(self._shape.layers)

    def _apply(self, report: _Report) -> int:
        """Applies the report of a finished step and counts hits and misses.

        Returns:
            Number of experts that the step read from host memory without giving them a slot.
        """
        parts = (part.numpy() for part in self._parts_of(report.written))
        counts, sources, guesses, places, decided, owner = parts
        guessed = [] if self.pauses is None else [guesses]
        if guessed and report.step is not None and (bounds := report.step.bounds) is not None:
            guessed += [np.where(places < np.repeat(bounds, self._shape.experts), places, UNUSED)]
        generating: np.ndarray | None = decided
        if report.step is None:
            counts, sources, generating = np.zeros_like(counts), np.full_like(sources, UNUSED), None
        elif report.known is not None:
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
        counted = self._account.add(counts, sources, owner, *guessed, between=report.step is None)
        nbytes = self._shape.expert_bytes
        self._counters.count_bytes(self._path, counted.admitted * nbytes)
        if self.on_report is not None:
            self.on_report(counted)
        if self.pauses is not None:
            self.pauses.report(counted.judged)
            self._counters.count_bytes(f"{self._path} ahead", counted.ahead * nbytes)
        return counted.streamed


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
