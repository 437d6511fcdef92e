"""Admission in the layer that misses an expert, before it computes: one transfer per expert, decided on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.allowance import Allowance, PauseNotice
from vllm_spac.cache.residency import NOWHERE, Residency
from vllm_spac.core import Step
from vllm_spac.execution.admission import Admission, Parts
from vllm_spac.execution.slot_offers import Offering, with_prompts
from vllm_spac.kernels.types import HIT, STREAMED, UNUSED, Experts, Offers

_WORD = 8  # bytes


class InLayers(Admission[np.ndarray | None]):
    """Two launches before the kernel of a layer: one assigns slots to the experts that it misses, one copies them.

    The host side is in ``slot_offers``, the device side in ``vllm_spac.kernels.admit``. Everything is ordered by one
    stream; the result is reported to the host after the step. Slots are for the rows before the first of a prompt:
    those of prompts would fill them with experts that only they need, and read theirs where they are. The same two
    launches for guesses about a layer take slots ahead of need.
    """

    looks_ahead: ClassVar[bool] = True

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        shape, memory, device = parts.shape, parts.memory, parts.memory.device
        self.offering = Offering(shape.total, parts.slots, parts.policy, parts.counters)
        made: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._experts = Experts(
            torch.full((shape.total,), NOWHERE, **made),
            torch.full((parts.slots,), NOWHERE, **made),
            memory.addresses,
            memory.hosts,
            torch.from_numpy(memory.slot_addresses).to(device, copy=True),
        )
        # The host's offers for a step, in one tensor so that they are one copy. Floats are stored as their bits.
        self._said = torch.zeros(2 + 3 * parts.slots + shape.total, **made)
        state, slots, owners, kept, used = self._said.split([2, *[parts.slots] * 3, shape.total])
        self._offers = Offers(state, slots, owners, kept.view(torch.float32), used.view(torch.float32))
        self._sources = torch.full((shape.total,), NOWHERE, **made)
        self._served = torch.zeros(1, **made)  # pairs of the step that slots are for: the first ones
        self._served_pairs = 0  # in ``_served``
        self._decided = torch.zeros_like(self.counts)  # ``counts`` of these pairs only
        self._copies = torch.zeros(1 + 2 * shape.experts, **made)
        self._words = torch.tensor([size // _WORD for size in memory.sizes], **made)
        self._guessed: Tensor | None = None  # int32 [keys], sources by the guesses of the step; None: none are made

    @property
    def residency(self) -> Residency:
        return self.offering.residency

    @property
    def _holds_all(self) -> bool:
        return self.parts.slots == self.parts.shape.total

    def seat(self, key: int) -> int:
        ((_, slot),) = self.residency.prepare([key]).loads
        self.residency.release([key])
        return slot

    def seated(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.residency.loaded(key)
        slots = self.residency.slot_of[list(keys)]
        self.parts.compute.submit(self.parts.memory.point, keys, slots)
        self.parts.compute.submit(self._tell_slots)

    def _tell_slots(self) -> None:
        self._experts.slot_of.copy_(torch.from_numpy(self.residency.slot_of))
        self._experts.owner.copy_(torch.from_numpy(self.residency.owner))

    def read_ahead(self, extra: float, prefetch: str) -> None:
        self.offering.allowance, self._pauses = Allowance(extra), PauseNotice(prefetch)
        self._guessed = torch.full_like(self._sources, UNUSED)

    @property
    def ahead_left(self) -> int:
        return 0 if self.offering.allowance is None else self.offering.allowance.left

    def ahead(self, layer: int, ids: Tensor, live: Tensor) -> None:
        assert self._guessed is not None
        first, kernels, weights = (
            layer * self.parts.shape.experts,
            self.parts.kernels,
            ids.new_ones(ids.shape, dtype=torch.float32),
        )
        given = self._experts, self._offers, self._decided, self._guessed, self._copies
        kernels.admit(ids, weights, first, *given, live)
        kernels.fetch(self._copies, self._experts, self._words)

    def begin(self, step: Step) -> None:
        self.take()
        if self._guessed is not None:
            self.parts.compute.submit(self._guessed.fill_, UNUSED)
        pairs = step.leading * self.parts.shape.top_k
        if pairs != self._served_pairs:
            self.parts.compute.submit(self._served.fill_, pairs)
        self._served_pairs = pairs
        if self._holds_all or not step.leading:
            return
        offered = self.offering.offer()
        said = torch.zeros(self._said.shape, dtype=torch.int32, pin_memory=self._said.is_cuda)
        state, *places, used = said.split([2, *[self.parts.slots] * 3, self.parts.shape.total])
        state[1] = len(offered.slots)
        for place, values in zip((*places, used), offered, strict=True):
            place[: len(values)] = torch.from_numpy(values.view(np.int32))
        self.parts.compute.submit(self._said.copy_, said, True)

    def slots(self) -> np.ndarray:
        """As in ``Admission``; waits for the steps that were launched, because only the device has their result."""
        if self._reports:
            self._reports[-1].there.wait()
            self.take()
        return self.residency.slot_of

    def enter(self, layer: int, ids: Tensor, weights: Tensor, live: Tensor) -> None:
        if not self._holds_all:
            first = layer * self.parts.shape.experts
            kernels, copies = self.parts.kernels, self._copies
            given = self._experts, self._offers, self._decided, self._sources, copies
            kernels.admit(ids, weights, first, *given, self._served)
            kernels.fetch(copies, self._experts, self._words)

    def end(self, step: Step, *, staged: bool) -> None:
        super().end(step, staged=staged)
        self.parts.compute.submit(self._offers.state.zero_)  # no offers outside of steps

    def check_integrity(self) -> None:
        """As in ``Admission``, including the state of the device, for which it waits."""
        slot_of = self.slots()
        super().check_integrity()
        told, owner, table, hosts, places = (tensor.cpu().numpy() for tensor in self._experts)
        assert (told == slot_of).all() and (owner == self.residency.owner).all()
        expected = np.where(slot_of == NOWHERE, hosts, places[:, slot_of])
        assert (table == expected).all(), "a pointer is not where its expert is"

    def _tells(self) -> Sequence[Tensor]:
        guessed = [] if self._guessed is None else [self._guessed]
        return [self.counts, self._sources, self._experts.owner, self._decided, *guessed]

    def _known(self, staged: bool) -> np.ndarray | None:
        """Returns bool [keys], experts with a slot in the step, if it was staged or every expert has one; else None.

        The layers of such a step launch no admission. A staged step has waited for the device, so the host's state is
        up to date.
        """
        return self.residency.slot_of != NOWHERE if staged or self._holds_all else None

    def _learn(self, told: Sequence[np.ndarray], known: np.ndarray | None, *, prompts: bool) -> int:
        counts, sources, owner, decided, *guessed = told
        if known is not None:
            sources = np.where(counts > 0, np.where(known, HIT, STREAMED), UNUSED)
            generating = None if prompts else counts
        else:
            sources = with_prompts(counts, sources, owner)
            generating = decided if decided.any() else None
        learned = self.offering.learn(counts, sources, owner, *guessed, generating=generating)
        nbytes = self.parts.shape.expert_bytes
        self.parts.counters.moved(self.parts.path, learned.admitted * nbytes)
        if guessed:
            self._pauses.tell(learned.judged)
            self.parts.counters.moved(f"{self.parts.path} ahead", learned.ahead * nbytes)
        return learned.streamed
