"""An expert worker: serves some layers of one engine from a pool of its own, over zmq."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import psutil
import zmq
from msgspec.structs import replace

from vllm_spac.core import MoEShape
from vllm_spac.cpu_kernels.base import Kernel
from vllm_spac.errors import SpacError
from vllm_spac.methods.od_moe import worker_link
from vllm_spac.methods.od_moe.layer_call import Forward
from vllm_spac.methods.od_moe.pool import ExpertPool
from vllm_spac.methods.od_moe.wire import (
    Counts,
    Frame,
    FrameError,
    FrameKind,
    Header,
    Held,
    Hello,
    Limits,
    Ready,
    Refusal,
    Service,
    decode,
    encode,
    expert_payload,
    raw,
    resident_payload,
    text_payload,
)
from vllm_spac.methods.od_moe.worker_link import difference, facts
from vllm_spac.storage.base import ExpertStore, allocate

logger = logging.getLogger("vllm.spac")

_POLL = 0.2  # seconds


class WorkerAnswer(NamedTuple):
    """What a frame is answered by; ``sizes`` are fields of its header."""

    kind: FrameKind
    payload: bytes = b""
    sizes: Mapping[str, Any] = {}


class HostedLayers:
    """The layers that a worker serves for one engine.

    Args:
        store: has their experts; owned.
        memory: bytes that slots may take.
    """

    def __init__(self, service: Service, store: ExpertStore, kernel: Callable[[Service], Kernel], memory: int) -> None:
        self.service, self.limits = service, service.limits  # of the engine's frames
        self._store, self._kernel, self._memory = store, kernel, memory
        self.pool: ExpertPool | None = None  # once it is filled

    def answer(self, frame: Frame) -> WorkerAnswer:
        """Does what the engine asks for; ``SpacError`` if it cannot be done."""
        if (handler := _HANDLERS.get(frame.header.kind)) is None:
            raise SpacError(f"spac: a worker is asked for {frame.header.kind.name}")
        return handler(self, frame)

    def prefetch(self, frame: Frame) -> None:
        """Reads ahead what the engine expects to need. It does not wait: a hint that cannot be used is dropped."""
        header = frame.header
        if self.pool is None or not self.service.hints or header.fingerprint != self.service.digest:
            logger.warning("spac: a hint about experts that this worker does not serve; dropped")
            return
        try:
            self.pool.hint(header.step, header.layer, header.sequence, frame.experts())
        except SpacError as error:
            logger.warning("%s; dropped", error)

    def held(self) -> WorkerAnswer:
        """Says which experts are stored."""
        held = np.packbits([self._store.holds(key) for key in self.service.keys])
        return WorkerAnswer(FrameKind.HELD, text_payload(Held(held.tobytes())))

    def close(self) -> None:
        """Stops the threads, and closes the store."""
        (self._store if self.pool is None else self.pool).close()  # the pool closes the store

    def _put(self, frame: Frame) -> WorkerAnswer:
        if (key := frame.header.layer) not in self.service.keys:
            raise SpacError(f"spac: expert {key} belongs to another worker")
        self._store.put(key, frame.expert(self._store.shape))
        return WorkerAnswer(FrameKind.STORED)

    def _drop(self, frame: Frame) -> WorkerAnswer:
        self._store.drop(frame.header.layer)
        return WorkerAnswer(FrameKind.DROPPED)

    def _fill(self, frame: Frame) -> WorkerAnswer:
        if self.pool is None:
            self.pool = ExpertPool(self.service, self._store, self._kernel(self.service), self._memory)
        speed = self.pool.speed(self.service.dtype) if self.service.divides else None
        return WorkerAnswer(FrameKind.READY, text_payload(Ready(self.pool.slots, speed)))

    def _fetch(self, frame: Frame) -> WorkerAnswer:
        tensors = {name: rows[0] for name, rows in allocate(self._store.shape.tensors, 1, "cpu").items()}
        self._store.read(frame.header.layer, tensors)
        return WorkerAnswer(FrameKind.EXPERT, expert_payload(self._store.shape, tensors))

    def _run(self, frame: Frame) -> WorkerAnswer:
        header, service = frame.header, self.service
        if self.pool is None or header.fingerprint != service.digest or header.hidden != service.hidden:
            raise SpacError("spac: a worker is asked for rows of experts that it does not serve")
        weights, ids = frame.pairs()
        out = self.pool.run(Forward(header.step, header.prompts), header.layer, frame.rows(), weights, ids)
        sizes = {"rows": len(out), "hidden": out.shape[1], "dtype": out.dtype}
        if not service.divides:
            return WorkerAnswer(FrameKind.ROWS, raw(out), sizes)
        resident = self.pool.resident()
        return WorkerAnswer(FrameKind.ROWS, raw(out) + resident_payload(resident), {**sizes, "top_k": len(resident)})


_HANDLERS: dict[FrameKind, Callable[[HostedLayers, Frame], WorkerAnswer]] = {
    FrameKind.PUT: HostedLayers._put,
    FrameKind.DROP: HostedLayers._drop,
    FrameKind.FILL: HostedLayers._fill,
    FrameKind.FETCH: HostedLayers._fetch,
    FrameKind.RUN: HostedLayers._run,
}


@dataclass
class _Session:
    """One engine."""

    peer: bytes
    epoch: int
    engine: str  # its own name, by which it returns with a new connection
    hosted: HostedLayers | None = None  # once it has said which layers

    def close(self) -> None:
        hosted, self.hosted = self.hosted, None
        if hosted is not None:
            hosted.close()


class Worker:
    """Answers the frames of one engine after another. All methods are called by one thread.

    Args:
        secret: of the cluster, 32 bytes; nobody else's frames arrive.
        store: opens the store of a shape under a fingerprint.
        memory: bytes that slots may take.
        host: address to bind, ``SpacError`` if it cannot be; port: 0 for any that is free.
    """

    def __init__(
        self,
        secret: bytes,
        kernel: Callable[[Service], Kernel],
        store: Callable[[MoEShape, str], ExpertStore],
        memory: int,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._kernel, self._open_store, self._memory = kernel, store, memory
        self._facts = facts()
        self._session: _Session | None = None
        self._listener = worker_link.WorkerListener(secret)
        self._socket = self._listener.socket
        try:
            if port:
                self._socket.bind(f"tcp://{host}:{port}")
            self.port = port or self._socket.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            self._listener.close()
            raise SpacError(
                f"spac: a worker cannot bind {host}:{port}: {error}; name another --bind or --port"
            ) from None

    def serve(self, ended: Callable[[], bool]) -> None:
        """Answers until ``ended`` returns true, which is asked a few times per second."""
        while not ended():
            if self._socket.poll(int(1000 * _POLL)):
                self.serve_message([self._socket.recv(), *worker_link.receive(self._socket)])

    def close(self) -> None:
        """Ends the session and closes the socket."""
        self._end_session()
        self._listener.close()

    def serve_message(self, message: list[bytes]) -> None:
        """Answers one message [peer, header, payload]; a damaged one, or one of nobody known, has no answer."""
        peer, *parts = message
        session = self._session if self._session is not None and self._session.peer == peer else None
        try:
            hosted = None if session is None else session.hosted
            frame = decode(parts, Limits() if hosted is None else hosted.limits)
            if frame.header.kind == FrameKind.HELLO:
                self._meet(peer, frame.header, frame.text(Hello))
            elif session is not None and frame.header.epoch == session.epoch:
                self._serve(session, frame)
        except FrameError as error:
            logger.warning("%s; dropped", error)

    def _meet(self, peer: bytes, header: Header, hello: Hello) -> None:
        other = self._session if self._session is not None and self._session.engine != hello.engine else None
        if (unlike := difference(self._facts, hello.facts)) is not None:
            self._refuse(peer, header, Refusal(f"results could differ in bits: {unlike}"))
        elif other is not None and self._send(other.peer, encode(Header(FrameKind.PROBE, other.epoch))):
            why = "it serves another engine; stop that, or start further workers"
            self._refuse(peer, header, Refusal(why, busy=True))
        else:
            self._welcome(peer, header, hello.engine)

    def _refuse(self, peer: bytes, header: Header, refusal: Refusal) -> None:
        logger.warning("spac: an engine was refused: %s", refusal.why)
        self._answer(peer, header, WorkerAnswer(FrameKind.REFUSED, text_payload(refusal)))

    def _welcome(self, peer: bytes, header: Header, engine: str) -> None:
        before, epoch = self._session, 1 + secrets.randbits(63)
        if before is not None and before.engine == engine:
            before.peer, before.epoch = peer, epoch  # it keeps what it has
        else:
            self._end_session()
            self._session = _Session(peer, epoch, engine)
        self._answer(peer, replace(header, epoch=epoch), WorkerAnswer(FrameKind.WELCOME))

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _serve(self, session: _Session, frame: Frame) -> None:
        kind = frame.header.kind
        if kind == FrameKind.LEAVE:
            self._end_session()
        elif kind == FrameKind.HINT:
            if session.hosted is None:
                logger.warning("spac: a hint from an engine that has not said what to serve; dropped")
            else:
                session.hosted.prefetch(frame)
        else:
            try:
                answer = self._done(session, frame)
            except Exception as error:  # whatever it is, the engine is told, and computes the rows elsewhere
                if not isinstance(error, SpacError):
                    logger.exception("spac: a worker failed")
                why = str(error) if isinstance(error, SpacError) else f"{type(error).__name__}: {error}"
                answer = WorkerAnswer(FrameKind.FAILED, text_payload(Refusal(why)))
            self._answer(session.peer, frame.header, answer)

    def _done(self, session: _Session, frame: Frame) -> WorkerAnswer:
        """Does what an engine asks for; ``SpacError`` if it cannot be done."""
        kind, hosted = frame.header.kind, session.hosted
        if kind == FrameKind.STATS:
            return self._count(session)
        if kind == FrameKind.SERVE:
            service = frame.text(Service)
            if hosted is None or hosted.service != service:
                session.close()
                store = self._open_store(service.shape, service.fingerprint)
                session.hosted = hosted = HostedLayers(service, store, self._kernel, self._memory)
            return hosted.held()
        if hosted is None:
            raise SpacError("spac: a worker is asked before it was told what to serve")
        return hosted.answer(frame)

    def _count(self, session: _Session) -> WorkerAnswer:
        """What this worker counts for an engine; see ``ExpertPool.counts``."""
        counts: Counts = {"memory_bytes": psutil.Process().memory_info().rss}
        if session.hosted is not None and session.hosted.pool is not None:
            counts |= session.hosted.pool.counts()
        return WorkerAnswer(FrameKind.COUNTS, text_payload(counts))

    def _answer(self, peer: bytes, to: Header, answer: WorkerAnswer) -> None:
        """Answers ``to``: the same session, step, layer, sequence and fingerprint."""
        header = Header(
            answer.kind, to.epoch, to.step, to.sequence, to.layer, fingerprint=to.fingerprint, **answer.sizes
        )
        self._send(peer, encode(header, answer.payload))

    def _send(self, peer: bytes, message: tuple[bytes, bytes]) -> bool:
        """Sends a frame; returns whether the peer is connected. One that reads no answers gets no more."""
        try:
            worker_link.send(self._socket, message, peer)
        except zmq.Again:
            logger.warning("spac: an engine does not read its answers; dropped")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True
