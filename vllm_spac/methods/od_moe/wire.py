"""Frames between an engine and its expert workers: a fixed header, then raw tensors or JSON. Pure, no pickle.

A frame has two parts, header and payload. ``decode`` checks a header by itself, then the payload against it, and only
then makes tensors: a frame that states a wrong size, kind, dtype or checksum is refused before memory is taken for it.
The checksum covers both parts, so that every changed bit is noticed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.errors import SpacError
from vllm_spac.system.untrusted import parse_json

MAGIC, VERSION = b"SPAC", 4
MOST_TEXT = 4 << 20  # bytes of JSON
MOST_BYTES = 1 << 29  # of a payload
MOST_SERVED = (1 << 16) - 1  # experts of which an answer may say whether they have a slot
NO_FINGERPRINT = bytes(16)
# magic, version, kind, dtype, prompts, epoch, step, sequence, layer, rows, hidden, top_k, payload,
# fingerprint, checksum
_FIELDS = struct.Struct("<4sBBBBQQQIIIHQ16s16s")
HEADER_BYTES = _FIELDS.size
_KIND = 5  # where a header has its kind
_SUM = 16
_ID = 4  # bytes of an expert's number (int32)
_PAIR = 8  # bytes of a pair's weight (float32) and expert (int32)
_DTYPES = {1: torch.float32, 2: torch.bfloat16, 3: torch.float16}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class FrameError(SpacError):
    """A frame is not what its header states, or states what no frame may."""


class FrameKind(IntEnum):
    """What a frame is. Each request has one answer; ``FAILED`` may answer any."""

    HELLO = 1  # an engine wants a session, or a visitor
    WELCOME = 4  # with the epoch of its session
    REFUSED = 5
    SERVE = 6  # what the worker is to serve
    HELD = 7  # the experts that it has already
    PUT = 8  # an expert to store
    STORED = 9
    FILL = 10  # everything is stored: fill the slots
    READY = 11
    FETCH = 12  # a stored expert is wanted
    EXPERT = 13
    RUN = 14  # rows of a layer, with the weights and experts of each
    ROWS = 15  # the layer's output for these rows
    FAILED = 16
    STATS = 17
    COUNTS = 18
    DROP = 19  # an expert that was stored is wrong
    DROPPED = 20
    LEAVE = 21  # the session ends; has no answer
    PROBE = 22  # sent by a worker to learn whether its engine is connected; has no answer
    ECHO = 23  # rows to be sent back as ``ROWS``, unchanged: what the network takes
    HINT = 24  # experts that a layer will probably need, to be loaded ahead; has no answer


_TEXTS = {
    *(FrameKind.HELLO, FrameKind.WELCOME, FrameKind.REFUSED, FrameKind.SERVE, FrameKind.HELD, FrameKind.READY),
    *(FrameKind.FAILED, FrameKind.COUNTS),
}
_EXPERTS = {FrameKind.PUT, FrameKind.EXPERT}


@dataclass(frozen=True, slots=True)
class Header:
    """What a frame states of itself.

    Attributes:
        epoch: session between one engine and one start of a worker; 0 before there is one.
        step: number of the forward, from 1; 0 outside of steps. Of ``HINT``, that of the layer's next run.
        sequence: number of the request; an answer repeats it.
        layer: number of the layer; of ``PUT``, ``FETCH``, ``EXPERT`` and ``DROP``, the key of the expert.
        rows, hidden, top_k: sizes of the tensors; 0 where there are none. ``HINT`` has ``top_k`` experts. ``ROWS`` of
            a worker whose group divides experts says of ``top_k`` experts, all that it serves, which have a slot.
        dtype: of the rows; None where there are none.
        payload: bytes of the second part.
        fingerprint: 16 bytes, of the experts.
    """

    kind: FrameKind
    epoch: int = 0
    step: int = 0
    sequence: int = 0
    layer: int = 0
    rows: int = 0
    hidden: int = 0
    top_k: int = 0
    dtype: torch.dtype | None = None
    payload: int = 0
    fingerprint: bytes = NO_FINGERPRINT
    prompts: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """The greatest sizes that a frame may state.

    Attributes:
        rows, hidden, top_k: of ``RUN``, ``ROWS`` and ``ECHO``.
        expert_bytes: exact size of an expert; 0 while it is not known, and no expert is accepted.
        experts: of a layer, of which a hint has at most all; 0 while it is not known, and no hint is accepted.
        served: most experts of which ``ROWS`` may say whether they have a slot.
    """

    rows: int = 1 << 12
    hidden: int = 1 << 17
    top_k: int = 1 << 10
    expert_bytes: int = 0
    experts: int = 0
    served: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    """A checked frame; ``payload`` has ``header.payload`` bytes."""

    header: Header
    payload: memoryview

    def text(self) -> dict[str, Any]:
        """Returns the JSON object of a frame with text; raises ``FrameError`` if it is none."""
        try:
            found = parse_json(bytes(self.payload).decode())
        except ValueError as error:
            raise FrameError(f"spac: a {self.header.kind.name} frame has no JSON: {error}") from None
        if not isinstance(found, dict):
            raise FrameError(f"spac: a {self.header.kind.name} frame has no JSON object")
        return found

    def why(self) -> str:
        """Returns the reason that ``FAILED`` or ``REFUSED`` gives."""
        try:
            return str(self.text().get("why"))
        except FrameError as error:
            return str(error)

    def rows(self) -> Tensor:
        """Returns a copy of the rows of ``RUN``, ``ROWS`` or ``ECHO``: [rows, hidden] in ``header.dtype``."""
        head = self.header
        assert head.dtype is not None
        return self._tensor(0, (head.rows, head.hidden), head.dtype)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Returns copies of the weights (float32) and experts (int32) of ``RUN``, both [rows, top_k]."""
        head = self.header
        assert head.dtype is not None
        start, shape = head.rows * head.hidden * head.dtype.itemsize, (head.rows, head.top_k)
        weights = self._tensor(start, shape, torch.float32)
        return weights, self._tensor(start + weights.nbytes, shape, torch.int32)

    def resident(self) -> np.ndarray:
        """Returns whether each expert that the sender of ``ROWS`` serves has a slot there, bool [top_k]."""
        head = self.header
        assert head.dtype is not None
        bits = np.frombuffer(self.payload, np.uint8, offset=head.rows * head.hidden * head.dtype.itemsize)
        return np.unpackbits(bits, count=head.top_k).astype(bool)

    def experts(self) -> np.ndarray:
        """Returns a copy of the experts of ``HINT``, int64 [top_k]."""
        return np.frombuffer(self.payload, np.dtype("<i4"), self.header.top_k).astype(np.int64)

    def expert(self, shape: MoEShape) -> dict[str, Tensor]:
        """Returns copies of the tensors of one expert of ``shape``; the frame's size is that of an expert."""
        found, start = {}, 0
        for name, spec in shape.tensors.items():
            found[name] = self._tensor(start, spec.shape, spec.dtype)
            start += spec.nbytes
        assert start == self.header.payload
        return found

    def _tensor(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = torch.Size(shape).numel()
        part = bytearray(self.payload[start : start + count * dtype.itemsize])
        return torch.frombuffer(part, dtype=dtype, count=count).view(shape)


def encode(header: Header, payload: bytes = b"") -> tuple[bytes, bytes]:
    """Returns the two parts of a frame; the size and the checksum are set here."""
    fields = (
        *(MAGIC, VERSION, header.kind, 0 if header.dtype is None else _CODES[header.dtype], header.prompts),
        *(header.epoch, header.step, header.sequence, header.layer, header.rows, header.hidden, header.top_k),
        *(len(payload), header.fingerprint),
    )
    head = _FIELDS.pack(*fields, bytes(_SUM))[:-_SUM]
    return head + _checksum(head, payload), payload


def run_payload(x: Tensor, weights: Tensor, ids: Tensor) -> bytes:
    """Returns the payload of ``RUN``: x [rows, hidden], weights and ids [rows, top_k], all on the CPU."""
    return b"".join(map(raw, (x, weights.to(torch.float32), ids.to(torch.int32))))


def resident_payload(resident: np.ndarray) -> bytes:
    """Returns what follows the rows of ``ROWS``: whether each expert has a slot, bool [experts]."""
    return np.packbits(resident).tobytes()


def expert_payload(shape: MoEShape, tensors: Mapping[str, Tensor]) -> bytes:
    """Returns the payload of ``PUT`` and ``EXPERT``: the tensors in the order of ``shape``."""
    return b"".join(raw(tensors[name]) for name in shape.tensors)


def hint_payload(experts: Sequence[int] | np.ndarray) -> bytes:
    """Returns the payload of ``HINT``: experts of a layer, the likeliest first."""
    return np.asarray(experts, np.dtype("<i4")).tobytes()


def raw(tensor: Tensor) -> bytes:
    """Returns the bytes of a CPU tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def stated_kind(parts: Sequence[Any]) -> int:
    """Returns the kind that a received message states, which nobody has checked; 0 if it has no header."""
    return parts[0][_KIND] if len(parts[0]) == HEADER_BYTES else 0


def decode(parts: Sequence[Any], limits: Limits) -> Frame:
    """Checks a received message and returns it.

    Args:
        parts: what arrived, buffers of bytes.

    Raises:
        FrameError: it is not a frame, or not as it was sent.
    """
    if len(parts) != 2:
        raise FrameError(f"spac: a message of {len(parts)} parts, not 2")
    head, payload = (memoryview(part).cast("B") for part in parts)
    header = _parse(head, limits)
    if len(payload) != header.payload:
        raise FrameError(f"spac: a {header.kind.name} frame states {header.payload} bytes and has {len(payload)}")
    if bytes(head[-_SUM:]) != _checksum(head[:-_SUM], payload):
        raise FrameError(f"spac: a {header.kind.name} frame arrived with another checksum")
    return Frame(header, payload)


def _parse(head: memoryview, limits: Limits) -> Header:
    if len(head) != HEADER_BYTES:
        raise FrameError(f"spac: a header of {len(head)} bytes, not {HEADER_BYTES}")
    magic, version, kind, code, prompts, *numbers, payload, fingerprint, _ = _FIELDS.unpack(head)
    if magic != MAGIC:
        raise FrameError("spac: a message that is no frame of an expert worker")
    if version != VERSION:
        raise FrameError(f"spac: a frame of version {version}, and this is version {VERSION}; use one release for all")
    if kind not in FrameKind.__members__.values():
        raise FrameError(f"spac: a frame of the unknown kind {kind}")
    if (code != 0 and code not in _DTYPES) or prompts > 1:
        raise FrameError(f"spac: a frame of the unknown dtype {code}, or flag {prompts}")
    epoch, step, sequence, layer, rows, hidden, top_k = numbers
    dtype = _DTYPES.get(code)
    header = Header(
        FrameKind(kind), epoch, step, sequence, layer, rows, hidden, top_k, dtype, payload, fingerprint, bool(prompts)
    )
    _check_sizes(header, limits)
    return header


def _check_sizes(header: Header, limits: Limits) -> None:
    name = header.kind.name
    if header.payload > MOST_BYTES:
        raise FrameError(f"spac: a {name} frame states {header.payload} bytes, more than any may have")
    if header.kind == FrameKind.HINT:
        if (header.rows, header.hidden, header.dtype) != (0, 0, None) or not 0 < header.top_k <= limits.experts:
            raise FrameError(f"spac: a hint of {header.top_k} experts of {limits.experts}, or with rows")
        if header.payload != header.top_k * _ID:
            raise FrameError(f"spac: a hint states {header.payload} bytes for {header.top_k} experts")
        return
    sized = header.kind in (FrameKind.RUN, FrameKind.ROWS, FrameKind.ECHO)
    pairs = header.top_k if header.kind == FrameKind.RUN else 0
    if not sized:
        if (header.rows, header.hidden, header.top_k, header.dtype) != (0, 0, 0, None):
            raise FrameError(f"spac: a {name} frame states rows, and has none")
        expert = limits.expert_bytes if header.kind in _EXPERTS else 0
        if header.kind in _EXPERTS and (expert == 0 or header.payload != expert):
            raise FrameError(f"spac: a {name} frame of {header.payload} bytes, and an expert has {expert}")
        if header.kind not in _EXPERTS and header.payload > (MOST_TEXT if header.kind in _TEXTS else 0):
            raise FrameError(f"spac: a {name} frame states {header.payload} bytes, more than it may have")
        return
    if header.dtype is None or not 0 < header.rows <= limits.rows or not 0 < header.hidden <= limits.hidden:
        raise FrameError(f"spac: a {name} frame states {header.rows} rows x {header.hidden} of {header.dtype}")
    least, most = {FrameKind.RUN: (1, limits.top_k), FrameKind.ROWS: (0, limits.served)}.get(header.kind, (0, 0))
    if not least <= header.top_k <= most:
        raise FrameError(f"spac: a {name} frame states {header.top_k} experts")
    needed = header.rows * (header.hidden * header.dtype.itemsize + pairs * _PAIR)
    needed += -(-header.top_k // 8) if header.kind == FrameKind.ROWS else 0
    if header.payload != needed:
        raise FrameError(f"spac: a {name} frame states {header.payload} bytes, and its tensors have {needed}")


def _checksum(head: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    checksum = xxhash.xxh3_128(head)
    checksum.update(payload)
    return checksum.digest()
