"""Admission with ``plane=pointers``: which missed experts get slots, decided on the device in the layer.

The host side is in ``slot_offers``, the device side in ``vllm_spac.kernels.admit``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.allowance import Allowance, Depths, PauseNotice
from vllm_spac.cache.residency import NOWHERE
from vllm_spac.core import Step, selected
from vllm_spac.execution.address_table import AddressTable, Kernels
from vllm_spac.execution.base import ExecutionContext
from vllm_spac.execution.device.slot_offers import Learned, Offering, with_prompts
from vllm_spac.execution.exchange import Event, Stream
from vllm_spac.kernels.types import HIT, STREAMED, UNUSED, Experts, Offers
from vllm_spac.recording.metrics import Counters

_WORD = 8  # bytes


@dataclass(frozen=True)
class _Report:
    """What a step's layers wrote, in flight to the host; or what was given away between steps, while drafts were made.

    Attributes:
        step: None between steps.
        known: as of ``Admission._known``.
        prompt: layers, and what the last rows of prompts that ran alone selected there, int32 [layers, rows, top_k].
    """

    step: Step | None
    staged: bool
    told: Tensor
    known: np.ndarray | None
    prompt: tuple[list[int], Tensor] | None
    there: Event


class Admission:
    """Assigns slots to missed experts: called between steps and in each layer, by one thread.

    Two launches precede the kernel of a layer: one assigns slots to the experts that it misses, one copies them.
    Everything is ordered by one stream, and the result is reported to the host after the step; no call except ``slots``
    waits for the device. Slots are for the rows before the first of a prompt: those of prompts would fill them with
    experts that only they need, and read theirs where they are. The same two launches for guesses about a layer take
    slots ahead of need: one layer ahead in a step, or of several layers between steps, while drafts are made.

    Args:
        memory: slots, host copies and the table.
        compute: the stream that runs the model.

    Attributes:
        counts: int32 [keys] on the device; each layer's launch overwrites its part with the rows that selected each
            expert.
        places: int32 [layers, N] on the device; what is named of each layer ahead of need writes the places there, -1
            for experts that are not named.
        residency: which expert has which slot, as last reported to the host.
        on_report: called with what each step's report says, if given.
    """

    def __init__(
        self, context: ExecutionContext, memory: AddressTable, counters: Counters, compute: Stream, kernels: Kernels
    ) -> None:
        self.shape, slots, self.memory = context.shape, context.slots, memory
        self._counters, self._compute, self._kernels, self._path = counters, compute, kernels, context.path
        shape, self._holds_all = context.shape, slots == context.shape.total
        self._reports: deque[_Report] = deque()
        self.offering = Offering(shape.total, shape.experts, slots, context.policy, counters)
        self.residency = self.offering.residency
        made: dict[str, Any] = {"dtype": torch.int32, "device": memory.device}
        # What a step's layers tell the host, in one tensor so that it is one copy.
        self._told = torch.zeros(5 * shape.total + slots, **made)
        # ``_decided``: ``counts`` of the pairs that slots are for
        self.counts, self._sources, self._decided, self._guesses, places, owner = self._parts_of(self._told)
        self.places = places.view(-1, shape.experts)
        self._named = self._told[3 * shape.total : 5 * shape.total].fill_(UNUSED)  # guesses and places
        self._sources.fill_(NOWHERE)
        self._spare: list[Tensor] = []  # pinned, on the host, for reports to come
        self._experts = Experts(
            torch.full((shape.total,), NOWHERE, **made),
            owner.fill_(NOWHERE),
            memory.addresses,
            memory.hosts,
            torch.from_numpy(memory.slot_addresses).to(memory.device, copy=True),
        )
        # The host's offers for a step, in one tensor so that they are one copy. Floats are stored as their bits.
        self._parts = [2, *[slots] * 3, shape.total]
        self._said = torch.zeros(sum(self._parts), **made)
        state, places, owners, kept, used = self._said.split(self._parts)
        self._offers = Offers(state, places, owners, kept.view(torch.float32), used.view(torch.float32))
        self._served = torch.zeros(1, **made)  # pairs of the step that slots are for: the first ones
        self._served_pairs = 0  # in ``_served``
        self._copies = torch.zeros(1 + 2 * shape.experts, **made)
        self._words = torch.tensor([size // _WORD for size in memory.sizes], **made)
        self.on_report: Callable[[Learned], None] | None = None
        self._guessed: Tensor | None = None  # int32 [keys], sources by the guesses of the step; None: none are made
        self._listed = 0  # slots that the host sent for the step, on offer or not
        # What a step leaves to the drafts after it, beside ``_offers``; None: drafts name nothing.
        self._between: Offers | None = None
        self._found = torch.zeros(0, **made)  # int32 [keys], as ``sources``, by drafts
        self._most = 0  # reads ahead while drafts are made

    def _parts_of(self, told: Tensor) -> Sequence[Tensor]:
        """Returns a report's counts, sources, decided counts, guesses and places [keys], and the owners [slots]."""
        return told.split([*5 * [self.shape.total], len(told) - 5 * self.shape.total])

    def assign(self, key: int) -> int:
        """Assigns a free slot to ``key``, which has none, to be filled before any kernel runs; returns it."""
        ((_, slot),) = self.residency.prepare([key]).loads
        self.residency.release([key])
        return slot

    def filled(self, keys: Sequence[int]) -> None:
        """Called when the slots of these experts have been filled."""
        for key in keys:
            self.residency.loaded(key)
        self._compute.submit(self._write_owners, keys, self.residency.slot_of[list(keys)].tolist())

    def _write_owners(self, keys: Sequence[int], slots: Sequence[int]) -> None:
        self.memory.point(keys, slots)
        there = self.memory.sent(torch.tensor([list(keys), list(slots)]))
        self._experts.slot_of.index_copy_(0, there[0], there[1].int())
        self._experts.owner.index_copy_(0, there[1], there[0].int())

    def begin(self, step: Step) -> None:
        """Called before a step is launched."""
        self.take()
        pairs = step.leading * self.shape.top_k
        if pairs != self._served_pairs:
            self._compute.submit(self._served.fill_, pairs)
        self._served_pairs = pairs
        drafts = self._between is not None
        if self._holds_all or not (step.leading or drafts):
            return
        offered = self.offering.offer(every=drafts)
        self._listed = len(offered.slots)
        said = torch.zeros(self._said.shape, dtype=torch.int32, pin_memory=self._said.is_cuda)
        state, *places, used = said.split(self._parts)
        state[1] = offered.to_layers if step.leading else 0
        for place, values in zip((*places, used), offered[:-1], strict=True):
            place[: len(values)] = torch.from_numpy(values.view(np.int32))
        self._compute.submit(self._said.copy_, said, True)

    def slots(self) -> np.ndarray:
        """Returns int32 [keys], the slot of each expert in the step; NOWHERE for none.

        Waits for the steps that were launched, because only the device has their result.
        """
        if self._reports:
            self._reports[-1].there.wait()
            self.take()
        return self.residency.slot_of

    def enter(self, layer: int, ids: Tensor, weights: Tensor, decided: Callable[[], None] | None = None) -> None:
        """Launches what precedes the kernel of a layer; not called for staged layers.

        Args:
            ids, weights: as in ``PointerExecution.run``.
            decided: launches what follows the decision and need not wait for the copies.
        """
        if not self._holds_all:
            self._admit(layer, ids, weights, self._sources, self._served, decided)

    @property
    def decisions(self) -> dict[str, Tensor]:
        """Returns ``used``, ``counts`` and ``sources``, as in ``kernels.mailbox.post``."""
        return {"used": self._offers.used, "counts": self.counts, "sources": self._sources}

    def read_ahead(self, extra: float, prefetch: str) -> None:
        """``ahead`` may be called from now on; called before any step.

        Args:
            extra: as in ``Allowance``.
            prefetch: the predictor's name, for the log.
        """
        self.offering.allowance, self._pauses = Allowance(extra), PauseNotice(prefetch)
        self.offering.depths = Depths(len(self.shape.layers), self.shape.experts, extra)
        self._guessed = self._guesses

    def read_between(self, extra: float, prefetch: str, most: int) -> None:
        """``drafted`` may be called from now on; called before any step.

        Args:
            extra, prefetch: as of ``read_ahead``.
            most: reads from the end of a step to the next one.
        """
        self.read_ahead(extra, prefetch)
        self._most, self._found = most, torch.full_like(self._sources, UNUSED)
        state, kept, used, offers = torch.zeros_like(self._offers.state), *self._offers[3:], self._offers
        # A slot is worth nothing to its owner beside what drafts name, as to a prefetcher on the host.
        self._between = Offers(state, offers.slots, offers.owners, torch.zeros_like(kept), torch.ones_like(used))

    @property
    def ahead_left(self) -> int:
        """How many more experts may be read ahead of need; as of the last report."""
        return 0 if self.offering.allowance is None else self.offering.allowance.left

    def read_of(self, bounds: Sequence[int] | None) -> list[int]:
        """Returns how many names of each layer are read, the likeliest first; ``bounds``: as of ``Step``."""
        depths = self.offering.depths
        if bounds is None or depths is None:
            return [self.shape.experts] * len(self.shape.layers)
        return np.minimum(bounds, depths.depths).tolist()

    def ahead(self, layer: int, ids: Tensor, named: Tensor) -> None:
        """Launches what gives slots to experts before their layer runs, on the calling stream; see ``DeviceLookahead``.

        Args:
            layer: the layer after one that was entered.
            ids: int32 [1, N], the experts of ``layer``.
            named: float32 [1, N], 0 for those that are not expected.
        """
        assert self._guessed is not None
        self._admit(layer, ids, named, self._guessed, None)

    def drafted(self, first: int, ids: Tensor, live: Tensor, copies: Tensor) -> None:
        """Launches what gives slots to the experts of some layers that drafts name, between steps, as ``ahead``.

        Args:
            first: the first layer.
            ids: int32 [rows, n], the number of each expert behind the first one of that layer; -1 for none.
            copies: int32 [1 + 2 N] on the device, where N is the number of experts of these layers.
        """
        assert self._guessed is not None and self._between is not None
        weights, key = ids.new_ones(ids.shape, dtype=torch.float32), first * self.shape.experts
        given = self._experts, self._between, self._decided, self._found, copies
        self._kernels.admit(ids, weights, key, *given, live)
        here = slice(key, key + len(copies) // 2)
        torch.maximum(self._guessed[here], self._found[here], out=self._guessed[here])  # ADMITTED is the greatest
        self._kernels.fetch(copies, self._experts, self._words)

    def end_drafts(self) -> None:
        """Called after drafts were made for which ``drafted`` was called, before the step that verifies them."""
        self._report(None)

    def _admit(
        self,
        layer: int,
        ids: Tensor,
        weights: Tensor,
        sources: Tensor,
        live: Tensor | None,
        decided: Callable[[], None] | None = None,
    ) -> None:
        first = layer * self.shape.experts
        given = self._experts, self._offers, self._decided, sources, self._copies
        self._kernels.admit(ids, weights, first, *given, live)
        if decided is not None:
            decided()
        self._kernels.fetch(self._copies, self._experts, self._words)

    def end(self, step: Step, *, staged: bool, prompt: Sequence[tuple[int, Tensor]] = ()) -> None:
        """Called after the layers of a step were launched; starts the copy of its report to the host.

        Args:
            step: the step.
            staged: whether some layers read their missing experts from buffers.
            prompt: layers, and the experts that the last rows of a prompt selected there, int32 [rows, top_k].
        """
        last = None
        if prompt:
            there = torch.stack([ids for _, ids in prompt])
            last = [layer for layer, _ in prompt], _pinned(there)
            self._compute.submit(last[1].copy_, there, True)
        self._report(step, staged, last)
        if self._between is not None:
            self._compute.submit(self._leave, self._between.state, self._listed, min(self._most, self.ahead_left))
        self._listed = 0
        self._compute.submit(self._offers.state.zero_)  # no offers to other layers outside of steps

    def _leave(self, state: Tensor, listed: int, most: int) -> None:
        """Leaves the next offers of those that are ``listed``, at most ``most``, to the drafts that follow."""
        state.copy_(self._offers.state[:1].expand(2))
        state[1:].add_(most).clamp_(max=listed)

    def _report(
        self,
        step: Step | None,
        staged: bool = False,
        prompt: tuple[list[int], Tensor] | None = None,
    ) -> None:
        """Starts the copy of a report to the host; arguments as of ``_Report``."""
        told = self._spare.pop() if self._spare else _pinned(self._told)
        self._compute.submit(told.copy_, self._told, True)
        known, there = self._known(staged), self._compute.record()
        self._reports.append(_Report(step, staged, told, known, prompt, there))
        if self._guessed is not None:
            self._compute.submit(self._named.fill_, UNUSED)

    def take(self) -> None:
        """Applies the reports of steps that have reached the host; does not wait."""
        while self._reports and self._reports[0].there.done():
            report = self._reports.popleft()
            missed = self._learn(report)
            self._spare.append(report.told)
            if report.step is None:
                continue
            if not report.staged:
                self._counters.moved(f"{self._path} streamed", missed * self.shape.expert_bytes)
            self._counters.waves += len(self.shape.layers)

    def check_integrity(self) -> None:
        """Checks every invariant, on the host and on the device, for which it waits; raises ``AssertionError``."""
        slot_of, residency = self.slots(), self.residency
        residency.check_integrity()
        told, owner, table, hosts, places = (tensor.cpu().numpy() for tensor in self._experts)
        assert (told == slot_of).all() and (owner == residency.owner).all()
        expected = np.where(slot_of == NOWHERE, hosts, places[:, slot_of])
        assert (table == expected).all(), "a pointer is not where its expert is"

    def _known(self, staged: bool) -> np.ndarray | None:
        """Returns bool [keys], experts with a slot in the step, if it was staged or every expert has one; else None.

        The layers of such a step launch no admission. A staged step has waited for the device, so the host's state is
        up to date.
        """
        return self.residency.slot_of != NOWHERE if staged or self._holds_all else None

    def _learn(self, report: _Report) -> int:
        """Applies the report of a finished step and counts hits and misses.

        Returns:
            Number of experts that the step read from host memory without giving them a slot.
        """
        told = report.told.clone()  # the memory is used again, and a policy may keep what it observed
        counts, sources, decided, guesses, places, owner = (part.numpy() for part in self._parts_of(told))
        guessed = [] if self._guessed is None else [guesses]
        if guessed and report.step is not None and (bounds := report.step.bounds) is not None:
            guessed += [np.where(places < np.repeat(bounds, self.shape.experts), places, UNUSED)]
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
            found = zip(layers, ids.numpy(), strict=True)
            prompt = selected(found, len(self.shape.layers), self.shape.experts)
        learned = self.offering.learn(
            counts,
            sources,
            owner,
            *guessed,
            generating=generating,
            prompt=prompt,
            between=report.step is None,
        )
        nbytes = self.shape.expert_bytes
        self._counters.moved(self._path, learned.admitted * nbytes)
        if self.on_report is not None:
            self.on_report(learned)
        if guessed:
            self._pauses.report(learned.judged)
            self._counters.moved(f"{self._path} ahead", learned.ahead * nbytes)
        return learned.streamed


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
