"""Timelines: rings that wrap while others read, the file, also of a killed process or a full disk, where time went."""

from __future__ import annotations

import itertools
import json
import resource
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from vllm_spac.errors import ConfigError
from vllm_spac.recording import timeline_recorder
from vllm_spac.recording.timeline_file import TimelineFacts, TimelineWriter, check_target
from vllm_spac.recording.timeline_recorder import STEP_KINDS, UNKNOWN, Kind, Recording, Timeline, capacity_of
from vllm_spac.recording.token_time import TokenTime

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
    found = Recording.of(timeline, 100)
    steps = found.kind == Kind.STEP
    assert steps.sum() == 2, "15 events are kept: the layer, 5 of each of two steps, and 4 of the one before"
    assert found.start[0] == 0 and found.kind[0] == Kind.STEP
    assert (found.kind == Kind.LOAD).sum() == 6 and (found.kind == Kind.FORWARD).sum() == 2
    assert (found.kind == Kind.LAYER).sum() == 0
    assert (Recording.of(timeline, 1).kind == Kind.STEP).sum() == 1


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
    assert (Recording.of(timeline, steps).kind == Kind.STEP).sum() == steps


# -- the file --------------------------------------------------------------------------------------------------------


def read(path: Path) -> tuple[list[dict], dict[int, str]]:
    """Returns the events of a file, and the names of the threads."""
    found = json.loads(path.read_text())
    assert found[0]["name"] == "process_name" and {event["ph"] for event in found} <= {"X", "M"}
    names = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    return [event for event in found if event["ph"] == "X"], names


def spans(events: list[dict]) -> list[tuple[int, int, int]]:
    """(thread, start, duration) of each event, in nanoseconds."""
    return [(event["tid"] - 1, round(1000 * event["ts"]), round(1000 * event["dur"])) for event in events]


def assert_nested(events: list[dict]) -> None:
    """In the file's order, on each thread: an event begins in another and ends in it, or begins when that has ended."""
    outer: dict[int, list[int]] = defaultdict(list)
    latest = 0
    for thread, start, duration in spans(events):
        assert 0 <= latest <= start and duration >= 0
        latest, around = start, outer[thread]
        while around and around[-1] <= start:
            around.pop()
        assert not around or start + duration <= around[-1], "it begins in an event and ends after it"
        around.append(start + duration)


def saved(timeline: Timeline, path: Path, facts: TimelineFacts = FACTS) -> tuple[list[dict], dict[int, str]]:
    writer = TimelineWriter(path, facts, 5)
    writer.timeline = timeline
    writer.save()
    return read(path)


def test_a_file_has_what_was_recorded(clock, tmp_path: Path) -> None:
    events, names = saved(two_steps(clock), tmp_path / "run.timeline")
    assert len(events) == 14 and events[0]["name"] == "prefill step" and events[0]["ts"] == 0
    assert_nested(events)
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


@st.composite
def timelines(draw) -> tuple[Timeline, list[tuple[Kind, int, int, int]]]:
    """Steps of a forward thread with what other threads did meanwhile; and the forward thread's events."""
    events, timeline = draw(nested()), Timeline(256)
    beside = draw(st.lists(st.lists(st.integers(0, 50), max_size=8), max_size=3))
    with pytest.MonkeyPatch.context() as patched:
        clock = Clock(patched)
        for number, pauses in enumerate(beside):
            times = list(itertools.accumulate(pauses))
            loads = [
                (draw(st.sampled_from([Kind.LOAD, Kind.HOST_LOAD, Kind.CPU])), *span, draw(st.integers(0, 9)))
                for span in itertools.pairwise(times)
            ]
            in_thread(f"io_{number}", lambda loads=loads: [clock.add(timeline, *load, 1) for load in loads])
        for kind, start, end, a in events:
            clock.add(timeline, kind, start, end, a, draw(st.integers(UNKNOWN if kind == Kind.STEP else 0, 9)))
    return timeline, events


@given(timelines(), st.text(), st.text(), st.text())
def test_whatever_is_recorded_is_json_with_nested_events(tmp_path_factory, recorded, model, layer, store) -> None:
    timeline, made = recorded
    facts = TimelineFacts(model, store, ("layers.0", layer), (4, 6))
    path = tmp_path_factory.mktemp("recorded") / "run.timeline"
    events, names = saved(timeline, path, facts)
    assert_nested(events)
    for outer, inner in itertools.pairwise(events):
        if spans([outer]) == spans([inner]):
            assert Kind[outer["cat"].upper()] <= Kind[inner["cat"].upper()], "a layer that is all of a forward is in it"
    recording = Recording.of(timeline, 5)
    assert spans(events) == [*zip(recording.thread, recording.start, recording.duration, strict=True)]
    assert [event["cat"] for event in events] == [Kind(kind).name.lower() for kind in recording.kind]
    assert Counter(event["cat"] for event in events)["step"] == sum(kind == Kind.STEP for kind, *_ in made)
    keys = {f"expert {layer}.{expert}": 4 * layer + expert for layer in (0, 1) for expert in range((4, 6)[layer])}
    for event, kind, a, b in zip(events, recording.kind, recording.a, recording.b, strict=True):
        arguments = event["args"]
        if kind == Kind.STEP:
            assert (event["name"], arguments.get("tokens", UNKNOWN)) == (f"{STEP_KINDS[a]} step", b)
        elif kind == Kind.LAYER:
            assert (event["name"], arguments) == (facts.layers[a], {"layer": a, "rows": b})
        elif kind in (Kind.LOAD, Kind.HOST_LOAD):
            assert keys[event["name"]] == a and arguments["layer"] == facts.layers[int(a >= 4)]
            assert (arguments["bytes"], arguments["from"]) == (b, store if kind == Kind.LOAD else "host memory")
    assert len(names) == len(set(names.values())) and {thread + 1 for thread in recording.thread} <= set(names)


def test_the_beginning_of_a_file_is_read_with_a_bracket(clock, tmp_path: Path) -> None:
    saved(two_steps(clock), tmp_path / "run.timeline")
    text = (tmp_path / "run.timeline").read_text()
    lines = text.splitlines()
    for count in range(2, len(lines)):
        whole = "\n".join(lines[:count]).removesuffix(",") + "]"
        assert json.loads(whole) == json.loads(text)[: count - 1]


def test_an_existing_file_stays_until_there_is_a_step(clock, tmp_path: Path) -> None:
    path = tmp_path / "run.timeline"
    saved(two_steps(clock), path)
    writer = TimelineWriter(path, FACTS, 5)
    writer.save()
    assert len(read(path)[0]) == 14
    clock.add(writer.timeline, Kind.STEP, 5, 9, DECODE, 1)
    writer.save()
    assert len(read(path)[0]) == 1


def test_on_a_full_disk_the_file_stays(clock, tmp_path: Path) -> None:
    """Writes fail in the middle of the file; what was saved before stays, and nothing else is left."""
    path = tmp_path / "run.timeline"
    writer, limits = TimelineWriter(path, FACTS, 5), resource.getrlimit(resource.RLIMIT_FSIZE)
    clock.add(writer.timeline, Kind.STEP, 5, 9, DECODE, 1)
    writer.save()
    before = path.read_bytes()
    writer.timeline = two_steps(clock)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))  # Python ignores the signal
    try:
        with pytest.raises(ConfigError, match=r"the timeline .*run.timeline cannot be written: File too large"):
            writer.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    writer.save()
    assert len(read(path)[0]) == 14


def test_a_target_is_a_timeline_or_nothing(clock, tmp_path: Path) -> None:
    check_target(tmp_path / "new")
    saved(two_steps(clock), tmp_path / "run.timeline", replace(FACTS, model='a "model"'))
    check_target(tmp_path / "run.timeline")
    (tmp_path / "empty").touch()
    check_target(tmp_path / "empty")
    save_file({"a": torch.zeros(1)}, tmp_path / "weights")
    (tmp_path / "text").write_text("kept")
    (tmp_path / "other.json").write_text(
        '[\n{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "mine"}}\n]'
    )
    for name in ("weights", "text", "other.json"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(ConfigError, match="would replace a file that is no timeline"):
            check_target(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
    for path in (tmp_path / "no" / "folder", tmp_path, Path("."), Path("/")):
        with pytest.raises(ConfigError, match="the timeline .*name another file"):
            check_target(path)


# -- where the time goes ---------------------------------------------------------------------------------------------


def test_a_split_by_hand(clock) -> None:
    found = TokenTime.of(Recording.of(two_steps(clock), 5))
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
    assert sum(found.parts.values()) == 60 + 7


def test_the_engine_may_have_been_idle_before_a_prompt(clock) -> None:
    timeline = Timeline(8)
    for kind, start in ((DECODE, 0), (PREFILL, 1000), (DECODE, 1013)):
        clock.add(timeline, Kind.STEP, start, start + 10, kind, UNKNOWN if kind == DECODE else 1)
    found = TokenTime.of(Recording.of(timeline, 5))
    assert found.parts["between steps"] == 3 and found.tokens is None and sum(found.parts.values()) == 23


@given(nested())
def test_parts_are_never_negative_and_together_all_time(events) -> None:
    with pytest.MonkeyPatch.context() as patched:
        clock, timeline = Clock(patched), Timeline(256)
        for kind, start, end, a in events:
            clock.add(timeline, kind, start, end, a, 1)
    recording = Recording.of(timeline, 100)
    steps = [(start, end, a) for kind, start, end, a in events if kind == Kind.STEP]
    found = TokenTime.of(recording)
    assert all(value >= 0 for value in found.parts.values())
    total = 0
    for number, (start, end, a) in enumerate(steps):
        if a != PREFILL:
            total += end - start
            total += start - steps[number - 1][1] if number else 0
    assert sum(found.parts.values()) == total
    assert found.tokens == found.steps == sum(a != PREFILL for *_, a in steps)


# -- drafts ------------------------------------------------------------------------------------------------------------


def test_the_drafters_time_is_recorded(clock) -> None:
    runner_v1 = pytest.importorskip(
        "vllm_spac.integration.stepping.v1.runner_v1", reason="the hooks are vLLM's runner's"
    )
    timeline = Timeline(8)
    told: list[tuple[int, float, None]] = []
    runtime = SimpleNamespace(
        recorder=SimpleNamespace(timeline=timeline), end_drafts=lambda *made: told.append(made),
        drafts=SimpleNamespace(length=lambda: None, chooser=None, in_prompt=False),
        budget=SimpleNamespace(weighs=False), observes_drafts=False,
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
