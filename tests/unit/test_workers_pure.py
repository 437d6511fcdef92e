"""Decisions about workers that need no worker: owners, deadlines, the description of a service."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.methods.od_moe.division import layers_of, owners
from vllm_spac.methods.od_moe.roster import Patience, ReadyWorker, Recovery
from vllm_spac.methods.od_moe.wire import (
    MOST_BYTES,
    MOST_TEXT,
    Frame,
    FrameError,
    FrameKind,
    Header,
    Held,
    Limits,
    Service,
    decode,
    encode,
    text_payload,
)
from vllm_spac.methods.od_moe.worker_link import difference

SPECS = {"w13_weight": TensorSpec((8, 4), torch.bfloat16), "w2_weight": TensorSpec((4, 4), torch.bfloat16)}
SHAPE = MoEShape(("a", "b", "c"), 4, 2, SPECS)


@given(workers=st.integers(1, 8), layers=st.integers(1, 20), data=st.data())
def test_each_layer_has_its_group(workers: int, layers: int, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([size for size in range(1, workers + 1) if workers % size == 0]))
    for layer in range(layers):
        found = owners(layer, workers, size)
        group = layer % (workers // size)
        assert list(found) == list(range(size * group, size * (group + 1)))
        assert list(found) == [w for w in range(workers) if layer in layers_of(w, layers, workers, size)]


def test_deadlines_follow_calls_of_their_size() -> None:
    patience = Patience(least=1.0, first=60.0)
    assert patience.of(1) == 60
    for _ in range(8):
        patience.observe(1, 0.01)
        patience.observe(100, 2.0)
    assert patience.of(1) == 1.0, "never below the least"
    assert patience.of(120) == 16.0
    assert patience.of(5000) == 60.0, "nothing of that size was measured"


def test_what_differs_is_named() -> None:
    ours = {"vllm": "0.32", "cpu": "AVX512+AMX"}
    assert difference(ours, dict(ours)) is None
    assert difference(ours, {"vllm": "0.32", "cpu": "AVX2"}) == "cpu AVX512+AMX here and 'AVX2' there"
    assert "vllm" in str(difference(ours, {"cpu": "AVX512+AMX"}))
    assert "cpu" in str(difference(ours, {}))


def service(**changes: object) -> Service:
    """A service as it arrives, after ``changes`` to what was sent."""
    sent = json.loads(text_payload(Service.of(SHAPE, "0a" * 16, (0, 2), hidden=4, slots="50%", policy="lru")))
    return arrived(FrameKind.SERVE, json.dumps(sent | changes).encode()).text(Service)


def arrived(kind: FrameKind, payload: bytes) -> Frame:
    return decode(encode(Header(kind), payload), Limits())


def test_a_service_is_read_as_it_was_written() -> None:
    found = service()
    assert found.shape == SHAPE and found.own_layers == (0, 2)
    assert found.keys == [*range(4), *range(8, 12)]
    assert found.digest == b"\x0a" * 16


@pytest.mark.parametrize(
    "changes",
    [
        {"own_layers": [0, 3]},
        {"own_layers": [2, 0]},
        {"own_layers": [0, 0]},
        {"own_layers": []},
        {"own_layers": [-1]},
        {"fingerprint": "../../etc"},
        {"fingerprint": "0a" * 16 + "\n"},
        {"experts": 0},
        {"tensors": {"w": {"shape": [2], "dtype": "object"}}},
        {"tensors": {"w": {"shape": [2], "dtype": ["float32"]}}},
        {"tensors": {"w": {"shape": [-2], "dtype": "float32"}}},
        {"tensors": {"w": {"shape": [1] * 9, "dtype": "float32"}}},
        {"tensors": {"w": {"shape": [1 << 25, 0], "dtype": "float32"}}},
        {"tensors": {"w": {"shape": [1 << 24, 1 << 24], "dtype": "float32"}}},
        {"layers": ["a" * 201, "b", "c"]},
        {"tensors": {}},
        {"experts": 1 << 20},
        {"surprise": 1},
        {"packed": {"codes": "int3"}},
        {"packed": {"codes": "int4", "group": 3}},
        {"packed": {"codes": "e2m1", "group": 48}},
        {"dtype": "int64"},
    ],
    ids=str,
)
def test_a_service_that_cannot_be_is_refused(changes: dict) -> None:
    with pytest.raises(FrameError, match="spac: a SERVE frame says something else"):
        service(**changes)


def test_the_longest_text_is_a_service_of_as_many_layers_as_may_be() -> None:
    """What any text may have, follows from it: more would only be memory that a peer can make a worker take."""
    names = tuple(f"{number:0200d}" for number in range(4096))
    most, every = MoEShape(names, 256, 8, SPECS), tuple(range(4096))
    sent = text_payload(Service.of(most, "0a" * 16, every, hidden=4, slots="50%", policy="lru"))
    assert arrived(FrameKind.SERVE, sent).text(Service).layers == names
    assert len(sent) < MOST_TEXT < 1.25 * len(sent)
    held = text_payload(Held(bytes(-(-(1 << 20) // 8))))
    assert len(arrived(FrameKind.HELD, held).text(Held).bits) == 1 << 17, "of as many experts as a worker may have"
    assert MOST_BYTES == 512 << 20


def test_what_no_worker_should_answer_does_not_end_the_thread_that_brings_it_back(caplog) -> None:
    """An answer without ``slots`` was a KeyError, and after it the worker never came back."""
    ended, tried = threading.Event(), threading.Semaphore(0)

    def bring(worker: int) -> ReadyWorker:
        tried.release()
        raise KeyError("slots")

    recovery = Recovery(bring, ended)
    try:
        recovery.request(0)
        for _ in range(2):  # a second time only if the thread still runs
            assert tried.acquire(timeout=60)
    finally:
        ended.set()
        recovery.close()
    assert "worker-0 is not back yet: KeyError: 'slots'" in caplog.text
