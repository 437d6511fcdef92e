"""Routing traces: the experts that routers chose, as columns in one safetensors file.

Format ``spac-trace-2``. Metadata: ``format``, ``model``, ``layers``, ``experts``, ``top_k``, ``expert_bytes`` (text).
S steps (forwards of the target model), R records (a MoE layer in a step), rows in the order of the forward:

    step_kind    uint8   [S]                 index into STEP_KINDS
    step_rows    uint32  [S]                 rows of the forward, without trailing padding
    step_tokens  uint32  [S]                 tokens that the step emitted; 0: unknown, or part of a prompt
    row_kind     uint8   [sum step_rows]     index into ROW_KINDS
    row_back     uint8   [sum step_rows]     of a draft: rows back to the row that it follows, 1 in a chain; else 0
    row_accepted uint8   [sum step_rows]     of a draft: 1 accepted, 0 rejected, 2 not known; else 1
    record_step  uint32  [R]                 ascending
    record_layer uint16  [R]                 in the order of execution
    ids          uint8   [sum rows, top_k]   experts; uint16 when there are more than 256; the rows of a record are
                                             those of its step
    weights      float16 [sum rows, top_k]   the router's weights; absent if not recorded

``top_k`` bytes per row and layer, three times as much with weights: 10^5 tokens of 6 layers, top-8, take 4.8 MB.

Format ``spac-trace-1`` has no ``row_back`` and no ``row_accepted``: its drafts are chains, and those of a step with one
request are accepted as far as ``step_tokens`` tells.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from vllm_spac.core import PROMPT_ROWS, selected
from vllm_spac.errors import ConfigError
from vllm_spac.system.files import replacing, writing
from vllm_spac.system.untrusted import read_header

FORMAT, CHAINS = "spac-trace-2", "spac-trace-1"
STEP_KINDS = ("prefill", "decode", "verify", "mixed")
ROW_KINDS = ("prefill", "decode", "verify", "draft", "padding")  # draft: a row of verify that holds a draft token
PREFILL, DRAFT, PADDING = 0, 3, 4
REJECTED, ACCEPTED, UNKNOWN = 0, 1, 2
DTYPES = {"U32": np.uint32, "U16": np.uint16, "F16": np.float16, "U8": np.uint8}
_MOST_LAYERS, _MOST_TOTAL, _MOST_BYTES = 1024, 1 << 20, 1 << 40  # limits on what a reader allocates, whatever the file


@dataclass(frozen=True)
class TraceFacts:
    """The recorded model: MoE layers, experts per layer, experts per token, bytes per expert (0: unknown).

    At most 1024 layers, 2^20 experts in all of them, and 2^40 bytes per expert.
    """

    layers: int
    experts: int
    top_k: int
    expert_bytes: int = 0
    model: str = ""

    @property
    def total(self) -> int:
        return self.layers * self.experts

    @property
    def id_dtype(self) -> type[np.unsignedinteger]:
        return np.uint8 if self.experts <= 256 else np.uint16

    @classmethod
    def of(cls, metadata: dict[str, str]) -> TraceFacts:
        """Parses the metadata of a file; raises ``KeyError`` or ``ValueError`` if no model can have such values."""
        numbers = {field.name: int(metadata[field.name]) for field in fields(cls) if field.name != "model"}
        found = cls(**numbers, model=metadata["model"])
        found.check()
        return found

    def check(self) -> None:
        """Raises ``ValueError`` if no model can have such values."""
        _check(0 < self.layers <= _MOST_LAYERS and 0 < self.top_k <= self.experts, "impossible model")
        _check(self.total <= _MOST_TOTAL and 0 <= self.expert_bytes <= _MOST_BYTES, "impossible model")


@dataclass(frozen=True, eq=False)
class Trace:
    """A routing trace in memory; the columns of the file and two derived ones."""

    facts: TraceFacts
    step_kind: np.ndarray
    step_rows: np.ndarray
    step_tokens: np.ndarray
    row_kind: np.ndarray
    record_step: np.ndarray
    record_layer: np.ndarray
    ids: np.ndarray
    weights: np.ndarray | None
    row_start: np.ndarray  # int64 [S + 1], where the rows of each step begin in ``row_kind``
    record_start: np.ndarray  # int64 [R + 1], where the rows of each record begin in ``ids`` and ``weights``
    # row_back, row_accepted: None in a trace of chains (``spac-trace-1``)
    row_back: np.ndarray | None = None
    row_accepted: np.ndarray | None = None

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Reads a trace file.

        Raises:
            ConfigError: it cannot be read, is no trace of this format, is damaged or contradicts itself.
        """
        from safetensors import SafetensorError, safe_open

        try:
            metadata, entries = read_header(path)
            if (found := metadata.get("format")) not in (FORMAT, CHAINS):
                raise ConfigError(f"{path} is no routing trace of format {FORMAT}; use --spac-record trace=FILE")
            facts = TraceFacts.of(metadata)
            expected = columns_of(facts, "weights" in entries, found == FORMAT)
            _check(set(entries) == set(expected), f"its columns are {', '.join(sorted(entries))}")
            for name, (dtype, width) in expected.items():
                _check(entries[name]["dtype"] == dtype, f"column {name} has another type")
                _check(tuple(entries[name]["shape"][1:]) == width, f"column {name} has another shape")
            with safe_open(str(path), framework="np") as file:
                columns = {name: file.get_tensor(name) for name in expected}
            return cls.of(facts, **columns)
        except ConfigError:
            raise
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as a routing trace: {error}; record it again") from error

    @classmethod
    def of(cls, facts: TraceFacts, *, weights: np.ndarray | None = None, **columns: np.ndarray) -> Trace:
        """Builds a trace from its columns; raises ``ValueError`` if they are not as documented above."""
        rows, steps = columns["step_rows"].astype(np.int64), columns["record_step"].astype(np.int64)
        _check(len(steps) == 0 or steps.max() < len(rows), "a record belongs to no step")
        row_start = np.concatenate(([0], np.cumsum(rows)))
        record_start = np.concatenate(([0], np.cumsum(rows[steps])))
        trace = cls(facts, weights=weights, row_start=row_start, record_start=record_start, **columns)
        trace._validate()
        return trace

    @property
    def steps(self) -> int:
        return len(self.step_kind)

    @property
    def records(self) -> int:
        return len(self.record_step)

    def save(self, path: str | Path) -> None:
        """Writes the file atomically; raises ``ConfigError`` if it cannot be written."""
        columns = {name: getattr(self, name) for name in self._columns()}
        write_file(Path(path), self.facts, {name: (value.shape, value.tobytes()) for name, value in columns.items()})

    def counted(self) -> np.ndarray:
        """Returns bool [sum rows]: whether a row of ``ids`` belongs to decode or verify (drafts included)."""
        rows = np.diff(self.record_start)
        offset = self.row_start[self.record_step] - self.record_start[:-1]
        kind = self.row_kind[np.repeat(offset, rows) + np.arange(len(self.ids))]
        return (kind != PREFILL) & (kind != PADDING)

    def step_counts(self) -> Iterator[np.ndarray | None]:
        """Yields the input of ``Policy.observe`` for each step.

        int64 [layers * experts]: the decode and verify rows that selected each expert, -1 for layers without a record;
        None for a step without such rows.
        """
        counted, total = self.counted(), self.facts.total
        bounds = np.searchsorted(self.record_step, np.arange(self.steps + 1))
        for step in range(self.steps):
            first, last = bounds[step], bounds[step + 1]
            rows = slice(self.record_start[first], self.record_start[last])
            keep = counted[rows]
            if not keep.any():
                yield None
                continue
            layers = self.record_layer[first:last].astype(np.int64)
            base = np.repeat(layers * self.facts.experts, self.step_rows[step])[:, None]
            counts = np.bincount((self.ids[rows] + base)[keep].ravel(), minlength=total)
            idle = np.ones(self.facts.layers, dtype=bool)
            idle[layers] = False
            counts[np.repeat(idle, self.facts.experts)] = -1
            yield counts

    def prompt_rows(self, step: int) -> np.ndarray | None:
        """Returns the input of ``Policy.observe_prompt`` for a step, bool [rows, keys]; None if it is not called."""
        kinds = self.row_kind[self.row_start[step] : self.row_start[step + 1]]
        rows = np.flatnonzero(kinds != PADDING)
        if len(rows) == 0 or (kinds[rows] != PREFILL).any():
            return None
        records = range(*np.searchsorted(self.record_step, (step, step + 1)))
        last = rows[-PROMPT_ROWS:]
        chosen = ((int(self.record_layer[each]), self.ids[self.record_start[each] + last]) for each in records)
        return selected(chosen, self.facts.layers, self.facts.experts)

    def _columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        _check((self.row_back is None) == (self.row_accepted is None), "one of row_back and row_accepted is missing")
        return columns_of(self.facts, self.weights is not None, self.row_back is not None)

    def _validate(self) -> None:
        facts = self.facts
        facts.check()
        for name, (dtype, width) in self._columns().items():
            column = getattr(self, name)
            _check(column.dtype == DTYPES[dtype] and column.shape[1:] == width, f"column {name} has another type")
        _check(self.step_kind.shape == self.step_rows.shape == self.step_tokens.shape, "steps differ in number")
        _check(self.record_step.shape == self.record_layer.shape, "records differ in number")
        _check(len(self.row_kind) == self.row_start[-1], "rows and their kinds differ in number")
        _check(len(self.ids) == self.record_start[-1], "rows and their experts differ in number")
        _check(self.weights is None or self.weights.shape == self.ids.shape, "experts and weights differ in number")
        _check(bool((np.diff(self.record_step.astype(np.int64)) >= 0).all()), "records are out of order")
        for name, limit in (
            ("step_kind", len(STEP_KINDS)),
            ("row_kind", len(ROW_KINDS)),
            ("record_layer", facts.layers),
            ("ids", facts.experts),
        ):
            column = getattr(self, name)
            _check(column.size == 0 or column.max() < limit, f"column {name} has a value beyond {limit - 1}")
        if self.row_back is not None:
            self._validate_drafts()

    def _validate_drafts(self) -> None:
        back, accepted, drafts = self.row_back, self.row_accepted, self.row_kind == DRAFT
        assert back is not None and accepted is not None
        _check(back.shape == accepted.shape == self.row_kind.shape, "rows and their drafts differ in number")
        _check(bool(((back > 0) == drafts).all()), "drafts, and no other rows, follow a row of their step")
        _check(bool((accepted[~drafts] == ACCEPTED).all() and (accepted <= UNKNOWN).all()), "impossible acceptance")
        rows = np.arange(len(drafts))
        root = np.maximum.accumulate(np.where(drafts, -1, rows)) if len(rows) else rows
        _check(bool((rows - back >= np.maximum(root, 0))[drafts].all()), "a draft follows a row of another request")
        parents = (rows - back)[drafts & (accepted == ACCEPTED)]
        _check(bool((accepted[parents] == ACCEPTED).all()), "an accepted draft follows one that was not")
        _check(len(np.unique(parents)) == len(parents), "two accepted drafts follow one row")


def columns_of(facts: TraceFacts, weights: bool, drafts: bool = True) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns (dtype, shape of a row) of each column; wide types first, so that all are aligned in the file."""
    columns = {
        "step_rows": ("U32", ()),
        "step_tokens": ("U32", ()),
        "record_step": ("U32", ()),
        "record_layer": ("U16", ()),
        "weights": ("F16", (facts.top_k,)),
        "ids": ("U8" if facts.experts <= 256 else "U16", (facts.top_k,)),
        "row_kind": ("U8", ()),
        "row_back": ("U8", ()),
        "row_accepted": ("U8", ()),
        "step_kind": ("U8", ()),
    }
    absent = () if weights else ("weights",)
    for name in absent if drafts else (*absent, "row_back", "row_accepted"):
        del columns[name]
    return dict(sorted(columns.items(), key=lambda item: -np.dtype(DTYPES[item[1][0]]).itemsize))


def write_file(path: Path, facts: TraceFacts, columns: dict) -> None:
    """Writes columns (shape and bytes, or shape and an open file with the bytes) to one safetensors file."""
    drafts = "row_back" in columns
    metadata = {"format": FORMAT if drafts else CHAINS} | {f.name: str(getattr(facts, f.name)) for f in fields(facts)}
    header: dict = {"__metadata__": metadata}
    types, offset = columns_of(facts, "weights" in columns, drafts), 0
    for name, (shape, _) in columns.items():
        dtype = types[name][0]
        end = offset + int(np.prod(shape)) * np.dtype(DTYPES[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with writing(f"the trace {path}"), replacing(path) as partial, open(partial, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, content in columns.values():
            if isinstance(content, bytes):
                file.write(content)
            else:
                content.seek(0)
                shutil.copyfileobj(content, file)


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
