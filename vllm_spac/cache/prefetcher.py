"""Score-based prefetcher as in MoE-SpAc: decides which missing experts are read ahead, and counts the outcome.

The paper's multi-level queue orders the experts to fetch (``ScorePrefetcher``). ``lookahead`` has a prefetcher that
plans from guesses about layers instead of scores after steps.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vllm_spac.cache.allowance import ReadAccount
from vllm_spac.cache.link import Link, Moved
from vllm_spac.cache.named import UNBOUNDED, BudgetHint, PredictedExperts
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.cache.residency import NOWHERE, Residency
from vllm_spac.decisions.balancers.base import Balancer
from vllm_spac.decisions.predictors.base import Predictor, PredictorInputs
from vllm_spac.recording.metrics import Counters


class LevelQueue:
    """One FIFO per score; the highest score is served first. A key is queued at most once. Scores are at least 1."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[int, None]] = {}  # no level is empty
        self._score: dict[int, int] = {}

    def put(self, key: int, score: int) -> None:
        """Enqueues ``key``, or moves it to the end of its new level; with an unchanged score it keeps its place."""
        assert score >= 1, f"score {score} of expert {key}: nothing below 1 is worth fetching"
        if self._score.get(key) == score:
            return
        self.discard(key)
        self._score[key] = score
        self._levels.setdefault(score, OrderedDict())[key] = None

    def pop(self, threshold: int = 1) -> int | None:
        """Removes and returns the oldest key of the highest level; None when no key scores ``threshold`` or more."""
        top = max(self._levels, default=0)
        if top < max(1, threshold):
            return None
        key = next(iter(self._levels[top]))
        self.discard(key)
        return key

    def discard(self, key: int) -> bool:
        """Removes ``key`` from its level; returns whether it was queued."""
        score = self._score.pop(key, None)
        if score is None:
            return False
        level = self._levels[score]
        del level[key]
        if not level:
            del self._levels[score]
        return True

    def reset(self) -> None:
        """Removes all keys."""
        self._levels.clear()
        self._score.clear()

    def __iter__(self) -> Iterator[int]:
        """Yields the keys in the order of service."""
        for score in sorted(self._levels, reverse=True):
            yield from self._levels[score]

    def __len__(self) -> int:
        return len(self._score)

    def __contains__(self, key: int) -> bool:
        return key in self._score


logger = logging.getLogger("vllm.spac")


class Prefetcher(ABC):
    """Fills slots in the background and counts the outcome; used by the forward thread only. Subclasses plan.

    Args:
        residency, transfers: shared with the loader.
        counters: counts all prefetches, also those that finish between steps: a step caused them.
        layer_experts: experts per layer; the keys of a layer are consecutive, layers run in the order of their keys.

    Attributes:
        balancer: decides the threshold of each layer instead of ``settings.threshold``, if there is one, and assigns
            some of the missing experts to the CPU.
        scores: int64 [keys], those of the predictor after the last step; zeros before the first, and if neither the
            prefetcher nor the balancer reads them.
    """

    def __init__(
        self,
        residency: Residency,
        transfers: Link,
        counters: Counters,
        layer_experts: int,
        predictor: Predictor,
        settings: PrefetchSettings,
        balancer: Balancer | None = None,
    ) -> None:
        self.balancer = balancer
        self.account = ReadAccount(counters, settings.extra, settings.prefetch)
        self._residency, self._ahead = residency, transfers.ahead
        self._link = transfers
        self._counters, self._layer_experts, self._settings = counters, layer_experts, settings
        self._predictor = predictor
        self.scores = np.zeros(len(residency.slot_of), dtype=np.int64)
        self._admitted: set[int] = set()  # read because the CPU computed them, or by ``prefetch_next``: not cancelled
        self._damaged: set[int] = set()  # failed; not prefetched again until a forward has used them

    def observe(self, counts: np.ndarray) -> None:
        """Updates the scores from the ``counts`` of a step, which the policy has observed (see ``Policy.observe``)."""
        self._predictor.observe_step(counts)
        self.scores = self._predictor.scores

    def begin_step(self, inputs: PredictorInputs | None, hint: BudgetHint = UNBOUNDED) -> None:
        """A step begins, of which a predictor that looks at layers may see ``inputs``; None: nothing is to be guessed.

        ``hint``: of its rows.
        """

    def ask(self, inputs: PredictorInputs) -> list[PredictedExperts]:
        """Returns what a predictor on a device names of ``inputs``, for ``draft`` or ``observe_layer``, at once."""
        return []

    def draft(self, inputs: PredictorInputs | None, names: Sequence[PredictedExperts] = ()) -> None:
        """The drafter has read the tokens of some rows of the next step: for a predictor that looks at it.

        With a predictor on a device: ``names``, what it has named of ``inputs``, have arrived on the host.
        """

    def observe_layer(self, inputs: PredictorInputs, names: Sequence[PredictedExperts] = ()) -> None:
        """A router has chosen, before the experts of its layer are loaded: for a predictor that looks at layers.

        Args:
            inputs: ``ids`` are on the host.
            names: of a predictor on a device, what has arrived with them.
        """

    def prefetch(self, layer: int, experts: np.ndarray) -> None:
        """``experts`` (int, distinct, the likeliest first) are guessed of the next run of ``layer``; between layers."""

    def end_layer(self) -> None:
        """The layer that entered last has its output: for a caller whose next layer may run much later."""

    @abstractmethod
    def plan(self) -> None:
        """Called after a step: queues what is to be read."""

    @abstractmethod
    def start_reads(self, layer: int) -> None:
        """Starts further reads; the experts of ``layer`` are about to run."""

    def end_step(self) -> None:
        """Processes the reads that have finished, and judges by a window of steps how many were used."""
        self.finish_reads()
        self.account.end_step()

    def admit(self, keys: Iterable[int]) -> None:
        """Starts reads of ``keys``, which were just used without a slot, where the policy prefers them to others.

        At most ``depth`` reads are outstanding. Unlike predictions these are for the next step: they are not cancelled
        because their layer has run.
        """
        loads: list[tuple[int, int]] = []
        for key in keys:
            if len(self._ahead.keys) + len(loads) >= self._settings.depth:
                break
            if self._residency.slot_of[key] == NOWHERE and key not in self._damaged:
                placement = self._residency.exchange(key)
                if placement is not None:
                    self.account.add_placement(placement)
                    loads += placement.loads
        self._fetch_for_good(loads)

    def prefetch_next(self, keys: Sequence[int], layer: range) -> None:
        """Starts reads of ``keys``, which the next layer is expected to use, as far as they find slots.

        Unlike those of a prediction these are not cancelled, and slots alone limit their number.

        Args:
            keys: of that layer, without a slot, the likeliest first.
            layer: all keys of that layer, of which none is evicted.
        """
        missing = [key for key in keys if key not in self._damaged][: self._residency.spare(layer)]
        if missing:
            placement = self._residency.admit_unless(missing, layer)
            self.account.add_placement(placement)
            self._fetch_for_good(placement.loads)

    def finish_reads(self) -> None:
        """Processes the reads that have finished."""
        if self._ahead.keys:
            self._arrive(self._ahead.take_finished())

    def cancel(self, keys: Iterable[int]) -> list[int]:
        """Cancels those of ``keys`` whose read has not begun and frees their slots; returns them."""
        gone = self._ahead.cancel(list(keys))
        for key in gone:
            self._residency.cancel_load(key)
        self._admitted.difference_update(gone)
        self.account.cancel(gone)
        return gone

    @property
    def reading(self) -> int:
        """Reads in flight."""
        return self._ahead.reading

    def cancel_unbegun(self, first: int, rows: np.ndarray) -> None:
        """A layer is about to be divided: its experts whose reads have not begun become misses like others.

        Args:
            first: key of the layer's first expert.
            rows: int [experts], rows that selected each expert; the others' reads go on.
        """
        self.finish_reads()
        if self._ahead.keys:
            last = first + len(rows)
            self.cancel([key for key in self._ahead.keys if first <= key < last and rows[key - first]])

    def take_over(self, keys: Sequence[int]) -> list[int]:
        """Cancels those of ``keys`` whose read has not begun, to be loaded on demand into their slots; returns them."""
        gone = self._ahead.cancel(keys)
        self.account.cancel(gone)
        self.account.add_demand(gone)
        return gone

    def wait(self, keys: list[int], counters: Counters | None) -> list[int]:
        """Waits for reads that have begun; returns the keys that failed, whose slots are free again."""
        start = self._link.clock()
        failed = self._arrive(self._ahead.wait(keys)) if keys else []
        if keys and counters is not None:
            counters.stall_seconds += self._link.clock() - start
        return failed

    def observe_hits(self, keys: Sequence[int] | np.ndarray) -> None:
        """Records that a layer uses ``keys``, all READY, and starts further reads for the layers after it."""
        self.account.add_uses(keys)
        if self._admitted:
            self._admitted.difference_update(np.asarray(keys).tolist())
        if self._damaged:
            self._damaged.difference_update(np.asarray(keys).tolist())
        if len(keys):
            self.start_reads(int(keys[-1]) // self._layer_experts)

    def _fetch_for_good(self, loads: Sequence[tuple[int, int]]) -> None:
        """Starts reads that are not cancelled because a prediction changes or their layer has run."""
        if loads:
            self._admitted.update(key for key, _ in loads)
            self._ahead.fetch(loads)

    def _room(self, more: int) -> int:
        """How many further reads may be asked for, after ``more`` that are about to be."""
        room = max(0, self._settings.depth - len(self._ahead.keys) - more)
        return self.account.left(room)

    def _arrive(self, results: Mapping[int, Moved | BaseException]) -> list[int]:
        failed = [key for key, result in results.items() if isinstance(result, BaseException)]
        self._admitted.difference_update(results)
        for key, result in results.items():
            if isinstance(result, BaseException):
                self._residency.cancel_load(key)
                logger.warning("spac: expert %d could not be prefetched; it is read again when needed: %s", key, result)
            else:
                self._residency.finish_load(key)
                self._counters.count_bytes(f"{result.path} ahead", result.nbytes)
        self.account.finish([key for key in results if key not in failed], failed)
        self._damaged.update(failed)
        return failed


class ScorePrefetcher(Prefetcher):
    """Reads the experts of the highest scores first, as of the last step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.queue = LevelQueue()

    def plan(self) -> None:
        """Cancels reads that have not begun, and queues new ones by the newest scores."""
        self.end_step()
        self.cancel([key for key in self._ahead.keys if key not in self._admitted])
        self.queue.reset()
        wanted = np.flatnonzero((self.scores >= self._thresholds()) & (self._residency.slot_of == NOWHERE))
        for key, score in zip(wanted.tolist(), self.scores[wanted].tolist(), strict=True):
            if key not in self._damaged:
                self.queue.put(key, score)
        self.fill_slots(0)

    def fill_slots(self, passed: int) -> None:
        """Starts reads of the best queued experts that find slots; keys below ``passed`` are too late."""
        self.cancel([key for key in self._ahead.keys if key < passed and key not in self._admitted])
        loads: list[tuple[int, int]] = []
        while self._room(len(loads)) and (key := self.queue.pop()) is not None:
            if key < passed or self._residency.slot_of[key] != NOWHERE:
                continue
            placement = self._residency.admit(key, self.scores)
            if placement is None:  # no queued key has a higher score
                self.queue.reset()
                break
            loads += self.account.guess(placement)
        if loads:
            self._ahead.fetch(loads)

    def start_reads(self, layer: int) -> None:
        if self.queue or self._ahead.keys:
            self.fill_slots((layer + 1) * self._layer_experts)

    def _thresholds(self) -> int | np.ndarray:
        if self.balancer is None:
            return self._settings.threshold
        layers = len(self.scores) // self._layer_experts
        return np.repeat([max(1, self.balancer.threshold(layer)) for layer in range(layers)], self._layer_experts)
