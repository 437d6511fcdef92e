"""An engine's side of its expert workers: which have what, and the rows of one layer after another."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
import zmq
from torch import Tensor

from vllm_spac.cpu_kernels.base import Kernel
from vllm_spac.errors import SpacError, StoreError
from vllm_spac.methods.od_moe import inquiries
from vllm_spac.methods.od_moe.division import Assigned, ExpertDivider, ProcessorRates
from vllm_spac.methods.od_moe.inquiries import WorkerCounts
from vllm_spac.methods.od_moe.layer_call import Forward, LayerCall
from vllm_spac.methods.od_moe.places import Places
from vllm_spac.methods.od_moe.pool import ExpertPool
from vllm_spac.methods.od_moe.roster import Recovery, Roster, Shares, name
from vllm_spac.methods.od_moe.wire import (
    Frame,
    FrameError,
    FrameKind,
    Header,
    Limits,
    decode,
    encode,
    expert_payload,
    hint_payload,
    stated_kind,
)
from vllm_spac.methods.od_moe.worker_link import Busy, Service, WorkerLink, facts
from vllm_spac.storage.base import ExpertStore

logger = logging.getLogger("vllm.spac")

_LOCAL_TOKENS = 4  # whose experts of a layer have slots, where rows of lost workers are computed
_JOIN, _AGAIN, _STORE, _FILL = 30.0, 1.0, 60.0, 3600.0  # seconds
_ASK_AGAIN = 30.0  # seconds after which a worker that did not say what it counts is asked once more
_MOST_WAITING = 64  # messages that are taken from a worker at once


class WorkerClient:
    """The workers of one engine. All methods are called by one thread.

    Args:
        places: where the workers are; owned.
        copy: all experts on this machine, for rows that no worker can compute; owned, and opened here.
        size: as in ``division.owners``.
        exact: ``kernel`` gives the same bits in every process; else results may differ by rounding.
    """

    def __init__(
        self,
        places: Places,
        services: Sequence[Service],
        kernel: Kernel,
        dtype: torch.dtype,
        copy: Callable[[], ExpertStore],
        size: int = 1,
        exact: bool = True,
    ) -> None:
        self._exact = exact
        self.places, self.services, self.shape = places, list(services), services[0].shape
        self.roster = Roster(len(services), services[0].digest, size=size)
        mine = [service.mine for service in services]
        self._divider = None if size == 1 else ExpertDivider(len(self.shape.layers), self.shape.experts, mine)
        self._message = 0.0 if self._divider is None else inquiries.message_seconds(services[0], dtype)
        # Of each worker that has filled its slots; none where nothing is divided.
        self._rates: dict[int, ProcessorRates] = {}
        self.slots = 0
        self._kernel, self._dtype, self._open_copy = kernel, dtype, copy
        self._copy: ExpertStore | None = None
        self._pool: ExpertPool | None = None  # of the copy, once it was needed
        self._limits = Limits()
        self._context = zmq.Context()
        self._engine, self._facts = secrets.token_hex(16), facts()
        self._links: dict[int, WorkerLink] = {}
        self._held: dict[int, set[int]] = {}
        self._samples: dict[int, inquiries.Sample] = {}
        self._resident: dict[int, np.ndarray] = {}  # of each worker at its last test
        self._counts = WorkerCounts()
        self._asked: dict[int, tuple[int, float]] = {}  # of a worker that is to say what it counts: sequence, and when
        self._ended = threading.Event()
        self._recovery = Recovery(self._bring, self._ended)
        self._poller = zmq.Poller()

    # -- before anything is served -------------------------------------------------------------------------

    def open(self) -> None:
        """Connects to every worker and learns which experts it has.

        Raises:
            SpacError: one cannot be reached, or refuses.
        """
        for worker, address in enumerate(self.places.addresses()[: len(self.services)]):
            link = self._links[worker] = self._joined(address)
            self._held[worker] = set(link.serve(self.services[worker], _STORE))

    def refresh(self) -> None:
        """Asks again which experts each worker has: a damaged file is found when it is read."""
        for worker, link in self._links.items():
            self._held[worker] = set(link.serve(self.services[worker], _STORE))

    def holds(self, key: int) -> bool:
        """Whether every worker that serves the layer of expert ``key`` has it."""
        return all(key in self._held[worker] for worker in self._having(key))

    def put(self, key: int, tensors: Mapping[str, Tensor]) -> None:
        """Stores an expert at the workers that serve its layer; raises ``StoreError`` if one could not."""
        payload = expert_payload(self.shape, tensors)
        for worker in self._having(key):
            if key not in self._held[worker]:
                try:
                    self._links[worker].ask(FrameKind.PUT, _STORE, payload, layer=key)
                except SpacError as error:
                    raise StoreError(f"spac: {name(worker)} did not store expert {key}: {error}") from error
                self._held[worker].add(key)

    def drop(self, key: int) -> None:
        """Has the workers remove an expert whose content is wrong; raises ``StoreError`` if one does not."""
        for worker in self._having(key):
            try:
                self._links[worker].ask(FrameKind.DROP, _STORE, layer=key)
            except SpacError as error:
                raise StoreError(f"spac: {name(worker)} did not drop expert {key}: {error}") from error
            self._held[worker].discard(key)

    def fetch(self, key: int) -> dict[str, Tensor]:
        """Returns the tensors of an expert, from a worker that has it; raises ``StoreError`` if none gives it."""
        worker = self._having(key)[0]
        try:
            return self._links[worker].ask(FrameKind.FETCH, _STORE, layer=key).expert(self.shape)
        except (SpacError, KeyError) as error:
            raise StoreError(f"spac: {name(worker)} did not give expert {key}: {error}") from error

    def fill(self) -> None:
        """Has all workers fill their slots, tests each, and admits it.

        Raises:
            StoreError: an expert could not be read.
            ConfigError: the slots do not fit, or a worker computes other bits than this process.
        """
        with ThreadPoolExecutor(len(self._links), thread_name_prefix="spac-fill") as pool:
            jobs = [pool.submit(link.ask, FrameKind.FILL, _FILL) for link in self._links.values()]
        self.slots = 0
        for worker, job in zip(self._links, jobs, strict=True):
            if (error := job.exception()) is not None:
                raise StoreError(f"spac: {name(worker)} cannot fill its slots: {error}") from error
            self.slots += self._filled(worker, job.result())
        for worker, link in self._links.items():
            self._samples[worker] = inquiries.sample(link, self.services[worker], worker, self._kernel, self._dtype)
            self._check(worker, link)
            self._admit(worker, link)
        self._copy = self._completed(self._open_copy())

    # -- serving -------------------------------------------------------------------------------------------

    def hint(self, step: int, layer: int, experts: np.ndarray) -> None:
        """Tells the workers that will be asked for a layer which experts they will probably need; there is no answer.

        Args:
            step: number of the forward in which the layer runs next.
            experts: int [n], the likeliest first.
        """
        if not (group := self.roster.owners(layer)):
            return
        whole = [Assigned(group[0], experts)]
        for worker, mine in whole if self._divider is None else self._divider.expect(layer, experts, group):
            epoch = self.roster.epoch(worker)
            assert epoch is not None, "it is in"
            header = Header(
                FrameKind.HINT, epoch, step, self.roster.sequence(), layer, top_k=len(mine),
                fingerprint=self.roster.fingerprint,
            )  # fmt: skip
            self._links[worker].send(encode(header, hint_payload(mine)))

    def compute(
        self,
        forward: Forward,
        layer: int,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        meanwhile: Callable[[], object] | None = None,
    ) -> Tensor:
        """Computes rows of a layer at its workers; returns [rows, hidden] like ``x``.

        Args:
            x: [rows, hidden] on the CPU.
            weights: [rows, top_k].
            ids: int [rows, top_k], experts of the layer.
            meanwhile: called once, while workers compute.

        Raises:
            StoreError: no worker could compute them, and this process cannot read their experts.
        """
        for worker, link in self._recovery.back():
            self._admit(worker, link)
            logger.warning("spac: %s is back", name(worker))
        call = LayerCall(self.roster, forward, layer, x, weights, ids, self._limits, divider=self._divider)
        while not call.done:
            for worker, message in call.outgoing(time.monotonic()):
                if not self._links[worker].send(message):
                    call.gone(worker, "it takes no messages")
            if meanwhile is not None:
                meanwhile()
                meanwhile = None
            for part in call.stranded():
                call.computed(part, self._elsewhere(call, part))
            if not call.done:
                self._wait(call)
                call.expire(time.monotonic())
                self._let_go()
        return call.out

    def counts(self) -> dict[str, Any]:
        """Returns counters as plain data, and does not wait for a worker, since layers of running requests would.

        The workers' counters and sizes, summed, and under ``expert_workers`` those of each worker, with its ``Share``
        of the rows and whether it is ``present`` (0 or 1). They are what each said last; it is asked to say it again,
        for the next call (see ``metrics.settled``). One that does not answer stays in; one whose connection ended is
        out, as it is for the next layer.
        """
        for worker, link in self._links.items():
            for _ in range(_MOST_WAITING):
                if not link.socket.poll(0):
                    break
                self._hear(worker, link.receive())
            if why := link.broken():
                self.roster.remove(worker, why)
            else:
                self._ask(worker, link)
        self._let_go()
        each = {name(worker): self._of(worker) for worker in range(len(self.services))}
        return {**self._counts.total(), "expert_workers": each}

    def _ask(self, worker: int, link: WorkerLink) -> None:
        """Asks a worker what it counts, unless it is to say so already."""
        now, epoch = time.monotonic(), self.roster.epoch(worker)
        if epoch is None or now - self._asked.get(worker, (0, -_ASK_AGAIN))[1] < _ASK_AGAIN:
            return
        sequence = self.roster.sequence()
        if link.send(encode(Header(FrameKind.STATS, epoch, sequence=sequence))):
            self._asked[worker] = sequence, now

    def _hear(self, worker: int, parts: Sequence[Any], call: LayerCall | None = None) -> None:
        """Takes a message of a worker; what is no answer to ``_ask`` is for ``call``."""
        if stated_kind(parts) != FrameKind.COUNTS:
            if call is not None:
                call.incoming(worker, parts, time.monotonic())
            else:
                self.shares.dropped += 1
            return
        try:
            frame = decode(parts, self._limits)
            sequence, asked = self._asked.get(worker, (0, 0.0))
            if (frame.header.epoch, frame.header.sequence) != (self.roster.epoch(worker), sequence):
                raise FrameError("spac: an answer to nobody")
            self._counts.told(worker, frame.text(), asked)
            del self._asked[worker]
        except FrameError:
            self.shares.dropped += 1

    def _of(self, worker: int) -> dict[str, Any]:
        """Returns what is known of a worker."""
        present = int(self.roster.epoch(worker) is not None)
        return {"present": present, **self._counts.of(worker), **asdict(self.shares.workers[worker])}

    @property
    def divides(self) -> bool:
        """Whether a layer's experts are divided among several workers, and results are exact up to rounding."""
        return self._divider is not None

    @property
    def shares(self) -> Shares:
        """What became of the rows."""
        return self.roster.shares

    def describe(self) -> str:
        """Returns which layers are where, for the start-up line."""
        first: dict[int, list[int]] = {}
        for layer in range(len(self.shape.layers)):
            first.setdefault(self.roster.having(layer)[0], []).append(layer)
        ends = {worker: worker + self.roster.size - 1 for worker in first}
        named = {worker: name(worker) if end == worker else f"{name(worker)} to {end}" for worker, end in ends.items()}
        where = "; ".join(f"{named[worker]}: layers {_numbers(layers)}" for worker, layers in sorted(first.items()))
        lost = "this process, from its disk"
        if self.roster.size > 1:
            where += f"; each layer's experts divided among {self.roster.size}"
            lost = f"the others of its group, then {lost}"
        return f"{self.places.describe()} ({where}; if one is lost: {lost})"

    def close(self) -> None:
        """Leaves the workers, ends those that were started for this engine, and releases everything."""
        self._ended.set()
        for link in self._links.values():
            link.close()
        self._links.clear()
        self.places.close()
        self._recovery.close()  # now: what it may wait for is over
        if self._pool is not None:
            self._pool.close()
        elif self._copy is not None:
            self._copy.close()
        self._context.destroy(linger=200)

    # -- parts ---------------------------------------------------------------------------------------------

    def _having(self, key: int) -> tuple[int, ...]:
        return self.roster.having(self.shape.split(key)[0])

    def _link(self, address: str) -> WorkerLink:
        return WorkerLink(self._context, address, self.places.secret, self._facts, self._engine, self._ended)

    def _joined(self, address: str) -> WorkerLink:
        """Returns a session with a worker; waits until it is clear that an engine that had it is gone."""
        end = time.monotonic() + _JOIN
        while True:
            link = self._link(address)
            try:
                link.join(_JOIN)
                return link
            except BaseException as error:
                link.drop()
                if not isinstance(error, Busy) or time.monotonic() > end:
                    raise
            time.sleep(_AGAIN)

    def _bring(self, worker: int) -> WorkerLink:
        """Returns a tested link to a worker that was lost; called in the thread of ``Recovery``."""
        service = self.services[worker]
        link = self._link(self.places.again(worker))
        try:
            link.join(_JOIN)
            held = link.serve(service, _STORE)
            if len(held) < len(service.keys):
                raise StoreError(
                    f"spac: {name(worker)} has {len(held)} of its {len(service.keys)} experts; restart the engine to "
                    "pack the others"
                )
            self._filled(worker, link.ask(FrameKind.FILL, _FILL))
            self._check(worker, link)
        except BaseException:
            link.drop()
            raise
        return link

    def _check(self, worker: int, link: WorkerLink) -> None:
        self._resident[worker] = inquiries.check(
            link, worker, self._samples[worker], self.roster.fingerprint, self._exact
        )

    def _filled(self, worker: int, ready: Frame) -> int:
        """Takes what a worker says when its slots are filled; returns their number."""
        found = ready.text()
        if self._divider is not None:
            self._rates[worker] = inquiries.rates(worker, found, self._message)
        if type(slots := found.get("slots")) is not int:
            raise SpacError(f"spac: {name(worker)} does not say how many slots it has")
        return slots

    def _admit(self, worker: int, link: WorkerLink) -> None:
        self._links[worker] = link
        if self._divider is not None:
            self._divider.admit(worker, self._rates[worker])
            self._divider.sees(worker, self._resident[worker])
        self._limits = replace(link.limits, served=max(self._limits.served, link.limits.served))
        self._poller.register(link.socket, zmq.POLLIN)
        self._poller.register(link.monitor, zmq.POLLIN)
        self.roster.admit(worker, link.epoch)
        self._ask(worker, link)

    def _let_go(self) -> None:
        """Drops the links of workers that are out, and has them brought back."""
        for worker, link in list(self._links.items()):
            if self.roster.epoch(worker) is None:
                logger.warning("spac: %s is lost: %s", name(worker), self.roster.why_out[worker])
                self._poller.unregister(link.socket)
                self._poller.unregister(link.monitor)
                link.drop()
                del self._links[worker]
                self._counts.lost(worker)
                self._asked.pop(worker, None)
                self._recovery.lost(worker)

    def _wait(self, call: LayerCall) -> None:
        """Takes what arrives until the next deadline."""
        deadline = call.deadline()
        left = 1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        ready = {socket for socket, _ in self._poller.poll(int(1000 * left) + 1)}
        for worker, link in self._links.items():
            if link.socket in ready:
                self._hear(worker, link.receive(), call)
            if link.monitor in ready and (why := link.broken()):
                call.gone(worker, why)

    def _completed(self, copy: ExpertStore) -> ExpertStore:
        """Returns ``copy`` with what it lacks, which is nothing where workers pack on this machine's disk."""
        missing = [key for key in range(self.shape.total) if not copy.holds(key)]
        try:
            copy.reserve(len(missing))
            for key in missing:
                copy.put(key, self.fetch(key))
        except BaseException:
            copy.close()
            raise
        return copy

    def _elsewhere(self, call: LayerCall, part: int) -> Tensor:
        if self._pool is None:
            assert self._copy is not None, "opened before anything is served"
            logger.warning("spac: rows of lost workers are computed by this process, from its disk")
            every = {"mine": tuple(range(len(self.shape.layers))), "slots": "auto", "hints": False}
            service = self.services[0].model_copy(update=every)
            few = _LOCAL_TOKENS * self.shape.top_k * self.shape.expert_bytes
            self._pool = ExpertPool(service, self._copy, self._kernel, few)
        return self._pool.run(call.step, call.layer, *call.rows(part))


def _numbers(layers: Sequence[int]) -> str:
    """Returns numbers for a log line, the middle of a long list left out."""
    texts = list(map(str, layers))
    return ", ".join(texts if len(texts) <= 6 else [*texts[:3], "…", texts[-1]])
