"""Copies between host and device through reused buffers, with copies that finish as late as allowed."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.execution.exchange import CudaStream, Exchange, Repeated, ThreadStream


class LateLane:
    """Runs nothing until somebody waits: what CUDA may do."""

    def __init__(self) -> None:
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.run = 0
        self.waits = 0

    def copy(self, target, source) -> None:
        self.waiting.append((target, source))

    def record(self) -> Reached:
        return Reached(self, len(self.waiting))

    def finish(self, stop: int) -> None:
        for target, source in self.waiting[self.run : stop]:
            target.copy_(source)
        self.run = max(self.run, stop)


class Reached:
    def __init__(self, lane: LateLane, stop: int) -> None:
        self.lane, self.stop = lane, stop

    def done(self) -> bool:
        return self.lane.run >= self.stop

    def wait(self) -> None:
        self.lane.waits += not self.done()
        self.lane.finish(self.stop)


class ThreadLane:
    def __init__(self) -> None:
        self.stream = ThreadStream("test-lane")

    def copy(self, target, source) -> None:
        self.stream.submit(target.copy_, source)

    def record(self):
        return self.stream.record()


DTYPES = [torch.int32, torch.int64, torch.uint8]
CALLS = st.lists(
    st.tuples(st.sampled_from([False] * 9 + [True]), st.integers(0, 40), st.integers(1, 3), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=30,
)


def check(exchange: Exchange, calls) -> list[tuple[torch.Tensor, torch.Tensor]]:
    kept = []
    for number, (down, rows, width, dtype) in enumerate(calls):
        tensor = torch.full((rows, width), number + 1, dtype=dtype)
        found = exchange.to_host(tensor.clone()) if down else exchange.to_device(tensor)
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        kept.append((found, tensor.clone()))
        if not down:
            tensor.zero_()  # the caller's own, and free again
        else:
            assert torch.equal(*kept[-1]), "complete when it returns"
    return kept


@given(CALLS)
def test_each_arrives_whenever_copies_run(calls) -> None:
    lane = LateLane()
    kept = check(Exchange(torch.device("cpu"), lane), calls)
    lane.finish(len(lane.waiting))
    assert all(torch.equal(found, sent) for found, sent in kept), "a buffer was written while it was being read"


@given(CALLS)
def test_each_arrives_beside_a_thread(calls) -> None:
    lane = ThreadLane()
    kept = check(Exchange(torch.device("cpu"), lane), calls)
    lane.stream.close()
    assert all(torch.equal(found, sent) for found, sent in kept)


def test_a_buffer_is_not_written_while_it_is_read() -> None:
    lane = LateLane()
    kept = check(Exchange(torch.device("cpu"), lane), 9 * [(False, 8, 1, torch.int32)])
    lane.finish(len(lane.waiting))
    assert [found[0].item() for found, _ in kept] == list(range(1, 10))


def test_sending_waits_for_no_copy_but_the_buffers_last() -> None:
    lane = LateLane()
    exchange = Exchange(torch.device("cpu"), lane)
    for _ in range(4):
        exchange.to_device(torch.ones(3))
    assert lane.waits == 0
    exchange.to_device(torch.ones(3))
    assert lane.waits == 1 and lane.run == 1
    exchange.to_host(torch.ones(3))  # in every layer: all that was sent before has arrived
    for _ in range(4):
        exchange.to_device(torch.ones(3))
    assert lane.waits == 2


def test_what_is_reserved_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps are under way at once: what they exchange takes no memory that a step would have to wait for."""
    made: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: made.append(1) or empty(*args, **kwargs))
    lane, target = LateLane(), torch.zeros(10)
    exchange = Exchange(torch.device("cpu"), lane)
    exchange.reserve(2, 64)
    made.clear()
    before = exchange.send([torch.ones(3), torch.ones(5)])
    for number in range(9):
        exchange.write(target, torch.full((10,), float(number)))
        after = exchange.send([torch.ones(3), torch.ones(5)])
        before.arrived.wait()
        exchange.read(before)
        before = after
    lane.finish(len(lane.waiting))
    assert not made and target[0] == 8


def test_a_target_is_written_when_its_turn_comes() -> None:
    lane, target = LateLane(), torch.zeros(2)
    exchange, given = Exchange(torch.device("cpu"), lane), torch.tensor([1.0, 2.0])
    exchange.write(target, given)
    given.zero_()
    assert target.tolist() == [0, 0]
    lane.finish(1)
    assert target.tolist() == [1, 2]


def test_what_came_is_not_overwritten() -> None:
    """The ids of a step's layers are kept until it ends."""
    exchange = Exchange(torch.device("cpu"), LateLane())
    first = exchange.to_host(torch.tensor([1, 2]))
    exchange.to_host(torch.tensor([3, 4]))
    assert first.tolist() == [1, 2]


def test_memory_is_used_again_once_it_was_read() -> None:
    """Pinned memory takes long to get."""
    lane = LateLane()
    exchange = Exchange(torch.device("cpu"), lane)
    first = exchange.send([torch.tensor([1, 2, 3])])
    exchange.read(first)
    second = exchange.send([torch.tensor([4])])
    assert second.buffer.data_ptr() != first.buffer.data_ptr(), "a copy still writes it"
    lane.finish(len(lane.waiting))
    assert (first.tensors[0].tolist(), second.tensors[0].tolist()) == ([1, 2, 3], [4])
    third = exchange.send([torch.tensor([5, 6])])
    assert third.buffer.data_ptr() == first.buffer.data_ptr() != second.buffer.data_ptr()
    lane.finish(len(lane.waiting))
    assert (second.tensors[0].tolist(), third.tensors[0].tolist()) == ([4], [5, 6])


@pytest.mark.parametrize("captures", [True, False])
def test_work_that_no_graph_takes_goes_on_as_launches_and_the_log_says_so(captures, monkeypatch, caplog) -> None:
    """CUDA is a stand-in: a graph replays, or the end of its capture fails as a driver's does."""

    class Graph:
        replay = staticmethod(lambda: ran.append("replay"))

    @contextmanager
    def capture(graph: Graph, stream: object, capture_error_mode: str):
        yield
        ran.clear()  # what is captured does not run
        if not captures:
            raise RuntimeError("operation not permitted when stream is capturing")

    class Now(CudaStream):
        stream = None

        def __init__(self) -> None: ...

        def submit(self, work, *arguments) -> None:
            work(*arguments)

    ran: list[str] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    repeated = Repeated(Now(), lambda: ran.append("launches"))
    repeated.prepare()
    assert ran == []
    repeated.submit()
    assert ran == ["replay" if captures else "launches"]
    assert [("not permitted" in text) for text in caplog.messages] == [True] * (not captures)
