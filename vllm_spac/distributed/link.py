"""A connection from an engine to one worker: the handshake, requests with one answer, and whether it still stands."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_spac.distributed.service import ENGINE, VISITOR, WORKER, Service, proof, proved
from vllm_spac.distributed.sockets import as_text, configure
from vllm_spac.distributed.wire import Frame, FrameError, Header, Kind, Limits, decode, encode
from vllm_spac.errors import SpacError

logger = logging.getLogger("vllm.spac")


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
        self.address, self._secret, self._facts, self._engine = address, secret, facts or {}, engine
        self.socket = configure(context.socket(zmq.DEALER))
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(address)
        self.epoch = 0
        self.limits = Limits()
        self._sequence = 1 << 62  # requests of ``ask``; those of layers are numbered from 1

    def join(self, seconds: float) -> None:
        """Proves to know the secret, and has the worker prove it.

        Raises:
            Lost: no answer, or the worker refuses; ``Busy`` if another engine has it.
            SpacError: the worker does not know the secret.
        """
        self._prove(ENGINE, {"facts": self._facts, "engine": self._engine}, seconds)

    def visit(self, seconds: float) -> None:
        """As ``join``, to ask for ``STATS`` and ``ECHO`` only, beside an engine that the worker may serve."""
        self._prove(VISITOR, {"visits": True}, seconds)

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

    def send(self, message: tuple[bytes, bytes]) -> None:
        """Sends a frame without waiting for an answer."""
        self.socket.send_multipart(message)

    def offer(self, message: tuple[bytes, bytes]) -> None:
        """Sends a frame that may get lost: not to a worker that has not taken many earlier ones."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart(message, zmq.NOBLOCK)

    def receive(self) -> list[bytes]:
        """Returns a message that has arrived."""
        return self.socket.recv_multipart(zmq.NOBLOCK)

    @property
    def broken(self) -> bool:
        """Whether the connection ended since the last call."""
        found = False
        while self.monitor.poll(0):
            recv_monitor_message(self.monitor)
            found = True
        return found

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

    def _prove(self, role: str, given: Mapping[str, Any], seconds: float) -> None:
        nonce, end = secrets.token_hex(16), time.monotonic() + seconds
        challenge = self._answer(Header(Kind.HELLO), as_text({"nonce": nonce}), end).text()
        own = str(challenge.get("nonce"))[:64]
        if not proved(self._secret, WORKER, nonce, own, challenge.get("proof")):
            raise SpacError(f"spac: the worker at {self.address} has another secret; use its cluster's file")
        mine = {"proof": proof(self._secret, role, own, nonce), **given}
        answer = self._answer(Header(Kind.PROOF), as_text(mine), end)
        if answer.header.kind != Kind.WELCOME:
            kind = Busy if answer.header.kind == Kind.REFUSED and answer.text().get("busy") else Lost
            raise kind(f"spac: the worker at {self.address} refused: {answer.why()}")
        self.epoch = answer.header.epoch

    def _answer(self, header: Header, payload: bytes, end: float) -> Frame:
        """Sends a frame and waits for the answer to it; what answers anything else is dropped."""
        self._sequence += 1
        header = replace(header, sequence=self._sequence)
        self.send(encode(header, payload))
        while (left := end - time.monotonic()) > 0:
            if self._ended.is_set():
                raise Lost("spac: the engine ends")
            if self.broken:
                raise Lost(f"spac: the worker at {self.address} closed the connection")
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
