"""Score-based prefetcher as in MoE-SpAc: decides which missing experts are read ahead, and counts the outcome."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from vllm_spac import components
from vllm_spac.balancers.base import Balancer
from vllm_spac.cache.level_queue import LevelQueue
from vllm_spac.cache.link import Link, Moved
from vllm_spac.cache.residency import NOWHERE, Placement, Residency
from vllm_spac.errors import ConfigError
from vllm_spac.metrics import Counters
from vllm_spac.policies.base import Policy
from vllm_spac.predictors.base import Guess, Predictor, Seen, Signal
from vllm_spac.system.printable import brief

SETTINGS = ("threshold", "depth", "background")  # that a name with arguments may set, next to the predictor's

logger = logging.getLogger("vllm.spac")


@dataclass(frozen=True, kw_only=True)
class PrefetchSettings:
    """Settings of the prefetcher.

    The ablations of the MoE-SpAc paper: ``prefetch="off"`` is "w/o SG-Prefetcher"; policy ``lru`` with
    ``prefetch="utility"`` is "w/o SG-Evictor"; of ``options``, ``upper=1`` is "w/o SpecUE" and ``boundaries=(3, 1)``
    "w/o AdaBC"; ``threshold=2`` is "w/o HetWB".

    Attributes:
        prefetch: ``off``, or a predictor, whose score must reach the threshold: a name of ``predictors/`` or
            ``package.module:Class``.
        threshold: the lowest score worth fetching (the paper's tau), where no balancer decides it.
        depth: maximum number of experts that have a slot and are not read yet. The experts they replaced are evicted
            while they wait.
        background: maximum number of prefetch reads in flight; None is half of the I/O threads.
        options: arguments of the predictor. Without any, the scores are those of a policy with the same predictor.
        poison: fill slots with NaN before they are loaded; for tests.

    Raises:
        ConfigError: there is no such predictor, it needs a signal that the prefetcher cannot provide, or a number is
            below 1.
        ValueError: the predictor refuses its options.
    """

    prefetch: str = "off"
    threshold: int = 1
    depth: int = 16
    background: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    poison: bool = False

    def __post_init__(self) -> None:
        known = components.serving("predictors")
        if self.prefetch not in ("off", *known) and ":" not in self.prefetch:
            raise ConfigError(f"spac: prefetch={self.prefetch!r} is not known; use off or {', '.join(known)}")
        if self.threshold < 1 or self.depth < 1 or (self.background is not None and self.background < 1):
            raise ConfigError("spac: threshold, depth and background of the prefetcher must be at least 1")
        others = self.build(1).needs - {Signal.COUNTS}  # also refuses wrong options now, not in the first forward
        if others:
            raise ConfigError(
                f"spac: prefetch={self.prefetch!r} looks at {', '.join(sorted(others))}, which is not passed on to "
                "predictors yet; use off or utility"
            )

    @classmethod
    def of(cls, spec: str) -> Self:
        """Returns the settings ``name@argument=value@...``: those of ``SETTINGS``, and arguments of the predictor.

        Raises:
            ConfigError: as the constructor, also for arguments that the predictor refuses.
        """
        name, options = components.parse(spec)
        own = {argument: options.pop(argument) for argument in SETTINGS if argument in options}
        try:
            return cls(prefetch=name, options=options, **own)
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"spac: prefetch={brief(spec)} cannot be built: {error}") from error

    @property
    def predictor(self) -> str:
        """Name of the predictor; balancers may need its scores even if nothing is prefetched."""
        return "utility" if self.prefetch == "off" else self.prefetch

    def build(self, experts: int) -> Predictor:
        """Returns a predictor of ``experts`` experts."""
        return components.build("predictors", self.predictor, num_experts=experts, **self.options)

    def predictor_beside(self, policy: Policy, experts: int) -> Predictor:
        """Returns the predictor to use with ``policy``; reads the policy's scores if it runs the same predictor."""
        same = policy.predictor == self.predictor and not self.options
        return _Lent(policy) if same else self.build(experts)


class _Lent(Predictor):
    """The scores of the eviction policy, which must have observed a step before this predictor does."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.scores = policy.scores

    def guesses(self, seen: Seen) -> Iterable[Guess]:
        return ()  # the prefetcher reads the scores

    def observe_step(self, counts: np.ndarray) -> None:
        self.scores = self._policy.scores


class Prefetcher:
    """Fills slots in the background and counts the outcome; used by the forward thread only.

    Args:
        residency, transfers: shared with the loader.
        predictor: scores experts.
        counters: counts all prefetches, also those that finish between steps: a step caused them.
        layer_experts: experts per layer; the keys of a layer are consecutive, layers run in the order of their keys.
        settings: see ``PrefetchSettings``.

    Attributes:
        balancer: decides the threshold of each layer instead of ``settings.threshold``, if there is one.
        scores: int64 [keys], those of the predictor after the last step; zeros before the first.
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
        self.queue = LevelQueue()
        self.unused: set[int] = set()  # prefetched, READY and not used yet
        self._residency, self._ahead = residency, transfers.ahead
        self._link = transfers
        self._poison = transfers.poison if settings.poison else None
        self._counters, self._layer_experts, self._settings = counters, layer_experts, settings
        self._predictor = predictor
        self.scores = np.zeros(len(residency.slot_of), dtype=np.int64)
        self._admitted: set[int] = set()  # being read for the next step, because the CPU computed them in this one
        self._damaged: set[int] = set()  # failed; not prefetched again until a forward has used them

    def observe(self, counts: np.ndarray) -> None:
        """Updates the scores from the ``counts`` of a step, which the policy has observed (see ``Policy.observe``)."""
        self._predictor.observe_step(counts)
        self.scores = self._predictor.scores

    def plan(self) -> None:
        """Called after a step: cancels reads that have not begun, and queues new ones by the newest scores."""
        self.reap()
        self.cancel([key for key in self._ahead.keys if key not in self._admitted])
        self.queue.clear()
        wanted = np.flatnonzero((self.scores >= self._thresholds()) & (self._residency.slot_of == NOWHERE))
        for key, score in zip(wanted.tolist(), self.scores[wanted].tolist(), strict=True):
            if key not in self._damaged:
                self.queue.put(key, score)
        self.top_up(0)

    def top_up(self, passed: int) -> None:
        """Starts reads of the best queued experts that find slots; keys below ``passed`` are too late."""
        self.cancel([key for key in self._ahead.keys if key < passed and key not in self._admitted])
        loads: list[tuple[int, int]] = []
        while len(self._ahead.keys) + len(loads) < self._settings.depth and (key := self.queue.pop()) is not None:
            if key < passed or self._residency.slot_of[key] != NOWHERE:
                continue
            placement = self._residency.admit(key, self.scores)
            if placement is None:  # no queued key has a higher score
                self.queue.clear()
                break
            self.placed(placement)
            loads.extend(placement.loads)
        if loads:
            self._ahead.fetch(loads)

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
                    self.placed(placement)
                    loads += placement.loads
        if loads:
            self._admitted.update(key for key, _ in loads)
            self._ahead.fetch(loads)

    def reap(self) -> None:
        """Processes the reads that have finished."""
        if self._ahead.keys:
            self._arrive(self._ahead.reap())

    def cancel(self, keys: Iterable[int]) -> list[int]:
        """Cancels those of ``keys`` whose read has not begun and frees their slots; returns them."""
        gone = self._ahead.cancel(list(keys))
        for key in gone:
            self._residency.failed(key)
        self._admitted.difference_update(gone)
        return gone

    def wait(self, keys: list[int], counters: Counters | None) -> list[int]:
        """Waits for reads that have begun; returns the keys that failed, whose slots are free again."""
        start = self._link.clock()
        failed = self._arrive(self._ahead.wait(keys)) if keys else []
        if keys and counters is not None:
            counters.stall_seconds += self._link.clock() - start
        return failed

    def placed(self, placement: Placement) -> None:
        """Records a placement: counts evicted unused prefetches, and poisons the new slots if set."""
        wasted = self.unused.intersection(placement.victims)
        self.unused -= wasted
        self._counters.prefetch_wasted += len(wasted)
        if self._poison:
            for _, slot in placement.loads:
                self._poison(slot)

    def used(self, keys: Sequence[int] | np.ndarray) -> None:
        """Records that a forward uses ``keys``, all READY, and starts further reads for the layers after them."""
        if self.unused:
            used = self.unused.intersection(np.asarray(keys).tolist())
            self.unused -= used
            self._counters.prefetch_hits += len(used)
        if self._admitted:
            self._admitted.difference_update(np.asarray(keys).tolist())
        if self._damaged:
            self._damaged.difference_update(np.asarray(keys).tolist())
        if len(keys) and (self.queue or self._ahead.keys):
            self.top_up((int(max(keys)) // self._layer_experts + 1) * self._layer_experts)

    def _thresholds(self) -> int | np.ndarray:
        if self.balancer is None:
            return self._settings.threshold
        layers = len(self.scores) // self._layer_experts
        return np.repeat([max(1, self.balancer.threshold(layer)) for layer in range(layers)], self._layer_experts)

    def _arrive(self, results: Mapping[int, Moved | BaseException]) -> list[int]:
        failed = [key for key, result in results.items() if isinstance(result, BaseException)]
        self._admitted.difference_update(results)
        for key, result in results.items():
            if isinstance(result, BaseException):
                self._residency.failed(key)
                logger.warning("spac: expert %d could not be prefetched; it is read again when needed: %s", key, result)
            else:
                self._residency.loaded(key)
                self._counters.moved(f"{result.path} ahead", result.nbytes)
                self.unused.add(key)
        self._damaged.update(failed)
        self._counters.prefetch_failed += len(failed)
        self._counters.prefetches += len(results) - len(failed)
        return failed
