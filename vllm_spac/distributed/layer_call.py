"""One layer computed by workers, as a protocol without sockets: what to send, and which answers count.

Rows are sent whole, with all their experts, in parts of consecutive rows. Each part is computed once: by the layer's
worker, else by a replica, else by this process. The parts of a prompt go to all of the layer's workers (``division``).
An answer counts if it belongs to an open request: the same worker, epoch, step, layer and sequence, and tensors of the
part's sizes. Whatever else arrives is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_spac.distributed import division
from vllm_spac.distributed.roster import Roster, name
from vllm_spac.distributed.wire import (
    HEADER_BYTES,
    Frame,
    FrameError,
    Header,
    Kind,
    Limits,
    decode,
    encode,
    run_payload,
)


@dataclass(eq=False)
class _Part:
    """Consecutive rows.

    Attributes:
        tried: workers that were asked and lost it.
        request: the sequence of its open request, if any.
    """

    rows: slice
    tried: set[int] = field(default_factory=set)
    request: int | None = None
    done: bool = False

    @property
    def count(self) -> int:
        return self.rows.stop - self.rows.start


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
    """The rows of one layer in one forward.

    Args:
        roster: the workers.
        step: the forward.
        layer: number of the layer.
        x: [rows, hidden] on the CPU.
        weights: [rows, top_k] float32.
        ids: int [rows, top_k], experts of the layer.
        limits: the sizes that answers may have.
        part_rows: most rows per part; more rows are divided among the layer's workers.

    Attributes:
        out: [rows, hidden] like ``x``: the output, complete once ``done``.
        reasons: why each worker that was asked did not answer.
    """

    def __init__(
        self,
        roster: Roster,
        step: Forward,
        layer: int,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        limits: Limits,
        part_rows: int = division.PART_ROWS,
    ) -> None:
        self.roster, self.step, self.layer = roster, step, layer
        self._x, self._weights, self._ids, self._limits = x, weights, ids, limits
        self.out = torch.empty_like(x)
        self.reasons: dict[int, str] = {}
        workers = max(1, len(roster.owners(layer)))
        self._parts = [_Part(rows) for rows in division.parts(len(x), workers, part_rows)]
        self._divided = len(x) > part_rows
        self._open: dict[int, _Request] = {}  # by sequence
        self._heard: dict[int, float] = {}  # when a worker with open requests was sent the first or answered last

    @property
    def done(self) -> bool:
        """Whether every row was computed."""
        return all(part.done for part in self._parts)

    def outgoing(self, now: float) -> list[tuple[int, tuple[bytes, bytes]]]:
        """Returns (worker, message) to send now; the requests are open from here on."""
        found = []
        waiting = [part for part in self._parts if not part.done and part.request is None]
        loads = {worker: self._load(worker) for worker in self.roster.owners(self.layer)}
        chosen = division.sent([(part.count, self._may(part)) for part in waiting], loads, self._divided)
        for part, worker in zip(waiting, chosen, strict=True):
            if worker is None:
                continue
            epoch, sequence = self.roster.epoch(worker), self.roster.sequence()
            assert epoch is not None
            if all(request.worker != worker for request in self._open.values()):
                self._heard[worker] = now
            self._open[sequence] = _Request(part, worker, epoch, now)
            part.request = sequence
            message = self._message(part, epoch, sequence)
            self.roster.asked(worker, sum(map(len, message)))
            found.append((worker, message))
        return found

    def incoming(self, worker: int, parts: Sequence[Any], now: float) -> bool:
        """Takes a message of ``worker``; returns whether it counted."""
        try:
            frame = decode(parts, self._limits)
        except FrameError as error:
            self.reasons[worker] = str(error)
            self.roster.shares.dropped += 1
            return False
        request = self._open.get(frame.header.sequence)
        if request is None or not self._answers(frame.header, worker, request):
            self.roster.shares.dropped += 1
            return False
        if frame.header.kind == Kind.FAILED:
            self._lose(request, frame.header.sequence, frame.why())
            self.roster.failed(worker, self.reasons[worker])
            return False
        return self._take(frame, request, now)

    def gone(self, worker: int, why: str) -> None:
        """The connection to ``worker`` is over: it is asked no more, and its parts are lost."""
        self.roster.remove(worker, why)
        self._lose_all(worker, why)

    def expire(self, now: float) -> None:
        """Gives up requests whose deadline is over."""
        for worker in {request.worker for request in self._open.values()}:
            if now >= self._deadline(worker):
                why = f"no answer for {now - self._heard[worker]:.2f} s"
                self._lose_all(worker, why)
                self.roster.failed(worker, why)

    def deadline(self) -> float | None:
        """When ``expire`` has something to do next; None while nothing is open."""
        return min((self._deadline(worker) for worker in {r.worker for r in self._open.values()}), default=None)

    def stranded(self) -> list[slice]:
        """The rows that no worker is left to compute, for ``computed``."""
        left = [part for part in self._parts if not part.done and part.request is None]
        return [part.rows for part in left if not self._may(part)]

    def rows(self, which: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Returns x, weights and ids of a part."""
        return self._x[which], self._weights[which], self._ids[which]

    def computed(self, rows: slice, out: Tensor) -> None:
        """This process computed a stranded part: ``out`` [rows, hidden]."""
        [part] = [part for part in self._parts if part.rows == rows]
        assert not part.done and part.request is None
        self.out[rows], part.done = out, True
        self.roster.shares.elsewhere += part.count

    def blame(self) -> str:
        """Returns which workers have the layer, and why each did not compute it."""
        why = self.roster.why_out | self.reasons
        having = self.roster.having(self.layer)
        return "; ".join(f"{name(worker)}: {why.get(worker, 'it was lost')}" for worker in having)

    def _may(self, part: _Part) -> list[int]:
        """The workers that may compute ``part``, the one to ask first in front."""
        return [worker for worker in self.roster.owners(self.layer) if worker not in part.tried]

    def _load(self, worker: int) -> division.Load:
        rows = [request.part.count for request in self._open.values() if request.worker == worker]
        return division.Load(len(rows), sum(rows), self.roster.pace(worker))

    def _message(self, part: _Part, epoch: int, sequence: int) -> tuple[bytes, bytes]:
        x, weights, ids = self.rows(part.rows)
        header = Header(
            Kind.RUN, epoch, self.step.number, sequence, self.layer, part.count, x.shape[1], ids.shape[1], x.dtype,
            fingerprint=self.roster.fingerprint, prompts=self.step.prompts,
        )  # fmt: skip
        return encode(header, run_payload(x, weights, ids))

    def _answers(self, header: Header, worker: int, request: _Request) -> bool:
        """Whether a frame belongs to ``request``, and has its part's sizes."""
        same = (worker, header.epoch, header.step, header.layer, header.fingerprint)
        if same != (request.worker, request.epoch, self.step.number, self.layer, self.roster.fingerprint):
            return False
        sizes = (header.kind, header.rows, header.hidden, header.dtype)
        wanted = (Kind.ROWS, request.part.count, self._x.shape[1], self._x.dtype)
        return header.kind == Kind.FAILED or sizes == wanted

    def _take(self, frame: Frame, request: _Request, now: float) -> bool:
        part, worker = request.part, request.worker
        rows = frame.rows()
        if not bool(rows.isfinite().all()) and bool(self._x[part.rows].isfinite().all()):
            self._lose(request, frame.header.sequence, "its answer had NaN or infinities, and the rows had none")
            self.roster.failed(worker, self.reasons[worker])
            return False
        del self._open[frame.header.sequence]
        part.request, part.done = None, True
        self.out[part.rows] = rows
        if self._divided:
            self.roster.paced(worker, part.count, now - self._heard[worker])
        self._heard[worker] = now
        if self._divided and self.done:
            for idle in set(self.roster.owners(self.layer)) - self._heard.keys():
                self.roster.rested(idle)
        self.roster.answered(worker, part.count, now - request.sent, HEADER_BYTES + frame.header.payload)
        return True

    def _lose(self, request: _Request, sequence: int, why: str) -> None:
        del self._open[sequence]
        request.part.request = None
        request.part.tried.add(request.worker)
        self.reasons[request.worker] = why
        self.roster.lost(request.worker, request.part.count)

    def _lose_all(self, worker: int, why: str) -> None:
        for sequence, request in list(self._open.items()):
            if request.worker == worker:
                self._lose(request, sequence, why)

    def _deadline(self, worker: int) -> float:
        rows = max(request.part.count for request in self._open.values() if request.worker == worker)
        if self.roster.epoch(worker) is None:  # removed by another part's failure
            return self._heard[worker]
        return self._heard[worker] + self.roster.patience(worker, rows)
