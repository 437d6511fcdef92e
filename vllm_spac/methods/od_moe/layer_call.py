"""One layer computed by workers, as a protocol without sockets: what to send, and which answers count.

Rows are sent in parts of consecutive rows (``division``). Where a group of workers divides experts
(``ExpertDivider``), a part is the rows' pairs with the experts of one worker, and the results for a row are added. Each
part is computed once: by its worker, else by another one of the group, else by this process. An answer counts if it
belongs to an open request: the same worker, epoch, step, layer and sequence, and tensors of the part's sizes. Whatever
else arrives is dropped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_spac.execution.row_shares import combine
from vllm_spac.methods.od_moe import division
from vllm_spac.methods.od_moe.division import Assigned, ExpertDivider
from vllm_spac.methods.od_moe.roster import Roster
from vllm_spac.methods.od_moe.wire import Frame, FrameKind, Header, encode, run_payload


@dataclass(eq=False)
class _Part:
    """Rows of the layer and their experts, all or those of one worker."""

    rows: slice | Tensor  # those of the layer: consecutive, or int64 [n], ascending
    x: Tensor  # [n, hidden]
    weights: Tensor  # [n, experts per row]
    ids: Tensor  # int like ``weights``; -1, with weight 0, where a row has fewer than others
    first: int | None = None  # the worker to ask first; None: the first one of the layer's group
    tried: set[int] = field(default_factory=set)  # workers that were asked and lost it
    request: int | None = None  # the sequence of its open request, if any
    out: Tensor | None = None  # [n, hidden] like ``x``; None until it was computed

    @property
    def count(self) -> int:
        return len(self.x)

    @property
    def done(self) -> bool:
        return self.out is not None

    @property
    def finite(self) -> Tensor:
        """Whether each row has neither NaN nor infinities, also in its weights: bool [n]."""
        return self.x.isfinite().all(dim=1) & self.weights.isfinite().all(dim=1)


@dataclass(frozen=True)
class _Request:
    part: _Part
    worker: int
    epoch: int
    sent: float


class Forward(NamedTuple):
    """A forward of the model: its number, 0 outside of steps, and whether it has rows of prompts."""

    number: int = 0
    prompts: bool = False


class LayerCall:
    """The rows of one layer in one forward, as of ``WorkerClient.compute``, in parts of at most ``part_rows`` rows.

    ``divider`` divides the experts among the workers of the layer's group; None: rows are computed whole.
    """

    def __init__(
        self,
        roster: Roster,
        step: Forward,
        layer: int,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        part_rows: int = division.PART_ROWS,
        divider: ExpertDivider | None = None,
    ) -> None:
        self.roster, self.step, self.layer = roster, step, layer
        self._like, self._divider = x, divider
        chunks = division.parts(len(x), part_rows)
        self._parts = [_Part(rows, x[rows], weights[rows], ids[rows]) for rows in chunks]
        if divider is not None and (group := roster.owners(layer)):
            self._parts = _shared(self._parts, divider.divide(layer, ids.numpy(), group), ids)
        self._open: dict[int, _Request] = {}  # by sequence
        self._active: dict[int, float] = {}  # when a worker with open requests was sent the first or answered last

    @property
    def done(self) -> bool:
        """Whether every row was computed."""
        return all(part.done for part in self._parts)

    @property
    def out(self) -> Tensor:
        """The layer's output, [rows, hidden] like ``x``, once ``done``.

        Where experts are divided, results of a row are added in float32 in the order of the workers and rounded once.
        """
        whole, shared = [], []
        for part in self._parts:
            assert part.out is not None
            if isinstance(part.rows, slice):
                whole.append(part.out)  # of consecutive rows
            else:
                shared.append((part.rows, part.out))
        return combine(self._like, shared) if shared else torch.cat(whole)

    def outgoing(self, now: float) -> list[tuple[int, tuple[bytes, bytes]]]:
        """Returns (worker, message) to send now; the requests are open from here on."""
        messages = []
        waiting = [part for part in self._parts if not part.done and part.request is None]
        requests = Counter(request.worker for request in self._open.values())
        for part in waiting:
            worker = next(iter(self._may(part)), None)
            if worker is None or requests[worker] >= division.WINDOW:
                continue
            epoch, sequence = self.roster.epoch(worker), self.roster.sequence()
            assert epoch is not None
            if not requests[worker]:
                self._active[worker] = now
            requests[worker] += 1
            self._open[sequence] = _Request(part, worker, epoch, now)
            part.request = sequence
            message = self._message(part, epoch, sequence)
            self.roster.shares.workers[worker].sent_bytes += sum(map(len, message))
            messages.append((worker, message))
        return messages

    def incoming(self, worker: int, frame: Frame, now: float) -> bool:
        """Takes an answer of ``worker``; returns whether it counted."""
        request = self._open.get(frame.header.sequence)
        if request is None or not self._answers(frame.header, worker, request):
            self.roster.shares.dropped += 1
            return False
        if frame.header.kind == FrameKind.FAILED:
            why = frame.why()
            self._lose(request, frame.header.sequence)
            self.roster.observe_failure(worker, why)
            return False
        return self._take(frame, request, now)

    def remove(self, worker: int, why: str) -> None:
        """The connection to ``worker`` is over: it is asked no more, and its parts are lost."""
        self.roster.remove(worker, why)
        self._lose_all(worker)

    def cancel_late(self, now: float) -> None:
        """Gives up requests whose deadline is over."""
        for worker in {request.worker for request in self._open.values()}:
            if now >= self._deadline(worker):
                why = f"no answer for {now - self._active[worker]:.2f} s"
                self._lose_all(worker)
                self.roster.observe_failure(worker, why)

    def deadline(self) -> float | None:
        """When ``cancel_late`` has something to do next; None while nothing is open."""
        return min((self._deadline(worker) for worker in {r.worker for r in self._open.values()}), default=None)

    def stranded(self) -> list[int]:
        """The parts that no worker is left to compute, for ``add_part``."""
        left = [(n, part) for n, part in enumerate(self._parts) if not part.done and part.request is None]
        return [number for number, part in left if not self._may(part)]

    def rows(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns x, weights and ids of a part; ids are -1, with weight 0, where a row has no further expert."""
        part = self._parts[number]
        return part.x, part.weights, part.ids

    def add_part(self, number: int, out: Tensor) -> None:
        """This process computed a stranded part: ``out`` [rows, hidden]."""
        part = self._parts[number]
        assert not part.done and part.request is None
        part.out = out
        self.roster.shares.elsewhere += part.count

    def _may(self, part: _Part) -> list[int]:
        """The workers that may compute ``part``, the one to ask first in front."""
        owners = [worker for worker in self.roster.owners(self.layer) if worker not in part.tried]
        return sorted(owners, key=lambda worker: worker != part.first)

    def _message(self, part: _Part, epoch: int, sequence: int) -> tuple[bytes, bytes]:
        x, top_k = part.x, part.ids.shape[1]
        header = Header(
            FrameKind.RUN, epoch, self.step.number, sequence, self.layer, part.count, x.shape[1], top_k, x.dtype,
            fingerprint=self.roster.fingerprint, prompts=self.step.prompts,
        )  # fmt: skip
        return encode(header, run_payload(x, part.weights, part.ids))

    def _answers(self, header: Header, worker: int, request: _Request) -> bool:
        """Whether a frame belongs to ``request``, and has its part's sizes."""
        same = (worker, header.epoch, header.step, header.layer, header.fingerprint)
        if same != (request.worker, request.epoch, self.step.number, self.layer, self.roster.fingerprint):
            return False
        sizes = (header.kind, header.rows, header.hidden, header.dtype)
        wanted = (FrameKind.ROWS, request.part.count, self._like.shape[1], self._like.dtype)
        served = 0 if self._divider is None else self._divider.served(worker)
        return header.kind == FrameKind.FAILED or (sizes, header.top_k) == (wanted, served)

    def _take(self, frame: Frame, request: _Request, now: float) -> bool:
        part, worker = request.part, request.worker
        rows = frame.rows()
        spoiled = ~rows.isfinite().all(dim=1)
        if bool(spoiled.any()) and bool((spoiled & part.finite).any()):
            self._lose(request, frame.header.sequence)
            self.roster.observe_failure(worker, "its answer had NaN or infinities for a row that had none")
            return False
        del self._open[frame.header.sequence]
        part.request, part.out = None, rows
        if self._divider is not None:
            self._divider.observe_resident(worker, frame.resident())
        self._active[worker] = now
        self.roster.observe_answer(worker, part.count, now - request.sent, frame.nbytes)
        return True

    def _lose(self, request: _Request, sequence: int) -> None:
        del self._open[sequence]
        request.part.request = None
        request.part.tried.add(request.worker)
        share = self.roster.shares.workers[request.worker]
        share.losses, share.rows_lost = share.losses + 1, share.rows_lost + request.part.count

    def _lose_all(self, worker: int) -> None:
        for sequence, request in list(self._open.items()):
            if request.worker == worker:
                self._lose(request, sequence)

    def _deadline(self, worker: int) -> float:
        rows = max(request.part.count for request in self._open.values() if request.worker == worker)
        if self.roster.epoch(worker) is None:  # removed by another part's failure
            return self._active[worker]
        return self._active[worker] + self.roster.patience(worker, rows)


def _shared(parts: list[_Part], shares: list[Assigned], ids: Tensor) -> list[_Part]:
    """Returns ``parts`` of whole rows divided by experts; ``ids`` as of ``LayerCall``."""
    if len(shares) == 1:
        for part in parts:
            part.first = shares[0].worker
        return parts
    masks = [(share.worker, torch.isin(ids, torch.from_numpy(share.experts))) for share in shares]
    return [_pairs(part, worker, mask[part.rows]) for part in parts for worker, mask in masks if mask[part.rows].any()]


def _pairs(part: _Part, worker: int, own: Tensor) -> _Part:
    """Returns the pairs ``own``, bool like ``part.ids``, of the rows that have one, for ``worker``."""
    assert isinstance(part.rows, slice)
    rows = own.any(dim=1).nonzero().flatten()
    own = own[rows]
    order = own.int().argsort(dim=1, descending=True, stable=True)[:, : int(own.sum(dim=1).max())]
    absent = ~own.gather(1, order)
    ids = part.ids[rows].gather(1, order).masked_fill(absent, -1)
    weights = part.weights[rows].gather(1, order).masked_fill(absent, 0)
    return _Part(part.rows.start + rows, part.x[rows], weights, ids, worker)
