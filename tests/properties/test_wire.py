"""Frames between an engine and its workers: what was sent arrives, or is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.methods.od_moe import wire
from vllm_spac.methods.od_moe.wire import (
    MOST_TEXT,
    PREFIX,
    Counts,
    FrameError,
    FrameKind,
    Header,
    Hello,
    Limits,
    Refusal,
    decode,
    encode,
    expert_payload,
    hint_payload,
    raw,
    resident_payload,
    run_payload,
    text_payload,
)

SHAPE = MoEShape(
    ("layer",),
    4,
    2,
    {"w13_weight": TensorSpec((4, 3), torch.bfloat16), "scale": TensorSpec((), torch.float32)},
)
LIMITS = Limits(rows=8, hidden=16, top_k=4, expert_bytes=SHAPE.expert_bytes, experts=6, served=12)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tensors(rows: int, hidden: int, top_k: int, dtype: torch.dtype, seed: int = 0):
    """x of random bits, NaN of every kind among them; weights and ids."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (rows, hidden * dtype.itemsize), dtype=torch.uint8, generator=rng).view(dtype)
    return x, torch.rand(rows, top_k, generator=rng), torch.randint(0, 4, (rows, top_k), generator=rng).int()


def run_frame(rows: int = 2, hidden: int = 5, top_k: int = 2, dtype: torch.dtype = torch.bfloat16):
    x, weights, ids = tensors(rows, hidden, top_k, dtype)
    header = Header(FrameKind.RUN, 2**64 - 1, 3, 4, 5, rows, hidden, top_k, dtype, bytes(range(16)))
    return encode(header, run_payload(x, weights, ids))


def rows_frame():
    x = tensors(2, 5, 2, torch.float32)[0]
    return encode(Header(FrameKind.ROWS, 1, 2, 3, 4, 2, 5, dtype=torch.float32), raw(x))


def resident_frame():
    x, resident = tensors(2, 5, 2, torch.float32)[0], np.arange(12) % 3 == 0
    return encode(Header(FrameKind.ROWS, 1, 2, 3, 4, 2, 5, 12, torch.float32), raw(x) + resident_payload(resident))


def expert() -> dict[str, torch.Tensor]:
    return {"w13_weight": torch.randn(4, 3).bfloat16(), "scale": torch.tensor(1.5)}


FRAMES = {
    "rows to run": run_frame,
    "rows": rows_frame,
    "rows, and what has a slot": resident_frame,
    "expert": lambda: encode(Header(FrameKind.PUT, 1, layer=3), expert_payload(SHAPE, expert())),
    "hint": lambda: encode(Header(FrameKind.HINT, 1, 2, 3, 4, top_k=3), hint_payload([5, 0, 3])),
    "text": lambda: encode(Header(FrameKind.FAILED, 1), b'{"why": "no"}'),
    "nothing": lambda: encode(Header(FrameKind.FILL, 9)),
}
each = pytest.mark.parametrize("name", FRAMES)


@given(
    rows=st.integers(1, 8),
    hidden=st.integers(1, 16),
    top_k=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    numbers=st.tuples(*[st.integers(0, 2**64 - 1)] * 3),
    layer=st.integers(0, 2**32 - 1),
    prompts=st.booleans(),
    seed=st.integers(0, 100),
)
def test_what_was_sent_arrives(rows, hidden, top_k, dtype, numbers, layer, prompts, seed) -> None:
    x, weights, ids = tensors(rows, hidden, top_k, dtype, seed)
    fingerprint = seed.to_bytes(16, "little")
    header = Header(FrameKind.RUN, *numbers, layer, rows, hidden, top_k, dtype, fingerprint, prompts)
    frame = decode(encode(header, run_payload(x, weights, ids)), LIMITS)
    found = frame.header
    for name in ("kind", "epoch", "step", "sequence", "layer", "rows", "hidden", "top_k", "dtype", "prompts"):
        assert getattr(found, name) == getattr(header, name), name
    assert found.fingerprint == fingerprint
    assert raw(frame.rows()) == raw(x)
    assert [raw(tensor) for tensor in frame.pairs()] == [raw(weights), raw(ids)]


def test_an_expert_arrives_in_the_layout_of_its_shape() -> None:
    sent = expert()
    found = decode(encode(Header(FrameKind.EXPERT, 1), expert_payload(SHAPE, sent)), LIMITS).expert(SHAPE)
    assert list(found) == list(SHAPE.tensors)
    assert all(found[name].dtype == sent[name].dtype and torch.equal(found[name], sent[name]) for name in sent)


@each
def test_every_changed_bit_is_noticed(name: str) -> None:
    parts = FRAMES[name]()
    decode(parts, LIMITS)
    for which, part in enumerate(parts):
        for bit in range(8 * len(part)):
            changed = bytearray(part)
            changed[bit // 8] ^= 1 << bit % 8
            message = list(parts)
            message[which] = bytes(changed)
            with pytest.raises(FrameError):
                decode(message, LIMITS)


@each
def test_parts_of_other_lengths_are_refused(name: str) -> None:
    head, payload = FRAMES[name]()
    for message in (
        *([head[:length], payload] for length in range(len(head))),
        *([head, payload[:length]] for length in range(len(payload))),
        *([head + b"\0", payload], [head, payload + b"\0"], [head], [head, payload, b""], []),
    ):
        with pytest.raises(FrameError):
            decode(message, LIMITS)


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (Header(FrameKind.RUN, rows=9, hidden=16, top_k=4, dtype=torch.float32), 9 * (64 + 32)),
        (Header(FrameKind.RUN, rows=1, hidden=17, top_k=4, dtype=torch.float32), 68 + 32),
        (Header(FrameKind.RUN, rows=1, hidden=16, top_k=5, dtype=torch.float32), 64 + 40),
        (Header(FrameKind.RUN, rows=1, hidden=16, top_k=0, dtype=torch.float32), 64),
        (Header(FrameKind.RUN, rows=0, hidden=16, top_k=4, dtype=torch.float32), 0),
        (Header(FrameKind.RUN, rows=1, hidden=16, top_k=4), 64 + 32),
        (Header(FrameKind.ROWS, rows=1, hidden=16, top_k=4, dtype=torch.float32), 64),
        (Header(FrameKind.ROWS, rows=1, hidden=16, top_k=13, dtype=torch.float32), 64 + 2),
        (Header(FrameKind.ROWS, rows=2**60, hidden=16, dtype=torch.float32), 64),
        (Header(FrameKind.ROWS, rows=9, hidden=16, dtype=torch.float32), 9 * 64),
        (Header(FrameKind.HINT, top_k=7), 28),
        (Header(FrameKind.HINT), 0),
        (Header(FrameKind.HINT, top_k=6), 28),
        (Header(FrameKind.HINT, rows=1, top_k=2), 8),
        (Header(FrameKind.HINT, top_k=2, dtype=torch.float32), 8),
        (Header(FrameKind.PUT), SHAPE.expert_bytes + 1),
        (Header(FrameKind.PUT, rows=1), SHAPE.expert_bytes),
        (Header(FrameKind.FAILED), MOST_TEXT + 1),
        (Header(FrameKind.FILL), 1),
        (Header(FrameKind.FILL, dtype=torch.float32), 0),
    ],
    ids=str,
)
def test_other_sizes_are_refused(header: Header, size: int) -> None:
    with pytest.raises(FrameError, match="states"):
        decode(encode(header, bytes(size)), LIMITS)


@pytest.mark.parametrize(
    "header",
    [
        msgspec.msgpack.encode([2]),
        msgspec.msgpack.encode([FrameKind.FILL, -1]),
        msgspec.msgpack.encode([FrameKind.FILL, 1.5]),
        msgspec.msgpack.encode([FrameKind.FILL, *[0] * 7, "float64"]),
        msgspec.msgpack.encode([FrameKind.FILL, *[0] * 7, ["float32"]]),
        msgspec.msgpack.encode([FrameKind.FILL, *[0] * 7, None, bytes(15)]),
        msgspec.msgpack.encode([FrameKind.FILL, *[0] * 7, None, bytes(16), 2]),
        msgspec.msgpack.encode([FrameKind.FILL, *[0] * 7, None, bytes(16), False, 0]),
        msgspec.msgpack.encode({"kind": FrameKind.FILL}),
        msgspec.msgpack.encode([FrameKind.FILL]) + b"\0",
        b"\xdd\xff\xff\xff\xff",  # four thousand million numbers
        b"\x91" * 200,
        b"",
    ],
    ids=str,
)
@pytest.mark.parametrize("prefix", [PREFIX, b"SPAC\x04"])
def test_headers_that_cannot_be(header: bytes, prefix: bytes) -> None:
    """With a right checksum: it is what they say that is refused."""
    head = prefix + header
    with pytest.raises(FrameError, match="cannot be" if prefix == PREFIX else "this release"):
        decode([head + wire._checksum(head, b""), b""], LIMITS)


def test_what_has_a_slot_arrives_after_the_rows() -> None:
    frame = decode(FRAMES["rows, and what has a slot"](), LIMITS)
    assert frame.resident().tolist() == [number % 3 == 0 for number in range(12)]
    assert raw(frame.rows()) == raw(tensors(2, 5, 2, torch.float32)[0])
    with pytest.raises(FrameError, match="12 experts, and at most 0 are known"):
        decode(FRAMES["rows, and what has a slot"](), Limits())


def test_a_hint_arrives_in_its_order() -> None:
    frame = decode(FRAMES["hint"](), LIMITS)
    assert frame.experts().tolist() == [5, 0, 3] and frame.header.top_k == 3


def test_no_hint_is_accepted_before_the_experts_are_known() -> None:
    with pytest.raises(FrameError, match="states .* 3 experts, and at most 0 are known"):
        decode(FRAMES["hint"](), Limits())


def test_no_expert_is_accepted_before_its_size_is_known() -> None:
    for message in (FRAMES["expert"](), encode(Header(FrameKind.PUT, 1))):
        with pytest.raises(FrameError, match="an expert has 0"):
            decode(message, Limits())


@pytest.mark.parametrize(
    "payload",
    [b"", b"[]", b"{", b"\xff", b"[" * 5000, b'{"facts": {}}', b'{"facts": {}, "engine": "", "more": 1}']
    + [b'{"facts": {}, "engine": ' + text + b"}" for text in (b"NaN", rb'"\ud800"', b'"' + b"a" * 65 + b'"')]
    + [b'{"facts": {"vllm": 1}, "engine": ""}'],
)
def test_text_that_says_something_else(payload: bytes) -> None:
    frame = decode(encode(Header(FrameKind.HELLO), payload), LIMITS)
    with pytest.raises(FrameError, match="a HELLO frame says something else"):
        frame.text(Hello)


def test_text_arrives() -> None:
    for kind, said in (
        (Hello, Hello(facts={"vllm": "0.32"}, engine="e")),
        (Refusal, Refusal("full", busy=True)),
        (Counts, {"pool": "a", "hits": 3, "seconds": 0.5, "serving": True, "bytes": {"disk": 5}}),
    ):
        assert decode(encode(Header(FrameKind.COUNTS), text_payload(said)), LIMITS).text(kind) == said
