"""A connection from an engine to one worker: the handshake, requests with one answer, and whether it still stands."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_spac.distributed import sockets
from vllm_spac.distributed.service import Service
from vllm_spac.distributed.sockets import as_text
from vllm_spac.distributed.wire import Frame, FrameError, Header, Kind, Limits, decode, encode
from vllm_spac.errors import SpacError

logger = logging.getLogger("vllm.spac")

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_REFUSAL = "it has another secret or is of another release; use its cluster's file, and one release for all"


class Lost(SpacError):
    """A worker does not answer; the message says why."""


class Busy(Lost):
    """A worker serves another engine."""


class Link:
    """One session with one worker. Used by one thread at a time.

    Args:
        context: of zmq.
        address: ``tcp://host:port``.
        secret: that of the workers.
        facts: of this side, as ``service.facts``; of no use to a visitor.
        engine: name of this engine, by which it returns after a lost connection; of no use to a visitor.
        ended: set when the engine ends: whatever is waited for is given up.

    Attributes:
        socket, monitor: to be polled.
        epoch: of the session; 0 before ``join``.
        limits: of the frames to accept.
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
        self.socket = sockets.dealer(context, secret)
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
        held = self.ask(Kind.SERVE, seconds, payload=as_text(service.model_dump(mode="json"))).text().get("held")
        if not isinstance(held, list) or not all(type(key) is int for key in held):
            raise SpacError(f"spac: the worker at {self.address} does not say which experts it has")
        return sorted(set(held) & set(service.keys))

    def ask(self, kind: Kind, seconds: float, payload: bytes = b"", **fields: Any) -> Frame:
        """Sends a request and returns its answer.

        Args:
            seconds: to wait.
            fields: of its ``Header``.

        Raises:
            Lost: there is none within ``seconds``.
            SpacError: the worker failed; the message is its own.
        """
        frame = self._answer(Header(kind, self.epoch, **fields), payload, time.monotonic() + seconds)
        if frame.header.kind == Kind.FAILED:
            raise SpacError(frame.why())
        return frame

    def send(self, message: tuple[bytes, bytes]) -> bool:
        """Sends a frame; returns False, and drops it, if the worker has not taken many earlier ones."""
        try:
            sockets.send(self.socket, message)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[Any]:
        """Returns a message that has arrived."""
        return sockets.receive(self.socket)

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
            self.send(encode(Header(Kind.LEAVE, self.epoch)))
        self.drop()

    def drop(self) -> None:
        """Closes the connection without a word."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()

    def _meet(self, given: Mapping[str, Any], seconds: float) -> None:
        answer = self._answer(Header(Kind.HELLO), as_text(given), time.monotonic() + seconds)
        if answer.header.kind != Kind.WELCOME:
            kind = Busy if answer.header.kind == Kind.REFUSED and answer.text().get("busy") else Lost
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
    return (frame.header.epoch,) if frame.header.kind == Kind.WELCOME else ()
