"""Prefetcher that plans from guesses about layers: reads ahead what they name, and keeps it from being evicted.

``Expected`` holds which experts are expected and how soon. Order is counted in layers, across the end of a step: after
the last layer of a step comes the first one of the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, TypeVar

import numpy as np

from vllm_spac.cache.allowance import Depths
from vllm_spac.cache.link import Link
from vllm_spac.cache.named import UNBOUNDED, BudgetHint, PredictedExperts, named
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.cache.prefetcher import Prefetcher
from vllm_spac.cache.residency import NOWHERE, Residency
from vllm_spac.decisions.balancers.base import Balancer
from vllm_spac.decisions.cutoff import DraftPhases, cutoff
from vllm_spac.decisions.predictors.base import START, Guess, Predictor, PredictorInputs
from vllm_spac.recording.metrics import Counters


class Expected:
    """The experts that guesses name for the next run of each layer, and those that the running layer uses.

    A guess names ``top_k`` experts for each of its rows. Those that more rows name, and more highly, are likelier.

    Args:
        layers, experts: numbers of layers, and of experts per layer; the keys of a layer are consecutive.
        local_of: int [experts of the model], the number of each among the ``experts`` that this process holds, -1: of
            another one. Guesses and routers name experts of the model. None: this process holds all of them.
        cutoff: number of the first layers that guesses may name experts of; None: of all.
    """

    def __init__(
        self, layers: int, experts: int, top_k: int, local_of: np.ndarray | None = None, cutoff: int | None = None
    ) -> None:
        self.layers, self._experts, self._top_k = layers, experts, top_k
        self._cutoff = cutoff
        self._local_of, self._of_model = local_of, experts if local_of is None else len(local_of)
        self._running = START
        self._left = False  # the running layer has its output
        self._named: dict[int, list[int]] = {}  # layer that has not run -> keys, the likeliest first
        self._soon = np.zeros(layers * experts, dtype=bool)
        self.hint = UNBOUNDED

    def begin(self) -> None:
        """A step begins: forgets what was expected of layers that the last one did not run."""
        self._pass(range(max(0, self._running + self._left), self.layers))
        self._running, self._left = START, False

    def reset(self) -> None:
        """A step begins, about which nothing is guessed."""
        self._named.clear()
        self._soon[:] = False
        self._running, self._left = START, False

    def begin_layer(self, layer: int, used: np.ndarray) -> None:
        """The router of ``layer`` has chosen the experts ``used``, int in any shape, of the layer."""
        first = self._running + self._left
        if layer >= first:
            passed = range(max(0, first), layer + 1)
        else:  # no step began in between
            passed = range(first, self.layers + layer + 1)
        self._pass(passed)
        self._running, self._left = layer, False
        self._soon[layer * self._experts + self.held(used.ravel())] = True

    def end_layer(self) -> None:
        """The running layer has its output: what it used is not expected, and it may be guessed about its next run."""
        if self._running != START:
            self._pass(range(self._running, self._running + 1))
            self._left = True

    def update(self, guess: Guess) -> None:
        """Takes ``guess`` in place of earlier ones about the same layers, except about the running layer."""
        for layer, experts in named(guess, self._of_model, self._top_k, self.hint):
            self.insert(layer, self.held(experts))

    def names(self, guess: Guess) -> PredictedExperts:
        """Returns what ``guess`` names, on its device; for ``receive``."""
        return PredictedExperts.of(guess, self._of_model, self._top_k, self.hint)

    def receive(self, names: PredictedExperts) -> None:
        """As ``update``, of ``names`` that are on the host."""
        for layer, experts in names.by_layer(self.hint):
            self.insert(layer, self.held(experts))

    def insert(self, layer: int, experts: np.ndarray) -> None:
        """Takes ``experts`` (int, distinct, the likeliest first) of ``layer`` as ``update`` takes those of a guess."""
        named = self._cutoff is None or layer < self._cutoff
        if named and (layer != self._running or self._left):
            self._pass(range(layer, layer + 1))
            keys = experts + layer * self._experts
            self._named[layer] = keys.tolist()
            self._soon[keys] = True

    def distance(self, key: int) -> int:
        """Returns how many layers later the layer of ``key`` runs next: 0 for one that runs now, else 1 or more."""
        ahead = key // self._experts - self._running
        return ahead if ahead >= self._left else ahead + self.layers

    def ranked(self) -> Iterator[int]:
        """Yields the keys that guesses name: those of nearer layers first, then the likelier ones."""
        for layer in sorted(self._named, key=lambda layer: self.distance(layer * self._experts)):
            yield from self._named[layer]

    def of(self, layer: int) -> list[int]:
        """Returns the keys that guesses name of ``layer``, the likelier ones first."""
        return self._named.get(layer, [])

    def until(self, key: int) -> Container[int]:
        """Returns the expected keys that are needed in the layer of ``key`` or before it."""
        return _Until(self, self.distance(key))

    def __contains__(self, key: Any) -> bool:
        return bool(self._soon[key])

    def held(self, experts: np.ndarray) -> np.ndarray:
        """Returns the numbers of those of ``experts``, of the model, that this process holds."""
        if self._local_of is None:
            return experts
        local = self._local_of[experts]
        return local[local >= 0]

    def _pass(self, layers: range) -> None:
        """Forgets what is expected of ``layers``, counted on into the next step."""
        for layer in layers:
            layer %= self.layers
            self._named.pop(layer, None)
            self._soon[layer * self._experts : (layer + 1) * self._experts] = False


@dataclass(frozen=True, slots=True)
class _Until:
    """Expected keys whose layers run at most ``distance`` layers later."""

    expected: Expected
    distance: int

    def __contains__(self, key: Any) -> bool:
        return key in self.expected and self.expected.distance(key) <= self.distance


logger = logging.getLogger("vllm.spac")
_Taken = TypeVar("_Taken")


class Lookahead(Prefetcher):
    """Asks a predictor at the start of a step and in each layer, or while drafts are made, and reads what it names.

    Nearer layers come first, also across the end of a step, then the experts that more rows name. A read begins when a
    layer has what it needs, and never evicts an expert that the running layer uses or that is expected in the layer it
    is for or in a nearer one; loads on demand evict what is expected last. What is no longer expected is cancelled if
    its read has not begun. While drafts are made, reads are of the layers below the cutoff, which is learned
    (``decisions.cutoff``), or given. Under a budget only the first names of a layer are read (``Depths``). After an
    error of the predictor, which is logged, it is not asked again.

    Where layers run on a device, the predictor does too. Then the caller asks it (``ask``), and passes on what it names
    once that is on the host: in the first layer of a step what it names at the start.

    Args:
        guesser: the predictor; the arguments before it as in ``Prefetcher``.
        top_k: experts per row, of which a guess names as many, unless the settings say how many.
        away: the predictor is on a device, and the caller asks it.
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
        away: bool = False,
        local_of: np.ndarray | None = None,
    ) -> None:
        super().__init__(residency, transfers, counters, layer_experts, predictor, settings, balancer)
        self._guesser, self._away = guesser, away
        layers, self._cutoff = len(residency.slot_of) // layer_experts, settings.cutoff
        self._depths: tuple[Depths, Depths] | None = None  # of names of steps, and of those while drafts are made
        if settings.extra is not None:
            self._depths = Depths(layers, layer_experts, settings.extra), Depths(layers, layer_experts, settings.extra)
        keys = len(residency.slot_of)
        # What ``Depths.end_step`` takes: of the names of the step, of those while its drafts were made, and for both.
        self._places, self._drafted, self._used = np.full(keys, -1), np.full(keys, -1), np.zeros(keys, dtype=bool)
        self._read_at: dict[int, int] = {}  # keys read ahead in steps under a budget -> their places
        self.expected = Expected(layers, layer_experts, settings.k or top_k, local_of, self._cutoff)
        self._phases = DraftPhases(settings.depth)
        self._bounds: Sequence[int] | None = None  # of the last step that was guessed about, not of a prompt
        self._drafting = False  # the drafter has read tokens of a step that has not begun
        self._broken = False  # the predictor has failed
        residency.soft = self.expected

    @property
    def _bounded(self) -> bool:
        """Whether a budget bounds the names of the step, so that depths bound the reads."""
        return self._depths is not None and self.expected.hint.bounds is not None

    def _worth_reading(self, names: list[int]) -> list[int]:
        """Returns the first of the keys that guesses name of one layer: all, or under a budget down to its depth."""
        if self._depths is None or not self._bounded or not names:
            return names
        return names[: self._depths[self._drafting].depths[names[0] // self._layer_experts]]

    def _note_drafted(self) -> None:
        """Notes the best place that each name without a slot had since the drafter began."""
        for layer in range(self.expected.layers):
            if keys := self.expected.of(layer):
                missing = self._residency.slot_of[keys] == NOWHERE
                named, places = np.array(keys)[missing], np.flatnonzero(missing)
                before = self._drafted[named]
                self._drafted[named] = np.where(before < 0, places, np.minimum(before, places))

    def _compare(self, layer: int, used: np.ndarray) -> None:
        """Notes which names of ``layer`` had no slot, by their places, and which of them it uses."""
        first, slot_of = layer * self._layer_experts, self._residency.slot_of
        for place, key in enumerate(self.expected.of(layer)):
            if slot_of[key] == NOWHERE and key not in self._read_at:
                self._places[key] = place
        for key in [key for key in self._read_at if first <= key < first + self._layer_experts]:
            self._places[key] = self._read_at.pop(key)
        self._used[first + self.expected.held(used.ravel())] = True

    def ask(self, inputs: PredictorInputs) -> list[PredictedExperts]:
        asked = self._away and not self._broken and (inputs.layer == START or self._guesser.reach > 0)
        return self._guesses(inputs, self.expected.names) if asked else []

    def draft(self, inputs: PredictorInputs | None, names: Sequence[PredictedExperts] = ()) -> None:
        self.finish_reads()
        if self._broken:
            return
        if not self._drafting:
            self._drafting = True
            self.expected.begin()
            self.expected.hint = BudgetHint(self._bounds)  # other rows, whose votes are not known
        self._take_names(inputs, names)
        self._cancel_unexpected()
        if self._bounded:
            self._note_drafted()
        layers = [self._worth_reading(self.expected.of(layer)) for layer in range(self.expected.layers)]
        first = self._cutoff
        if first is None:
            missing = [int((self._residency.slot_of[keys] == NOWHERE).sum()) for keys in layers]
            first = cutoff(list(map(len, layers)), missing, self._residency.slots, self._phases.left)
        self._phases.request(self._read(chain.from_iterable(layers[:first])))

    def begin_step(self, inputs: PredictorInputs | None, hint: BudgetHint = UNBOUNDED) -> None:
        self.finish_reads()
        self.expected.hint = hint
        if inputs is not None:
            self._bounds = hint.bounds
        self._phases.end(self._ahead.keys)
        drafted, self._drafting = self._drafting, False
        if inputs is None or self._broken:
            self.expected.reset()
        elif not (self._away and drafted):  # what was named of the drafts holds until the step's names arrive
            self.expected.begin()
            self._take_names(inputs, ())
        self.start_reads(0)

    def observe_layer(self, inputs: PredictorInputs, names: Sequence[PredictedExperts] = ()) -> None:
        assert inputs.ids is not None
        if not self._broken:
            used = inputs.ids.numpy()
            if self._bounded:
                self._compare(inputs.layer, used)
            self.expected.begin_layer(inputs.layer, used)
            if self._away or self._guesser.reach:
                self._take_names(inputs, names)

    def prefetch(self, layer: int, experts: np.ndarray) -> None:
        if not self._broken:
            self.finish_reads()
            self.expected.insert(layer, experts)
            self.start_reads(0)

    def end_layer(self) -> None:
        self.expected.end_layer()
        self.start_reads(0)

    def plan(self) -> None:
        if self._depths is not None:
            if self._bounded:
                for depths, places in zip(self._depths, (self._places, self._drafted), strict=True):
                    depths.end_step(places, self._used)
            self._places[:], self._drafted[:], self._used[:] = -1, -1, False
        self.end_step()

    def start_reads(self, layer: int) -> None:
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
            named = self._worth_reading(list(layer))
            missing = [key for key in named if slot_of[key] == NOWHERE and key not in self._damaged]
            if not missing:
                continue
            wanted = missing[: self._room(len(loads))]
            placement = self._residency.admit_unless(wanted, self.expected.until(missing[0]))
            loads += self.account.guess(placement)
            if self._bounded and not self._drafting:
                self._read_at.update((key, named.index(key)) for key, _ in placement.loads)
            if len(placement.loads) < len(missing):  # no slot is worth less, and still less so for what is needed later
                break
        if loads:
            self._ahead.fetch(loads)
        return [key for key, _ in loads]

    def _take_names(self, inputs: PredictorInputs | None, names: Sequence[PredictedExperts]) -> None:
        """Takes what the predictor names of ``inputs``; where it is away, ``names``, which it has named of it."""
        if self._away:
            for each in names:
                self.expected.receive(each)
        else:
            assert inputs is not None
            self._guesses(inputs, self.expected.update)

    def _guesses(self, inputs: PredictorInputs, take: Callable[[Guess], _Taken]) -> list[_Taken]:
        """Returns what ``take`` makes of each guess about ``inputs``; nothing after an error."""
        try:
            return [take(guess) for guess in self._guesser.guesses(inputs)]
        except Exception:  # of any predictor, also of another package: it moves experts ahead of need, and no more
            self._broken = True
            self.expected.reset()
            logger.exception("spac: prefetch=%s failed; nothing is read ahead from now on", self._settings.prefetch)
            return []
