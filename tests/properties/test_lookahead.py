"""Reads ahead from guesses about layers, into poisoned slots: their order, what they may evict, and what is counted.

The predictor says what a test tells it to, right or wrong.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pytest
import torch
from driven import Endless, Instant
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_store import MemoryStore
from poison import poison_slots
from torch import Tensor

from vllm_spac import components
from vllm_spac.cache import allowance, transfers
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.cache.residency import NOWHERE, Residency
from vllm_spac.core import MoEShape, RequestRows, RowKind, Step, TensorSpec
from vllm_spac.decisions.predictors.base import START, Guess, Predictor, PredictorInputs, Signal
from vllm_spac.errors import ConfigError, StoreError
from vllm_spac.execution.base import ExecutionContext, Rows
from vllm_spac.execution.host.slots_execution import SlotExecution

BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # the machine may be, and that is no failure
LAYERS, EXPERTS, TOP = 4, 8, 2
SHAPE = MoEShape(tuple("abcd"), EXPERTS, TOP, {"w": TensorSpec((1,), torch.float32)})
POLICIES = components.serving("policies")


class Script(Predictor):
    """Guesses what is in ``says``: layer in which it is asked -> pairs of a layer and the experts that it names."""

    needs = frozenset({Signal.ROUTING})
    reach = LAYERS

    def __init__(self) -> None:
        self.says: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        self.asked: list[int] = []

    def guesses(self, seen: PredictorInputs) -> Iterable[Guess]:
        self.asked.append(seen.layer)
        for layer, experts in self.says.get(seen.layer, ()):
            scores = [float(EXPERTS - experts.index(e)) if e in experts else 0.0 for e in range(EXPERTS)]
            yield Guess(layer * EXPERTS, torch.tensor([scores]))


class Recorded(MemoryStore):
    """Keeps the order of its reads; those of ``failing`` keys fail."""

    def __init__(self) -> None:
        super().__init__(SHAPE, "")
        self.order: list[int] = []
        self.failing: Counter[int] = Counter()
        for key in range(SHAPE.total):
            self.put(key, {"w": torch.full((1,), float(key))})

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        self.order.append(key)
        if self.failing[key]:
            self.failing[key] -= 1
            raise StoreError(f"{key} is gone")
        return super().read(key, into)


class Kernel:
    """Sees that each slot holds the expert of the row, whose number is its input."""

    activation, takes_slots, by_expert = "silu", True, False

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._slots, self.keys = tensors["w"], torch.zeros(0)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, slot_of=None, rows: int = 0) -> Tensor:
        assert torch.equal(self._slots[ids.long(), 0], self.keys[x[:, 0].long()].float()), "another expert's weights"
        return x.clone()


class Pool(SlotExecution):
    def __init__(self, slots: int, policy: str = "lru", background: type = Instant, exchange=None, **knobs) -> None:
        self.script = Script()
        before, transfers.Background = transfers.Background, background
        ahead = PrefetchSettings(prefetch="script", built=self.script, **knobs)
        chosen = components.build("policies", policy)
        try:
            super().__init__(ExecutionContext(
                SHAPE, slots, chosen, Recorded(), {"w": torch.full((slots, 1), float("nan"))},
                io_threads=2, path="double", ahead=ahead, exchange=exchange,
            ))  # fmt: skip
        finally:
            transfers.Background = before
        poison_slots(self)
        self._kernel = Kernel(self.tensors)
        list(self.fill())
        self.store.order.clear()

    @property
    def expected(self):
        return self._loader.prefetcher.expected

    def begin(self, rows: int = 1, kind: RowKind = RowKind.DECODE, bounds=None, votes=None) -> None:
        self.begin_step(Step((RequestRows(0, rows, kind, weights=votes),), bounds=bounds))

    def layer(self, layer: int, *rows: tuple[int, ...]) -> None:
        ids = torch.tensor(rows, dtype=torch.int32)
        self._kernel.keys = ids + layer * EXPERTS
        x = torch.arange(len(rows), dtype=torch.float32)[:, None]
        self.forward(layer, x, torch.ones(ids.shape), ids, self._kernel, Rows(len(rows), as_routed=True))
        self.residency.check_integrity()

    def step(self, *experts: tuple[int, ...]) -> None:
        """A step of one row, with the experts of each layer."""
        self.begin()
        for layer, chosen in enumerate(experts):
            self.layer(layer, chosen)
        self.end_forward()

    def there(self, *keys: int) -> bool:
        return bool((self.residency.slot_of[list(keys)] != NOWHERE).all())


@contextlib.contextmanager
def pool(*given, **knobs) -> Iterator[Pool]:
    with contextlib.closing(Pool(*given, **knobs)) as made:
        yield made


ANY = st.lists(st.integers(0, EXPERTS - 1), unique=True, min_size=TOP, max_size=TOP).map(tuple)
SAYS = st.dictionaries(
    st.integers(START, LAYERS - 1), st.lists(st.tuples(st.integers(0, LAYERS - 1), ANY), max_size=3), max_size=5
)
STEPS = st.lists(
    st.tuples(SAYS, st.lists(st.lists(ANY, min_size=1, max_size=3), min_size=LAYERS, max_size=LAYERS)),
    min_size=1,
    max_size=6,
)


def run(made: Pool, steps: list) -> None:
    """Steps of up to three rows per layer, with what is guessed in each step."""
    for says, layers in steps:
        made.script.says = says
        rows = max(map(len, layers))
        made.begin(rows)
        for layer, chosen in enumerate(layers):
            made.layer(layer, *(chosen[number % len(chosen)] for number in range(rows)))
        made.end_forward()


# -- order ---------------------------------------------------------------------------------------------------------


def test_a_layer_s_own_loads_come_first() -> None:
    with pool(16) as made:
        made.script.says = {0: [(1, (6, 7)), (2, (6, 7))]}
        made.step((5, 6), (6, 7), (6, 7), (0, 1))
    assert sorted(made.store.order[:2]) == [5, 6] and made.store.order[2:] == [14, 15, 22, 23], "then nearer layers"


def test_the_first_layers_of_the_next_step_are_read_in_the_last_of_this_one() -> None:
    with pool(16) as made:
        made.script.says = {3: [(0, (6, 7)), (1, (5, 6))]}
        made.step((0, 1), (0, 1), (0, 1), (0, 1))
        assert made.store.order == [6, 7, 13, 14]
        made.script.says = {}
        made.step((6, 7), (5, 6), (0, 1), (0, 1))
        assert made.counters.prefetch_hits == 4 and made.counters.misses == 0


def test_what_is_no_longer_expected_is_not_read() -> None:
    """The first of them is being read; of those behind it, the second guess names one."""
    with pool(16, background=Endless) as made:
        made.script.says = {START: [(2, (6, 7)), (3, (6, 7))], 0: [(3, (5, 6))]}
        made.begin()
        ahead = made._loader._transfers.ahead
        assert list(ahead.keys) == [22, 23, 30, 31] and ahead._threads == 1
        made.layer(0, (0, 1))
        assert list(ahead.keys) == [22, 23, 30, 29]
        made.layer(1, (0, 1))
        made.layer(2, (0, 1))
        assert list(ahead.keys) == [22, 30, 29], "that of 23 had not begun and comes too late"
        made.layer(3, (5, 6))
        assert list(ahead.keys) == [22], "those of layer 3 became loads on demand"


def test_reads_that_never_began_are_not_counted_against_the_share() -> None:
    """One read never ends; two more are asked for behind it in each step, and cancelled."""
    with pool(20, background=Endless, extra=1.0) as made:
        made.step((5, 6), (5, 6), (5, 6), (5, 6))
        ahead = made._loader._transfers.ahead
        for _ in range(30):
            made.script.says = {START: [(1, (7, 6)), (2, (7, 6)), (3, (7, 6))]}
            made.begin()
            assert list(ahead.keys) == [15, 23, 31]
            for layer in range(LAYERS):
                made.layer(layer, (0, 1))
            assert list(ahead.keys) == [15]
            made.end_forward()


def test_prompts_are_not_guessed_about() -> None:
    with pool(16) as made:
        made.script.says = {START: [(0, (5, 6))], 0: [(1, (6, 7))], 3: [(0, (6, 7))]}
        made.begin(1, RowKind.PREFILL)
        made.layer(0, (0, 1))
        made.end_forward()
        assert not made.script.asked and not made.store.order
        made.step((0, 1), (0, 1), (0, 1), (0, 1))
        made.begin(1, RowKind.PREFILL)
        assert not any(key in made.expected for key in range(SHAPE.total)), "nor is anything kept from before"


def test_a_predictor_that_fails_is_logged_once_and_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    """Layers run on; what it had named before is neither read nor kept."""
    with pool(16) as made, caplog.at_level(logging.ERROR, "vllm.spac"):
        made.script.says = {START: [(2, (6, 7))], 1: [(LAYERS + 9, (0, 1))]}
        made.begin()
        made.layer(0, (5, 6))
        assert made.there(22, 23)
        made.layer(1, (5, 6))
        assert not any(key in made.expected for key in range(SHAPE.total))
        made.layer(2, (6, 7))
        made.layer(3, (0, 1))
        made.end_forward()
        made.step((0, 1), (0, 1), (0, 1), (0, 1))
        draft(made, (5, 7))
        assert made.script.asked == [START, 0, 1] and made.counters.prefetches == made.counters.prefetch_hits == 2
    [record] = caplog.records
    assert "prefetch=script failed; nothing is read ahead" in record.getMessage() and record.exc_info is not None


# -- under a budget ------------------------------------------------------------------------------------------------


class ByRow(Script):
    """Guesses at the start what each row names of layer 1."""

    rows = ((4, 5), (4, 6), (7, 5))

    def guesses(self, seen: PredictorInputs) -> Iterable[Guess]:
        if seen.layer == START:
            named = [[float(EXPERTS - r.index(e)) if e in r else 0.0 for e in range(EXPERTS)] for r in self.rows]
            yield Guess(EXPERTS, torch.tensor(named))


@pytest.mark.parametrize(
    ("bounds", "votes", "read"),
    [
        (None, None, {4, 5, 6, 7}),
        (None, (0.1, 0.1, 1.0), {4, 5, 6, 7}),
        ((1, 4, 1, 1), None, {4, 5, 6, 7}),
        ((1, 2, 1, 1), None, {4, 5}),
        ((1, 2, 1, 1), (0.1, 0.1, 1.0), {5, 7}),
    ],
)
def test_a_budget_leaves_what_it_would_keep(bounds, votes, read: set[int]) -> None:
    """The first by the votes of all rows, of its own layer; a row that is hardly reached counts hardly."""
    with pool(16) as made:
        made._loader.prefetcher._guesser = ByRow()
        made.begin(3, RowKind.VERIFY, bounds, votes)
        assert {key - EXPERTS for key in made.store.order} == read


class Ranked(Script):
    """Two rows name four experts of the next layer. It uses the first two nearly always, the others as any others."""

    rng, names = np.random.default_rng(0), (0, 1, 2, 3)

    def guesses(self, seen: PredictorInputs) -> Iterable[Guess]:
        if 0 <= seen.layer < LAYERS - 1:
            self.names = a, b, c, d = tuple(self.rng.permutation(EXPERTS).tolist())[:4]
            scores = torch.zeros(2, EXPERTS)
            for row, first, second in ((0, a, c), (1, b, d)):
                scores[row, first], scores[row, second] = 2.0, 1.0
            yield Guess((seen.layer + 1) * EXPERTS, scores)

    def used(self) -> list[int]:
        first = list(self.names[:2]) if self.rng.random() < 0.97 else []
        rest = [e for e in self.rng.permutation(EXPERTS).tolist() if e not in first]
        return first + rest[: 4 - len(first)]


@pytest.mark.parametrize("slots", [8, 16])
def test_under_a_budget_nine_of_ten_reads_are_used(slots: int) -> None:
    """By ``extra``: reads go down to the place where names are no longer worth it."""
    unused, read = {}, {}
    for bounds in (None, (4,) * LAYERS):
        with pool(slots, extra=0.1) as made:
            made._loader.prefetcher._guesser = ranked = Ranked()
            ranked.rng = np.random.default_rng(0)
            for _ in range(150):
                made.begin(2, RowKind.VERIFY, bounds, (1.0, 0.9))
                for layer in range(LAYERS):
                    a, b, c, d = ranked.used()
                    made.layer(layer, (a, c), (b, d))
                made.end_forward()
            stats = made.snapshot()
            read[bounds] = stats["prefetches"]
            unused[bounds] = 1 - stats["prefetch_hits"] / stats["prefetches"]
    assert unused[None] > 0.13 and 0 < unused[(4,) * LAYERS] <= 0.1
    assert read[(4,) * LAYERS] > 250


# -- while drafts are made -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def drafted(*given, **knobs) -> Iterator[Pool]:
    """A pool whose predictor looks at a draft model, after a step of experts that are there."""
    with pool(*given, **knobs) as made:
        made.step((0, 1), (0, 1), (0, 1), (0, 1))
        made.store.order.clear()
        yield made


def draft(made: Pool, *layers: tuple[int, ...]) -> None:
    """The drafter reads a token, about which these experts are guessed, from the first layer on."""
    made.script.says = {START: list(enumerate(layers))}
    made.draft(torch.zeros(1, LAYERS, TOP, dtype=torch.int64))
    made.residency.check_integrity()


def test_what_is_guessed_of_drafts_is_read_before_the_step() -> None:
    with drafted(16) as made:
        draft(made, (5, 6), (6, 7))
        assert made.store.order == [5, 6, 14, 15] and made.there(5, 6, 14, 15)
        draft(made, (5, 7), (6, 7))
        assert made.store.order == [5, 6, 14, 15, 7], "the next draft names another expert"
        made.step((5, 7), (6, 7), (0, 1), (0, 1))
        assert made.counters.misses == 0 and made.counters.prefetch_hits == 4


def test_reads_before_the_step_end_at_the_cutoff_and_go_on_in_the_step() -> None:
    """Five reads fit into a phase: the third layer would need a sixth one."""
    with drafted(16) as made:
        made._loader.prefetcher._phases.reads = 5
        draft(made, (4, 5), (4, 5), (6, 7), (6, 7))
        assert made.store.order == [4, 5, 12, 13]

        draft(made, (4, 5), (4, 5), (6, 7), (6, 7))
        assert made.store.order == [4, 5, 12, 13]
        made.begin()
        assert made.there(*(layer * EXPERTS + expert for layer in (2, 3) for expert in (6, 7)))


@pytest.mark.parametrize("given", [0, 1, 3, LAYERS])
def test_a_given_cutoff_is_obeyed_exactly(given: int) -> None:
    """However little a phase has finished so far, before the step and in it; ``depth`` bounds nothing."""
    settings = PrefetchSettings.of(f"shadow@cutoff={given}@depth=1")
    assert (settings.cutoff, settings.depth) == (given, 1)
    with drafted(16, depth=PrefetchSettings.of(f"shadow@cutoff={given}").depth, cutoff=given) as made:
        made._loader.prefetcher._phases.reads = 1
        draft(made, (4, 5), (4, 5), (6, 7), (6, 7))
        below = [4, 5, 12, 13, 22, 23, 30, 31][: 2 * given]
        assert made.store.order == below
        made.begin()
        assert made.store.order == below
        made.layer(0, (0, 1))
        assert made.store.order == below


def test_a_row_names_as_many_experts_as_k_says() -> None:
    """Of two named in each layer, the likelier one."""
    with drafted(16, k=1) as made:
        draft(made, (5, 6), (6, 7))
        assert [key for key in made.store.order if key < 2 * EXPERTS] == [5, 14]


def test_the_reads_of_a_phase_are_as_many_as_the_last_ones_finished() -> None:
    with drafted(16, background=Endless) as made:
        phases = made._loader.prefetcher._phases
        draft(made, (5, 6), (6, 7))
        assert phases.left == phases.reads - 4
        made.begin()
        assert phases.reads == phases.left == 1, "none has finished"
    with drafted(16, depth=4) as made:
        draft(made, (5, 6), (6, 7))
        made.begin()
        assert made._loader.prefetcher._phases.reads == 5, "all have, and there could be no more"


# -- evictions -----------------------------------------------------------------------------------------------------


@given(STEPS, st.integers(TOP, 20), st.sampled_from(POLICIES))
@settings(max_examples=examples(60), **BUSY)
def test_nothing_is_evicted_for_what_is_needed_later(steps: list, slots: int, policy: str) -> None:
    """Neither what the running layer uses, nor what is expected in the same layer or in one before it."""
    placed = Residency.admit_unless

    def watched(self, keys, kept):
        due = {key: made.expected.distance(key) for key in range(SHAPE.total) if key in made.expected}
        placement = placed(self, keys, kept)
        assert [key for key, _ in placement.loads] == list(keys[: len(placement.loads)])
        for victim in placement.victims:
            assert due.get(victim, LAYERS + 1) > max(due[key] for key in keys) and all(due[key] > 0 for key in keys)
        return placement

    with pytest.MonkeyPatch.context() as patch, pool(slots, policy) as made:
        patch.setattr(Residency, "admit_unless", watched)
        run(made, steps)


def test_soft_pins_keep_what_is_expected() -> None:
    """The oldest expert is the one that is expected, or it would be evicted, and loaded again."""
    for guess, loads in (({}, 3), ({0: [(1, (0, 1))]}, 2)):
        with pool(4, extra=0.0) as made:  # an expert of each layer, and no reads ahead
            made.script.says = guess
            made.begin()
            made.layer(0, (6, 7))
            assert made.there(EXPERTS) == bool(guess)
            made.script.says = {}
            made.layer(1, (0, 0))
            made.end_forward()
            assert made.counters.loads == loads


@given(STEPS, st.integers(TOP, 20), st.sampled_from(POLICIES), st.booleans(), st.sampled_from([Instant, Endless]))
@settings(max_examples=examples(60), **BUSY)
def test_soft_pins_starve_no_forward(steps: list, slots: int, policy: str, limited: bool, background: type) -> None:
    """Also where everything is expected; every row reads its own experts, which the kernel sees."""
    with pool(slots, policy, background=background, extra=0.1 if limited else None) as made:
        run(made, steps)
        assert not made.residency.pinned
        counters = made.counters
        unused = made._loader.prefetcher.account.unused
        assert counters.prefetches == counters.prefetch_hits + counters.prefetch_wasted + len(unused)
        assert counters.prefetch_late <= counters.prefetch_hits + counters.prefetch_wasted


# -- outcomes ------------------------------------------------------------------------------------------------------


def test_a_failing_read_fails_no_forward() -> None:
    with pool(16) as made:
        made.script.says = {START: [(0, (6, 7))], 0: [(1, (6, 7))]}
        made.store.failing.update({6: 1, 7: 1, 14: 1})
        made.step((6, 7), (6, 7), (0, 1), (0, 1))
        assert (made.counters.prefetch_failed, made.counters.prefetch_hits, made.counters.loads) == (3, 1, 3)


def test_outcomes_are_counted_apart() -> None:
    """LRU: reading 27 ahead evicts 0, which is harmful when 0 is loaded; and is wasted when 27 goes."""
    with pool(5) as made:  # 0, 1, 8, 16, 24
        made.script.says = {START: [(3, (3, 0))]}
        made.begin()
        assert made.there(27, 24) and not made.there(0)
        made.layer(0, (0, 0))
        counters = made.counters
        assert (counters.prefetches, counters.prefetch_harmful, counters.prefetch_wasted) == (1, 1, 0)
        made.layer(1, (4, 4))
        made.layer(2, (4, 4))
        assert made.there(27)
        made.layer(3, (4, 5))
        made.end_forward()
        assert not made.there(27)
        assert (counters.prefetch_harmful, counters.prefetch_wasted, counters.prefetch_hits) == (1, 1, 0)


def test_reads_that_nobody_needs_add_a_tenth_and_then_stop(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every guess is wrong. It is said once, though the reads are tried again and stop again."""
    monkeypatch.setattr(allowance, "PAUSE", 100)
    rng = np.random.default_rng(0)
    used: list[list[tuple[int, ...]]] = [
        [tuple(rng.permutation(EXPERTS - 2)[:TOP].tolist()) for _ in range(LAYERS)] for _ in range(400)
    ]
    totals = {}
    with caplog.at_level(logging.WARNING, "vllm.spac"):
        for says in ({}, {layer: [((layer + 1) % LAYERS, (6, 7))] for layer in range(LAYERS)}):
            with pool(8, "reuse", extra=0.1) as made:
                made.script.says = says
                for layers in used:
                    made.step(*layers)
                totals[bool(says)] = made.counters.loads + made.counters.prefetches
    assert made.counters.prefetches > 64 and made.counters.prefetch_hits == 0
    assert totals[False] < totals[True] <= 1.1 * totals[False]
    [said] = [record.getMessage() for record in caplog.records if "pauses" in record.getMessage()]
    assert "prefetch=script pauses: layers used 0 of the last" in said and "--spac-prefetch off" in said


# -- settings ------------------------------------------------------------------------------------------------------


class OfRouters(Script):
    needs = frozenset({Signal.ROUTER_INPUT})

    def __init__(self, num_experts: int) -> None:
        super().__init__()


class OfTheFuture(OfRouters):
    needs = frozenset({Signal.FUTURE})


def test_a_predictor_of_another_package_may_look_at_layers() -> None:
    settings = PrefetchSettings(prefetch=f"{__name__}:OfRouters")
    assert settings.observes_layers and isinstance(settings.build(3), OfRouters)
    with pytest.raises(ConfigError, match="looks at future, which is not passed on to predictors; use off"):
        PrefetchSettings(prefetch=f"{__name__}:OfTheFuture")


def test_a_trained_predictor_needs_its_file() -> None:
    with pytest.raises(ConfigError, match="prefetch='neural' is trained for a model; use --spac-prefetch neural@file"):
        PrefetchSettings(prefetch="neural")
    with pytest.raises(ConfigError, match="neural has no argument 'reach'"):
        PrefetchSettings.of("neural@reach=2", built=Script())
    assert PrefetchSettings.of("neural@depth=2", built=Script()).depth == 2
    with pytest.raises(ConfigError, match="extra of the prefetcher must be from 0 to 1"):
        PrefetchSettings(extra=1.5)
