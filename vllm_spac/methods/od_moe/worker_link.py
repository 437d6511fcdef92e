"""Connections between an engine and workers: zmq's CURVE with the cluster's secret, and bounds on peers.

A cluster's secret is a CURVE secret key, and both sides use its one pair of keys: an engine talks to nobody who does
not have it, and a worker's socket hands over no message of anybody else. zmq encrypts, numbers and checks what follows.

A message is a header and a payload in parts of up to ``PART`` bytes. zmq takes a part, also of a handshake, into memory
before anybody can judge it, so ``PART`` is what a connection that has proved nothing can hold, for ``_HANDSHAKE``.

Versions and processors of both sides must agree (``facts``), for equal bits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import zmq
from msgspec.structs import replace
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from vllm_spac.errors import SpacError, brief
from vllm_spac.methods.od_moe.wire import (
    MOST_BYTES,
    Frame,
    FrameError,
    FrameKind,
    Header,
    Held,
    Hello,
    Limits,
    Refusal,
    Service,
    decode,
    encode,
    text_payload,
)
from vllm_spac.system.machine import versions

logger = logging.getLogger("vllm.spac")

_SAME = ("vllm_spac", "vllm", "torch", "cpu")
HEARTBEAT, SILENCE = 1000, 5000  # milliseconds between heartbeats, and after which a peer counts as gone
PART = 1 << 14  # bytes
_SEALED = 64  # bytes that CURVE may add to a part
_MOST_PARTS = 1 + MOST_BYTES // PART
_HANDSHAKE = 5000  # milliseconds until a connection to a worker must have proved to know the secret
_BACKLOG = 4096  # connections that wait to be accepted; the system may allow fewer
_QUEUE = 8  # messages of a peer that wait at a worker, and answers that the peer has not read
_LONGEST_RETRY = 30_000  # milliseconds between attempts to connect again
_DOMAIN = "spac"
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_REFUSAL = "it has another secret or is of another release; use its cluster's file, and one release for all"


def facts() -> dict[str, str]:
    """Returns what both sides must have in common for equal bits: versions, and what the processor can do."""
    facts = versions()
    tiles = "+AMX" if torch.cpu._is_amx_tile_supported() else ""
    facts["cpu"] = f"{torch.backends.cpu.get_cpu_capability()}{tiles}"
    return {name: str(facts.get(name)) for name in _SAME}


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Returns in what two sides differ, or None."""
    parts = [f"{name} {value} here and {brief(theirs.get(name))} there" for name, value in ours.items()]
    return "; ".join(text for text, name in zip(parts, ours, strict=True) if ours[name] != theirs.get(name)) or None


class _Keys(NamedTuple):
    """A pair of CURVE keys, in Z85."""

    public: bytes
    secret: bytes

    @classmethod
    def of(cls, secret: bytes) -> _Keys:
        if not zmq.has("curve"):
            raise SpacError("spac: this pyzmq was built without CURVE, which expert workers need; pip install pyzmq")
        text = z85.encode(secret)
        return cls(zmq.curve_public(text), text)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a peer whose handshake proved that it has the secret of the public ``key`` may come in."""
        return key == self.public


class WorkerListener:
    """A worker's socket in a context of its own; only who has the 32 bytes of ``secret`` can send it anything."""

    def __init__(self, secret: bytes) -> None:
        keys = _Keys.of(secret)
        self._context = zmq.Context()
        self._door = ThreadAuthenticator(self._context)
        self._door.start()
        self._door.configure_curve_callback(_DOMAIN, keys)
        self.socket = _configure(self._context.socket(zmq.ROUTER), keys)  # to be bound and polled
        options: dict[int, int | bytes] = {
            zmq.CURVE_SERVER: 1,
            zmq.ZAP_DOMAIN: _DOMAIN.encode(),
            zmq.ZAP_ENFORCE_DOMAIN: 1,  # nobody comes in if nobody is there to ask
            zmq.ROUTER_MANDATORY: 1,  # to send to an engine that is gone is an error
            zmq.HANDSHAKE_IVL: _HANDSHAKE,
            zmq.BACKLOG: _BACKLOG,
            zmq.SNDHWM: _QUEUE,
        }
        for option, value in options.items():
            self.socket.setsockopt(option, value)

    def close(self) -> None:
        """Closes the socket and ends zmq's threads."""
        self._door.stop()
        self._context.destroy(linger=0)


def dealer(context: zmq.Context, secret: bytes) -> zmq.Socket:
    """Returns an engine's socket, which connects to workers that have the cluster's ``secret``, 32 bytes."""
    keys = _Keys.of(secret)
    socket = _configure(context.socket(zmq.DEALER), keys)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _LONGEST_RETRY)
    return socket


def send(socket: zmq.Socket, message: tuple[bytes, bytes], peer: bytes | None = None) -> None:
    """Sends a frame without waiting.

    Raises:
        zmq.Again: the other side has left so many unread that no more are kept for it.
        zmq.ZMQError: with ``EHOSTUNREACH``, the worker's peer is gone.
    """
    head, payload = message[0], memoryview(message[1])
    parts = [payload[start : start + PART] for start in range(0, max(1, len(payload)), PART)]
    socket.send_multipart([*(() if peer is None else (peer,)), head, *parts], zmq.NOBLOCK)


def receive(socket: zmq.Socket) -> list[Any]:
    """Returns the header and the payload of a message that has arrived, as buffers of bytes.

    Of what is no frame, there may be fewer; of what is longer than any frame, the end is dropped.
    """
    head, more = socket.recv(zmq.NOBLOCK), socket.rcvmore
    parts: list[zmq.Frame] = []
    while more:
        part = socket.recv(copy=False)
        more = part.more
        if len(parts) < _MOST_PARTS:
            parts.append(part)
    if not parts:
        return [head]
    return [head, parts[0].buffer if len(parts) == 1 else b"".join(part.buffer for part in parts)]


def _configure(socket: zmq.Socket, keys: _Keys) -> zmq.Socket:
    """Sets the keys, limits and heartbeats of both sides; returns ``socket``.

    zmq's own threads exchange the heartbeats, also while a worker computes; a stopped process sends none.
    """
    options: dict[int, int | bytes] = {
        zmq.CURVE_PUBLICKEY: keys.public,
        zmq.CURVE_SECRETKEY: keys.secret,
        zmq.LINGER: 0,
        zmq.MAXMSGSIZE: PART + _SEALED,
        zmq.RCVHWM: _QUEUE,
        zmq.HEARTBEAT_IVL: HEARTBEAT,
        zmq.HEARTBEAT_TIMEOUT: SILENCE,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)
    return socket


class Lost(SpacError):
    """A worker does not answer; the message says why."""


class Busy(Lost):
    """A worker serves another engine."""


class WorkerLink:
    """One session with one worker. Used by one thread at a time.

    Args:
        address: ``tcp://host:port``.
        facts: of this side, as of the function ``facts``.
        engine: name of this engine, by which it returns after a lost connection.
        ended: set when the engine ends: whatever is waited for is given up.
    """

    def __init__(
        self,
        context: zmq.Context,
        address: str,
        secret: bytes,
        facts: Mapping[str, str],
        engine: str,
        ended: threading.Event | None = None,
    ) -> None:
        self._ended = ended or threading.Event()
        self.address, self._facts, self._engine = address, facts, engine
        self.socket = dealer(context, secret)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _REFUSED)
        self.socket.connect(address)
        self.epoch = 0  # of the session, once ``open`` has begun it
        self.limits = Limits()
        self._sequence = 1 << 62  # requests of ``ask``; those of layers are numbered from 1

    def open(self, seconds: float) -> None:
        """Begins a session.

        Raises:
            Lost: no answer, it has another secret, or the worker refuses; ``Busy`` if another engine has it.
        """
        hello = Hello(facts=dict(self._facts), engine=self._engine)
        answer = self._answer(Header(FrameKind.HELLO), text_payload(hello), time.monotonic() + seconds)
        if answer.header.kind != FrameKind.WELCOME:
            refusal = answer.text(Refusal)
            kind = Busy if refusal.busy else Lost
            raise kind(f"spac: the worker at {self.address} refused: {refusal.why}")
        self.epoch = answer.header.epoch

    def serve(self, service: Service, seconds: float) -> list[int]:
        """Tells the worker what to serve; returns the keys of the experts that it has."""
        self.limits, keys = service.limits, service.keys
        bits = self.ask(FrameKind.SERVE, seconds, text_payload(service)).text(Held).bits
        held = np.unpackbits(np.frombuffer(bits, np.uint8))
        if not 0 <= len(held) - len(keys) < 8:
            raise SpacError(f"spac: the worker at {self.address} does not say which experts it has")
        return [key for key, has in zip(keys, held, strict=False) if has]

    def ask(self, kind: FrameKind, seconds: float, payload: bytes = b"", **fields: Any) -> Frame:
        """Sends a request and returns its answer.

        Raises:
            Lost: there is none within ``seconds``.
            SpacError: the worker failed; the message is its own.
        """
        frame = self._answer(Header(kind, self.epoch, **fields), payload, time.monotonic() + seconds)
        if frame.header.kind == FrameKind.FAILED:
            raise SpacError(frame.why())
        return frame

    def send(self, message: tuple[bytes, bytes]) -> bool:
        """Sends a frame; returns False, and drops it, if the worker has not taken many earlier ones."""
        try:
            send(self.socket, message)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[Any]:
        """Returns a message that has arrived."""
        return receive(self.socket)

    def broken(self) -> str:
        """Returns why the connection ended since the last call, or was none; empty if it stands."""
        why = ""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            why = why or (_REFUSAL if event & _REFUSED else "its connection ended")
        return why

    def close(self) -> None:
        """Ends the session and the connection."""
        if self.epoch:
            self.socket.setsockopt(zmq.LINGER, 200)
            self.send(encode(Header(FrameKind.LEAVE, self.epoch)))
        self.drop()

    def drop(self) -> None:
        """Closes the connection without a word."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()

    def _answer(self, header: Header, payload: bytes, end: float) -> Frame:
        """Sends a frame and waits for the answer to it; what answers anything else is dropped."""
        self._sequence += 1
        header = replace(header, sequence=self._sequence)
        if not self.send(encode(header, payload)):
            raise Lost(f"spac: the worker at {self.address} takes no messages")
        while (left := end - time.monotonic()) > 0:
            if self._ended.is_set():
                raise Lost("spac: the engine ends")
            if why := self.broken():
                raise Lost(f"spac: the worker at {self.address} cannot be used: {why}")
            if not self.socket.poll(int(1000 * min(left, 0.2)) + 1):
                continue
            try:
                frame = decode(self.receive(), self.limits)
            except FrameError as error:
                logger.warning("%s; dropped", error)
                continue
            if frame.header.sequence == header.sequence and frame.header.epoch in (header.epoch, *_new(frame)):
                return frame
        raise Lost(f"spac: the worker at {self.address} did not answer {header.kind.name}")


def _new(frame: Frame) -> tuple[Any, ...]:
    return (frame.header.epoch,) if frame.header.kind == FrameKind.WELCOME else ()
