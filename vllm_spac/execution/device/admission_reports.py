"""What the layers of a step decided on the device, on its way to the host: copied after the step, applied there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.allowance import PauseNotice
from vllm_spac.cache.residency import NOWHERE
from vllm_spac.core import MoEShape, Step, selected
from vllm_spac.execution.device.slot_offers import Learned, Offering, with_prompts
from vllm_spac.execution.exchange import Event, Stream
from vllm_spac.kernels.types import HIT, STREAMED, UNUSED
from vllm_spac.recording.metrics import Counters


class _Report(NamedTuple):
    """What a step's layers wrote, in flight to the host; or what was given away between steps, while drafts were made.

    Attributes:
        prompt: layers, and what the last rows of prompts that ran alone selected there, int32 [layers, rows, top_k].
    """

    step: Step | None  # None between steps
    written: Tensor
    known: np.ndarray | None  # bool [keys], experts that kept their slots in a step that has borrowed others; else None
    prompt: tuple[list[int], Tensor] | None
    arrived: Event


class AdmissionReports:
    """Copies what layers write to the host, in one tensor so that it is one copy, and counts it there.

    Args:
        slots: number of slots.
        offering: learns from each report.
        compute: the stream that runs the model.
        path: name of the store in the counters.

    Attributes:
        counts, sources, decided: int32 [keys] on the device, by layers: the rows that selected each expert, how it was
            read, and ``counts`` of the pairs that slots are for.
        guesses, places: int32 [keys], by what names experts ahead of need; owner: int32 [slots], by both.
        pauses: logs when reads ahead pause; None: there are none, and no guesses.
        on_report: called with what each report says, if given.
    """

    def __init__(
        self,
        shape: MoEShape,
        slots: int,
        offering: Offering,
        counters: Counters,
        compute: Stream,
        path: str,
        device: torch.device,
    ) -> None:
        self._shape, self._offering, self._path = shape, offering, path
        self._counters, self._compute = counters, compute
        self._written = torch.zeros(5 * shape.total + slots, dtype=torch.int32, device=device)
        self.counts, self.sources, self.decided, self.guesses, self.places, self.owner = self._parts_of(self._written)
        self._named = self._written[3 * shape.total : 5 * shape.total].fill_(UNUSED)  # guesses and places
        self.sources.fill_(NOWHERE)
        self._tally = torch.zeros((), dtype=torch.int64, device=device)  # hits of steps that send no report
        self._under_way: deque[_Report] = deque()
        self._spare: list[Tensor] = []  # pinned, on the host, for reports to come
        self.pauses: PauseNotice | None = None
        self.on_report: Callable[[Learned], None] | None = None

    def __len__(self) -> int:
        """Number of reports on their way."""
        return len(self._under_way)

    def _parts_of(self, written: Tensor) -> Sequence[Tensor]:
        """Returns a report's counts, sources, decided counts, guesses and places [keys], and the owners [slots]."""
        return written.split([*5 * [self._shape.total], len(written) - 5 * self._shape.total])

    def send(
        self, step: Step | None, known: np.ndarray | None = None, prompt: Sequence[tuple[int, Tensor]] = ()
    ) -> None:
        """Starts the copy of a report to the host.

        Args:
            step: None between steps.
            known: bool [keys], experts that kept their slots in a step that has borrowed the others; None: no step has.
            prompt: layers, and the experts that the last rows of a prompt selected there, int32 [rows, top_k].
        """
        last = None
        if prompt:
            there = torch.stack([ids for _, ids in prompt])
            last = [layer for layer, _ in prompt], _pinned(there)
            self._compute.submit(last[1].copy_, there, True)
        written = self._spare.pop() if self._spare else _pinned(self._written)
        self._compute.submit(written.copy_, self._written, True)
        self._under_way.append(_Report(step, written, known, last, self._compute.record()))
        if self.pauses is not None:
            self._compute.submit(self._named.fill_, UNUSED)

    def count_step(self) -> None:
        """Counts a step on the device, in place of ``send`` where each expert has its slot."""
        self._counters.waves += len(self._shape.layers)
        self._compute.submit(self._count)

    def _count(self) -> None:
        self._tally.add_(torch.count_nonzero(self.counts))

    def count(self) -> None:
        """Counts what has reached the host; for a tally it waits."""
        self.apply()
        if self._offering.residency.slots == self._shape.total:
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
        written = report.written.clone()  # the memory is used again, and a policy may keep what it observed
        counts, sources, decided, guesses, places, owner = (part.numpy() for part in self._parts_of(written))
        guessed = [] if self.pauses is None else [guesses]
        if guessed and report.step is not None and (bounds := report.step.bounds) is not None:
            guessed += [np.where(places < np.repeat(bounds, self._shape.experts), places, UNUSED)]
        generating: np.ndarray | None
        if report.step is None:
            counts, sources, generating = np.zeros_like(counts), np.full_like(sources, UNUSED), None
        elif report.known is not None:
            sources = np.where(counts > 0, np.where(report.known, HIT, STREAMED), UNUSED)
            generating = None if report.step.prompts else counts
        else:
            sources = with_prompts(counts, sources, owner)
            generating = decided if decided.any() else None
        prompt = None
        if report.prompt is not None:
            layers, ids = report.prompt
            by_layer = zip(layers, ids.numpy(), strict=True)
            prompt = selected(by_layer, len(self._shape.layers), self._shape.experts)
        learned = self._offering.learn(
            counts, sources, owner, *guessed, generating=generating, prompt=prompt, between=report.step is None
        )
        nbytes = self._shape.expert_bytes
        self._counters.count_bytes(self._path, learned.admitted * nbytes)
        if self.on_report is not None:
            self.on_report(learned)
        if self.pauses is not None:
            self.pauses.report(learned.judged)
            self._counters.count_bytes(f"{self._path} ahead", learned.ahead * nbytes)
        return learned.streamed


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
