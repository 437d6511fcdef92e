"""A recorded timeline: the events of the last steps in one safetensors file, read, and written while an engine runs.

Format ``spac-timeline-1``. Metadata: ``format``, ``model``, ``store`` (names), ``threads`` (JSON, names), ``layers``
(JSON, names of the MoE layers), ``experts`` (JSON, number of experts of each). Columns of n events, by their start:

    thread    uint8  [n]   index into threads
    kind      uint8  [n]   see ``timeline_recorder.Kind``, also for a and b
    start     int64  [n]   nanoseconds; the first step starts at 0
    duration  int64  [n]   nanoseconds
    a, b      int64  [n]

Experts are numbered over all layers: those of the first layer, then those of the second, and so on. ``split`` divides
the time of the steps into what the forward thread did.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch

from vllm_spac.errors import ConfigError
from vllm_spac.recording.timeline_recorder import STEP_KINDS, UNKNOWN, Kind, Timeline, capacity_of
from vllm_spac.system import tensor_file
from vllm_spac.system.files import check_replaceable, writing
from vllm_spac.system.tensor_file import check
from vllm_spac.system.untrusted import parse_json, read_header

FORMAT = "spac-timeline-1"
_REMEDY = "record one with --spac-timeline"
_DTYPES = {"thread": np.uint8, "kind": np.uint8, "start": np.int64, "duration": np.int64, "a": np.int64, "b": np.int64}
_MOST_THREADS, _MOST_LAYERS, _MOST_EXPERTS, _LONGEST = 256, 1024, 1 << 20, 1 << 61
_OF_EXPERTS = (Kind.LOAD, Kind.HOST_LOAD)


@dataclass(frozen=True)
class TimelineFacts:
    """The recorded model: its name, the store of its experts, and the name and number of experts of each MoE layer."""

    model: str
    store: str
    layers: tuple[str, ...]
    experts: tuple[int, ...]

    def expert(self, key: int) -> tuple[int, int]:
        """Returns (layer, expert of the layer) of an expert numbered over all layers."""
        ends = np.cumsum(self.experts)
        layer = int(np.searchsorted(ends, key, side="right"))
        return layer, key - int(ends[layer]) + self.experts[layer]


@dataclass(frozen=True, eq=False)
class Recording:
    """The events of some consecutive steps, sorted by their start, and those that contain others before these."""

    facts: TimelineFacts
    threads: tuple[str, ...]
    thread: np.ndarray
    kind: np.ndarray
    start: np.ndarray
    duration: np.ndarray
    a: np.ndarray
    b: np.ndarray

    @classmethod
    def of(cls, timeline: Timeline, facts: TimelineFacts, steps: int) -> Self:
        """Returns the last ``steps`` steps of which no event was overwritten; fewer if the rings hold fewer."""
        threads, thread, events, complete = timeline.last()
        start, duration, kind, a, b = events.T
        began = np.sort(start[(kind == Kind.STEP) & (start >= complete)])[-steps:]
        ends = (start + duration)[(kind == Kind.STEP) & (start >= complete)]
        first, last = (int(began[0]), int(ends.max())) if len(began) else (0, 0)
        kept = np.flatnonzero((start >= first) & (start < last))
        order = kept[np.lexsort((-duration[kept], start[kept]))]
        columns = {"thread": thread, "kind": kind, "start": start - first, "duration": duration, "a": a, "b": b}
        chosen = {name: values[order].astype(_DTYPES[name]) for name, values in columns.items()}
        return cls(facts, tuple(threads), **chosen)

    @property
    def end(self) -> np.ndarray:
        """int64 [n], when each event ended."""
        return self.start + self.duration

    def save(self, path: Path) -> None:
        """Writes the file atomically; raises ``ConfigError`` if it cannot be written."""
        facts = self.facts
        metadata = {"format": FORMAT, "model": facts.model, "store": facts.store}
        texts = {"threads": self.threads, "layers": facts.layers, "experts": facts.experts}
        metadata |= {name: json.dumps(values) for name, values in texts.items()}
        tensor_file.write(path, {name: torch.from_numpy(getattr(self, name)) for name in _DTYPES}, metadata)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a file.

        Raises:
            ConfigError: it cannot be read, is no timeline of this format, is damaged or contradicts itself.
        """
        metadata, tensors = tensor_file.read(path, FORMAT, "a timeline", _REMEDY, ("U8", "I64"))
        try:
            check(set(tensors) == set(_DTYPES), f"its columns are {', '.join(sorted(tensors))}")
            threads, layers = (_names(metadata[name]) for name in ("threads", "layers"))
            facts = TimelineFacts(metadata["model"], metadata["store"], layers, _numbers(metadata["experts"]))
            found = cls(facts, threads, **{name: tensor.numpy() for name, tensor in tensors.items()})
            found._validate()
        except (KeyError, ValueError) as error:
            raise ConfigError(f"spac: {path} cannot be read as a timeline: {error}; {_REMEDY}") from error
        return found

    def _validate(self) -> None:
        facts = self.facts
        check(len(self.threads) <= _MOST_THREADS and len(facts.layers) <= _MOST_LAYERS, "too many threads or layers")
        check(len(facts.layers) == len(facts.experts) > 0, "layers and their experts differ in number")
        check(min(facts.experts) > 0 and sum(facts.experts) <= _MOST_EXPERTS, "impossible numbers of experts")
        for name, dtype in _DTYPES.items():
            column = getattr(self, name)
            check(column.dtype == dtype and column.shape == self.start.shape, f"column {name} has another type or size")
        check(self.start.ndim == 1, "columns have more than one axis")
        if not len(self.start):
            return
        check(int(self.start.min()) >= 0 and int(self.duration.min()) >= 0, "an event has a negative time")
        check(int(self.start.max()) < _LONGEST and int(self.duration.max()) < _LONGEST, "an event is too long")
        check(bool((np.diff(self.start) >= 0).all()), "events are out of order")
        check(int(self.thread.max()) < len(self.threads), "an event is of no thread")
        check(int(self.kind.max()) < len(Kind), "an event is of no kind")
        self._check_numbers()

    def _check_numbers(self) -> None:
        a, b, kind = self.a, self.b, self.kind
        limits = {
            Kind.STEP: len(STEP_KINDS),
            Kind.LAYER: len(self.facts.layers),
            **dict.fromkeys(_OF_EXPERTS, sum(self.facts.experts)),
        }
        for each, limit in limits.items():
            numbers = a[kind == each]
            check(not len(numbers) or numbers.max() < limit, f"an event {each.name} has a number beyond {limit - 1}")
        check(int(a.min()) >= 0 and int(b.min()) >= UNKNOWN, "an event has a negative number")
        steps = kind == Kind.STEP
        check(bool((self.start[steps][1:] >= self.end[steps][:-1]).all()), "steps overlap")


def _names(text: str) -> tuple[str, ...]:
    names = parse_json(text)
    check(isinstance(names, list) and all(isinstance(name, str) for name in names), "threads or layers are no names")
    return tuple(names)


def _numbers(text: str) -> tuple[int, ...]:
    numbers = parse_json(text)
    check(isinstance(numbers, list) and all(type(number) is int for number in numbers), "experts are no numbers")
    return tuple(numbers)


class TimelineWriter:
    """A timeline of the last steps, and the file that it is saved in.

    Args:
        path: the file; an existing one is replaced at ``save``.
        steps: number of steps to keep; fewer are kept where steps have many waves or loads.
    """

    def __init__(self, path: Path, facts: TimelineFacts, steps: int) -> None:
        self.path, self._facts, self._steps = path, facts, steps
        self.timeline = Timeline(capacity_of(steps, len(facts.layers)))

    def save(self) -> Path:
        """Writes the last steps, atomically; recording continues. An existing file stays until there is a step.

        Raises:
            ConfigError: the file cannot be written.
        """
        recording = Recording.of(self.timeline, self._facts, self._steps)
        if len(recording.start) or not self.path.exists():
            recording.save(self.path)
        return self.path


def check_target(path: Path) -> None:
    """Checks, before a run, that a timeline can be written to ``path``.

    Raises:
        ConfigError: it cannot be written, or it would replace a file that is no timeline.
    """
    with writing(f"the timeline {path}"), contextlib.suppress(ValueError):  # no timeline
        check_replaceable(path)
        if not path.exists() or (path.is_file() and path.stat().st_size == 0):
            return
        if path.is_file() and read_header(path)[0].get("format") == FORMAT:
            return
    raise ConfigError(f"the timeline {path} would replace a file that is no timeline; name another file")


GENERATING = ("decode", "verify")
PROMPTS = ("prefill", "mixed")
WAITS = (Kind.WAIT, Kind.WAIT_AHEAD)


@dataclass(frozen=True)
class TimeSplit:
    """Where the time of some steps went.

    Attributes:
        tokens: tokens that they emitted; None if the host does not know it.
        parts: name -> nanoseconds; together the steps and the gaps before them.
    """

    steps: int
    tokens: int | None
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Nanoseconds of all parts."""
        return sum(self.parts.values())


def split(recording: Recording, kinds: Collection[str]) -> TimeSplit:
    """Returns where the time of the steps of these ``kinds`` (of ``STEP_KINDS``) went.

    A gap counts as a part of the step that follows it, if the forward thread had a reason to go on: not before steps
    with prompts, because before a new request the engine may have had nothing to do, and not before the first step.
    """
    is_step = recording.kind == Kind.STEP
    start, end, tokens = recording.start[is_step], recording.end[is_step], recording.b[is_step]
    chosen = np.isin(recording.a[is_step], [STEP_KINDS.index(kind) for kind in kinds])
    sums = _sums(recording, start, end, chosen)
    layers, waits = sums[Kind.LAYER], sum(sums[kind] for kind in WAITS)
    inside = sums[Kind.FORWARD] + sums[Kind.UPDATE] + sums[Kind.DRAFT]
    follows = chosen[1:] & np.isin(recording.a[is_step][1:], [STEP_KINDS.index(kind) for kind in GENERATING])
    parts = {
        "waiting for loads": waits,
        "waiting for CPU experts": sums[Kind.WAIT_CPU],
        "experts": layers - waits - sums[Kind.WAIT_CPU],
        "rest of the forward": sums[Kind.FORWARD] - layers,
        "policies and predictors": sums[Kind.UPDATE],
        "drafts": sums[Kind.DRAFT],
        "sampling and the rest of the step": sums[Kind.STEP] - inside,
        "between steps": int((start[1:] - end[:-1])[follows].sum()),
    }
    emitted = tokens[chosen]
    return TimeSplit(int(chosen.sum()), None if (emitted == UNKNOWN).any() else int(emitted.sum()), parts)


def median_step(recording: Recording, kinds: Collection[str]) -> tuple[int, int] | None:
    """Returns (start, end) in nanoseconds of the step of median duration among those of ``kinds``; None without any."""
    codes = [STEP_KINDS.index(kind) for kind in kinds]
    steps = np.flatnonzero((recording.kind == Kind.STEP) & np.isin(recording.a, codes))
    if not len(steps):
        return None
    chosen = steps[np.argsort(recording.duration[steps], kind="stable")[len(steps) // 2]]
    return int(recording.start[chosen]), int(recording.end[chosen])


def _sums(recording: Recording, start: np.ndarray, end: np.ndarray, chosen: np.ndarray) -> dict[Kind, int]:
    """Returns the nanoseconds of each kind on the forward thread, inside the ``chosen`` steps."""
    if not len(start):
        return dict.fromkeys(Kind, 0)
    forward = recording.thread[recording.kind == Kind.STEP][0]
    step = np.searchsorted(start, recording.start, side="right") - 1
    inside = (recording.thread == forward) & (step >= 0) & (recording.end <= end[step]) & chosen[step]
    sums = np.zeros(len(Kind), dtype=np.int64)
    np.add.at(sums, recording.kind[inside], recording.duration[inside])
    return {kind: int(sums[kind]) for kind in Kind}
