"""Records a routing trace while a model runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_spac.errors import ConfigError
from vllm_spac.recording.trace_file import (
    ACCEPTED,
    CHAINS,
    DRAFT,
    DTYPES,
    FORMAT,
    PADDING,
    REJECTED,
    ROW_KINDS,
    STEP_KINDS,
    UNKNOWN,
    TraceFacts,
    columns_of,
    write_file,
)
from vllm_spac.system.files import remove_leftovers, writing
from vllm_spac.system.untrusted import read_header

if TYPE_CHECKING:
    from vllm_spac.core import Step

_FLUSH_BYTES = 1 << 20  # of recorded ids and weights, before conversion


@dataclass(slots=True)
class _Recorded:
    """A recorded step; columns are made from many steps at once.

    ``ids`` and ``weights`` hold the bytes of layers' rows, int32 and float32.
    """

    step: Step
    rows: int
    layers: list[int] = field(default_factory=list)
    ids: list[bytes] = field(default_factory=list)
    weights: list[bytes] = field(default_factory=list)
    tokens: Sequence[int] | None = None
    paths: Sequence[Sequence[int]] | None = None


class TraceWriter:
    """Records a run in bounded memory.

    Columns grow in unnamed files on the disk of ``path`` and become one file at ``save``. The unnamed files disappear
    with the process, however it ends.

    Call ``begin_step``, then ``observe`` for all MoE layers, together or one by one, then ``end_step``. Calls outside
    of a step, or in a step without requests (a dummy run), are not recorded. A step that was not ended before the next
    ``begin_step`` is dropped.

    Args:
        path: the file; an existing one is replaced at ``save``. A symbolic link is followed.

    Raises:
        ConfigError: ``path`` cannot be written. Also raised by ``end_step`` and ``save``; call ``cancel`` then.
    """

    def __init__(self, path: str | Path, facts: TraceFacts) -> None:
        self.path = Path(os.path.realpath(path))
        self.facts = facts
        facts.check()
        self._columns = columns_of(facts, weights=True)
        self._recorded: list[_Recorded] = []
        self._pending: _Recorded | None = None
        self._held = self._steps = 0
        with writing(f"the trace {self.path}"):
            remove_leftovers(self.path)
            folder = self.path.parent
            self._spools = {name: tempfile.TemporaryFile(dir=folder) for name in self._columns}  # noqa: SIM115

    def begin_step(self, step: Step) -> None:
        """Starts recording a forward of the target model."""
        self._pending = _Recorded(step, step.rows) if step.requests else None

    def observe(self, layers: Sequence[int], ids: np.ndarray, weights: np.ndarray) -> None:
        """Records the routers' choices in some layers.

        Args:
            ids: int [layers, rows, top_k]; rows beyond those of the step's requests are padding and left out.
            weights: float of the same shape.
        """
        pending = self._pending
        if pending is None:
            return
        rows, facts = pending.rows, self.facts
        assert ids.ndim == 3 and ids.shape[::2] == (len(layers), facts.top_k), "[layers, rows, top_k]"
        assert ids.shape[1] >= rows, "rows are missing"
        assert min(layers) >= 0 and max(layers) < facts.layers
        pending.layers += layers
        pending.ids.append(ids[:, :rows].astype(np.int32, copy=False).tobytes())
        assert weights.shape == ids.shape, "one weight for each expert"
        pending.weights.append(weights[:, :rows].astype(np.float32, copy=False).tobytes())

    def end_step(self, tokens: Sequence[int] | None = None, paths: Sequence[Sequence[int]] | None = None) -> None:
        """Ends the step.

        Args:
            tokens: number that each request emitted; default: one each if none of them verifies, else not known.
            paths: numbers of the accepted drafts of each request, ascending; default: as many of the first ones as it
                emitted tokens beyond one.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.tokens, pending.paths = tokens, paths
        self._recorded.append(pending)
        self._held += 2 * sum(map(len, pending.ids))
        if self._held >= _FLUSH_BYTES:
            self._flush()

    def save(self) -> Path:
        """Writes everything up to the last ended step, atomically; recording may continue.

        An existing file stays as it is until there is a step to write.
        """
        self._flush()
        if self._steps == 0 and self.path.exists():
            return self.path
        sizes = {}
        for name, (dtype, width) in self._columns.items():
            row = np.dtype(DTYPES[dtype]).itemsize * int(np.prod(width, initial=1))
            sizes[name] = ((self._spools[name].tell() // row, *width), self._spools[name])
        write_file(self.path, self.facts, sizes)
        return self.path

    def finish(self) -> Path:
        """Saves the trace and stops recording."""
        try:
            return self.save()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Stops recording without saving; may be called twice."""
        self._pending = None
        for file in self._spools.values():
            file.close()

    def _flush(self) -> None:
        columns = self._columns_of(self._recorded)
        with writing(f"the trace {self.path}"):
            for name, column in columns.items():
                self._spools[name].write(column.astype(DTYPES[self._columns[name][0]]).tobytes())
        self._steps += len(self._recorded)
        self._recorded.clear()
        self._held = 0

    def _columns_of(self, recorded: list[_Recorded]) -> dict[str, np.ndarray]:
        """Returns the values that these steps append to each column."""
        steps = [item.step for item in recorded]
        kinds = [_kinds(step) for step in steps]
        records = [len(item.layers) for item in recorded]
        flat = {
            "step_kind": [STEP_KINDS.index(step.kind) for step in steps],
            "step_rows": [item.rows for item in recorded],
            "step_tokens": [_emitted(item.step) if item.tokens is None else sum(item.tokens) for item in recorded],
            "row_kind": np.concatenate(kinds) if kinds else [],
            "row_back": np.concatenate([_backs(step) for step in steps]) if steps else [],
            "row_accepted": np.concatenate([_accepted(item) for item in recorded]) if recorded else [],
            "record_step": np.repeat(self._steps + np.arange(len(recorded)), records),
            "record_layer": [layer for item in recorded for layer in item.layers],
            "ids": np.frombuffer(b"".join(part for item in recorded for part in item.ids), dtype=np.int32),
            "weights": np.frombuffer(b"".join(part for item in recorded for part in item.weights), dtype=np.float32),
        }
        return {name: np.asarray(column) for name, column in flat.items()}


def check_target(path: str | Path) -> TraceFacts | None:
    """Checks, before a run, that a trace can be written to ``path``.

    Returns:
        The model of the trace that would be replaced, if there is one.

    Raises:
        ConfigError: it cannot be written, or it is not a trace.
    """
    path = Path(os.path.realpath(path))
    with writing(f"the trace {path}"):
        if path.exists() and not path.is_file():
            raise ConfigError(f"the trace {path} cannot be written: there is something else; name another file")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if not path.exists() or path.stat().st_size == 0:
            return None
    try:
        metadata, _ = read_header(path)
        if metadata.get("format") in (FORMAT, CHAINS):
            return TraceFacts.of(metadata)
    except (OSError, KeyError, ValueError):  # not a trace
        pass
    raise ConfigError(f"the trace {path} would replace a file that is no trace; remove it first, or name another")


def _kinds(step: Step) -> np.ndarray:
    """Returns int [rows]: the index into ``ROW_KINDS`` of each row of a step."""
    kinds = np.full(step.rows, PADDING)
    for request in step.requests:
        kinds[request.start : request.stop] = ROW_KINDS.index(str(request.kind))
        kinds[request.stop - request.drafts : request.stop] = DRAFT
    return kinds


def _backs(step: Step) -> np.ndarray:
    """Returns int [rows]: how many rows before it is the row that each draft follows; 0 for other rows."""
    backs = np.zeros(step.rows, dtype=np.int64)
    for request in step.requests:
        if request.drafts:
            parents = range(request.drafts) if request.parents is None else request.parents
            backs[request.stop - request.drafts : request.stop] = 1 + np.arange(request.drafts) - np.asarray(parents)
    return backs


def _accepted(item: _Recorded) -> np.ndarray:
    """Returns int [rows]: whether the text goes through each row."""
    accepted = np.full(item.rows, ACCEPTED)
    for number, request in enumerate(item.step.requests):
        drafts = accepted[request.stop - request.drafts : request.stop]
        if item.paths is not None:
            drafts[:] = REJECTED
            drafts[list(item.paths[number])] = ACCEPTED
        elif item.tokens is not None:
            drafts[max(0, item.tokens[number] - 1) :] = REJECTED
        else:
            drafts[:] = UNKNOWN
    return accepted


def _emitted(step: Step) -> int:
    """Returns the tokens of a step ended without a number: one per request if none of them verifies; 0: unknown."""
    emits = [str(request.kind) == "decode" for request in step.requests if str(request.kind) != "prefill"]
    return len(emits) if all(emits) else 0
