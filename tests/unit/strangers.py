"""Peers of an expert worker that do not have its secret, or have it and send anything: bytes of ZMTP over TCP."""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import threading
from collections.abc import Iterator, Sequence

from vllm_spac.methods.od_moe.wire import FrameKind, Header, encode

_READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"


def greeting(mechanism: bytes) -> bytes:
    """What every ZMTP 3.1 connection begins with."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def piece(content: bytes, more: bool = False, command: bool = False) -> bytes:
    """One part of a message, or a command."""
    return bytes([2 | more | 4 * command]) + len(content).to_bytes(8, "big") + content


def message(*parts: bytes) -> bytes:
    return b"".join(piece(part, more=number < len(parts)) for number, part in enumerate(parts, 1))


NULL = greeting(b"NULL") + piece(_READY, command=True)  # a handshake without a secret, as of releases without CURVE
HELLO = message(*encode(Header(FrameKind.HELLO), b'{"nonce": "n"}'))
KINDS: tuple[bytes, ...] = (
    b"",  # never begins
    b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
    greeting(b"CURVE"),  # never goes on
    greeting(b"CURVE") + piece(b"\x05HELLO" + bytes(194), command=True),  # CURVE's, of no key
    *[NULL] * 4,  # and then asks and asks
)


def connect(port: int) -> socket.socket:
    """A connection with room for few answers."""
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.settimeout(30)
    peer.connect(("127.0.0.1", port))
    return peer


def enter(peer: socket.socket) -> None:
    """A handshake without a secret: done if the worker takes part in it."""
    push(peer, NULL)
    seen = b""
    with contextlib.suppress(OSError):
        while b"READY" not in seen and (data := peer.recv(1)):
            seen += data


def push(peer: socket.socket, data: bytes) -> int:
    """Sends until the other side closes, or takes nothing for a while; returns the bytes that left."""
    peer.settimeout(0.5)
    left = memoryview(data)
    with contextlib.suppress(OSError):
        while left:
            left = left[peer.send(left[: 1 << 20]) :]
    return len(data) - len(left)


@contextlib.contextmanager
def crowd(port: int, count: int, kinds: Sequence[bytes] = KINDS) -> Iterator[None]:
    """So many strangers at a time, who say something, read nothing, and come again when they are sent away."""
    ended = threading.Event()
    with selectors.DefaultSelector() as selector:

        def come(number: int) -> None:
            peer = socket.socket()
            peer.setblocking(False)
            peer.connect_ex(("127.0.0.1", port))
            selector.register(peer, selectors.EVENT_WRITE, (number, False))

        def look() -> None:
            for key, _ in selector.select(0.05):
                peer, (number, spoke) = key.fileobj, key.data
                assert isinstance(peer, socket.socket)
                try:
                    if not spoke:
                        peer.send(kinds[number % len(kinds)])
                        selector.modify(peer, selectors.EVENT_READ, (number, True))
                    elif not peer.recv(64):
                        raise ConnectionError
                    elif kinds[number % len(kinds)] == NULL:
                        peer.send(8 * HELLO)
                except BlockingIOError:
                    pass
                except OSError:
                    selector.unregister(peer)
                    peer.close()
                    come(number)

        def run() -> None:
            while not ended.is_set():
                look()

        for number in range(count):
            come(number)
        look()
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]


@contextlib.contextmanager
def open_files(count: int) -> Iterator[None]:
    """At least so many descriptors; a machine that has fewer fails here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
