"""Timelines: rings that wrap while others read, the file and what it refuses, where time went, the Chrome trace."""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from vllm_spac.cli.main import app
from vllm_spac.errors import ConfigError
from vllm_spac.recording import timeline_recorder
from vllm_spac.recording.timeline_file import (
    GENERATING,
    PROMPTS,
    Recording,
    TimelineFacts,
    TimelineWriter,
    check_target,
    median_step,
    split,
)
from vllm_spac.recording.timeline_recorder import STEP_KINDS, UNKNOWN, Kind, Timeline, capacity_of
from vllm_spac.tools.traces import timeline_pictures

FACTS = TimelineFacts("toy", "disk", ("layers.0", "layers.1"), (4, 6))
DECODE, VERIFY, PREFILL = (STEP_KINDS.index(kind) for kind in ("decode", "verify", "prefill"))


class Clock:
    """Nanoseconds that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 0
        monkeypatch.setattr(timeline_recorder, "now", lambda: self.time)

    def add(self, timeline: Timeline, kind: Kind, start: int, end: int, a: int = 0, b: int = 0) -> None:
        self.time = end
        timeline.add(kind, start, a, b)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def in_thread(name: str, work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()


def two_steps(clock: Clock) -> Timeline:
    """A prompt of 100 ns and, 7 ns later, a decode step of 60 ns with two tokens, in which a thread loads an expert."""
    timeline = Timeline(64)
    clock.add(timeline, Kind.LAYER, 1020, 1060, 0, 5)
    clock.add(timeline, Kind.FORWARD, 1000, 1080, 5, 1)
    clock.add(timeline, Kind.UPDATE, 1080, 1082)
    clock.add(timeline, Kind.STEP, 1000, 1100, PREFILL, 1)
    in_thread("spac-io_0", lambda: clock.add(timeline, Kind.LOAD, 1121, 1128, 7, 512))
    clock.add(timeline, Kind.HOST_LOAD, 1121, 1125, 3, 512)
    clock.add(timeline, Kind.WAIT, 1120, 1130, 2)
    clock.add(timeline, Kind.WAIT_AHEAD, 1130, 1131, 1)
    clock.add(timeline, Kind.WAIT_CPU, 1133, 1136)
    clock.add(timeline, Kind.LAYER, 1119, 1139, 1, 2)
    clock.add(timeline, Kind.FORWARD, 1107, 1147, 2, 1)
    clock.add(timeline, Kind.UPDATE, 1147, 1149)
    clock.add(timeline, Kind.DRAFT, 1152, 1160, 4, 1)
    clock.add(timeline, Kind.STEP, 1107, 1167, VERIFY, 2)
    return timeline


# -- rings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 9, 50])
def test_a_ring_keeps_the_last_events(clock, count: int) -> None:
    timeline = Timeline(8)
    for number in range(count):
        clock.add(timeline, Kind.LAYER, 10 * number, 10 * number + 3, number)
    threads, thread, events, complete = timeline.last()
    kept = min(count, 7)  # the place that the thread may be writing is left out
    assert events[:, 3].tolist() == list(range(count - kept, count))
    assert (threads, set(thread)) == ((["MainThread"], {0}) if count else ([], set()))
    first = count - kept
    assert complete == (10 * first + 3 if first else 0), "the end of the oldest event that is kept"


def test_each_thread_has_its_own_ring(clock) -> None:
    timeline = Timeline(4)
    for number in range(3):
        in_thread(f"thread {number}", lambda number=number: clock.add(timeline, Kind.LOAD, 1, 2, number))
    threads, thread, events, _ = timeline.last()
    assert threads == ["thread 0", "thread 1", "thread 2"]
    assert thread.tolist() == events[:, 3].tolist() == [0, 1, 2]


def test_what_is_read_while_threads_write_is_whole_and_without_gaps() -> None:
    """Each event holds its number twice: a torn one would differ, a lost one would leave a gap."""
    timeline, stop = Timeline(32), threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            timeline.add(Kind.LOAD, timeline_recorder.now(), number, number)

    threads = [threading.Thread(target=write, name=f"writer {number}") for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            names, of, events, _ = timeline.last()
            assert (events[:, 3] == events[:, 4]).all() and (events[:, 1] >= 0).all()
            for number in range(len(names)):
                mine = events[of == number]
                assert (np.diff(mine[:, 3]) == 1).all()
                assert (np.diff(mine[:, 0] + mine[:, 1]) >= 0).all(), "first ended first"
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_recording_has_whole_steps_only(clock) -> None:
    """The oldest steps have lost events to the ring of another thread; layers after the last step are of none yet."""
    timeline = Timeline(16)
    for step in range(10):
        start = 100 * step
        for load in range(3):
            clock.add(timeline, Kind.LOAD, start + 10 + load, start + 11 + load, load, 1)
        clock.add(timeline, Kind.FORWARD, start + 1, start + 50, 1, 1)
        clock.add(timeline, Kind.STEP, start, start + 90, DECODE, 1)
    clock.add(timeline, Kind.LAYER, 1001, 1002)
    found = Recording.of(timeline, FACTS, 100)
    steps = found.kind == Kind.STEP
    assert steps.sum() == 2, "15 events are kept: the layer, 5 of each of two steps, and 4 of the one before"
    assert found.start[0] == 0 and found.kind[0] == Kind.STEP
    assert (found.kind == Kind.LOAD).sum() == 6 and (found.kind == Kind.FORWARD).sum() == 2
    assert (found.kind == Kind.LAYER).sum() == 0
    assert (Recording.of(timeline, FACTS, 1).kind == Kind.STEP).sum() == 1


def test_a_capacity_is_enough_for_the_steps_that_were_asked_for(clock) -> None:
    layers, steps = 5, 7
    timeline = Timeline(capacity_of(steps, layers))
    for step in range(3 * steps):
        start = 1000 * step
        for layer in range(layers):
            at = start + 10 * layer
            clock.add(timeline, Kind.LOAD, at + 1, at + 2)
            clock.add(timeline, Kind.WAIT, at + 1, at + 3)
            clock.add(timeline, Kind.WAIT_CPU, at + 4, at + 5)
            clock.add(timeline, Kind.LAYER, at, at + 9)
        clock.add(timeline, Kind.FORWARD, start, start + 900)
        clock.add(timeline, Kind.UPDATE, start + 900, start + 901)
        clock.add(timeline, Kind.DRAFT, start + 902, start + 903)
        clock.add(timeline, Kind.STEP, start, start + 950, DECODE, 1)
    assert (Recording.of(timeline, FACTS, steps).kind == Kind.STEP).sum() == steps


# -- the file --------------------------------------------------------------------------------------------------------


def test_a_file_holds_what_was_recorded(clock, tmp_path: Path) -> None:
    recorded = Recording.of(two_steps(clock), FACTS, 5)
    recorded.save(tmp_path / "run.timeline")
    found = Recording.load(tmp_path / "run.timeline")
    assert found.facts == FACTS and found.threads == ("MainThread", "spac-io_0")
    for name in ("thread", "kind", "start", "duration", "a", "b"):
        assert np.array_equal(getattr(found, name), getattr(recorded, name)), name
    assert len(found.start) == 14 and found.start[0] == 0 and found.kind[0] == Kind.STEP


def test_a_recording_without_steps_can_be_saved_and_read(clock, tmp_path: Path) -> None:
    writer = TimelineWriter(tmp_path / "run.timeline", FACTS, 5)
    clock.add(writer.timeline, Kind.LAYER, 1, 2)
    writer.save()
    assert len(Recording.load(tmp_path / "run.timeline").start) == 0
    result = CliRunner().invoke(app, ["trace", "timeline", str(tmp_path / "run.timeline")])
    assert result.exit_code == 1 and "holds no finished step" in " ".join(result.output.split())


def test_an_existing_file_stays_until_there_is_a_step(clock, tmp_path: Path) -> None:
    path = tmp_path / "run.timeline"
    Recording.of(two_steps(clock), FACTS, 5).save(path)
    writer = TimelineWriter(path, FACTS, 5)
    writer.save()
    assert len(Recording.load(path).start) == 14
    clock.add(writer.timeline, Kind.STEP, 5, 9, DECODE, 1)
    writer.save()
    assert len(Recording.load(path).start) == 1


def spoiled(path: Path, change: Callable[[dict, dict], None]) -> None:
    """Rewrites a file after ``change(tensors, metadata)``."""
    header = path.read_bytes()
    metadata = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata)


def put(name: str, index: int, value: int) -> Callable[[dict, dict], None]:
    def change(tensors: dict, metadata: dict) -> None:
        tensors[name][index] = value

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors, metadata: tensors.pop("b"), "its columns are"),
        (lambda tensors, metadata: tensors.update(a=tensors["a"][:-1].clone()), "column a has another"),
        (lambda tensors, metadata: tensors.update(kind=tensors["kind"].long()), "column kind has another"),
        (lambda tensors, metadata: tensors.update(start=tensors["start"].double()), "tensors of other types"),
        (lambda tensors, metadata: metadata.update(format="spac-trace-1"), "not a timeline of format"),
        (lambda tensors, metadata: metadata.pop("layers"), "layers"),
        (lambda tensors, metadata: metadata.update(layers='["one"]'), "differ in number"),
        (lambda tensors, metadata: metadata.update(layers="[1, 2]"), "no names"),
        (lambda tensors, metadata: metadata.update(experts="[4, true]"), "no numbers"),
        (lambda tensors, metadata: metadata.update(experts="[4, 99999999]"), "impossible numbers"),
        (lambda tensors, metadata: metadata.update(experts="[4, 0]"), "impossible numbers"),
        (lambda tensors, metadata: metadata.update(threads='["MainThread"]'), "of no thread"),
        (lambda tensors, metadata: metadata.update(threads="[" * 100000), "nested too deeply"),
        (put("kind", 3, len(Kind)), "of no kind"),
        (put("duration", 3, -1), "negative time"),
        (put("start", 0, -1), "negative time"),
        (put("duration", 3, 1 << 62), "too long"),
        (put("start", 3, 1 << 60), "out of order"),
        (put("a", 0, len(STEP_KINDS)), "STEP has a number beyond 4"),
        (put("a", 2, 2), "LAYER has a number beyond 1"),
        (put("a", 2, -1), "negative number"),
        (put("duration", 0, 108), "steps overlap"),
    ],
)
def test_what_is_no_timeline_is_refused_in_one_line(clock, tmp_path: Path, change, problem: str) -> None:
    path = tmp_path / "run.timeline"
    Recording.of(two_steps(clock), FACTS, 5).save(path)
    spoiled(path, change)
    with pytest.raises(ConfigError, match=problem) as refused:
        Recording.load(path)
    assert str(path) in str(refused.value) and "--spac-timeline" in str(refused.value)
    assert "\n" not in str(refused.value)


@given(st.data())
def test_a_damaged_file_is_refused_or_read(tmp_path_factory, data) -> None:
    """Whatever bytes change: no other error, and no impossible event."""
    path = tmp_path_factory.mktemp("damaged") / "run.timeline"
    columns = {name: np.zeros(3, np.uint8) for name in ("thread", "kind")}
    columns |= {name: np.arange(3) for name in ("start", "duration", "a", "b")}
    Recording(FACTS, ("one",), **columns | {"kind": np.full(3, Kind.CPU, np.uint8)}).save(path)
    content = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        found = Recording.load(path)
    except ConfigError:
        return
    assert (found.duration >= 0).all() and (found.kind < len(Kind)).all()
    split(found, GENERATING)


def test_a_target_is_a_timeline_or_nothing(clock, tmp_path: Path) -> None:
    check_target(tmp_path / "new")
    Recording.of(two_steps(clock), FACTS, 5).save(tmp_path / "run.timeline")
    check_target(tmp_path / "run.timeline")
    (tmp_path / "empty").touch()
    check_target(tmp_path / "empty")
    save_file({"a": torch.zeros(1)}, tmp_path / "weights")
    (tmp_path / "text").write_text("kept")
    for name in ("weights", "text"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(ConfigError, match="would replace a file that is no timeline"):
            check_target(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
    for name in ("no/folder", "."):
        with pytest.raises(ConfigError, match="the timeline .*name another file"):
            check_target(tmp_path / name)


# -- where the time goes ---------------------------------------------------------------------------------------------


def test_a_split_by_hand(clock) -> None:
    recording = Recording.of(two_steps(clock), FACTS, 5)
    found = split(recording, GENERATING)
    assert (found.steps, found.tokens) == (1, 2)
    assert found.parts == {
        "waiting for loads": 10 + 1,
        "waiting for CPU experts": 3,
        "experts": 20 - 14,
        "rest of the forward": 40 - 20,
        "policies and predictors": 2,
        "drafts": 8,
        "sampling and the rest of the step": 60 - 40 - 2 - 8,
        "between steps": 7,
    }
    prompts = split(recording, PROMPTS)
    assert (prompts.steps, prompts.tokens, prompts.total) == (1, 1, 100)
    assert prompts.parts["experts"] == 40 and prompts.parts["between steps"] == 0
    assert median_step(recording, GENERATING) == (107, 167) and median_step(recording, ("mixed",)) is None


def test_the_engine_may_have_been_idle_before_a_prompt(clock) -> None:
    timeline = Timeline(8)
    for kind, start in ((DECODE, 0), (PREFILL, 1000), (DECODE, 1013)):
        clock.add(timeline, Kind.STEP, start, start + 10, kind, UNKNOWN if kind == DECODE else 1)
    recording = Recording.of(timeline, FACTS, 5)
    assert split(recording, PROMPTS).parts["between steps"] == 0
    found = split(recording, GENERATING)
    assert found.parts["between steps"] == 3 and found.tokens is None and found.total == 23


@st.composite
def nested(draw) -> list[tuple[Kind, int, int, int]]:
    """(kind, start, end, a) of steps as a forward thread runs them, the inner events first."""
    events, time = [], 0

    def passing() -> int:
        nonlocal time
        time += draw(st.integers(0, 20))
        return time

    for _ in range(draw(st.integers(1, 4))):
        begun = passing()
        for layer in range(draw(st.integers(0, 3))):
            entered = passing()
            for kind in draw(st.lists(st.sampled_from([Kind.WAIT, Kind.WAIT_AHEAD, Kind.WAIT_CPU]), max_size=3)):
                events.append((kind, passing(), passing(), 0))
            events.append((Kind.LAYER, entered, passing(), layer % 2))
        events.append((Kind.FORWARD, begun, passing(), 1))
        events.append((Kind.UPDATE, passing(), passing(), 0))
        if draw(st.booleans()):
            events.append((Kind.DRAFT, passing(), passing(), 0))
        time += 1  # a step takes some time
        events.append((Kind.STEP, begun, passing(), draw(st.sampled_from([DECODE, VERIFY, PREFILL]))))
    return events


@given(nested())
def test_parts_are_never_negative_and_together_all_time(events) -> None:
    with pytest.MonkeyPatch.context() as patched:
        clock, timeline = Clock(patched), Timeline(256)
        for kind, start, end, a in events:
            clock.add(timeline, kind, start, end, a, 1)
    recording = Recording.of(timeline, FACTS, 100)
    steps = [(start, end, a) for kind, start, end, a in events if kind == Kind.STEP]
    for kinds in (GENERATING, PROMPTS):
        found = split(recording, kinds)
        assert all(value >= 0 for value in found.parts.values())
        total = 0
        for number, (start, end, a) in enumerate(steps):
            if STEP_KINDS[a] in kinds:
                total += end - start
                total += start - steps[number - 1][1] if number and a != PREFILL else 0
        assert found.total == total
        assert found.tokens == found.steps == sum(STEP_KINDS[a] in kinds for *_, a in steps)


# -- the Chrome trace -------------------------------------------------------------------------------------------------


def assert_nested(events: list[dict]) -> None:
    """On each thread an event is inside another or beside it, as Chrome's format wants."""
    threads = defaultdict(list)
    for event in events:
        threads[event["tid"]].append((round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)))
    for spans in threads.values():
        outer: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            assert end >= start
            while outer and outer[-1] <= start:
                outer.pop()
            assert not outer or end <= outer[-1], "it begins in an event and ends after it"
            outer.append(end)


def test_a_chrome_trace(clock, tmp_path: Path) -> None:
    recording = Recording.of(two_steps(clock), FACTS, 5)
    assert timeline_pictures.write(recording, tmp_path / "run.json") == 14
    found = json.loads((tmp_path / "run.json").read_text())
    events = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 14 and all(event["dur"] >= 0 and event["ts"] >= 0 for event in events)
    assert_nested(events)
    names = {event["tid"]: event["args"]["name"] for event in found["traceEvents"] if event["name"] == "thread_name"}
    assert sorted(names.values()) == ["forward (MainThread)", "spac-io_0"]
    (load,) = (event for event in events if names[event["tid"]] == "spac-io_0")
    assert load == {
        "ph": "X",
        "name": "expert 1.3",
        "cat": "load",
        "pid": 1,
        "tid": load["tid"],
        "ts": 0.121,
        "dur": 0.007,
        "args": {"layer": "layers.1", "expert": 3, "bytes": 512, "from": "disk"},
    }
    by_name = {event["name"]: event["args"] for event in events}
    assert by_name["expert 0.3"] == {"layer": "layers.0", "expert": 3, "bytes": 512, "from": "host memory"}
    assert by_name["verify step"] == {"tokens": 2} and by_name["layers.1"] == {"layer": 1, "rows": 2}
    assert by_name["draft"] == {"tokens": 4, "requests": 1} and by_name["wait for loads"] == {"experts": 2}


def test_the_command_prints_draws_and_refuses(clock, tmp_path: Path) -> None:
    path = tmp_path / "run.timeline"
    Recording.of(two_steps(clock), FACTS, 5).save(path)

    def run(*arguments: object, code: int = 0) -> str:
        asked = ["trace", "timeline", *map(str, arguments)]
        result = CliRunner().invoke(app, asked, env={"COLUMNS": "200", "NO_COLOR": "1"})
        assert result.exit_code == code, result.output
        return " ".join(result.output.split())

    text = run(path, "--output", tmp_path / "run.json", "--picture", tmp_path / "run.png")
    assert "a token" in text and "2 in 1 steps" in text and "a step with prompts" in text and "14 events" in text
    assert re.search(r"waiting for loads │ 0.000 ms 16.4%", text), "11 of 67 nanoseconds"
    assert re.search(r"forward \(MainThread\) │ host memory │ 1 │ 0.5 KiB", text)
    assert re.search(r"spac-io_0 │ disk │ 1 │ 0.5 KiB", text)
    assert (tmp_path / "run.png").stat().st_size > 10_000 and (tmp_path / "run.json").exists()
    assert "cannot be written" in run(path, "--output", tmp_path / "no" / "run.json", code=1)
    assert "cannot be written" in run(path, "--picture", tmp_path / "no" / "run.png", code=1)
    assert "cannot be read as a timeline" in run(tmp_path / "none", code=1)


# -- drafts ------------------------------------------------------------------------------------------------------------


def test_the_drafters_time_is_recorded(clock) -> None:
    runner_v1 = pytest.importorskip(
        "vllm_spac.integration.stepping.v1.runner_v1", reason="the hooks are vLLM's runner's"
    )
    timeline = Timeline(8)
    told: list[tuple[int, float, None]] = []
    runtime = SimpleNamespace(
        timeline=timeline, drafted=lambda *made: told.append(made), draft_length=lambda: None, chooser=None,
        budget=SimpleNamespace(weighs=False), looks_at_drafts=False,
    )  # fmt: skip
    runner = SimpleNamespace(
        _spac_experts=SimpleNamespace(runtime=runtime),
        drafter=SimpleNamespace(),
        input_batch=SimpleNamespace(req_ids=["a", "b", "c"]),
    )

    def propose(self, plan, tokens):
        clock.time += 25
        return tokens

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runner_v1, "now", lambda: clock.time)
        for tokens in ([[1, 2], []], torch.zeros(3, 4)):
            assert runner_v1._proposing(propose)(runner, None, tokens) is tokens
        runner._spac_experts = None
        assert runner_v1._proposing(propose)(runner, None, [[1]]) == [[1]]
    assert told == [(2, 25e-9, None), (4, 25e-9, None)], "of a chain a forward makes one draft"
    _, _, events, _ = timeline.last()
    assert events[:, 1:].tolist() == [[25, Kind.DRAFT, 2, 2], [25, Kind.DRAFT, 12, 3]]
