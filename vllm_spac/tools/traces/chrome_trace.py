"""Writes a timeline as a Chrome trace for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_spac.recording.timeline_file import Recording, TimelineFacts
from vllm_spac.recording.timeline_recorder import STEP_KINDS, UNKNOWN, Kind
from vllm_spac.system.files import write_text, writing

_NAMES = {
    Kind.FORWARD: ("forward", "rows", "requests"),
    Kind.WAIT: ("wait for loads", "experts", ""),
    Kind.WAIT_AHEAD: ("wait for reads ahead", "experts", ""),
    Kind.WAIT_CPU: ("wait for CPU experts", "", ""),
    Kind.UPDATE: ("policies and predictors", "", ""),
    Kind.DRAFT: ("draft", "tokens", "requests"),
    Kind.CPU: ("CPU experts", "rows", ""),
}


def write(recording: Recording, path: Path) -> int:
    """Writes the file atomically; returns its number of events, without those that name threads.

    Raises:
        ConfigError: the file cannot be written.
    """
    events = list(_events(recording))
    named = [*_thread_names(recording), *events]
    with writing(path):
        write_text(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": named}))
    return len(events)


def thread_titles(recording: Recording) -> list[str]:
    """Returns what each thread is called; the one that runs the steps is the forward thread."""
    forward = {int(thread) for thread in recording.thread[recording.kind == Kind.STEP]}
    return [f"forward ({name})" if number in forward else name for number, name in enumerate(recording.threads)]


def thread_order(recording: Recording) -> list[int]:
    """Returns the numbers of the threads, the forward thread first, the others by their names."""
    forward = {int(thread) for thread in recording.thread[recording.kind == Kind.STEP]}
    numbers = range(len(recording.threads))
    return sorted(numbers, key=lambda number: (number not in forward, recording.threads[number]))


def _thread_names(recording: Recording) -> Iterator[dict[str, Any]]:
    titles = thread_titles(recording)
    model = recording.facts.model or "model"
    yield {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": f"vllm_spac: {model}"}}
    for place, number in enumerate(thread_order(recording)):
        common = {"ph": "M", "pid": 1, "tid": number + 1}
        yield common | {"name": "thread_name", "args": {"name": titles[number]}}
        yield common | {"name": "thread_sort_index", "args": {"sort_index": place}}


def _events(recording: Recording) -> Iterator[dict[str, Any]]:
    columns = (recording.thread, recording.kind, recording.start, recording.duration, recording.a, recording.b)
    for thread, kind, start, duration, a, b in zip(*(column.tolist() for column in columns), strict=True):
        name, arguments = _described(recording.facts, Kind(kind), a, b)
        yield {
            "ph": "X",
            "name": name,
            "cat": Kind(kind).name.lower(),
            "pid": 1,
            "tid": thread + 1,
            "ts": start / 1000,  # microseconds
            "dur": duration / 1000,
            "args": arguments,
        }


def _described(facts: TimelineFacts, kind: Kind, a: int, b: int) -> tuple[str, dict[str, Any]]:
    """Returns the name and the arguments of an event."""
    if kind == Kind.STEP:
        return f"{STEP_KINDS[a]} step", {} if b == UNKNOWN else {"tokens": b}
    if kind == Kind.LAYER:
        return facts.layers[a], {"layer": a, "rows": b}
    if kind in (Kind.LOAD, Kind.HOST_LOAD):
        layer, expert = facts.expert(a)
        source = facts.store if kind == Kind.LOAD else "host memory"
        return f"expert {layer}.{expert}", {"layer": facts.layers[layer], "expert": expert, "bytes": b, "from": source}
    name, first, second = _NAMES[kind]
    return name, {label: value for label, value in ((first, a), (second, b)) if label}
