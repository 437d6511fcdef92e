"""The sockets of engines and workers: zmq's CURVE with the cluster's secret, and bounds on what a peer sends or leaves.

A cluster's secret is a CURVE secret key, and both sides use its one pair of keys: an engine talks to nobody who does
not have it, and a worker's socket hands over no message of anybody else. zmq encrypts, numbers and checks what follows.

A message is a header and a payload in parts of up to ``PART`` bytes. zmq takes a part, also of a handshake, into memory
before anybody can judge it, so ``PART`` is what a connection that has proved nothing can hold, for ``_HANDSHAKE``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from vllm_spac.distributed.wire import MOST_BYTES
from vllm_spac.errors import SpacError

HEARTBEAT, SILENCE = 1000, 5000  # milliseconds between heartbeats, and after which a peer counts as gone
PART = 1 << 18  # bytes
SECRET_BYTES = 32
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


class Listener:
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

    Args:
        socket: of an engine, or of a worker.
        message: the frame's header and payload.
        peer: whom a worker sends it to.

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
