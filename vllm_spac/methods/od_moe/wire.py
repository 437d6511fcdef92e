"""Frames between an engine and its expert workers: a typed header, then raw tensors or JSON. Pure, no pickle.

A frame has two parts, header and payload. ``decode`` checks a header by itself, then the payload's size against it, and
only then makes tensors: a frame with a wrong size, kind, dtype or checksum is refused before memory is taken for it.
The checksum covers both parts, so that every changed bit is noticed. JSON is read into the type of its kind of frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import torch
import xxhash
from msgspec import Meta, Struct
from torch import Tensor

from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import ConfigError, SpacError, brief
from vllm_spac.kernels.formats import Format
from vllm_spac.system.host_memory import gib

PREFIX = b"SPAC\x07"  # and the version of the frames
MOST_TEXT = 1 << 20  # bytes of JSON: the longest is a service of 4,096 layers with names of 200 letters
MOST_BYTES = 1 << 29  # of a payload: the largest expert, and a prompt's rows
NO_FINGERPRINT = bytes(16)
_MOST_HEAD = 256  # bytes; a header has some 100
_SUM = 16
_ID = 4  # bytes of an expert's number (int32)
_PAIR = 8  # bytes of a pair's weight (float32) and expert (int32)
_DTYPES = {  # of rows, and of experts; of packed ones, also those after the third
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int32)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class FrameError(SpacError):
    """A frame is not what its header states, or states what no frame may."""


class FrameKind(IntEnum):
    """What a frame is. Each request has one answer; ``FAILED`` may answer any."""

    HELLO = 1  # an engine wants a session
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
    HINT = 24  # experts that a layer will probably need, to be loaded ahead; has no answer

    @property
    def is_text(self) -> bool:
        """Whether its payload is JSON."""
        return self.name in ("HELLO", "REFUSED", "SERVE", "HELD", "READY", "FAILED", "COUNTS")


_Number = Annotated[int, Meta(ge=0)]


class Header(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a frame states of itself.

    ``rows``, ``hidden`` and ``top_k`` are sizes of its tensors, 0 where there are none. ``HINT`` has ``top_k`` experts;
    ``ROWS`` of a worker whose group divides experts says of ``top_k`` experts, all that it serves, which have a slot.
    """

    kind: FrameKind
    epoch: _Number = 0  # session between one engine and one start of a worker; 0 before there is one
    step: _Number = 0  # number of the forward, from 1; 0 outside of steps. Of ``HINT``, that of the layer's next run
    sequence: _Number = 0  # number of the request; an answer repeats it
    layer: _Number = 0  # number of the layer; of ``PUT``, ``FETCH``, ``EXPERT`` and ``DROP``, the key of the expert
    rows: _Number = 0
    hidden: _Number = 0
    top_k: _Number = 0
    dtype: torch.dtype | None = None  # of the rows
    fingerprint: Annotated[bytes, Meta(min_length=16, max_length=16)] = NO_FINGERPRINT  # of the experts
    prompts: bool = False


class Limits(Struct, frozen=True):
    """The greatest sizes that a frame may state."""

    # rows, hidden, top_k: of ``RUN`` and ``ROWS``
    rows: int = 1 << 12
    hidden: int = 1 << 17
    top_k: int = 1 << 10
    expert_bytes: int = 0  # exact size of an expert; 0 while it is not known, and no expert is accepted
    experts: int = 0  # of a layer, of which a hint has at most all; 0 while it is not known, and no hint is accepted
    served: int = 0  # most experts of which ``ROWS`` may say whether they have a slot


class Hello(Struct, frozen=True, forbid_unknown_fields=True):
    """``HELLO``."""

    facts: dict[str, str]  # of the engine, as of ``worker_link.facts``
    engine: Annotated[str, Meta(max_length=64)]  # its own name, by which it returns with a new connection


class Refusal(Struct, frozen=True, forbid_unknown_fields=True):
    """``REFUSED`` and ``FAILED``; ``busy``: another engine has the worker."""

    why: str
    busy: bool = False


class Held(Struct, frozen=True, forbid_unknown_fields=True):
    """``HELD``: a bit for each expert of the service."""

    bits: bytes


_Seconds = Annotated[float, Meta(ge=0)]


class Speed(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that a worker takes."""

    expert: _Seconds  # one expert in a slot, for few rows
    row: _Seconds  # one row of an expert, where its rows are many: an expert takes ``max(expert, rows * row)``
    load: _Seconds  # one expert into a slot


class Ready(Struct, frozen=True, forbid_unknown_fields=True):
    """``READY``: how many slots are filled; ``speed`` of a worker whose group divides experts."""

    slots: _Number
    speed: Speed | None = None


Counts = dict[str, bool | int | float | str | dict[str, int | float]]  # ``COUNTS``
_Count = Annotated[int, Meta(ge=1, le=1 << 20)]
_MOST_EXPERTS = 1 << 20  # at one worker, which says of each in a bit whether it is packed, or has a slot
_MOST_AXIS, _MOST_AXES = 1 << 24, 8


class Service(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``SERVE``: the layers that one worker serves, and how."""

    fingerprint: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]  # of the packed experts
    layers: Annotated[tuple[Annotated[str, Meta(max_length=200)], ...], Meta(min_length=1, max_length=4096)]
    own_layers: Annotated[
        tuple[_Number, ...], Meta(min_length=1, max_length=4096)
    ]  # numbers of this worker's, ascending
    experts: _Count
    top_k: _Count
    tensors: Annotated[dict[str, TensorSpec], Meta(min_length=1, max_length=16)]
    packed: Format | None = None  # how ``tensors`` are stored
    dtype: torch.dtype = torch.float32  # of rows
    hidden: _Count
    slots: str
    policy: str
    io_threads: Annotated[int, Meta(ge=1, le=64)] = 4
    activation: str = "silu"
    isa: str = ""
    divides: bool = False  # experts are divided among workers: rows have some, answers say which have a slot
    hints: bool = False  # the engine says which experts layers will probably need, and they are loaded ahead
    # extra, depth, background: of these loads, as in ``PrefetchSettings``
    extra: Annotated[float, Meta(ge=0, le=1)] | None = None
    depth: _Count = 16
    background: Annotated[int, Meta(ge=1, le=64)] | None = None

    def __post_init__(self) -> None:
        """Raises ``ConfigError`` for what cannot be together."""
        if self.own_layers[-1] >= len(self.layers) or list(self.own_layers) != sorted(set(self.own_layers)):
            raise ConfigError(f"spac: a service of the layers {brief(self.own_layers)} of {len(self.layers)}")
        for spec in self.tensors.values():
            if spec.dtype not in _NAMES:
                raise ConfigError(f"spac: expert workers compute {', '.join(_DTYPES)}, not {spec.dtype}")
            if len(spec.shape) > _MOST_AXES or not all(0 <= size <= _MOST_AXIS for size in spec.shape):
                raise ConfigError(f"spac: no expert has a tensor of {brief(spec.shape)}")
        if (served := len(self.own_layers) * self.experts) > _MOST_EXPERTS:
            raise ConfigError(f"spac: {served} experts at a worker, which serves {_MOST_EXPERTS}; use more workers")
        if (nbytes := self.shape.expert_bytes) > MOST_BYTES:
            raise ConfigError(
                f"spac: experts of {gib(nbytes)} do not fit a frame of expert workers ({gib(MOST_BYTES)})"
            )

    @classmethod
    def of(cls, shape: MoEShape, fingerprint: str, own_layers: tuple[int, ...], **others: Any) -> Service:
        """Returns the service of the layers ``own_layers`` of ``shape``."""
        return cls(
            fingerprint=fingerprint,
            layers=shape.layers,
            own_layers=own_layers,
            experts=shape.experts,
            top_k=shape.top_k,
            tensors=shape.tensors,
            packed=shape.packed,
            **others,
        )

    @property
    def shape(self) -> MoEShape:
        """The shape of all layers."""
        return MoEShape(self.layers, self.experts, self.top_k, self.tensors, self.packed)

    @property
    def limits(self) -> Limits:
        """The greatest sizes of frames about these layers."""
        return Limits(
            hidden=self.hidden,
            top_k=self.top_k,
            expert_bytes=self.shape.expert_bytes,
            experts=self.experts,
            served=len(self.own_layers) * self.experts if self.divides else 0,
        )

    @property
    def keys(self) -> list[int]:
        """The experts of ``own_layers``, as keys of ``shape``."""
        return [layer * self.experts + expert for layer in self.own_layers for expert in range(self.experts)]

    @property
    def digest(self) -> bytes:
        """The fingerprint as the 16 bytes of a frame."""
        return bytes.fromhex(self.fingerprint)


_Text = TypeVar("_Text")


class Frame(Struct, frozen=True):
    """A checked frame of ``nbytes``; ``payload`` has the size that its header states."""

    header: Header
    payload: memoryview
    nbytes: int

    def text(self, kind: type[_Text]) -> _Text:
        """Returns what a frame with text says; ``FrameError`` if it is no ``kind``."""
        try:
            return msgspec.json.decode(self.payload, type=kind, dec_hook=_decoded)
        except (ValueError, AssertionError) as error:  # a format that cannot be asserts
            raise FrameError(
                f"spac: a {self.header.kind.name} frame says something else: {brief(str(error))}"
            ) from None

    def why(self) -> str:
        """Returns the reason that ``FAILED`` or ``REFUSED`` gives."""
        return self.text(Refusal).why

    def rows(self) -> Tensor:
        """Returns a copy of the rows of ``RUN`` or ``ROWS``: [rows, hidden] in ``header.dtype``."""
        head = self.header
        assert head.dtype is not None
        return self._tensor(0, (head.rows, head.hidden), head.dtype)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Returns copies of the weights (float32) and experts (int32) of ``RUN``, both [rows, top_k]."""
        start, shape = _row_bytes(self.header), (self.header.rows, self.header.top_k)
        weights = self._tensor(start, shape, torch.float32)
        return weights, self._tensor(start + weights.nbytes, shape, torch.int32)

    def resident(self) -> np.ndarray:
        """Returns whether each expert that the sender of ``ROWS`` serves has a slot there, bool [top_k]."""
        bits = np.frombuffer(self.payload, np.uint8, offset=_row_bytes(self.header))
        return np.unpackbits(bits, count=self.header.top_k).astype(bool)

    def experts(self) -> np.ndarray:
        """Returns a copy of the experts of ``HINT``, int64 [top_k]."""
        return np.frombuffer(self.payload, np.dtype("<i4"), self.header.top_k).astype(np.int64)

    def expert(self, shape: MoEShape) -> dict[str, Tensor]:
        """Returns copies of the tensors of one expert of ``shape``; the frame's size is that of an expert."""
        tensors, start = {}, 0
        for name, spec in shape.tensors.items():
            tensors[name] = self._tensor(start, spec.shape, spec.dtype)
            start += spec.nbytes
        assert start == len(self.payload)
        return tensors

    def _tensor(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = torch.Size(shape).numel()
        part = bytearray(self.payload[start : start + count * dtype.itemsize])
        return torch.frombuffer(part, dtype=dtype, count=count).view(shape)


def encode(header: Header, payload: bytes = b"") -> tuple[bytes, bytes]:
    """Returns the two parts of a frame; the checksum is made here."""
    head = PREFIX + msgspec.msgpack.encode(header, enc_hook=_encoded)
    return head + _checksum(head, payload), payload


def text_payload(text: Struct | Counts) -> bytes:
    """Returns the payload of a frame with text."""
    return msgspec.json.encode(text, enc_hook=_encoded)


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


def decode(parts: Sequence[Any], limits: Limits) -> Frame:
    """Returns a received message, buffers of bytes; ``FrameError`` if it is no frame, or not as it was sent."""
    if len(parts) != 2:
        raise FrameError(f"spac: a message of {len(parts)} parts, not 2")
    head, payload = (memoryview(part).cast("B") for part in parts)
    if len(head) > _MOST_HEAD or head[: len(PREFIX)] != PREFIX:
        raise FrameError("spac: a message that is no frame of an expert worker of this release; use one for all")
    try:
        header = _headers.decode(head[len(PREFIX) : -_SUM])
    except ValueError as error:
        raise FrameError(f"spac: a frame with a header that cannot be: {brief(str(error))}") from None
    _check_sizes(header, len(payload), limits)
    if bytes(head[-_SUM:]) != _checksum(head[:-_SUM], payload):
        raise FrameError(f"spac: a {header.kind.name} frame arrived with another checksum")
    return Frame(header, payload, len(head) + len(payload))


def _check_sizes(header: Header, size: int, limits: Limits) -> None:
    """Raises ``FrameError`` if a frame states more than ``limits``, or has a payload of another ``size``."""
    kind, rows, top_k = header.kind, header.rows, header.top_k
    stated = f"spac: a {kind.name} frame states {rows} rows x {header.hidden} of {header.dtype}, {top_k} experts"
    least, most, experts_bytes = {
        FrameKind.RUN: (1, limits.top_k, rows * top_k * _PAIR),
        FrameKind.ROWS: (0, limits.served, -(-top_k // 8)),
        FrameKind.HINT: (1, limits.experts, top_k * _ID),
    }.get(kind, (0, 0, 0))
    if kind in (FrameKind.RUN, FrameKind.ROWS):
        right = (
            header.dtype is not None
            and header.dtype.is_floating_point
            and 0 < rows <= limits.rows
            and 0 < header.hidden <= limits.hidden
        )
    else:
        right = (rows, header.hidden, header.dtype) == (0, 0, None)
    if not right or not least <= top_k <= most:
        raise FrameError(f"{stated}, and at most {most} are known")
    if kind.is_text:
        fits = size <= MOST_TEXT
    elif kind in (FrameKind.PUT, FrameKind.EXPERT):
        fits = 0 < size == limits.expert_bytes
    else:
        fits = size == _row_bytes(header) + experts_bytes
    if not fits:
        raise FrameError(f"{stated}, and has {size} bytes; an expert has {limits.expert_bytes}")


def _row_bytes(header: Header) -> int:
    return 0 if header.dtype is None else header.rows * header.hidden * header.dtype.itemsize


def _encoded(value: Any) -> Any:
    """A dtype as its name; anything else is no part of a frame."""
    return _NAMES[value]


def _decoded(kind: type, name: Any) -> Any:
    if kind is not torch.dtype or name not in _DTYPES:
        raise ValueError(f"expert workers compute {', '.join(_DTYPES)}, not {brief(name)}")
    return _DTYPES[name]


_headers = msgspec.msgpack.Decoder(Header, dec_hook=_decoded)


def _checksum(head: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    checksum = xxhash.xxh3_128(head)
    checksum.update(payload)
    return checksum.digest()
