"""An engine's side of its expert workers: which have what, and the rows of one layer after another."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import zmq
from msgspec.structs import replace
from torch import Tensor

from vllm_spac.cpu_kernels.base import Kernel
from vllm_spac.errors import SpacError, StoreError
from vllm_spac.methods.od_moe import inquiries
from vllm_spac.methods.od_moe.division import Assigned, ExpertDivider
from vllm_spac.methods.od_moe.inquiries import WorkerCounts
from vllm_spac.methods.od_moe.layer_call import Forward, LayerCall
from vllm_spac.methods.od_moe.places import Places
from vllm_spac.methods.od_moe.pool import ExpertPool
from vllm_spac.methods.od_moe.roster import ReadyWorker, Recovery, Roster, Shares, name
from vllm_spac.methods.od_moe.wire import (
    Frame,
    FrameError,
    FrameKind,
    Header,
    Ready,
    Service,
    decode,
    encode,
    hint_payload,
)
from vllm_spac.methods.od_moe.worker_link import Busy, WorkerLink, facts
from vllm_spac.storage.base import ExpertStore, allocate

logger = logging.getLogger("vllm.spac")

_JOIN, _AGAIN, _STORE, _FILL = 30.0, 1.0, 60.0, 3600.0  # seconds
_LOCAL_TOKENS = 4  # whose experts of a layer have slots, where rows of lost workers are computed
_MOST_WAITING = 64  # messages that are taken from a worker at once


class Connections:
    """Sessions with the workers of one engine: joined, told what they serve, and tested before they are asked for rows.

    Args:
        places: where the workers are; owned.
        services: what each of them is to serve.
        kernel: computes a row here, with which each worker is tested.
        exact: ``kernel`` gives the same bits in every process; else results may differ by rounding.
    """

    def __init__(
        self, places: Places, services: Sequence[Service], kernel: Kernel, dtype: torch.dtype, exact: bool = True
    ) -> None:
        self.places, self.services, self.dtype = places, list(services), dtype
        self.links: dict[int, WorkerLink] = {}  # of the workers that are connected
        self.ended = threading.Event()  # set when the engine ends: whatever is waited for is given up
        self._kernel, self._exact = kernel, exact
        self._context = zmq.Context()
        self._engine, self._facts = secrets.token_hex(16), facts()
        self._samples: dict[int, inquiries.Sample] = {}

    def open(self) -> None:
        """Connects to every worker; ``SpacError`` if one cannot be reached, or refuses."""
        for worker, address in enumerate(self.places.addresses()[: len(self.services)]):
            self.links[worker] = self._joined(address)

    def held(self, worker: int) -> set[int]:
        """Tells a worker what to serve; returns the keys of the experts that it has."""
        return set(self.links[worker].serve(self.services[worker], _STORE))

    def fill(self) -> list[ReadyWorker]:
        """Has all workers fill their slots, and tests each.

        Raises ``StoreError`` where they cannot, and ``ConfigError`` for one that computes other bits than this process.
        """
        with ThreadPoolExecutor(len(self.links), thread_name_prefix="spac-fill") as pool:
            jobs = [pool.submit(link.ask, FrameKind.FILL, _FILL) for link in self.links.values()]
        tested = []
        for (worker, link), job in zip(self.links.items(), jobs, strict=True):
            if (error := job.exception()) is not None:
                raise StoreError(f"spac: {name(worker)} cannot fill its slots: {error}") from error
            self._samples[worker] = inquiries.sample(link, self.services[worker], worker, self._kernel, self.dtype)
            tested.append(self._tested(worker, link, job.result()))
        return tested

    def bring(self, worker: int) -> ReadyWorker:
        """Returns a worker that was lost, tested; called in the thread of ``Recovery``."""
        service = self.services[worker]
        link = self._link(self.places.again(worker))
        try:
            link.open(_JOIN)
            held = link.serve(service, _STORE)
            if len(held) < len(service.keys):
                raise StoreError(
                    f"spac: {name(worker)} has {len(held)} of its {len(service.keys)} experts; restart the engine to "
                    "pack the others"
                )
            return self._tested(worker, link, link.ask(FrameKind.FILL, _FILL))
        except BaseException:
            link.drop()
            raise

    def end_sessions(self) -> None:
        """Ends the sessions, and the workers that were started for this engine."""
        self.ended.set()
        for link in self.links.values():
            link.close()
        self.links.clear()
        self.places.close()

    def close(self) -> None:
        """Releases zmq's context, once all links are closed."""
        self._context.destroy(linger=200)

    def _link(self, address: str) -> WorkerLink:
        return WorkerLink(self._context, address, self.places.secret, self._facts, self._engine, self.ended)

    def _joined(self, address: str) -> WorkerLink:
        """Returns a session with a worker; waits until it is clear that an engine that had it is gone."""
        end = time.monotonic() + _JOIN
        while True:
            link = self._link(address)
            try:
                link.open(_JOIN)
                return link
            except BaseException as error:
                link.drop()
                if not isinstance(error, Busy) or time.monotonic() > end:
                    raise
            time.sleep(_AGAIN)

    def _tested(self, worker: int, link: WorkerLink, frame: Frame) -> ReadyWorker:
        """Tests a worker whose slots are filled, as ``frame`` says."""
        service, ready = self.services[worker], frame.text(Ready)
        if service.divides and ready.speed is None:
            raise SpacError(f"spac: {name(worker)} does not say how fast it is")
        resident = inquiries.check(link, worker, self._samples[worker], service.digest, self._exact)
        return ReadyWorker(worker, link, ready, resident)


class OwnCopy:
    """All experts on this machine's disk, from which rows of lost workers are computed in this process.

    Args:
        open_store: called once workers of this machine have packed in its folder.
        service: of any worker; its layers and slots count for nothing here.
    """

    def __init__(self, open_store: Callable[[], ExpertStore], service: Service, kernel: Kernel) -> None:
        self._open_store, self._kernel = open_store, kernel
        every = tuple(range(len(service.layers)))
        self._service = replace(service, own_layers=every, slots="auto", hints=False)
        self._store: ExpertStore | None = None
        self._pool: ExpertPool | None = None  # once it was needed

    def open(self, experts: ExpertStore) -> None:
        """Opens the store, and packs what it lacks, for which there must be room; nothing, where workers pack here."""
        self._store = store = self._open_store() if self._store is None else self._store
        missing = [key for key in range(store.shape.total) if not store.holds(key)]
        store.reserve(len(missing))
        tensors = {name: rows[0] for name, rows in allocate(store.shape.tensors, 1, "cpu").items()}
        for key in missing:
            experts.read(key, tensors)
            store.put(key, tensors)

    def run(self, forward: Forward, layer: int, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """As ``ExpertPool.run``."""
        if self._pool is None:
            assert self._store is not None, "opened before anything is served"
            logger.warning("spac: rows of lost workers are computed by this process, from its disk")
            shape = self._store.shape
            few = _LOCAL_TOKENS * shape.top_k * shape.expert_bytes
            self._pool = ExpertPool(self._service, self._store, self._kernel, few)
        return self._pool.run(forward, layer, x, weights, ids)

    def close(self) -> None:
        """Closes the store."""
        if self._pool is not None:
            self._pool.close()
        elif self._store is not None:
            self._store.close()


class WorkerClient:
    """Sends the rows of layers to workers. All methods are called by one thread.

    Args:
        connections, copy: owned.
        size: as in ``division.owners``.
    """

    def __init__(self, connections: Connections, copy: OwnCopy, size: int = 1) -> None:
        services = connections.services
        self.connections, self.copy, self.shape = connections, copy, services[0].shape
        self.roster = Roster(len(services), services[0].digest, size=size)
        mine = [service.own_layers for service in services]
        self._divider = None
        if size > 1:
            message = inquiries.message_seconds(services[0], connections.dtype)
            self._divider = ExpertDivider(len(self.shape.layers), self.shape.experts, mine, message)
        self.slots = 0
        self._counts = WorkerCounts()
        self._recovery = Recovery(connections.bring, connections.ended)
        self._poller = zmq.Poller()

    def fill(self) -> None:
        """Has all workers fill their slots, and admits them; raises as ``Connections.fill``."""
        tested = self.connections.fill()
        self.slots = sum(each.ready.slots for each in tested)
        for each in tested:
            self._admit(each)

    def send_hint(self, step: int, layer: int, experts: np.ndarray) -> None:
        """Names experts that a layer will probably need to the workers that will be asked for it; there is no answer.

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
            self.connections.links[worker].send(encode(header, hint_payload(mine)))

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
        for back in self._recovery.back():
            self._admit(back)
            logger.warning("spac: %s is back", name(back.worker))
        call = LayerCall(self.roster, forward, layer, x, weights, ids, divider=self._divider)
        while not call.done:
            for worker, message in call.outgoing(time.monotonic()):
                if not self.connections.links[worker].send(message):
                    call.remove(worker, "it takes no messages")
            if meanwhile is not None:
                meanwhile()
                meanwhile = None
            for part in call.stranded():
                of_x, of_weights, of_ids = call.rows(part)
                call.add_part(part, self.copy.run(forward, layer, of_x, of_weights, of_ids))
            if not call.done:
                self._wait(call)
                call.cancel_late(time.monotonic())
                self._drop_lost()
        return call.out

    def counts(self) -> dict[str, Any]:
        """Returns counters as plain data, and does not wait for a worker, since layers of running requests would.

        The workers' counters and sizes, summed, and under ``expert_workers`` those of each worker, with its share of
        the rows and whether it is ``present`` (0 or 1). They are what each answered last; it is asked again, for the
        next call (see ``metrics.settled``). One that does not answer stays in; one whose connection ended is out.
        """
        for worker, link in self.connections.links.items():
            for _ in range(_MOST_WAITING):
                if not link.socket.poll(0):
                    break
                self._receive(worker, link.receive())
            if why := link.broken():
                self.roster.remove(worker, why)
            else:
                self._ask(worker, link)
        self._drop_lost()
        each = {
            name(worker): {
                "present": int(self.roster.epoch(worker) is not None),
                **self._counts.of(worker),
                **asdict(share),
            }
            for worker, share in enumerate(self.shares.workers)
        }
        return {**self._counts.total(), "expert_workers": each}

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
        size, first = self.roster.size, dict[int, list[int]]()
        for layer in range(len(self.shape.layers)):
            first.setdefault(self.roster.having(layer)[0], []).append(layer)
        to = {worker: f" to {worker + size - 1}" if size > 1 else "" for worker in first}
        where = "; ".join(f"{name(each)}{to[each]}: layers {_numbers(own)}" for each, own in sorted(first.items()))
        lost = "this process, from its disk"
        if size > 1:
            where += f"; each layer's experts divided among {size}"
            lost = f"the others of its group, then {lost}"
        return f"{self.connections.places.describe()} ({where}; if one is lost: {lost})"

    def close(self) -> None:
        """Leaves the workers, ends those that were started for this engine, and releases everything."""
        self.connections.end_sessions()
        self._recovery.close()  # now: what it may wait for is over
        self.copy.close()
        self.connections.close()

    def _ask(self, worker: int, link: WorkerLink) -> None:
        if (epoch := self.roster.epoch(worker)) is not None:
            self._counts.request(worker, link, epoch, self.roster.sequence())

    def _receive(self, worker: int, parts: Sequence[Any], call: LayerCall | None = None) -> None:
        """Takes a message of a worker: what it counts, or else an answer of ``call``."""
        try:
            frame = decode(parts, self.connections.links[worker].limits)
            if frame.header.kind == FrameKind.COUNTS:
                self._counts.receive(worker, frame)
            elif call is not None:
                call.incoming(worker, frame, time.monotonic())
            else:
                raise FrameError("spac: an answer of a layer that is done")
        except FrameError:
            self.shares.dropped += 1

    def _admit(self, tested: ReadyWorker) -> None:
        worker, link = tested.worker, tested.link
        self.connections.links[worker] = link
        if self._divider is not None:
            assert tested.ready.speed is not None
            self._divider.admit(worker, tested.ready.speed)
            self._divider.observe_resident(worker, tested.resident)
        self._poller.register(link.socket, zmq.POLLIN)
        self._poller.register(link.monitor, zmq.POLLIN)
        self.roster.admit(worker, link.epoch)
        self._ask(worker, link)

    def _drop_lost(self) -> None:
        """Drops the links of workers that are out, and has them brought back."""
        for worker, link in list(self.connections.links.items()):
            if self.roster.epoch(worker) is None:
                logger.warning("spac: %s is lost: %s", name(worker), self.roster.why_out[worker])
                self._poller.unregister(link.socket)
                self._poller.unregister(link.monitor)
                link.drop()
                del self.connections.links[worker]
                self._counts.remove(worker)
                self._recovery.request(worker)

    def _wait(self, call: LayerCall) -> None:
        """Takes what arrives until the next deadline."""
        deadline = call.deadline()
        left = 1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        ready = {socket for socket, _ in self._poller.poll(int(1000 * left) + 1)}
        for worker, link in self.connections.links.items():
            if link.socket in ready:
                self._receive(worker, link.receive(), call)
            if link.monitor in ready and (why := link.broken()):
                call.remove(worker, why)


def _numbers(layers: Sequence[int]) -> str:
    """Returns numbers for a log line, the middle of a long list left out."""
    texts = list(map(str, layers))
    return ", ".join(texts if len(texts) <= 6 else [*texts[:3], "…", texts[-1]])
