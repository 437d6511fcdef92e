"""A trace or a timeline that cannot be written stops and says so once; steps and the shutdown go on."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.integration.loading import description
from vllm_spac.methods.moe_spec.control import BudgetControl
from vllm_spac.recording import trace_writer
from vllm_spac.recording.timeline_file import TimelineFacts, TimelineWriter
from vllm_spac.recording.trace_file import TraceFacts
from vllm_spac.recording.trace_writer import TraceWriter
from vllm_spac.runtime import Runtime

DECODE = Step((RequestRows(0, 1, RowKind.DECODE), RequestRows(1, 2, RowKind.DECODE)))
TRACE_FACTS = TraceFacts(layers=2, experts=8, top_k=2, expert_bytes=100, model="toy")
FACTS = TimelineFacts("toy", "disk", ("a", "b"), (8, 8))


class Experts:
    """An execution that computes nothing; passes on what a router chose, as ``Execution.forward`` does."""

    shape = SimpleNamespace(layers=("a", "b"), total=16)

    def __init__(self) -> None:
        self.closed = False
        self.watching: object = None

    def begin_step(self, step: Step) -> None:
        """Does nothing."""

    def watch(self, timeline, first: int) -> None:
        self.watching = timeline

    def forward(self, layer: int, x, weights, ids, kernel, rows):
        if rows.record is not None:
            rows.record(layer, ids, weights)
        return x

    def end_forward(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        self.closed = True


class Engine:
    """A runtime that records both in ``folder`` and saves after each step, and its steps."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.experts = folder, Experts()
        folder.mkdir()
        trace = TraceWriter(folder / "run.trace", TRACE_FACTS)
        saved = TimelineWriter(folder / "run.timeline", FACTS, 100)
        self.seconds = 0.0
        self.runtime = Runtime([self.experts], BudgetControl([]), trace, saved=saved, clock=lambda: self.seconds)
        self.runtime.watch(saved.timeline)

    def step(self) -> None:
        self.seconds += 60
        run, x = self.runtime, torch.zeros(2, 4)
        ids, weights = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2)
        run.begin_step(DECODE)
        for layer in range(2):
            run.forward(self.experts, layer, x, weights, ids, None)
        run.end_forward()
        run.end_step([1, 1])

    @property
    def stopped(self) -> dict[str, str]:
        return self.runtime.recordings.stopped


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path / "recorded")


def remove_folder(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(engine.folder)


def fill_disk(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Nothing is synced to, nor written to, the disk from now on."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(os, "fsync", full)
    patch.setattr(trace_writer, "_FLUSH_BYTES", 1)
    patch.setattr(trace_writer.TraceWriter, "_columns_of", lambda self, recorded: full())


FAULTS = [remove_folder, fill_disk]
each_fault = pytest.mark.parametrize("fault", FAULTS)


@each_fault
def test_steps_go_on_and_each_is_said_once(engine: Engine, fault: Callable, monkeypatch, caplog) -> None:
    engine.step()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        fault(engine, patch)
        for _ in range(3):
            engine.step()
        engine.runtime.close()
    said = [record.getMessage() for record in caplog.records]
    reason = {remove_folder: "No such file or directory", fill_disk: "No space left on device"}[fault]
    for name in ("trace", "timeline"):
        (one,) = (text for text in said if f"the {name} (--spac-record)" in text)
        assert reason in one and "\n" not in one and reason in engine.stopped[name]
    assert len(said) == 2 and engine.experts.closed


def test_what_stopped_costs_nothing_more(engine: Engine) -> None:
    """Nobody waits for numbers of tokens, nor keeps events that will be read by nobody."""
    engine.step()
    shutil.rmtree(engine.folder)
    engine.step()
    run = engine.runtime
    assert run.recorder.timeline is engine.experts.watching is run.recordings.trace is run.recordings.timeline is None
    run.begin_step(DECODE)
    assert not run.counts_tokens
    run.rerouter.observe_capture(run.recordings.trace is not None)  # nothing looks at layers any more


@pytest.mark.parametrize("error", [OSError(errno.EIO, "bad disk"), AssertionError("rows are missing"), MemoryError()])
@pytest.mark.parametrize("at", ["begin_step", "observe", "end_step", "save", "cancel"])
def test_whatever_fails_wherever(engine: Engine, at: str, error: Exception, monkeypatch) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(engine.runtime.recordings.trace, at, fails)
    if at == "cancel":
        monkeypatch.setattr(engine.runtime.recordings.trace, "save", fails)
    engine.step()
    engine.step()
    engine.runtime.close()
    assert set(engine.stopped) == {"trace"} and engine.stopped["trace"] and engine.experts.closed


def test_statistics_say_what_stopped(engine: Engine, monkeypatch) -> None:
    config = SimpleNamespace(execution_name="slots", policy="lru")
    monkeypatch.setattr(description, "mode", lambda *_: "exact")
    monkeypatch.setattr(description, "counts", lambda _: {"hits": 1})
    engine.experts.holds_all = True
    assert description.stats(engine.runtime, engine.runtime.budget, config, "disk", None)["stopped"] == {}
    shutil.rmtree(engine.folder)
    engine.step()
    facts = json.loads(json.dumps(description.stats(engine.runtime, engine.runtime.budget, config, "disk", None)))
    assert "No such file" in facts["stopped"]["timeline"] and "No such file" in facts["stopped"]["trace"]
