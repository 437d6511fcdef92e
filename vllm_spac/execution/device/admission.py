"""Admission with ``plane=pointers``: which missed experts get slots, decided on the device in the layer.

Slots are put on offer between steps (``slot_offers``), and taken in the layers (``vllm_spac.kernels.admit``). The host
hears of it afterwards (``admission_reports``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.residency import NOWHERE
from vllm_spac.core import Step
from vllm_spac.execution.address_table import AddressTable, Kernels
from vllm_spac.execution.base import ExecutionContext
from vllm_spac.execution.device.admission_reports import AdmissionReports, ReportAccount
from vllm_spac.execution.device.slot_offers import OfferUpdates
from vllm_spac.execution.exchange import Stream
from vllm_spac.execution.expert_delivery import ExpertDelivery
from vllm_spac.kernels.types import Experts, Offers, Request
from vllm_spac.recording.metrics import Counters


class Admission:
    """Assigns slots to missed experts: called between steps and in each layer, by one thread.

    One launch precedes the kernel of a layer: it assigns slots to the experts that the layer misses, which the kernel
    copies there as it computes. Everything is ordered by one stream, and the result is reported to the host after the
    step; no call except ``slots`` waits for the device. Where each expert has its slot nothing is decided or reported.
    Slots are for the rows before the first of a prompt: those of prompts would fill them with experts that
    only they need, and read theirs where they are.

    Args:
        memory: slots, host copies and the table.
        compute, copy: the stream that runs the model, and one for copies.

    Attributes:
        counts: int32 [keys] on the device; each layer's launch overwrites its part with the rows that selected each
            expert.
        residency: which expert has which slot, as last reported to the host.
        turn: as of the kernel ``admit``, where something reads ahead in layers.
        reports: what the layers of a step tell the host; ``account``: what they amount to.
        experts: where all are; delivery: has those read that the device cannot address; None: it can address all.
    """

    def __init__(
        self,
        context: ExecutionContext,
        memory: AddressTable,
        counters: Counters,
        compute: Stream,
        copy: Stream,
        kernels: Kernels,
    ) -> None:
        self.shape, slots, self.memory = context.shape, context.slots, memory
        self._compute, self._kernels = compute, kernels
        shape = context.shape
        self.account = ReportAccount(shape.total, slots, counters)
        self.residency = self.account.residency
        made: dict[str, Any] = {"dtype": torch.int32, "device": memory.device}
        reports = AdmissionReports(shape, slots, self.account, counters, compute, context.path, memory.device)
        self.reports, self.counts = reports, reports.counts
        self.experts = Experts(
            torch.full((shape.total,), NOWHERE, **made),
            reports.owner.fill_(NOWHERE),
            memory.addresses,
            memory.hosts,
            torch.from_numpy(memory.slot_addresses).to(memory.device, copy=True),
        )
        # None: each expert has its slot, and nothing is on offer.
        self._updates: OfferUpdates | None = None
        if slots < shape.total:
            settled = len(context.store.settled)
            self._updates = OfferUpdates(context.policy, shape, slots, reports.ending, compute, copy, settled)
        self._served = torch.zeros(1, **made)  # pairs of the step that slots are for: the first ones
        self._served_pairs = 0  # in ``_served``
        self._copies = torch.zeros(1 + 2 * shape.experts, **made)
        self.delivery: ExpertDelivery | None = None
        self.turn: Tensor | None = None

    def finish_fill(self, keys: Sequence[int]) -> None:
        """Called when the slots of these experts have been filled."""
        self._compute.submit(self.write, np.array(keys), self.residency.slot_of[list(keys)].astype(np.int64))

    def write(self, keys: np.ndarray, slots: np.ndarray) -> None:
        """Writes ``keys`` to the table, int64 [n], which are in ``slots``; called on the compute stream."""
        self.memory.write(keys.tolist(), slots.tolist())
        there = self.memory.sent(torch.from_numpy(np.stack([keys, slots])))
        self.experts.slot_of.index_copy_(0, there[0], there[1].int())
        self.experts.owner.index_copy_(0, there[1], there[0].int())

    def evict(self, keys: np.ndarray) -> None:
        """Writes that ``keys``, int64 [n], have no slots; as ``write``, which must name new owners of their slots."""
        there = self.memory.sent(torch.from_numpy(keys))
        self.memory.write_home(there)
        self.experts.slot_of.index_fill_(0, there, NOWHERE)

    def compile(self) -> None:
        """Launches what may be launched between steps, which changes nothing that a step reads."""
        if self._updates is not None:
            self._updates.compile()

    def begin(self, step: Step) -> None:
        """Called before a step is launched."""
        if self._updates is None:
            return
        self.reports.apply()
        pairs = step.leading * self.shape.top_k
        if pairs != self._served_pairs:
            self._compute.submit(self._served.fill_, pairs)
        self._served_pairs = pairs
        self._updates.begin(step.leading > 0)

    def slots(self) -> np.ndarray:
        """Returns int32 [keys], slots or NOWHERE, in the step; waits for those before, whose result the device has."""
        self.reports.wait()
        return self.residency.slot_of

    def begin_layer(self, layer: int, ids: Tensor, weights: Tensor, request: Request | None = None) -> None:
        """Launches what precedes the kernel of a layer, ``ids`` and ``weights`` [T, k]; not called with borrowed slots.

        ``request``: the CPU may compute some of the missed experts, which then get no slots.
        """
        if self._updates is not None:
            state = self.experts, self.offers, self.reports.decided, self.reports.sources, self._copies
            asked = {"request": request, "turn": self.turn}
            given = {name: value for name, value in asked.items() if value is not None}
            self._kernels.admit(ids, weights, layer * self.shape.experts, *state, self._served, **given)

    def far(self, layer: int) -> Tensor:
        """Returns bool on the device: which experts from those of ``layer`` on have no slot, and need no order."""
        far = self.experts.slot_of[layer * self.shape.experts :] < 0
        return far if self.delivery is None else far & self.delivery.near(layer)

    @property
    def offers(self) -> Offers:
        """What is on offer, at fixed addresses; not called where each expert has its slot."""
        assert self._updates is not None
        return self._updates.made.offers

    def end(self, step: Step, known: np.ndarray | None, prompt: Sequence[tuple[int, Tensor]] = ()) -> None:
        """Called after the layers of a step were launched.

        Args:
            known: as of ``AdmissionReports.send``.
            prompt: layers, and the experts that the last rows of a prompt selected there, int32 [rows, top_k].
        """
        if self._updates is None:
            self.reports.count_step()
            return
        self.reports.send(step, known)
        generating, counts = step.leading > 0, None
        if known is not None:  # layers that borrow slots count all rows
            generating, counts = not step.prompts, self.counts
        self._updates.end(generating=generating, counts=counts, prompt=prompt)

    def check_integrity(self) -> None:
        """Checks every invariant, on the host and on the device, for which it waits; raises ``AssertionError``."""
        slot_of, residency = self.slots(), self.residency
        residency.check_integrity()
        slot_there, owner, table, hosts, places = (tensor.cpu().numpy() for tensor in self.experts)
        assert (slot_there == slot_of).all() and (owner == residency.owner).all()
        expected = np.where(slot_of == NOWHERE, hosts, places[:, slot_of])
        assert (table == expected).all(), "a pointer is not where its expert is"
