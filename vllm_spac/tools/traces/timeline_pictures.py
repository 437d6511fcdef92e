"""Draws a timeline, and writes it as a Chrome trace for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vllm_spac.recording.timeline_file import GENERATING, PROMPTS, Recording, TimelineFacts, median_step, split
from vllm_spac.recording.timeline_recorder import STEP_KINDS, UNKNOWN, Kind
from vllm_spac.system.files import write_text, writing
from vllm_spac.system.pictures import begin_picture, save_picture

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


_COLORS = {  # by kind; those of the split's parts follow
    Kind.LAYER: "tab:blue",
    Kind.WAIT: "tab:red",
    Kind.WAIT_AHEAD: "tab:orange",
    Kind.WAIT_CPU: "tab:purple",
    Kind.UPDATE: "tab:olive",
    Kind.DRAFT: "tab:green",
    Kind.LOAD: "indianred",
    Kind.HOST_LOAD: "sandybrown",
    Kind.CPU: "mediumpurple",
}
_PARTS = {
    "waiting for loads": "tab:red",
    "waiting for CPU experts": "tab:purple",
    "experts": "tab:blue",
    "rest of the forward": "lightsteelblue",
    "policies and predictors": "tab:olive",
    "drafts": "tab:green",
    "sampling and the rest of the step": "silver",
    "between steps": "gainsboro",
}
_HEIGHTS = dict.fromkeys((Kind.WAIT, Kind.WAIT_AHEAD, Kind.WAIT_CPU), 0.5)  # inside of layers; 0.8 for others
_LOADS = (Kind.LOAD, Kind.HOST_LOAD)


def draw(recording: Recording, path: Path, title: str) -> None:
    """Draws the time of a token and of a step with prompts above the step of median duration, by thread.

    Raises:
        ConfigError: the file cannot be written.
    """
    titles = thread_titles(recording)
    size, ratios = (12, 3.6 + 0.35 * len(titles)), (1.6, 0.6 + 0.35 * len(titles))
    figure, (above, below) = begin_picture(2, figsize=size, height_ratios=ratios)
    _draw_split(above, recording)
    above.set_title(title)
    _draw_step(below, recording, titles)
    save_picture(figure, path)


def _draw_split(axes, recording: Recording) -> None:
    labels: list[str] = []
    for kinds, what in ((GENERATING, "generating"), (PROMPTS, "with prompts")):
        found = split(recording, kinds)
        if not found.steps:
            continue
        each = found.tokens if kinds == GENERATING and found.tokens else found.steps
        unit = "token" if kinds == GENERATING and found.tokens else "step"
        left = 0.0
        for name, value in found.parts.items():
            width = value / each / 1e6
            axes.barh(len(labels), width, left=left, color=_PARTS[name], label=None if labels else name)
            left += width
        labels.append(f"{what}: a {unit}")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    if labels:
        axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.35), frameon=False)


def _draw_step(axes, recording: Recording, titles: list[str]) -> None:
    span = median_step(recording, GENERATING) or median_step(recording, PROMPTS)
    if span is None:
        axes.set_axis_off()
        return
    order = thread_order(recording)
    inside = (recording.end > span[0]) & (recording.start < span[1])
    for kind, color in _COLORS.items():
        found = np.flatnonzero(inside & (recording.kind == kind))
        for thread in np.unique(recording.thread[found]).tolist():
            of_thread = found[recording.thread[found] == thread]
            begins = (recording.start[of_thread] - span[0]) / 1e6
            bars = list(zip(begins.tolist(), (recording.duration[of_thread] / 1e6).tolist(), strict=True))
            place = order.index(thread)
            height = 0.2 if place == 0 and kind in _LOADS else _HEIGHTS.get(kind, 0.8)
            axes.broken_barh(bars, (place - height / 2, height), color=color)
    axes.set_yticks(range(len(titles)), [titles[thread] for thread in order], fontsize=8)
    axes.set(xlim=(0, (span[1] - span[0]) / 1e6), ylim=(len(titles) - 0.4, -0.6))
    axes.set_xlabel("milliseconds of the step of median duration (blue: layers, with waits and loads in them)")
