"""What workers count of themselves, as an engine sums it up, and as somebody beside the engine asks for it.

A worker counts for as long as its pool of experts lives. One that returns with the same pool goes on counting; one that
was started again begins at zero, and what its earlier process had counted stays in the sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import zmq

from vllm_spac.errors import SpacError
from vllm_spac.methods.od_moe.wire import FrameKind
from vllm_spac.methods.od_moe.worker_link import WorkerLink
from vllm_spac.recording.metrics import Counters

SIZES = ("slots", "resident", "slot_bytes", "memory_bytes")  # memory: of its process, resident
_COUNTERS = tuple(field.name for field in fields(Counters))
_BY_KEY = ("bytes", "steps")  # counters of which there is one per store, or per kind
_OWN = ("compute_seconds", "hints")
_SHOWN = ("hits", "misses", "loads", "stall_seconds", "prefetches", "prefetch_hits", "prefetch_wasted")


class WorkerCounts:
    """The counters of all workers of an engine."""

    def __init__(self) -> None:
        self._last: dict[int, dict[str, dict[str, Any]]] = {}  # worker -> its pools -> what each counted last
        self._pool: dict[int, str] = {}  # of each worker that is in

    def told(self, worker: int, found: Mapping[str, Any]) -> None:
        """Takes what ``worker`` says of itself; names that this version does not know are left out."""
        pool = str(found.get("pool"))[:64]
        counts = {name: value for name in (*_COUNTERS, *_OWN, *SIZES) if _is_count(name, value := found.get(name))}
        self._last.setdefault(worker, {})[pool] = counts
        self._pool[worker] = pool

    def lost(self, worker: int) -> None:
        """``worker`` is out: its memory counts no more."""
        self._pool.pop(worker, None)

    def of(self, worker: int) -> dict[str, int | float]:
        """Returns the chief counters of one worker, and the sizes of its memory, zeros while it is out."""
        found = self._all(worker)
        shown = {name: found.get(name, 0) for name in (*_SHOWN, *_OWN, *SIZES)}
        return {**shown, "loaded_bytes": sum(found.get("bytes", {}).values())}

    def total(self) -> dict[str, Any]:
        """Returns the counters and sizes of all workers, summed, as those of one engine."""
        summed = _sum([dict.fromkeys(SIZES, 0), *map(self._all, self._last)])
        return {name: value for name, value in summed.items() if name not in (*_OWN, "memory_bytes")}

    def _all(self, worker: int) -> dict[str, Any]:
        pools = self._last.get(worker, {})
        now = pools.get(self._pool.get(worker, ""), {})
        return {**_sum(pools.values()), **{name: now.get(name, 0) for name in SIZES}}


def _sum(all_of_them: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    total: Counter[str] = Counter()
    inner: dict[str, Counter[str]] = {}
    for counts in all_of_them:
        for name, value in counts.items():
            if isinstance(value, Mapping):
                inner.setdefault(name, Counter()).update(value)
            else:
                total[name] += value
    return {**total, **{name: dict(values) for name, values in inner.items()}}


def _is_count(name: str, value: Any) -> bool:
    if name in _BY_KEY:
        return isinstance(value, dict) and all(isinstance(number, int | float) for number in value.values())
    return isinstance(value, int | float)


_AT_ONCE = 16


def counts(addresses: Sequence[str], secret: bytes, seconds: float = 3.0) -> list[dict[str, Any] | str]:
    """Returns what each worker counts, see ``Worker``, or why it did not say.

    Args:
        addresses: of the workers, ``tcp://host:port``.
        secret: of their cluster.
        seconds: to wait for each; one that computes or fills its slots answers afterwards.
    """
    context = zmq.Context()

    def ask(address: str) -> dict[str, Any] | str:
        link = WorkerLink(context, address, secret)
        try:
            link.visit(seconds)
            return link.ask(FrameKind.STATS, seconds).text()
        except SpacError as error:
            return str(error).removeprefix("spac: ")
        finally:
            link.close()

    try:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="spac-visit") as pool:
            return list(pool.map(ask, addresses))
    finally:
        context.destroy(linger=200)
