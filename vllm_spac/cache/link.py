"""What a loader needs of whatever moves experts: ``Transfers`` moves bytes, the simulator's link only passes time."""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from vllm_spac.recording.metrics import Counters


class Moved(NamedTuple):
    """What a load moved into its slot: the bytes, and the name in ``Counters.bytes`` of where they were."""

    path: str
    nbytes: int


class Ahead(Protocol):
    """Reads ahead of need, begun in the order in which they were queued, and never while a layer waits."""

    @property
    def keys(self) -> KeysView[int]:
        """Keys that were queued and not cancelled, reaped or waited for since; the oldest first."""

    @property
    def reading(self) -> int:
        """Reads in flight."""

    def fetch(self, loads: Iterable[tuple[int, int]]) -> None:
        """Queues the reads of each (key, slot), in this order; does not wait."""

    def cancel(self, keys: Iterable[int]) -> list[int]:
        """Cancels those of ``keys`` whose read has not begun; returns them. Their slots were not written."""

    def take_finished(self) -> Mapping[int, Moved | BaseException]:
        """Returns the reads finished since the last call: key -> what was moved, or the error. Does not wait."""

    def wait(self, keys: Sequence[int]) -> Mapping[int, Moved | BaseException]:
        """Waits for the reads of ``keys`` to finish; returns as ``take_finished``. All of them must have begun."""


class Link(Protocol):
    """Loads experts into slots. Called by the forward thread only."""

    @property
    def ahead(self) -> Ahead:
        """The reads ahead of need."""

    def clock(self) -> float:
        """Returns monotonic time in seconds."""

    def load(self, loads: Sequence[tuple[int, int]], counters: Counters | None) -> dict[int, BaseException]:
        """Fills each (key, slot) of ``loads``; returns when all are done and adds to ``counters``, if given.

        Returns:
            The keys that failed, with their errors.
        """

    def begin_layer(self, layer: range) -> None:
        """A layer starts, as in ``Policy.begin_layer``: for the policy of host memory."""

    def observe(self, counts: np.ndarray) -> None:
        """A forward has finished, as in ``Policy.observe``: for the policy of host memory."""

    def observe_prompt(self, rows: np.ndarray) -> None:
        """A prompt has run, as in ``Policy.observe_prompt``: for the policy of host memory."""

    def close(self) -> None:
        """Waits for the reads in flight, cancels the others and stops the threads."""


def reads_ahead(io_threads: int, limit: int | None) -> int:
    """Returns the maximum number of prefetch reads in flight: ``limit``, else half of the I/O threads."""
    return max(1, io_threads // 2) if limit is None else limit
