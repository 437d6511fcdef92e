"""Records a routing trace while a model runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_spac.trace import DRAFT, DTYPES, PADDING, ROW_KINDS, STEP_KINDS, TraceFacts, columns_of, write_file, writing

if TYPE_CHECKING:
    from vllm_spac.core import Step

_FLUSH_BYTES = 1 << 20


class TraceWriter:
    """Records a run in bounded memory: columns grow in files beside ``path`` and become one file at ``save``.

    ``begin_step``, then ``observe`` once for each MoE layer, then ``end_step``. What comes outside of a step, or in a
    step without requests (a dummy run), is not recorded; a step that is begun again was never ended and is dropped.

    Args:
        path: the file; what is there is replaced at ``save``.
        facts: the model.
        weights: record the weights too, three times the size.

    Raises:
        ConfigError: ``path`` cannot be written; from ``end_step`` and ``save`` too; then ``discard`` it.
    """

    def __init__(self, path: str | Path, facts: TraceFacts, *, weights: bool = True) -> None:
        self.path = Path(path)
        self.facts = facts
        self._columns = columns_of(facts, weights)
        self._buffers: dict[str, list[bytes]] = {name: [] for name in self._columns}
        self._pending: dict[str, list[bytes]] | None = None
        self._held = self._steps = self._rows = 0
        self._tokens = 0
        with writing(self.path):
            self._spools = {name: open(self._spool(name), "w+b") for name in self._columns}  # noqa: SIM115

    def begin_step(self, step: Step) -> None:
        """A forward of the target model begins."""
        self._pending = None
        if not step.requests:
            return
        self._rows = max(request.stop for request in step.requests)
        kinds = np.full(self._rows, PADDING, dtype=np.uint8)
        for request in step.requests:
            kinds[request.start : request.stop] = ROW_KINDS.index(str(request.kind))
            kinds[request.stop - request.drafts : request.stop] = DRAFT
        emits = [str(request.kind) == "decode" for request in step.requests if str(request.kind) != "prefill"]
        self._tokens = len(emits) if all(emits) else 0
        self._pending = {name: [] for name in self._columns}
        self._pending["step_kind"].append(bytes([STEP_KINDS.index(step.kind)]))
        self._pending["step_rows"].append(np.uint32(self._rows).tobytes())
        self._pending["row_kind"].append(kinds.tobytes())

    def observe(self, layer: int, ids: np.ndarray, weights: np.ndarray | None = None) -> None:
        """A layer's router has chosen.

        Args:
            layer: number of the layer.
            ids: int [rows, top_k], on the host; rows beyond those of the step's requests are padding and left out.
            weights: float [rows, top_k]; not needed without ``weights``.
        """
        if self._pending is None:
            return
        ids = np.asarray(ids)
        assert ids.ndim == 2 and ids.shape[1] == self.facts.top_k and len(ids) >= self._rows, "rows are missing"
        assert 0 <= layer < self.facts.layers
        self._pending["record_step"].append(np.uint32(self._steps).tobytes())
        self._pending["record_layer"].append(np.uint16(layer).tobytes())
        self._pending["ids"].append(ids[: self._rows].astype(self.facts.id_dtype).tobytes())
        if "weights" in self._columns:
            assert weights is not None and np.shape(weights) == ids.shape, "one weight for each expert"
            self._pending["weights"].append(np.asarray(weights)[: self._rows].astype(np.float16).tobytes())

    def end_step(self, tokens: int | None = None) -> None:
        """The forward is over; ``tokens`` were emitted. Without it: one for each request if none of them verifies."""
        if self._pending is None:
            return
        self._pending["step_tokens"].append(np.uint32(self._tokens if tokens is None else tokens).tobytes())
        for name, parts in self._pending.items():
            self._buffers[name] += parts
            self._held += sum(map(len, parts))
        self._pending = None
        self._steps += 1
        if self._held >= _FLUSH_BYTES:
            self._flush()

    def save(self) -> Path:
        """Write everything up to the last ended step, all or nothing; recording may go on."""
        self._flush()
        sizes = {}
        for name, (dtype, width) in self._columns.items():
            row = np.dtype(DTYPES[dtype]).itemsize * int(np.prod(width, initial=1))
            sizes[name] = ((self._spools[name].tell() // row, *width), self._spools[name])
        write_file(self.path, self.facts, sizes)
        return self.path

    def finish(self) -> Path:
        """``save``, then remove the files beside it. Nothing can be recorded any more."""
        try:
            return self.save()
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the files beside ``path`` and write nothing; also when called twice."""
        self._pending = None
        for name, file in self._spools.items():
            file.close()
            self._spool(name).unlink(missing_ok=True)

    def _flush(self) -> None:
        with writing(self.path):
            for name, parts in self._buffers.items():
                self._spools[name].write(b"".join(parts))
                parts.clear()
            self._held = 0

    def _spool(self, name: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{os.getpid()}.{name}")
