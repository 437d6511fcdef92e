"""What a worker is asked beside its layers: a test before it serves, how fast it is, and what it counts.

The test is a row of its experts, computed on both sides. A worker counts for as long as its pool of experts lives. One
that returns with the same pool goes on counting; one that was started again begins at zero, and what its earlier
process had counted stays in the sums.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cpu_kernels.base import Kernel, check_same
from vllm_spac.errors import ConfigError
from vllm_spac.methods.od_moe.roster import name
from vllm_spac.methods.od_moe.wire import (
    Counts,
    Frame,
    FrameError,
    FrameKind,
    Header,
    Limits,
    Service,
    decode,
    encode,
    raw,
    run_payload,
)
from vllm_spac.methods.od_moe.worker_link import WorkerLink
from vllm_spac.recording.metrics import Counters
from vllm_spac.storage.base import allocate
from vllm_spac.system.timing import median

SIZES = ("slots", "resident", "slot_bytes", "memory_bytes")  # memory: of its process, resident
_COUNTERS = tuple(field.name for field in fields(Counters))
_BY_KEY = ("bytes", "steps")  # counters of which there is one per store, or per kind
_OWN = ("compute_seconds", "hints")
_SHOWN = ("hits", "misses", "loads", "stall_seconds", "prefetches", "prefetch_hits", "prefetch_wasted")
_ASK_AGAIN = 30.0  # seconds after which a worker that did not answer is asked once more
_ANSWER = 60.0  # seconds to wait for one
_MEASURED = 0.005  # seconds


class _Question(NamedTuple):
    epoch: int
    sequence: int
    at: float  # as of ``time.monotonic``


class WorkerCounts:
    """The counters of all workers of an engine."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._at: dict[int, float] = {}  # when each worker was asked for what it said last
        self._last: dict[int, dict[str, dict[str, Any]]] = {}  # worker -> its pools -> what each counted last
        self._pool: dict[int, str] = {}  # of each worker that is in
        self._asked: dict[int, _Question] = {}  # of a worker that is to say what it counts

    def request(self, worker: int, link: WorkerLink, epoch: int, sequence: int) -> None:
        """Asks ``worker`` what it counts, unless it is to say so already."""
        now = time.monotonic()
        if (question := self._asked.get(worker)) is not None and now - question.at < _ASK_AGAIN:
            return
        if link.send(encode(Header(FrameKind.STATS, epoch, sequence=sequence))):
            self._asked[worker] = _Question(epoch, sequence, now)

    def receive(self, worker: int, frame: Frame) -> None:
        """Takes an answer of ``worker``; ``FrameError`` if it is none to what it was asked last."""
        question = self._asked.get(worker)
        if question is None or (frame.header.epoch, frame.header.sequence) != (question.epoch, question.sequence):
            raise FrameError("spac: an answer to nobody")
        self.count(worker, frame.text(Counts), question.at)
        del self._asked[worker]

    def count(self, worker: int, answer: Counts, at: float) -> None:
        """Takes what ``worker``, asked at a time, counts; names that this version does not know are left out."""
        self._at[worker] = at
        pool = str(answer.get("pool"))[:64]
        counts = {name: value for name in (*_COUNTERS, *_OWN, *SIZES) if _is_count(name, value := answer.get(name))}
        self._last.setdefault(worker, {})[pool] = counts
        self._pool[worker] = pool

    def remove(self, worker: int) -> None:
        """``worker`` is out: its memory counts no more."""
        self._pool.pop(worker, None)
        self._asked.pop(worker, None)

    def of(self, worker: int) -> dict[str, int | float]:
        """Returns the chief counters of one worker, and the sizes of its memory, zeros while it is out.

        ``counts_age_seconds``: since it was asked for them, or if it never answered since this object was made.
        """
        counts = self._all(worker)
        shown = {name: counts.get(name, 0) for name in (*_SHOWN, *_OWN, *SIZES)}
        age = time.monotonic() - self._at.get(worker, self._began)
        return {**shown, "loaded_bytes": sum(counts.get("bytes", {}).values()), "counts_age_seconds": age}

    def total(self) -> dict[str, Any]:
        """Returns the counters and sizes of all workers, summed, as those of one engine."""
        summed = _sum([dict.fromkeys(SIZES, 0), *map(self._all, self._last)])
        return {name: value for name, value in summed.items() if name not in (*_OWN, "memory_bytes")}

    def _all(self, worker: int) -> dict[str, Any]:
        pools = self._last.get(worker, {})
        now = pools.get(self._pool.get(worker, ""), {})
        return {**_sum(pools.values()), **{name: now.get(name, 0) for name in SIZES}}


def _sum(counted: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    total: Counter[str] = Counter()
    inner: dict[str, Counter[str]] = {}
    for counts in counted:
        for key, value in counts.items():
            if isinstance(value, Mapping):
                inner.setdefault(key, Counter()).update(value)
            else:
                total[key] += value
    return {**total, **{name: dict(values) for name, values in inner.items()}}


def _is_count(name: str, value: Any) -> bool:
    if name in _BY_KEY:
        return isinstance(value, dict) and all(isinstance(number, int | float) for number in value.values())
    return isinstance(value, int | float)


class Sample(NamedTuple):
    """A row of a layer, with as many of its experts as a token uses, and its output."""

    layer: int
    x: Tensor  # [1, hidden]
    weights: Tensor  # float32 [1, top_k]
    ids: Tensor  # int32 [1, top_k]
    out: Tensor  # [1, hidden] like ``x``


def sample(link: WorkerLink, service: Service, worker: int, kernel: Kernel, dtype: torch.dtype) -> Sample:
    """Computes a row, which ``worker`` seeds, with experts that it gives: they and its kernel are tested by it."""
    top_k, layer, shape = service.top_k, service.own_layers[0], service.shape
    experts = allocate(shape.tensors, top_k, "cpu")
    for expert in range(top_k):
        frame = link.ask(FrameKind.FETCH, _ANSWER, layer=shape.key(layer, expert))
        for tensor_name, tensor in frame.expert(shape).items():
            experts[tensor_name][expert].copy_(tensor)
    # vLLM loads models with their dtype as torch's default, and its kernel takes routing weights in float32 only.
    random = torch.Generator().manual_seed(worker)
    x = torch.randn(1, service.hidden, generator=random, dtype=torch.float32).to(dtype)
    ids = torch.arange(top_k, dtype=torch.int32)[None]
    weights = torch.full((1, top_k), 1 / top_k, dtype=torch.float32)
    return Sample(layer, x, weights, ids, kernel(x, weights, ids, experts).to(x.dtype))


def check(link: WorkerLink, worker: int, row: Sample, fingerprint: bytes, exact: bool = True) -> np.ndarray:
    """Returns which experts have a slot at the worker afterwards, as ``Frame.resident``.

    Raises:
        ConfigError: the worker's output for its sample has other bits than this process's, or, unless ``exact``,
            differs by more than rounding.
    """
    sizes = {"rows": 1, "hidden": row.x.shape[1], "top_k": row.ids.shape[1], "dtype": row.x.dtype}
    payload = run_payload(row.x, row.weights, row.ids)
    frame = link.ask(FrameKind.RUN, _ANSWER, payload, layer=row.layer, fingerprint=fingerprint, **sizes)
    same = frame.header.kind == FrameKind.ROWS
    if same and not exact:
        where = f"spac: {name(worker)} at {link.address}, compared with this process"
        check_same(frame.rows(), row.out, row.x.dtype, row.x.shape[1], where)
    elif not same or not torch.equal(frame.rows(), row.out):
        raise ConfigError(
            f"spac: {name(worker)} at {link.address} computes other bits than this process for the same experts; "
            "use machines with the same processors, and the same vLLM"
        )
    return frame.resident()


def message_seconds(service: Service, dtype: torch.dtype) -> float:
    """Measures the seconds that this process takes to write a request with one row and to read its answer."""
    hidden, top_k, limits = service.hidden, service.top_k, Limits()
    x, weights = torch.zeros(1, hidden, dtype=dtype), torch.zeros(1, top_k)

    def both() -> None:
        encode(Header(FrameKind.RUN, rows=1, hidden=hidden, top_k=top_k, dtype=dtype), run_payload(x, weights, weights))
        decode(encode(Header(FrameKind.ROWS, rows=1, hidden=hidden, dtype=dtype), raw(x)), limits).rows()

    return median(both, _MEASURED)
