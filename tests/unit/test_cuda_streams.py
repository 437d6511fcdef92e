"""The order that streams of a GPU are given, with a recorder in place of torch.cuda."""

from __future__ import annotations

import contextlib

import pytest
import torch

from vllm_spac.execution.exchange import CudaStream, CurrentCudaStream


class Recorded:
    """A stream or an event that writes down what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Recorded) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Recorded) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def record(self, stream: Recorded) -> None:
        self.name = f"event of {stream.name}"


class Gpu:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.current, self.capturing = self.stream("model"), False
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "Event", lambda: Recorded("", self.log))
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    def stream(self, name: str) -> Recorded:
        return Recorded(name, self.log)

    @contextlib.contextmanager
    def on(self, stream: Recorded):
        before, self.current = self.current, stream
        yield
        self.current = before


def test_a_new_stream_of_the_model_waits_for_the_old_one(monkeypatch) -> None:
    gpu = Gpu(monkeypatch)
    compute = CurrentCudaStream(torch.device("cuda"))
    gpu.current = gpu.stream("another")
    assert compute.record().event.name == "event of another"
    compute.submit(lambda: gpu.log.append(f"work on {gpu.current.name}"))
    assert gpu.log == ["another waits for model", "work on another"], "once"


def test_a_capture_waits_for_nothing_outside_of_it(monkeypatch) -> None:
    """What is read ahead in a graph: the copy stream joins the capture, and the capture's own stream goes on behind it.

    A wait for a stream that is not captured ends a capture with an error.
    """
    gpu = Gpu(monkeypatch)
    compute, copy = CurrentCudaStream(torch.device("cuda")), CudaStream(gpu.stream("copy"))
    gpu.current, gpu.capturing = gpu.stream("capture"), True
    copy.wait(compute.record())
    copy.submit(lambda: gpu.log.append(f"work on {gpu.current.name}"))
    compute.wait(copy.record())
    compute.submit(lambda: gpu.log.append(f"work on {gpu.current.name}"))
    assert gpu.log == [
        "copy waits for event of capture",
        "work on copy",
        "capture waits for event of copy",
        "work on capture",
    ]
    gpu.log.clear()
    gpu.current, gpu.capturing = gpu.stream("model 2"), False
    compute.wait(copy.record())
    assert gpu.log == ["model 2 waits for model", "model 2 waits for event of copy"]
