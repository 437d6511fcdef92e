"""Prefetcher that plans from guesses about layers: reads ahead what they name, and keeps it from being evicted."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import chain, groupby

import numpy as np

from vllm_spac.balancers.base import Balancer
from vllm_spac.cache.cutoff import DraftPhases, cutoff
from vllm_spac.cache.expected import Expected
from vllm_spac.cache.link import Link
from vllm_spac.cache.payback import Payback
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.cache.prefetcher import Prefetcher
from vllm_spac.cache.residency import NOWHERE, Residency
from vllm_spac.metrics import Counters
from vllm_spac.predictors.base import Predictor, Seen

logger = logging.getLogger("vllm.spac")


class Lookahead(Prefetcher):
    """Asks a predictor at the start of a step and in each layer, or while drafts are made, and reads what it names.

    Nearer layers come first, also across the end of a step, then the experts that more rows name. A read begins when a
    layer has what it needs, and never evicts an expert that the running layer uses or that is expected in the layer it
    is for or in a nearer one. What is no longer expected is cancelled if its read has not begun. While drafts are made,
    reads are of the layers below the cutoff. After an error of the predictor, which is logged, it is not asked again.

    Args:
        guesser: the predictor; the arguments before it as in ``Prefetcher``.
        top_k: experts per row, of which a guess names as many.
    """

    def __init__(
        self,
        residency: Residency,
        transfers: Link,
        counters: Counters,
        layer_experts: int,
        predictor: Predictor,
        settings: PrefetchSettings,
        balancer: Balancer | None,
        guesser: Predictor,
        top_k: int,
    ) -> None:
        super().__init__(residency, transfers, counters, layer_experts, predictor, settings, balancer)
        self._guesser = guesser
        self.expected = Expected(len(residency.slot_of) // layer_experts, layer_experts, top_k)
        self._phases = DraftPhases(settings.depth)
        self._drafting = False  # the drafter has read tokens of a step that has not begun
        self._broken = False  # the predictor has failed
        self._payback = Payback() if settings.stops else None
        self._began = 0.0  # when the step began
        self._rows = 0  # of the step; 0: nothing was to be guessed about it, or it has not reached a layer
        if settings.pins:
            residency.soft = self.expected

    @property
    def _idle(self) -> bool:
        """Whether nothing follows from a guess."""
        if self._broken or (self._payback is not None and self._payback.stopped):
            return True
        return self._allowance is not None and self._allowance.paused and not self._settings.pins

    def draft(self, seen: Seen) -> None:
        self.reap()
        if self._idle:
            return
        if not self._drafting:
            self._drafting = True
            self.expected.begin()
        self._ask(seen)
        self._cancel_unexpected()
        layers = [self.expected.of(layer) for layer in range(self.expected.layers)]
        missing = [int((self._residency.slot_of[keys] == NOWHERE).sum()) for keys in layers]
        first = cutoff(list(map(len, layers)), missing, self._residency.slots, self._phases.left)
        self._phases.ask(self._read(chain.from_iterable(layers[:first])))

    def begin_step(self, seen: Seen | None) -> None:
        self.reap()
        self._phases.end(self._ahead.keys)
        self._drafting = False
        self._began, self._rows = self._link.clock(), 0
        if seen is None or self._idle:
            self.expected.clear()
        else:
            self.expected.begin()
            self._ask(seen)
        self._proceed(0)

    def look(self, seen: Seen) -> None:
        assert seen.ids is not None
        self._rows = len(seen.ids)
        if not self._idle:
            self.expected.enter(seen.layer, seen.ids.numpy())
            if self._guesser.reach:
                self._ask(seen)

    def expect(self, layer: int, experts: np.ndarray) -> None:
        if not self._idle:
            self.reap()
            self.expected.expect(layer, experts)
            self._proceed(0)

    def leave(self) -> None:
        self.expected.leave()
        self._proceed(0)

    def plan(self) -> None:
        if self._payback is not None and self._rows:
            self._judge(self._payback, self._link.clock() - self._began)
        self.end_step()

    def _judge(self, payback: Payback, seconds: float) -> None:
        """Counts and logs what follows from the duration of a step."""
        if (verdict := payback.end_step(self._rows, seconds)) is None:
            return
        self._counters.prefetch_stops += verdict.stop
        if verdict.changes:
            logger.warning(
                "spac: prefetch=auto %s reading ahead by %s: %s",
                "stops" if verdict.stop else "goes on",
                self._settings.prefetch,
                verdict,
            )

    def _proceed(self, layer: int) -> None:
        """Starts reads of the experts that are expected first and find slots, and cancels those of no others."""
        self._cancel_unexpected()
        self._read(self.expected.ranked())

    def _cancel_unexpected(self) -> None:
        queued = self._ahead.keys
        if queued:
            self.cancel([key for key in queued if key not in self.expected and key not in self._admitted])

    def _read(self, keys: Iterable[int]) -> list[int]:
        """Starts reads of those of ``keys`` that find slots, the first ones first; returns them."""
        if not self._room(0):
            return []
        loads: list[tuple[int, int]] = []
        slot_of = self._residency.slot_of
        for _, layer in groupby(keys, self.expected.distance):
            missing = [key for key in layer if slot_of[key] == NOWHERE and key not in self._damaged]
            if not missing:
                continue
            wanted = missing[: self._room(len(loads))]
            placement = self._residency.admit_unless(wanted, self.expected.until(missing[0]))
            loads += self._guess(placement)
            if len(placement.loads) < len(missing):  # no slot is worth less, and still less so for what is needed later
                break
        if loads:
            self._ahead.fetch(loads)
        return [key for key, _ in loads]

    def _ask(self, seen: Seen) -> None:
        try:
            for guess in self._guesser.guesses(seen):
                self.expected.name(guess)
        except Exception:  # of any predictor, also of another package: it moves experts ahead of need, and no more
            self._broken = True
            self.expected.clear()
            logger.exception("spac: prefetch=%s failed; nothing is read ahead from now on", self._settings.prefetch)
