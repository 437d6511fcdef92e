"""Loads run concurrently and have finished when ``load`` returns: a kernel reads the slots right after it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping

import pytest
import torch
from memory_store import MemoryStore
from torch import Tensor

from vllm_spac.cache import transfers as transfers_module
from vllm_spac.cache.transfers import Transfers
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import StoreError
from vllm_spac.recording.metrics import Counters
from vllm_spac.storage.host import HostStore

SHAPE = MoEShape(("layer",), 8, 2, {"w": TensorSpec((2, 3), torch.float32), "b": TensorSpec((1,), torch.float32)})
THREADS = 4


class Store(MemoryStore):
    """Expert ``key`` is filled with ``key``; ``before(key)`` runs at the start of each read."""

    def __init__(self, before: Callable[[int], None] = lambda key: None) -> None:
        super().__init__(SHAPE, "")
        self.before = before
        for key in range(SHAPE.total):
            self.put(key, {name: torch.full(spec.shape, float(key)) for name, spec in SHAPE.tensors.items()})

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        self.before(key)
        return super().read(key, into)


def blank(device: str = "cpu") -> dict[str, Tensor]:
    return {name: torch.full((8, *spec.shape), float("nan"), device=device) for name, spec in SHAPE.tensors.items()}


def values(slots: dict[str, Tensor]) -> list[float | None]:
    """The one value that fills each slot; None for a slot that was not written."""
    rows = torch.cat([slots["w"].flatten(1), slots["b"].flatten(1)], 1).cpu()
    assert all(row.isnan().all() or (row == row[0]).all() for row in rows)
    return [None if row[0].isnan() else row[0].item() for row in rows]


@pytest.fixture(params=[-1, 1 << 20], ids=["threads", "caller alone"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads beside each other, or by the caller alone, as of few bytes: no difference may be seen."""
    monkeypatch.setattr(transfers_module, "_HAND_OFF", request.param)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers_module, "_HAND_OFF", -1)


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[Transfers, dict[str, Tensor]]]]:
    made: list[Transfers] = []

    def make(before: Callable[[int], None] = lambda key: None, threads: int = THREADS):
        slots = blank()
        made.append(Transfers(Store(before), slots, threads, "somewhere"))
        return made[-1], slots

    yield make
    for transfers in made:
        transfers.close()


def test_fills_these_slots_and_no_other(either, make) -> None:
    transfers, slots = make()
    assert transfers.load([(7, 1), (0, 4), (3, 6), (5, 0), (2, 2), (6, 7)], None) == {}
    assert values(slots) == [5, 7, 2, None, 0, None, 3, 6]


def test_counts(either, make) -> None:
    transfers, _ = make(lambda key: time.sleep(0.01))
    counters = Counters(loads=1, bytes={"somewhere": 5, "else": 7})
    transfers.load([(0, 0), (1, 1), (2, 2)], counters)
    assert (counters.loads, counters.bytes) == (4, {"somewhere": 5 + 3 * SHAPE.expert_bytes, "else": 7})
    assert counters.stall_seconds >= 0.01
    assert (counters.hits, counters.misses, counters.waves) == (0, 0, 0), "not its business"


def test_reads_run_beside_each_other(beside, make) -> None:
    """All threads and the caller: none gets past the barrier unless five reads are in flight at once."""
    barrier = threading.Barrier(THREADS + 1, timeout=30)
    transfers, slots = make(lambda key: barrier.wait() and None)
    assert transfers.load([(key, key) for key in range(5)], None) == {}
    assert values(slots)[:5] == [0, 1, 2, 3, 4]


def test_never_more_reads_than_threads_and_the_caller(beside, make) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def before(key: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.005)
        with lock:
            running -= 1

    transfers, _ = make(before, threads=2)
    transfers.load([(key, key) for key in range(8)], None)
    assert most <= 3


def test_a_few_bytes_are_read_by_the_caller(make) -> None:
    threads = set()
    transfers, slots = make(lambda key: threads.add(threading.current_thread()))
    assert transfers.load([(key, key) for key in range(8)], None) == {}
    assert values(slots) == list(range(8)) and threads == {threading.current_thread()}


def test_an_interrupt_ends_the_reads_of_the_caller(make) -> None:
    def before(key: int) -> None:
        if key == 1:
            raise KeyboardInterrupt

    transfers, slots = make(before)
    with pytest.raises(KeyboardInterrupt):
        transfers.load([(key, key) for key in range(3)], None)
    assert values(slots)[:3] == [0, None, None]
    transfers.load([(2, 2)], None)
    assert values(slots)[2] == 2


@pytest.mark.parametrize("bad", [{0}, {3}, {7}, {0, 4}, set(range(8))])
def test_failures_are_told_key_by_key(bad: set[int], either, make) -> None:
    """The first is read by the caller, the others by threads: no difference may be seen."""

    def before(key: int) -> None:
        if key in bad:
            raise StoreError(f"expert {key} is damaged")

    transfers, slots = make(before)
    counters = Counters()
    failed = transfers.load([(key, key) for key in range(8)], counters)
    assert failed.keys() == bad
    assert all(str(error) == f"expert {key} is damaged" for key, error in failed.items())
    assert values(slots) == [None if key in bad else key for key in range(8)]
    good = 8 - len(bad)
    assert (counters.loads, counters.bytes.get("somewhere", 0)) == (good, good * SHAPE.expert_bytes)


def test_a_failure_does_not_end_the_others_early(beside, make) -> None:
    """A read that goes on after ``load`` would write into a slot that has been given to another expert."""
    finished: list[int] = []
    failed = threading.Event()

    def before(key: int) -> None:
        if key == 0:
            failed.set()
            raise StoreError("at once")
        assert failed.wait(30)
        finished.append(key)

    transfers, slots = make(before)
    assert list(transfers.load([(0, 0), (1, 1), (2, 2)], None)) == [0]
    assert sorted(finished) == [1, 2]
    assert values(slots)[:3] == [None, 1, 2]


# -- queued copies: here what is copied and told; what a stream orders is checked on a GPU, below --------------------


class NoClock:
    """Stands in for the events of a stream."""

    def __init__(self, seconds: float) -> None:
        self.told, self.blocks = seconds, 0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        self.blocks += 1
        yield

    def seconds(self) -> float:
        return self.told


def queued(missing: Collection[int] = ()) -> tuple[Transfers, dict[str, Tensor]]:
    """Transfers that queue their copies, from memory that lacks the experts ``missing``."""
    store, slots = HostStore(SHAPE, ""), blank()
    for key in set(range(SHAPE.total)) - set(missing):
        store.put(key, {name: torch.full(spec.shape, float(key)) for name, spec in SHAPE.tensors.items()})
    transfers = Transfers(store, slots, THREADS, "host")
    transfers._stalls = NoClock(0.25)  # type: ignore[assignment]
    return transfers, slots


def test_queued_copies_fill_these_slots_and_no_other() -> None:
    transfers, slots = queued()
    counters = Counters()
    with contextlib.closing(transfers):
        assert transfers.load([(7, 1), (0, 4), (3, 6)], counters) == {}
    assert values(slots) == [None, 7, None, None, 0, None, 3, None]
    assert (counters.loads, counters.bytes) == (3, {"host": 3 * SHAPE.expert_bytes})
    assert counters.stall_seconds == 0.25, "of the stream, as of its last events"


def test_filling_slots_at_the_start_is_no_stall() -> None:
    transfers, _ = queued()
    with contextlib.closing(transfers):
        transfers.load([(7, 1), (0, 4)], None)
    assert transfers._stalls.blocks == 0  # type: ignore[union-attr, attr-defined]


def test_a_queued_copy_that_fails_is_told_by_its_key() -> None:
    transfers, slots = queued(missing=[0, 5])
    counters = Counters()
    with contextlib.closing(transfers):
        failed = transfers.load([(5, 0), (6, 1), (0, 2)], counters)
    assert failed.keys() == {0, 5} and all(isinstance(error, StoreError) for error in failed.values())
    assert values(slots)[:3] == [None, 6, None]
    assert (counters.loads, counters.bytes) == (1, {"host": SHAPE.expert_bytes})


# -- order on the device: vLLM runs its kernels on a stream of its own, which waits for no other ---------------------


@pytest.fixture
def on_gpu() -> Iterator[tuple[Transfers, dict[str, Tensor], torch.cuda.Stream]]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    store, slots = HostStore(SHAPE, ""), blank("cuda")
    for key in range(SHAPE.total):
        store.put(key, {name: torch.full(spec.shape, float(key)) for name, spec in SHAPE.tensors.items()})
    transfers = Transfers(store, slots, THREADS, "host")
    transfers.load([(key, key) for key in range(8)], None)
    torch.cuda.synchronize()
    yield transfers, slots, torch.cuda.Stream()
    transfers.close()
    store.close()


@pytest.mark.gpu
def test_kernels_after_a_load_see_the_new_experts(on_gpu) -> None:
    transfers, slots, stream = on_gpu
    torch.cuda._sleep(500_000_000)  # on the default stream, where the threads would copy: a quarter of a second
    with torch.cuda.stream(stream):
        transfers.load([(7 - slot, slot) for slot in range(8)], None)
        seen = {name: tensor.clone() for name, tensor in slots.items()}
    stream.synchronize()
    assert values(seen) == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.gpu
def test_kernels_before_a_load_see_the_old_experts(on_gpu) -> None:
    """The wave before may still be running when the next one takes its slots."""
    transfers, slots, stream = on_gpu
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        seen = {name: tensor.clone() for name, tensor in slots.items()}
        transfers.load([(7 - slot, slot) for slot in range(8)], None)
    torch.cuda.synchronize()
    assert values(seen) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert values(slots) == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.gpu
def test_kernels_before_a_read_ahead_see_the_old_experts(on_gpu) -> None:
    """It is asked for while they run, and does not make the caller wait."""
    transfers, slots, stream = on_gpu
    told: dict[int, object] = {}
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        seen = {name: tensor.clone() for name, tensor in slots.items()}
        transfers.ahead.fetch([(7 - slot, slot) for slot in range(8)])
        assert not stream.query()
        while len(told) < 8:
            told |= transfers.ahead.take_finished()
    torch.cuda.synchronize()
    assert set(told.values()) == {("host", SHAPE.expert_bytes)}
    assert values(seen) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert values(slots) == [7, 6, 5, 4, 3, 2, 1, 0]
