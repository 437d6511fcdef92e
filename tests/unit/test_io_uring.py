"""Experts that are read together by io_uring are those that single reads give, or fail alike; nothing writes later."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packed_experts import blank, expert, packed

from vllm_spac.cache.transfers import Transfers
from vllm_spac.config.config import SpacConfig
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import ConfigError, StoreError
from vllm_spac.recording.metrics import Counters
from vllm_spac.storage.base import Slots
from vllm_spac.storage.disk import DiskStore
from vllm_spac.storage.memory import MemoryStore
from vllm_spac.system import io_uring
from vllm_spac.system.io_uring import ENTRIES, Ring

SHAPE = MoEShape(
    ("layer",),
    2 * ENTRIES + 5,
    2,
    {"w": TensorSpec((3, 1024), torch.float32), "v": TensorSpec((2048,), torch.bfloat16)},
)
DAMAGE = ("none", "bit", "header", "short", "long", "empty", "gone")


def packed_directly(folder: Path) -> DiskStore:
    store = packed(folder, SHAPE)
    if not store.direct:
        pytest.skip(f"{folder} has no direct I/O, which io_uring reads with here")
    return store


def spoil(path: Path, how: str) -> None:
    if how == "bit":
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
    elif how == "header":
        path.write_bytes(bytes(4096) + path.read_bytes()[4096:])
    elif how == "gone":
        path.unlink()
    elif how != "none":
        os.truncate(path, {"short": 8192, "long": path.stat().st_size + 4096, "empty": 0}[how])


@pytest.fixture
def ring() -> Iterator[Ring]:
    try:
        made = Ring()
    except ConfigError as error:
        pytest.skip(str(error))
    with closing(made):
        yield made


def assert_is(slots: dict[str, torch.Tensor], slot: int, key: int) -> None:
    assert all(torch.equal(slots[name][slot], tensor) for name, tensor in expert(SHAPE, key).items())


def test_more_than_fit_into_the_ring_at_once(ring, tmp_path) -> None:
    store, slots = packed_directly(tmp_path), blank(SHAPE, SHAPE.total)
    keys = [(7 * number + 3) % SHAPE.total for number in range(SHAPE.total)]  # all of them, in another order
    made = Slots(slots)
    found = dict(store.read_all([(key, made[slot]) for slot, key in enumerate(keys)], ring))
    assert found == dict.fromkeys(range(SHAPE.total), SHAPE.expert_bytes)
    for slot, key in enumerate(keys):
        assert_is(slots, slot, key)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(how=st.lists(st.sampled_from(DAMAGE), min_size=1, max_size=6), number=st.integers(0, 1 << 30))
def test_each_fails_or_not_as_a_single_read_does(how, number, ring, tmp_path) -> None:
    """Side by side with others; a damaged file is moved aside in the same way."""
    together, alone = packed_directly(tmp_path / f"{number}-together"), packed_directly(tmp_path / f"{number}-alone")
    for key, kind in enumerate(how):
        for store in (together, alone):
            spoil(store.path(key), kind)
    slots = blank(SHAPE, len(how))
    made = Slots(slots)
    found = dict(together.read_all([(key, made[key]) for key in range(len(how))], ring))
    assert sorted(found) == list(range(len(how)))
    for key, kind in enumerate(how):
        try:
            expected = alone.read(key, Slots(blank(SHAPE, 1))[0])
        except StoreError as error:
            assert str(found[key]).replace("together", "alone") == str(error), kind
        else:
            assert kind == "none" and found[key] == expected
            assert_is(slots, key, key)
    names = [sorted(path.name for path in store.folder.rglob("*.corrupt")) for store in (together, alone)]
    assert names[0] == names[1]


def test_loads_of_a_layer(ring, tmp_path) -> None:
    store, slots, counters = packed_directly(tmp_path), blank(SHAPE, 4), Counters()
    spoil(store.path(2), "bit")
    with closing(Transfers(store, slots, 2, "disk", ring=Ring())) as transfers:
        failed = transfers.load([(5, 3), (2, 1), (0, 0)], counters)
        assert list(failed) == [2] and isinstance(failed[2], StoreError)
        assert (counters.loads, counters.bytes["disk"]) == (2, 2 * SHAPE.expert_bytes)
        assert transfers.load([], counters) == {}
    assert_is(slots, 3, 5)
    assert_is(slots, 0, 0)
    assert slots["w"][2].isnan().all(), "a slot that was not asked for was written"


class _StopsOnce(Ring):
    """The first wait for a read is interrupted."""

    stopped = False

    def completed(self):
        if not self.stopped:
            self.stopped = True
            raise KeyboardInterrupt
        yield from super().completed()


def test_nothing_writes_after_an_interrupt(ring, tmp_path) -> None:
    """Reads in flight have ended when ``load`` is left, and the next load works."""
    store, slots = packed_directly(tmp_path), blank(SHAPE, 3)
    stopping = _StopsOnce()
    with closing(Transfers(store, slots, 2, "disk", ring=stopping)) as transfers:
        with pytest.raises(KeyboardInterrupt):
            transfers.load([(0, 0), (1, 1)], None)
        assert stopping.stopped and not stopping._in_flight
        assert_is(slots, 0, 0)  # the kernel had them
        assert transfers.load([(2, 2)], None) == {}
    assert_is(slots, 2, 2)


def test_a_file_that_cannot_be_read_is_told(ring, tmp_path) -> None:
    part = [np.zeros(4096, np.uint8)]
    ring.submit([(1, 9999, part)])
    assert list(ring.completed()) == [(1, -1)]


def test_the_lock_is_free_while_a_read_is_waited_for(ring, tmp_path) -> None:
    """A pipe that nobody has written to yet: another thread writes to it while this one waits."""
    reading, writing = os.pipe()
    part = np.zeros(4, np.uint8)
    ring.submit([(3, reading, [part])])
    threading.Timer(0.2, os.write, (writing, b"done")).start()
    assert list(ring.completed()) == [(3, 4)] and bytes(part) == b"done"
    os.close(reading)
    os.close(writing)


def test_what_cannot_be_read_so_is_refused(ring, tmp_path) -> None:
    store = MemoryStore(SHAPE, "")
    assert not store.batches(Slots(blank(SHAPE, 1))[0])
    with pytest.raises(ConfigError, match="use --spac-io-submit threads"):
        Transfers(store, blank(SHAPE, 1), 2, "memory", ring=Ring())


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "liburing", None)
    with pytest.raises(ConfigError, match=r"needs the package liburing .*pip install 'vllm-spac\[io-uring\]'"):
        Ring()


def test_a_kernel_that_refuses_is_named(monkeypatch, ring) -> None:
    def refuse(*_) -> None:
        raise PermissionError(1, "Operation not permitted")

    assert io_uring.available(), "the control"
    monkeypatch.setattr(io_uring.importlib.import_module("liburing"), "io_uring_queue_init", refuse)
    with pytest.raises(ConfigError, match="the kernel refuses .Operation not permitted.*io_uring_disabled"):
        Ring()
    assert not io_uring.available()


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"store": "host"}, "use --spac-store disk"),
        ({"host_memory": "1GiB"}, "drop --spac-host-memory, or drop --spac-io-submit"),
        ({"execution": "pointers"}, "reads none; drop --spac-io-submit"),
        ({"executor": "processes", "workers": 2}, "drop --spac-io-submit"),
    ],
)
def test_what_it_does_not_go_with(knobs, said) -> None:
    with pytest.raises(ConfigError, match=said):
        SpacConfig.parse({"io_submit": "io_uring", **knobs})
