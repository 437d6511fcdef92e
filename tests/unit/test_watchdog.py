"""Steps that stand still, on a passed clock: what is reported, when, and what is no stall."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.integration.hooks.runner_hooks import _failed
from vllm_spac.methods.moe_spec.control import BudgetControl
from vllm_spac.recording import watchdog
from vllm_spac.recording.watchdog import (
    ENDLESS_SECONDS,
    KEPT,
    MOST_FILES,
    PROMPT_SECONDS,
    SECONDS,
    Notes,
    Stall,
    Watchdog,
)
from vllm_spac.runtime import Runtime

DECODE = Step((RequestRows(0, 1, RowKind.DECODE),))
PROMPT = Step((RequestRows(0, 5, RowKind.PREFILL),))


def told(notes: Notes, until: float, stall: Stall | None = None, begin: float = 0.0, busy=lambda: False) -> list[float]:
    """When a report is made, of looks once a second."""
    stall = stall or Stall()
    times = [begin + number for number in range(int(until) + 1)]
    return [now for now in times if stall.check(notes, now, busy)]


def begun(prompts: bool = False) -> Notes:
    notes = Notes()
    notes.begin(3, prompts)
    return notes


def test_a_step_that_stands_still_is_reported_once() -> None:
    assert told(begun(), 500) == [SECONDS]
    assert told(begun(prompts=True), 500) == [PROMPT_SECONDS]


def test_a_long_step_is_no_stall() -> None:
    notes, stall = begun(), Stall()
    for number in range(30):
        assert told(notes, SECONDS - 2, stall, begin=number * SECONDS) == []
        notes.add("layer", 3)  # of the same number, and yet another note


def noting(notes: Notes, stall: Stall, begin: int, seconds: float, ends: bool = False) -> list[float]:
    """When a report is made of a thread that notes something each second."""
    reports = []
    for now in range(begin, begin + int(seconds) + 1):
        notes.add("layer", now)
        if stall.check(notes, float(now), lambda: False):
            reports.append(float(now))
        if ends:
            notes.end("end of a step")
            notes.begin(3, False)
    return reports


@pytest.mark.parametrize("prompts", [False, True])
def test_a_step_that_goes_on_and_does_not_end_is_reported_once(prompts: bool) -> None:
    notes, stall = begun(prompts), Stall()
    assert noting(notes, stall, 0, 3 * ENDLESS_SECONDS) == [ENDLESS_SECONDS]
    notes.end("end of a step")
    notes.begin(3, prompts)
    begin = 4 * int(ENDLESS_SECONDS)
    assert noting(notes, stall, begin, ENDLESS_SECONDS) == [begin + ENDLESS_SECONDS], "the next one is another"


def test_steps_that_end_are_no_stall_however_many_they_are() -> None:
    assert noting(begun(), Stall(), 0, 3 * ENDLESS_SECONDS, ends=True) == []


def test_a_step_that_stood_still_and_goes_on_is_reported_once() -> None:
    notes, stall, most = begun(), Stall(), int(ENDLESS_SECONDS)
    assert noting(notes, stall, 0, most - 60) == []
    assert len(told(notes, 3 * most, stall, begin=most - 59)) == 1
    assert noting(notes, stall, 5 * most, most - 60) == []


def test_a_device_that_is_busy_long_after_its_step_stands_still() -> None:
    asked: list[int] = []
    ended, stall = begun(), Stall()
    ended.end("end of a step")
    assert told(ended, 100, stall, busy=lambda: bool(asked.append(1)) or True) == [SECONDS]
    assert len(asked) == 1, "asked for once, where something may stand still"


def test_a_process_that_was_stopped_does_not_stand_still() -> None:
    notes, stall = begun(), Stall()
    for now in (0.0, 1.0, 3600.0, 3601.0):
        assert not stall.check(notes, now, lambda: False)
    assert told(notes, 100, stall, begin=3602.0), "but what stands still afterwards does"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Watchdog]]:
    """Makes watchdogs that look when a test says so, and then a second has passed."""
    dogs: list[Watchdog] = []
    monkeypatch.setattr(Watchdog, "clock", staticmethod(map(float, range(10**6)).__next__))
    monkeypatch.setattr(Watchdog, "period", 3600.0)

    def make(notes: Notes, folder: Path = tmp_path, streams=dict) -> Watchdog:
        dogs.append(Watchdog(notes, folder, streams))
        return dogs[-1]

    yield make
    for dog in dogs:
        dog.close()


def look(dog: Watchdog, times: float = SECONDS) -> None:
    for _ in range(int(times) + 1):
        dog.check()


def test_the_report(made, tmp_path, caplog) -> None:
    gate = threading.Event()

    def blocked_read() -> None:
        gate.wait(60)

    thread = threading.Thread(target=blocked_read, name="spac-reader")
    thread.start()
    try:
        notes = begun()
        for layer in range(100):
            notes.add("layer", layer)
        (folder := tmp_path / "new").parent.chmod(0o700)
        with caplog.at_level(logging.WARNING, "vllm.spac"):
            look(made(notes, folder, lambda: {"model": lambda: True, "copies": lambda: False}), 3 * SECONDS)
    finally:
        gate.set()
        thread.join()
    (path,) = folder.iterdir()
    text = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "thread spac-reader" in text and "in blocked_read" in text and "thread MainThread" in text
    assert "  layer 99\n" in text and f"  layer {100 - KEPT}\n" in text and f"  layer {99 - KEPT}\n" not in text
    first, second = caplog.messages
    assert str(path) in first and "layer 99" in first and "\n" not in first, "short, and it names the file"
    assert "model busy, copies idle" in second and second.endswith(text.split("streams: ")[1].strip())


def test_many_stalls_leave_few_files(made, tmp_path) -> None:
    dog = made(notes := begun())
    for number in range(3 * MOST_FILES):
        notes.add("layer", number)
        look(dog)
    files = sorted(tmp_path.iterdir())
    assert len(files) == MOST_FILES and all(f"-{os.getpid()}-" in path.name for path in files)
    assert dog.stalls == 3 * MOST_FILES


def test_a_folder_that_cannot_be_written_leaves_the_report_to_the_log(made, tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "vllm.spac"):
        look(made(begun(), tmp_path / "file"))
    assert "cannot be written" in caplog.messages[0] and "thread MainThread" in caplog.messages[1]


def test_a_forked_process_closes_what_it_does_not_have(made) -> None:
    dog = made(begun())
    with dog._closed._cond:  # as another thread may hold it while the process is forked
        if not (child := os.fork()):
            try:
                dog.close()
            finally:
                os._exit(0)
        for _ in range(600):
            if os.waitpid(child, os.WNOHANG)[0]:
                return
            threading.Event().wait(0.05)
        os.kill(child, 9)
        os.waitpid(child, 0)
    raise AssertionError("it waits for a lock that nobody gives back")


def runtime(execution=None) -> Runtime:
    return Runtime([] if execution is None else [execution], BudgetControl([]))


def last(run: Runtime) -> list[str]:
    return [what for what, _ in run.recorder.notes.last]


def test_what_a_runtime_notes() -> None:
    run = runtime()
    run.begin_step(DECODE)
    notes = run.recorder.notes
    assert notes.in_step and not notes.prompts and notes.thread == threading.get_ident()
    run.end_forward()
    assert run.recorder.notes.in_step, "it is sampled"
    run.end_step([1])
    assert not run.recorder.notes.in_step
    assert last(run) == ["step of rows", "end of the layers, rows", "end of a step"]
    run.begin_step(PROMPT)
    assert run.recorder.notes.prompts and run.recorder.notes.in_step


def test_a_warm_up_notes_nothing() -> None:
    run = runtime()
    with run.warming_up():
        run.begin_step(DECODE)
        run.end_forward()
        run.end_step([1])
    assert not run.recorder.notes.last and not run.recorder.notes.in_step


def test_a_step_that_failed_has_ended() -> None:
    run = runtime()
    run.begin_step(DECODE)
    experts = SimpleNamespace(runtime=run, ranks=SimpleNamespace(end_process=lambda error: None))
    _failed(SimpleNamespace(_spac_experts=experts), ValueError())
    assert not run.recorder.notes.in_step and last(run)[-1] == "error"


def test_its_thread_ends_with_the_runtime(tmp_path) -> None:
    def threads() -> int:
        return sum(thread.name == "spac-watchdog" for thread in threading.enumerate())

    before, run = threads(), runtime()
    run.report_stalls(tmp_path, torch.device("cpu"))
    assert threads() == before + 1
    assert run.recorder.stalls == 0
    run.recorder.watchdogs[0]._report("a step stands still")
    assert run.recorder.stalls == 1
    run.close()
    assert threads() == before


def test_streams_are_known_as_long_as_they_are_used() -> None:
    class Asked:
        def __init__(self, idle: bool) -> None:
            self.query = lambda: idle

    before = len(watchdog.device_streams())
    model, copies = Asked(False), Asked(True)
    watchdog.watch(model, "model")
    watchdog.watch(copies, "loads")
    found = {name.split(" (")[0]: busy() for name, busy in watchdog.device_streams().items()}
    assert found["model"] is True and found["loads"] is False
    del model, copies
    assert len(watchdog.device_streams()) == before
