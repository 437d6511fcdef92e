"""A timeline as a file in Chrome's trace event format, which https://ui.perfetto.dev and chrome://tracing open.

A JSON array with one event per line, so that the beginning of a damaged copy is read with its last line replaced by
``]``. Times are microseconds; the first step starts at 0.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_spac.errors import ConfigError
from vllm_spac.recording.timeline_recorder import STEP_KINDS, UNKNOWN, Kind, Recording, Timeline, capacity_of
from vllm_spac.system.files import check_replaceable, remove_leftovers, replacing, writing
from vllm_spac.system.untrusted import open_file

_FIRST = '[\n{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "vllm_spac: '  # how each file begins
_NAMES = {
    Kind.FORWARD: ("forward", "rows", "requests"),
    Kind.WAIT: ("wait for loads", "experts", ""),
    Kind.WAIT_AHEAD: ("wait for reads ahead", "experts", ""),
    Kind.WAIT_CPU: ("wait for CPU experts", "", ""),
    Kind.UPDATE: ("policies and predictors", "", ""),
    Kind.DRAFT: ("draft", "tokens", "requests"),
    Kind.CPU: ("CPU experts", "rows", ""),
}


@dataclass(frozen=True)
class TimelineFacts:
    """The recorded model: its name, the store of its experts, and the name and number of experts of each MoE layer."""

    model: str
    store: str
    layers: tuple[str, ...]
    experts: tuple[int, ...]

    @functools.cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(self.experts))

    def expert(self, key: int) -> tuple[int, int]:
        """Returns (layer, expert of the layer) of an expert numbered over all layers."""
        layer = bisect.bisect_right(self._ends, key)
        return layer, key - self._ends[layer] + self.experts[layer]

    def event(self, kind: Kind, a: int, b: int) -> dict[str, Any]:
        """Returns name, category and arguments of an event."""
        arguments: dict[str, Any]
        match kind:
            case Kind.STEP:
                name, arguments = f"{STEP_KINDS[a]} step", {} if b == UNKNOWN else {"tokens": b}
            case Kind.LAYER:
                name, arguments = self.layers[a], {"layer": a, "rows": b}
            case Kind.LOAD | Kind.HOST_LOAD:
                layer, expert = self.expert(a)
                source = self.store if kind == Kind.LOAD else "host memory"
                name = f"expert {layer}.{expert}"
                arguments = {"layer": self.layers[layer], "expert": expert, "bytes": b, "from": source}
            case _:
                name, first, second = _NAMES[kind]
                arguments = {label: value for label, value in ((first, a), (second, b)) if label}
        return {"name": name, "cat": kind.name.lower(), "args": arguments}


class TimelineWriter:
    """A timeline of the last steps, and the file that it is saved in.

    Args:
        path: the file; an existing one is replaced at ``save``.
        steps: number of steps to keep; fewer are kept where steps have many waves or loads.

    Raises:
        ConfigError: the folder of ``path`` cannot be read.
    """

    def __init__(self, path: Path, facts: TimelineFacts, steps: int) -> None:
        self.path, self._facts, self._steps = path, facts, steps
        self.timeline = Timeline(capacity_of(steps, len(facts.layers)))
        with writing(f"the timeline {path}"):
            remove_leftovers(path)

    def save(self) -> Path:
        """Writes the last steps, atomically; recording continues. An existing file stays until there is a step.

        Raises:
            ConfigError: the file cannot be written.
        """
        recording = Recording.of(self.timeline, self._steps)
        if len(recording.start) or not self.path.exists():
            with writing(f"the timeline {self.path}"), replacing(self.path) as partial, open(partial, "w") as file:
                file.write(_FIRST + json.dumps(self._facts.model or "model")[1:-1] + '"}}')
                file.writelines(f",\n{line}" for line in _lines(recording, self._facts))
                file.write("\n]\n")
        return self.path


def _lines(recording: Recording, facts: TimelineFacts) -> Iterator[str]:
    """Yields the threads' names, the forward thread first, and the events, each as JSON."""
    forward = {int(thread) for thread in recording.thread[recording.kind == Kind.STEP]}
    numbers = range(len(recording.threads))
    for place, thread in enumerate(sorted(numbers, key=lambda each: (each not in forward, recording.threads[each]))):
        name, common = recording.threads[thread], {"ph": "M", "pid": 1, "tid": thread + 1}
        titled = {"name": f"forward ({name})" if thread in forward else name}
        yield json.dumps(common | {"name": "thread_name", "args": titled})
        yield json.dumps(common | {"name": "thread_sort_index", "args": {"sort_index": place}})

    @functools.cache  # most events are repeated in many steps
    def head(kind: int, a: int, b: int) -> str:
        return json.dumps({"ph": "X", "pid": 1} | facts.event(Kind(kind), a, b))[:-1]

    columns = (recording.thread, recording.start, recording.duration, recording.kind, recording.a, recording.b)
    for thread, start, duration, kind, a, b in zip(*(column.tolist() for column in columns), strict=True):
        yield f'{head(kind, a, b)}, "tid": {thread + 1}, "ts": {start / 1000}, "dur": {duration / 1000}}}'


def check_target(path: Path) -> None:
    """Checks, before a run, that a timeline can be written to ``path``.

    Raises:
        ConfigError: it cannot be written, or it would replace a file that is no timeline.
    """
    with writing(f"the timeline {path}"):
        if path.exists():
            with open_file(path) as file:
                if file.read(len(_FIRST)) not in (b"", _FIRST.encode()):
                    raise ConfigError(f"the timeline {path} would replace a file that is no timeline; name another")
        check_replaceable(path)
