"""Connections between an engine and workers: zmq's CURVE with the cluster's secret, and bounds on peers.

A cluster's secret is a CURVE secret key, and both sides use its one pair of keys: an engine talks to nobody who does
not have it, and a worker's socket hands over no message of anybody else. zmq encrypts, numbers and checks what follows.

A message is a header and a payload in parts of up to ``PART`` bytes. zmq takes a part, also of a handshake, into memory
before anybody can judge it, so ``PART`` is what a connection that has proved nothing can hold, for ``_HANDSHAKE``.

A ``Service`` is what a worker is asked to serve, and what it and an engine must have in common: checked JSON.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import torch
import zmq
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import ConfigError, SpacError, brief
from vllm_spac.methods.od_moe.wire import (
    MOST_BYTES,
    MOST_SERVED,
    Frame,
    FrameError,
    FrameKind,
    Header,
    Limits,
    decode,
    encode,
)
from vllm_spac.system.host_memory import gib
from vllm_spac.system.machine import versions

_FINGERPRINT = r"^[0-9a-f]{32}$"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_Count = Annotated[int, Field(ge=1, le=1 << 20)]
_MOST_EXPERTS = 1 << 20  # at one worker
_SAME = ("vllm_spac", "vllm", "torch", "cpu")


class Tensors(BaseModel):
    """Shape and dtype of one tensor of an expert."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: tuple[Annotated[int, Field(ge=0, le=1 << 24)], ...] = Field(max_length=8)
    dtype: str


class Service(BaseModel):
    """The layers that one worker serves, and how.

    Attributes:
        fingerprint: of the packed experts, 32 hexadecimal digits.
        mine: numbers of those that this worker has, ascending.
        divides: the layers' experts are divided among several workers: rows come with some of theirs, and each answer
            says which experts have a slot.
        hints: the engine says which experts layers will probably need, and they are loaded ahead.
        extra, depth, background: of these loads, as in ``PrefetchSettings``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    fingerprint: str = Field(pattern=_FINGERPRINT)
    layers: tuple[str, ...] = Field(min_length=1, max_length=4096)
    mine: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1, max_length=4096)
    experts: _Count
    top_k: _Count
    tensors: dict[str, Tensors] = Field(min_length=1, max_length=16)
    hidden: _Count
    slots: str
    policy: str
    io_threads: Annotated[int, Field(ge=1, le=64)] = 4
    activation: str = "silu"
    isa: str = ""
    divides: bool = False
    hints: bool = False
    extra: Annotated[float, Field(ge=0, le=1)] | None = None
    depth: _Count = 16
    background: Annotated[int, Field(ge=1, le=64)] | None = None

    @classmethod
    def parse(cls, raw: Any) -> Service:
        """Validates what arrived; ``ConfigError`` if it is no service."""
        try:
            service = cls.model_validate(raw)
        except ValidationError as error:
            raise ConfigError(f"spac: this is no service of an expert worker: {brief(str(error))}") from None
        if service.mine[-1] >= len(service.layers) or list(service.mine) != sorted(set(service.mine)):
            raise ConfigError(f"spac: a service of the layers {brief(service.mine)} of {len(service.layers)}")
        if unknown := [spec.dtype for spec in service.tensors.values() if spec.dtype not in _DTYPES]:
            raise ConfigError(f"spac: expert workers compute {', '.join(_DTYPES)}, not {brief(unknown[0])}")
        served, most = len(service.mine) * service.experts, MOST_SERVED if service.divides else _MOST_EXPERTS
        if served > most:
            divides = ", and one whose group divides experts serves" if service.divides else ", which serves"
            raise ConfigError(f"spac: {served} experts at a worker{divides} at most {most}; use more workers")
        if (nbytes := service.shape.expert_bytes) > MOST_BYTES:
            raise ConfigError(
                f"spac: experts of {gib(nbytes)} do not fit a frame of expert workers ({gib(MOST_BYTES)})"
            )
        return service

    @classmethod
    def of(cls, shape: MoEShape, fingerprint: str, mine: tuple[int, ...], **others: Any) -> Service:
        """Returns the service of the layers ``mine`` of ``shape``."""
        tensors = {
            name: Tensors(shape=spec.shape, dtype=str(spec.dtype).removeprefix("torch."))
            for name, spec in shape.tensors.items()
        }
        given = {"layers": shape.layers, "experts": shape.experts, "top_k": shape.top_k, "tensors": tensors}
        return cls.parse({"fingerprint": fingerprint, "mine": mine, **given, **others})

    @property
    def shape(self) -> MoEShape:
        """The shape of all layers."""
        specs = {name: TensorSpec(spec.shape, _DTYPES[spec.dtype]) for name, spec in self.tensors.items()}
        return MoEShape(self.layers, self.experts, self.top_k, specs)

    @property
    def keys(self) -> list[int]:
        """The experts of ``mine``, as keys of ``shape``."""
        return [layer * self.experts + expert for layer in self.mine for expert in range(self.experts)]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of an expert's tensors, and of rows."""
        return next(iter(self.shape.tensors.values())).dtype

    @property
    def digest(self) -> bytes:
        """The fingerprint as the 16 bytes of a frame."""
        return bytes.fromhex(self.fingerprint)


def facts() -> dict[str, str]:
    """Returns what both sides must have in common for equal bits: versions, and what the processor can do."""
    found = versions()
    tiles = "+AMX" if torch.cpu._is_amx_tile_supported() else ""
    found["cpu"] = f"{torch.backends.cpu.get_cpu_capability()}{tiles}"
    return {name: str(found.get(name)) for name in _SAME}


def difference(ours: Mapping[str, str], theirs: Any) -> str | None:
    """Returns in what two sides differ, or None."""
    if not isinstance(theirs, dict):
        return "its facts are missing"
    parts = [f"{name} {value} here and {brief(theirs.get(name))} there" for name, value in ours.items()]
    return "; ".join(text for text, name in zip(parts, ours, strict=True) if ours[name] != theirs.get(name)) or None


HEARTBEAT, SILENCE = 1000, 5000  # milliseconds between heartbeats, and after which a peer counts as gone
PART = 1 << 14  # bytes
_SEALED = 64  # bytes that CURVE may add to a part
_MOST_PARTS = 1 + MOST_BYTES // PART
_HANDSHAKE = 5000  # milliseconds until a connection to a worker must have proved to know the secret
_BACKLOG = 4096  # connections that wait to be accepted; the system may allow fewer
_QUEUE = 8  # messages of a peer that wait at a worker, and answers that the peer has not read
_LONGEST_RETRY = 30_000  # milliseconds between attempts to connect again
_DOMAIN = "spac"


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
    """A worker's socket in a context of its own; only who has the cluster's secret can send it anything.

    Args:
        secret: of the cluster, 32 bytes.

    Attributes:
        socket: a ROUTER, to be bound and polled.
    """

    def __init__(self, secret: bytes) -> None:
        keys = _Keys.of(secret)
        self._context = zmq.Context()
        self._door = ThreadAuthenticator(self._context)
        self._door.start()
        self._door.configure_curve_callback(_DOMAIN, keys)
        self.socket = _configure(self._context.socket(zmq.ROUTER), keys)
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


def as_text(found: Mapping[str, Any]) -> bytes:
    """Returns the payload of a frame with text."""
    return json.dumps(found).encode()


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


logger = logging.getLogger("vllm.spac")

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_REFUSAL = "it has another secret or is of another release; use its cluster's file, and one release for all"


class Lost(SpacError):
    """A worker does not answer; the message says why."""


class Busy(Lost):
    """A worker serves another engine."""


class WorkerLink:
    """One session with one worker. Used by one thread at a time.

    Args:
        address: ``tcp://host:port``.
        facts: of this side, as of the function ``facts``; of no use to a visitor.
        engine: name of this engine, by which it returns after a lost connection; of no use to a visitor.
        ended: set when the engine ends: whatever is waited for is given up.

    Attributes:
        epoch: of the session; 0 before ``join``.
    """

    def __init__(
        self,
        context: zmq.Context,
        address: str,
        secret: bytes,
        facts: Mapping[str, str] | None = None,
        engine: str = "",
        ended: threading.Event | None = None,
    ) -> None:
        self._ended = ended or threading.Event()
        self.address, self._facts, self._engine = address, facts or {}, engine
        self.socket = dealer(context, secret)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _REFUSED)
        self.socket.connect(address)
        self.epoch = 0
        self.limits = Limits()
        self._sequence = 1 << 62  # requests of ``ask``; those of layers are numbered from 1

    def join(self, seconds: float) -> None:
        """Begins a session.

        Raises:
            Lost: no answer, it has another secret, or the worker refuses; ``Busy`` if another engine has it.
        """
        self._meet({"facts": self._facts, "engine": self._engine}, seconds)

    def visit(self, seconds: float) -> None:
        """As ``join``, to ask for ``STATS`` and ``ECHO`` only, beside an engine that the worker may serve."""
        self._meet({"visits": True}, seconds)

    def serve(self, service: Service, seconds: float) -> list[int]:
        """Tells the worker what to serve; returns the keys of the experts that it has."""
        sizes = {"hidden": service.hidden, "top_k": service.top_k, "expert_bytes": service.shape.expert_bytes}
        self.limits = Limits(**sizes, served=len(service.keys) if service.divides else 0)
        held = self.ask(FrameKind.SERVE, seconds, payload=as_text(service.model_dump(mode="json"))).text().get("held")
        if not isinstance(held, list) or not all(type(key) is int for key in held):
            raise SpacError(f"spac: the worker at {self.address} does not say which experts it has")
        return sorted(set(held) & set(service.keys))

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

    def _meet(self, given: Mapping[str, Any], seconds: float) -> None:
        answer = self._answer(Header(FrameKind.HELLO), as_text(given), time.monotonic() + seconds)
        if answer.header.kind != FrameKind.WELCOME:
            kind = Busy if answer.header.kind == FrameKind.REFUSED and answer.text().get("busy") else Lost
            raise kind(f"spac: the worker at {self.address} refused: {answer.why()}")
        self.epoch = answer.header.epoch

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
