"""MoE-SpAc's asynchronous engine: makes experts resident, on demand and ahead of need. Used by the forward thread only.

I/O threads only fill slots and complete futures. The forward thread collects their results in ``hold`` and ``end_step``
and only there updates the state of ``Residency``: the state machine is single-threaded. Of forwards with many rows, as
of prompts, it remembers which experts each layer used, to read the next layer's while one runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from vllm_spac.cache.link import Link
from vllm_spac.cache.lookahead import Lookahead
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.cache.prefetcher import Prefetcher, ScorePrefetcher
from vllm_spac.cache.residency import NOWHERE, Placement, Residency
from vllm_spac.decisions.balancers.base import Balancer
from vllm_spac.decisions.predictors.base import Signal
from vllm_spac.errors import StoreError
from vllm_spac.recording.metrics import Counters

_PAIRS = 4  # (row, expert) pairs per expert from which a forward may use most experts
_GAIN = 0.5  # weight of the last forward
_EXPECTED = 0.5  # share of forwards from which an expert is expected
_RIGHT = 0.95  # share of the named experts that must have been used
_LEAST = 16  # named experts by which that is judged
_WINDOW = 8  # forwards


class LayerUse:
    """Names experts that a layer will use, if such names were right before for about as many rows.

    An expert is expected if the last forward used it, or most of those before. Whether that is worth a read depends on
    the model: over the rows of a prompt some use nearly all experts of each layer, others a part that follows the text.
    """

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        self.layers = layers
        self._least_rows = -(-_PAIRS * experts // top_k)
        self._shares = np.zeros((layers, experts), dtype=np.float32)
        self._named: dict[int, np.ndarray] = {}  # by layer, until it runs
        self._judged: dict[int, tuple[float, float]] = {}  # by the binary logarithm of rows: named experts, used ones

    def counts(self, rows: int) -> bool:
        """Whether a forward has so many ``rows`` that it may use most experts of a layer."""
        return rows >= self._least_rows

    def observe(self, layer: int, rows: int, used: np.ndarray) -> None:
        """A forward with many ``rows`` uses the experts ``used`` of a layer, int [n]."""
        if (named := self._named.pop(layer, None)) is not None:
            size, keep = rows.bit_length(), 1 - 1 / (_WINDOW * self.layers)
            before, right = self._judged.get(size, (0.0, 0.0))
            self._judged[size] = keep * before + len(named), keep * right + len(np.intersect1d(named, used))
        self._shares[layer] *= 1 - _GAIN
        self._shares[layer, used] += _GAIN

    def name(self, layer: int, rows: int, missing: np.ndarray) -> np.ndarray:
        """Returns the experts to read for a layer that runs next with ``rows`` rows, int [n], the likeliest first.

        Args:
            missing: bool [experts], those without a slot.
        """
        shares = np.where(missing, self._shares[layer], 0)
        order = np.argsort(-shares, kind="stable")
        self._named[layer] = named = order[: np.count_nonzero(shares >= _EXPECTED)]
        judged, right = self._judged.get(rows.bit_length(), (0.0, 0.0))
        return named if judged >= _LEAST and right >= _RIGHT * judged else named[:0]


class ExpertLoader:
    """Loads experts into the slots of ``residency``.

    Args:
        residency: which expert is in which slot; owned.
        transfers: moves bytes; owned.
        counters, layer_experts, settings, balancer: as in ``Prefetcher``.
        top_k: experts per row; a predictor that looks at layers is taken to name as many.
        away, local_of: as in ``Lookahead``.

    Attributes:
        prefetcher: reads ahead; its caller tells it of steps and layers, where something is to be guessed about them.
        needs: what its predictor is passed by ``begin_step`` and ``observe_layer``; None: neither needs to be called.
    """

    def __init__(
        self,
        residency: Residency,
        transfers: Link,
        counters: Counters,
        layer_experts: int,
        settings: PrefetchSettings,
        balancer: Balancer | None = None,
        top_k: int = 1,
        away: bool = False,
        local_of: np.ndarray | None = None,
    ) -> None:
        self.residency = residency
        self._transfers = transfers
        self._counters = counters
        self._layer_experts = layer_experts
        keys = len(residency.slot_of)
        self._use = LayerUse(keys // layer_experts, layer_experts, top_k)
        self._fetches, self._streams = settings.prefetch != "off", settings.next_layer
        predictor = settings.predictor_beside(residency.policy, keys)
        shared = residency, transfers, counters, layer_experts, predictor, settings, balancer
        self.needs: frozenset[Signal] | None = None
        self.prefetcher: Prefetcher
        if settings.observes_layers:
            of_model = layer_experts if local_of is None else len(local_of)
            guesser = settings.build(keys // layer_experts * of_model)
            self.needs = guesser.needs
            self.prefetcher = Lookahead(*shared, guesser, top_k, away, local_of)
        else:
            self.prefetcher = ScorePrefetcher(*shared)

    def end_layer(self) -> None:
        """As ``Prefetcher.end_layer``."""
        self.residency.end_use()
        self.prefetcher.end_layer()

    def hold(self, keys: list[int], counters: Counters | None) -> list[int]:
        """Pins ``keys``, waits until all are READY, and returns those that were not; ``release`` unpins.

        Args:
            keys: experts of one layer, distinct.

        Raises:
            StoreError: an expert could not be read; nothing stays pinned.
        """
        self.prefetcher.finish_reads()
        placement = self._prepare(keys, counters)
        missed = [key for key, _ in placement.loads + placement.waits]
        if missed:
            try:
                self._bring(placement, counters)
            except BaseException:
                self._give_up(missed)
                self.residency.release(keys)
                raise
        self.prefetcher.observe_hits(keys)
        return missed

    def begin_layer(self, layer: range) -> None:
        """A layer starts, as in ``Policy.begin_layer``."""
        self.residency.policy.begin_layer(layer)
        self._transfers.begin_layer(layer)

    def use(self, keys: np.ndarray) -> bool:
        """Returns whether all ``keys``, distinct experts of one layer, are READY: then nothing is to be held.

        They stay where they are until ``use`` or ``hold`` is called for another layer, or the layer has run: see
        ``end_layer`` and ``end_step``.
        """
        self.prefetcher.finish_reads()
        if not self.residency.use(keys):
            return False
        self.prefetcher.observe_hits(keys)
        return True

    def observe_slotless(self, layer: int) -> None:
        """A layer runs that uses no slot, after the one before it has run."""
        self.residency.end_use()
        self.prefetcher.start_reads(layer)

    def observe_layer(self, layer: int, rows: int, keys: np.ndarray) -> None:
        """The ``keys`` (int [n]) of a layer's experts are there for ``rows`` rows, and are about to run.

        With many rows, what the next layer is expected to use is read meanwhile, unless the CPU may compute it.
        """
        use = self._use
        if not (self._streams and use.counts(rows) and self.prefetcher.balancer is None):
            return
        use.observe(layer, rows, keys - layer * self._layer_experts)
        if (following := layer + 1) < use.layers:
            first = following * self._layer_experts
            behind = range(first, first + self._layer_experts)
            named = use.name(following, rows, self.residency.slot_of[behind.start : behind.stop] == NOWHERE)
            self.prefetcher.prefetch_next((named + first).tolist(), behind)

    def admit(self, keys: Iterable[int]) -> None:
        """Starts to load ``keys``, which were just used without a slot, where the policy prefers them to others.

        Their layer has run.
        """
        self.residency.end_use()
        self.prefetcher.admit(keys)

    def end_step(self, counts: np.ndarray | None, prompt: np.ndarray | None = None) -> None:
        """Ends a forward: updates scores and policy, and starts prefetches.

        Args:
            counts: as in ``Policy.observe``; None for a forward without decode or verify rows.
            prompt: as in ``Policy.observe_prompt``; None unless prompts ran alone.
        """
        self.residency.end_use()
        if prompt is not None:
            self.residency.policy.observe_prompt(prompt)
            self._transfers.observe_prompt(prompt)
        if counts is not None:
            self.residency.observe(counts)
            self._transfers.observe(counts)
            counted, balancer = self._fetches and self.needs is None, self.prefetcher.balancer
            if counted or (balancer is not None and balancer.needs_scores):
                self.prefetcher.observe(counts)
        if self._fetches:
            self.prefetcher.plan()

    def close(self) -> None:
        """Waits for the reads in flight, cancels the others and stops the threads."""
        self._transfers.close()

    def _prepare(self, keys: list[int], counters: Counters | None) -> Placement:
        """Finds slots for ``keys``; if there are too few, first cancels or waits for prefetches of other experts."""
        while True:
            try:
                placement = self.residency.prepare(keys)
            except LookupError:
                others = [key for key in self._transfers.ahead.keys if key not in keys]
                if not others:
                    raise
                if not self.prefetcher.cancel(others):
                    self.prefetcher.wait(others[:1], counters)
                continue
            self._placed(placement, counters)
            return placement

    def _placed(self, placement: Placement, counters: Counters | None) -> None:
        self.prefetcher.account.add_placement(placement)
        if counters is not None:
            self.prefetcher.account.add_demand([key for key, _ in placement.loads])

    def _bring(self, placement: Placement, counters: Counters | None) -> None:
        """Loads the missing experts; prefetches that have not begun become loads on demand, others are waited for."""
        loads, begun = placement.loads, dict(placement.waits)
        if begun:
            for key in self.prefetcher.take_over(list(begun)):
                del begun[key]
            loads += tuple((key, slot) for key, slot in placement.waits if key not in begun)
        failed = self._load(loads, counters)
        if begun:
            again = self.prefetcher.wait(list(begun), counters)
            second = self.residency.prepare(again)  # into the slots that their failed reads have just freed
            self._placed(second, counters)
            failed |= self._load(second.loads, counters)
            self._counters.prefetch_late += len(begun) - len(again)
        if failed:
            raise StoreError("; ".join(str(error) for error in failed.values())) from next(iter(failed.values()))

    def _load(self, loads: Sequence[tuple[int, int]], counters: Counters | None) -> dict[int, BaseException]:
        failed = self._transfers.load(loads, counters)
        for key, _ in loads:
            (self.residency.cancel_load if key in failed else self.residency.finish_load)(key)
        return failed

    def _give_up(self, keys: list[int]) -> None:
        """Frees the slots of ``keys`` that are LOADING, except those that a background read may still write to."""
        for key in keys:
            if self.residency.is_loading(key) and key not in self._transfers.ahead.keys:
                self.residency.cancel_load(key)
