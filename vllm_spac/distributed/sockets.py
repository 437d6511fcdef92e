"""What the sockets of engines and workers have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import zmq

from vllm_spac.distributed.wire import MOST_BYTES

HEARTBEAT, SILENCE = 1000, 5000  # milliseconds between heartbeats, and after which a peer counts as gone


def configure(socket: zmq.Socket) -> zmq.Socket:
    """Sets limits and heartbeats; returns ``socket``.

    zmq's own threads exchange the heartbeats, also while a worker computes; a stopped process sends none. A connection
    that announces a part of more than ``MOST_BYTES`` is closed before it is received.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE)
    return socket


def as_text(found: Mapping[str, Any]) -> bytes:
    """Returns the payload of a frame with text."""
    return json.dumps(found).encode()
