"""An expert worker: serves some layers of one engine from a pool of its own, over zmq."""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import psutil
import zmq

from vllm_spac.core import MoEShape
from vllm_spac.cpu_kernels.base import Kernel
from vllm_spac.errors import SpacError
from vllm_spac.methods.od_moe import worker_link
from vllm_spac.methods.od_moe.layer_call import Forward
from vllm_spac.methods.od_moe.pool import ExpertPool
from vllm_spac.methods.od_moe.wire import (
    Frame,
    FrameError,
    FrameKind,
    Header,
    Limits,
    decode,
    encode,
    expert_payload,
    raw,
    resident_payload,
)
from vllm_spac.methods.od_moe.worker_link import Service, as_text, difference, facts
from vllm_spac.storage.base import ExpertStore, allocate

logger = logging.getLogger("vllm.spac")

_MOST_VISITORS = 64
_POLL = 0.2  # seconds


@dataclass
class _Session:
    """One engine, or a visitor, which has the secret too, but is not served.

    Attributes:
        engine: its own name, by which it returns with a new connection; empty for a visitor.
    """

    peer: bytes
    engine: str
    epoch: int
    service: Service | None = None
    store: ExpertStore | None = None
    pool: ExpertPool | None = None
    limits: Limits = Limits()


class Worker:
    """Answers the frames of one engine after another. All methods are called by one thread.

    Args:
        secret: of the cluster, 32 bytes; nobody else's frames arrive.
        store: opens the store of a shape under a fingerprint.
        memory: bytes that slots may take.
        host: address to bind; other machines reach only one that is not a loopback address.
        port: 0 for any that is free.

    Raises:
        SpacError: the address cannot be bound.
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
        self._visitors: OrderedDict[bytes, _Session] = OrderedDict()
        self._session: _Session | None = None
        self._listener = worker_link.WorkerListener(secret)
        self._socket = self._listener.socket
        try:
            self.port = self._bind(host, port)
        except zmq.ZMQError as error:
            self._listener.close()
            raise SpacError(
                f"spac: a worker cannot bind {host}:{port}: {error}; name another --bind or --port"
            ) from None

    def serve(self, ended: Callable[[], bool]) -> None:
        """Answers until ``ended`` returns true, which is asked a few times per second."""
        while not ended():
            if self._socket.poll(int(1000 * _POLL)):
                self.answer([self._socket.recv(), *worker_link.receive(self._socket)])

    def close(self) -> None:
        """Ends the session and closes the socket."""
        self._end_session()
        self._listener.close()

    def answer(self, message: list[bytes]) -> None:
        """Answers one message [peer, header, payload]; a damaged one, or one of nobody known, has no answer."""
        peer, *parts = message
        session = self._session
        ours = session is not None and session.peer == peer
        try:
            frame = decode(parts, session.limits if session is not None and ours else Limits())
        except FrameError as error:
            logger.warning("%s; dropped", error)
            return
        header = frame.header
        if header.kind == FrameKind.HELLO:
            self._meet(peer, frame)
        elif session is not None and ours and header.epoch == session.epoch:
            self._serve(session, frame, self._acts)
        elif (visitor := self._visitors.get(peer)) is not None and header.epoch == visitor.epoch:
            self._serve(visitor, frame, self._visits)

    # -- who asks ------------------------------------------------------------------------------------------

    def _meet(self, peer: bytes, frame: Frame) -> None:
        try:
            given = frame.text()
        except FrameError as error:
            logger.warning("%s; dropped", error)
            return
        engine = str(given.get("engine"))
        if given.get("visits") is True:
            self._receive(peer, frame.header)
        elif (unlike := difference(self._facts, given.get("facts"))) is not None:
            self._refuse(peer, frame.header, f"results could differ in bits: {unlike}")
        elif self._busy(engine):
            self._refuse(peer, frame.header, "it serves another engine; stop that, or start further workers", True)
        else:
            self._welcome(peer, frame.header, engine)

    def _busy(self, engine: str) -> bool:
        """Whether another engine has the worker, and is still connected."""
        session = self._session
        if session is None or session.engine == engine:
            return False
        return self._send(session.peer, encode(Header(FrameKind.PROBE, session.epoch)))

    def _refuse(self, peer: bytes, header: Header, why: str, busy: bool = False) -> None:
        logger.warning("spac: an engine was refused: %s", why)
        self._say(peer, header, FrameKind.REFUSED, as_text({"why": why, "busy": busy}))

    def _welcome(self, peer: bytes, header: Header, engine: str) -> None:
        epoch = 1 + secrets.randbits(63)
        before, self._session = self._session, _Session(peer, engine, epoch)
        if before is not None and before.engine == engine:
            self._session = replace(before, peer=peer, epoch=epoch)  # it keeps what it has
        elif before is not None:
            _close(before)
        self._say(peer, replace(header, epoch=epoch), FrameKind.WELCOME, as_text({}))

    def _receive(self, peer: bytes, header: Header) -> None:
        visitor = self._visitors[peer] = _Session(peer, "", 1 + secrets.randbits(63))
        while len(self._visitors) > _MOST_VISITORS:
            self._visitors.popitem(last=False)
        self._say(peer, replace(header, epoch=visitor.epoch), FrameKind.WELCOME, as_text({}))

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            _close(session)

    # -- what it asks --------------------------------------------------------------------------------------

    def _serve(self, session: _Session, frame: Frame, acts: Mapping[FrameKind, _Act]) -> None:
        header = frame.header
        if header.kind == FrameKind.LEAVE:
            if self._visitors.pop(session.peer, None) is None:
                self._end_session()
            return
        if header.kind == FrameKind.HINT:
            self._take_hint(session, frame)
            return
        act = acts.get(header.kind)
        try:
            if act is None:
                raise SpacError(f"spac: a worker is asked for {header.kind.name}")
            kind, sizes, payload = act(self, session, frame)
        except Exception as error:  # whatever it is, the engine is told, and computes the rows elsewhere
            if not isinstance(error, SpacError):
                logger.exception("spac: a worker failed")
            why = str(error) if isinstance(error, SpacError) else f"{type(error).__name__}: {error}"
            kind, sizes, payload = FrameKind.FAILED, {}, as_text({"why": why})
        self._say(session.peer, header, kind, payload, **sizes)

    def _take_service(self, session: _Session, frame: Frame) -> tuple[FrameKind, dict, bytes]:
        service = Service.parse(frame.text())
        if session.service != service or session.store is None:
            _close(session)
            shape = service.shape
            session.service, session.store, session.pool = service, self._open_store(shape, service.fingerprint), None
            sizes = {"hidden": service.hidden, "top_k": service.top_k, "experts": service.experts}
            session.limits = Limits(**sizes, expert_bytes=shape.expert_bytes)
        return FrameKind.HELD, {}, as_text({"held": [key for key in service.keys if session.store.holds(key)]})

    def _put(self, session: _Session, frame: Frame) -> tuple[FrameKind, dict, bytes]:
        service, store = _given(session)
        key = frame.header.layer
        if key not in service.keys:
            raise SpacError(f"spac: expert {key} belongs to another worker")
        store.put(key, frame.expert(store.shape))
        return FrameKind.STORED, {}, b""

    def _drop(self, session: _Session, frame: Frame) -> tuple[FrameKind, dict, bytes]:
        _given(session)[1].drop(frame.header.layer)
        return FrameKind.DROPPED, {}, b""

    def _fill(self, session: _Session, frame: Frame) -> tuple[FrameKind, dict, bytes]:
        service, store = _given(session)
        if session.pool is None:
            session.pool = ExpertPool(service, store, self._kernel(service), self._memory)
        found: dict[str, Any] = {"slots": session.pool.slots, "store": store.describe()}
        if service.divides:
            found["rates"] = session.pool.rates(service.dtype)
        return FrameKind.READY, {}, as_text(found)

    def _fetch(self, session: _Session, frame: Frame) -> tuple[FrameKind, dict, bytes]:
        _, store = _given(session)
        tensors = {name: rows[0] for name, rows in allocate(store.shape.tensors, 1, "cpu").items()}
        store.read(frame.header.layer, tensors)
        return FrameKind.EXPERT, {}, expert_payload(store.shape, tensors)

    def _run(self, session: _Session, frame: Frame) -> tuple[FrameKind, dict, bytes]:
        service, _ = _given(session)
        header = frame.header
        if session.pool is None or header.fingerprint != service.digest or header.hidden != service.hidden:
            raise SpacError("spac: a worker is asked for rows of experts that it does not serve")
        x, pairs = frame.rows(), frame.pairs()
        out = session.pool.run(Forward(header.step, header.prompts), header.layer, x, *pairs)
        sizes = {"rows": len(out), "hidden": out.shape[1], "dtype": out.dtype}
        if not service.divides:
            return FrameKind.ROWS, sizes, raw(out)
        resident = session.pool.resident()
        return FrameKind.ROWS, sizes | {"top_k": len(resident)}, raw(out) + resident_payload(resident)

    def _take_hint(self, session: _Session, frame: Frame) -> None:
        """Reads ahead what the engine expects to need. It does not wait: a hint that cannot be used is dropped."""
        header, service, pool = frame.header, session.service, session.pool
        if service is None or pool is None or not service.hints or header.fingerprint != service.digest:
            logger.warning("spac: a hint about experts that this worker does not serve; dropped")
            return
        try:
            pool.hint(header.step, header.layer, header.sequence, frame.experts())
        except SpacError as error:
            logger.warning("%s; dropped", error)

    def _count(self, session: _Session, frame: Frame) -> tuple[FrameKind, dict, bytes]:
        """What this worker counts, whoever asks; see ``ExpertPool.counts``."""
        served = self._session
        pool = None if served is None else served.pool
        found: dict[str, Any] = {"serving": served is not None, "memory_bytes": psutil.Process().memory_info().rss}
        if pool is not None:
            found |= {"layers": len(pool.shape.layers), **pool.counts()}
        return FrameKind.COUNTS, {}, as_text(found)

    def _echo(self, session: _Session, frame: Frame) -> tuple[FrameKind, dict, bytes]:
        if self._session is not None:
            raise SpacError("spac: this worker serves an engine; measure while it serves none")
        rows = frame.rows()
        return FrameKind.ROWS, {"rows": len(rows), "hidden": rows.shape[1], "dtype": rows.dtype}, raw(rows)

    _acts: dict[FrameKind, _Act] = {
        FrameKind.SERVE: _take_service,
        FrameKind.PUT: _put,
        FrameKind.DROP: _drop,
        FrameKind.FILL: _fill,
        FrameKind.FETCH: _fetch,
        FrameKind.RUN: _run,
        FrameKind.STATS: _count,
    }
    _visits: dict[FrameKind, _Act] = {FrameKind.STATS: _count, FrameKind.ECHO: _echo}

    # -- frames --------------------------------------------------------------------------------------------

    def _say(self, peer: bytes, asked: Header, kind: FrameKind, payload: bytes, **sizes: Any) -> None:
        """Answers ``asked``: the same session, step, layer, sequence and fingerprint."""
        repeated = (asked.epoch, asked.step, asked.sequence, asked.layer)
        header = Header(kind, *repeated, fingerprint=asked.fingerprint, **sizes)
        self._send(peer, encode(header, payload))

    def _send(self, peer: bytes, message: tuple[bytes, bytes]) -> bool:
        """Sends a frame; returns whether the peer is connected. One that leaves its answers unread gets no more."""
        try:
            worker_link.send(self._socket, message, peer)
        except zmq.Again:
            logger.warning("spac: an engine does not read its answers; dropped")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _bind(self, host: str, port: int) -> int:
        if port:
            self._socket.bind(f"tcp://{host}:{port}")
            return port
        return self._socket.bind_to_random_port(f"tcp://{host}")


_Act = Callable[[Worker, _Session, Frame], tuple[FrameKind, dict[str, Any], bytes]]


def _given(session: _Session) -> tuple[Service, ExpertStore]:
    if session.service is None or session.store is None:
        raise SpacError("spac: a worker is asked before it was told what to serve")
    return session.service, session.store


def _close(session: _Session) -> None:
    if session.pool is not None:
        session.pool.close()  # and the store
    elif session.store is not None:
        session.store.close()
    session.pool = session.store = session.service = None
