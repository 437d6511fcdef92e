"""Reads ahead with real threads and slow, failing reads into poisoned slots: every row sees its experts, whole.

Nothing depends on time: where an order of events matters, a gate in the store makes it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from memory_store import MemoryStore
from poison import poison_slots
from torch import Tensor

from vllm_spac import components
from vllm_spac.cache import transfers
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.cache.prefetcher import ScorePrefetcher
from vllm_spac.cache.residency import Residency
from vllm_spac.core import MoEShape, RequestRows, RowKind, Step, TensorSpec
from vllm_spac.decisions.predictors.base import Signal
from vllm_spac.errors import ConfigError, StoreError
from vllm_spac.execution.base import ExecutionContext
from vllm_spac.execution.host.slots_execution import SlotExecution
from vllm_spac.methods.moe_spac.utility_predictor import UtilityEstimator
from vllm_spac.recording.metrics import Counters

SPECS = {"w13": TensorSpec((3, 2), torch.float32), "w2": TensorSpec((2,), torch.bfloat16)}  # numbers < 256 are exact
SHAPE = MoEShape(("a", "b", "c"), experts=8, top_k=3, tensors=SPECS)
VERIFY = Step((RequestRows(0, 9, RowKind.VERIFY, 8),))
PATIENCE = 30  # seconds until a test that hangs is told from a slow machine


class Gated(MemoryStore):
    """Spoils a slot before it fills it; a read waits at its gate, if it has one, and fails as often as it must."""

    def __init__(self, delay: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(SHAPE, "")
        self.delay = delay
        self.gates: dict[int, threading.Event] = {}
        self.begun: dict[int, threading.Event] = {key: threading.Event() for key in range(SHAPE.total)}
        self.failures: dict[int, list[BaseException]] = {}
        self.reads: Counter[int] = Counter()
        for key in range(SHAPE.total):
            self.put(key, {name: torch.full(spec.shape, float(key), dtype=spec.dtype) for name, spec in SPECS.items()})

    def gate(self, *keys: int) -> None:
        for key in keys:
            self.gates[key] = threading.Event()

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        self.reads[key] += 1
        for tensor in into.values():
            tensor.fill_(float("nan"))
        self.begun[key].set()
        if key in self.gates:
            assert self.gates[key].wait(PATIENCE), "nobody opened the gate"
        time.sleep(self.delay())  # also lets the other threads run
        if self.failures.get(key):
            raise self.failures[key].pop()
        return super().read(key, into)


class Pool(SlotExecution):
    def __init__(
        self, slots: int, policy: str = "utility", threads: int = 4, delay: Callable[[], float] = lambda: 0.0, **knobs
    ) -> None:
        tensors = {name: torch.empty((slots, *spec.shape), dtype=spec.dtype) for name, spec in SPECS.items()}
        super().__init__(
            ExecutionContext(
                SHAPE,
                slots,
                components.build("policies", policy),
                Gated(delay),
                tensors,
                io_threads=threads,
                path="double",
                ahead=PrefetchSettings(prefetch="utility", options={"gamma": 2}, **knobs),
            )
        )
        poison_slots(self)

    @property
    def ahead(self) -> transfers.Background:
        return self._loader._transfers.ahead

    def check(self, layer: int, ids: Tensor) -> None:
        """Run a layer and look at what its rows would read, also after everything else had its turn."""
        self.observe(layer, ids)
        for wave in self.slots.waves(layer, ids, self._counted):
            keys = (ids[wave.rows].long() + layer * SHAPE.experts).flatten()
            for _ in range(2):
                for tensor in self.tensors.values():
                    assert (tensor[wave.slot_ids.long().flatten()].flatten(1).float() == keys[:, None]).all()
                time.sleep(0)
            self.residency.check_integrity()
        assert not self.residency._pinned

    def until_read(self) -> None:
        until(lambda: all(ticket.done.done() for ticket in self.ahead._tickets.values()))

    def want(self, *keys: int) -> None:
        """A step has ended after which these experts have the highest score and all others none."""
        scores = np.zeros(SHAPE.total, dtype=np.int64)
        scores[list(keys)] = 4
        self._loader.prefetcher.scores = scores
        self._loader.end_step(None)


def making(build: Callable[..., SlotExecution]) -> Iterator[Callable[..., SlotExecution]]:
    """Yields what builds pools over ``Gated`` stores, read by threads; afterwards opens their gates and closes them."""
    made: list[SlotExecution] = []
    hand_off, transfers._HAND_OFF = transfers._HAND_OFF, -1

    def make(*args, **kwargs) -> SlotExecution:
        made.append(build(*args, **kwargs))
        return made[-1]

    yield make
    for pool in made:
        for gate in pool.store.gates.values():
            gate.set()
        pool.close()
    transfers._HAND_OFF = hand_off


@pytest.fixture
def make() -> Iterator[Callable[..., Pool]]:
    yield from making(Pool)


def row(*experts: int) -> Tensor:
    return torch.tensor([experts])


def until(condition: Callable[[], bool]) -> None:
    """Wait for a thread to get somewhere; the condition never becomes false again."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never happens"
        time.sleep(1e-3)


def in_thread(run: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def target() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread, errors


def finish(thread: threading.Thread) -> None:
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it hangs"


# -- any routing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [n for n in components.names("policies") if not components.find("policies", n).offline]
)
@pytest.mark.parametrize(("slots", "depth"), [(3, 16), (6, 3), (12, 16), (20, 4)])
def test_every_row_sees_its_experts(policy: str, slots: int, depth: int, make) -> None:
    rng = np.random.default_rng(slots)
    pool = make(slots, policy, delay=lambda: rng.choice([0.0, 0.0, 5e-4]), depth=depth)
    list(pool.fill())
    for step in range(2000):
        if step >= 40 and pool.counters.prefetches:  # on a busy machine it may be long until a read begins
            break
        for key in rng.integers(0, SHAPE.total, 2).tolist():
            pool.store.failures[key] = [StoreError("for now")] * int(rng.integers(0, 2))
        pool.begin_step(VERIFY)
        for layer in range(3):
            favourites = np.argsort(rng.random((9, SHAPE.experts)) + 0.5 * (np.arange(8) % 2), axis=1)[:, :3]
            try:
                pool.check(layer, torch.from_numpy(favourites))
            except StoreError as error:
                assert "for now" in str(error)
        pool.end_forward()
        pool.residency.check_integrity()
    counters = pool.counters
    assert counters.prefetches == counters.prefetch_hits + counters.prefetch_wasted + len(
        pool._loader.prefetcher.account.unused
    )
    assert counters.bytes.get("double ahead", 0) == counters.prefetches * SHAPE.expert_bytes
    assert counters.bytes["double"] == counters.loads * SHAPE.expert_bytes
    assert counters.prefetches > 0 and counters.prefetch_late <= counters.prefetches


def test_experts_that_score_are_there_before_they_are_needed(make) -> None:
    pool = make(6)
    list(pool.fill())  # 0, 1, 8, 9, 16, 17
    pool.want(2, 3, 10)
    pool.until_read()
    pool.begin_step(VERIFY)
    pool.check(0, row(2, 3, 2))
    pool.check(1, row(2, 2, 2))
    pool.end_forward()
    counters = pool.counters
    assert (counters.hits, counters.misses, counters.loads) == (3, 0, 0)
    assert (counters.prefetches, counters.prefetch_hits, counters.prefetch_late) == (3, 3, 0)
    assert counters.bytes == {"double ahead": 3 * SHAPE.expert_bytes}


@pytest.mark.parametrize("policy", ["lru", "utility"])
def test_scores_come_from_what_steps_select(policy: str, make) -> None:
    """The policy's own, or the estimator's where it has none; rows of prompts say nothing."""
    pool = make(9, policy)
    for rows, expert in ((1, 2), (2, 2), (3, 2)):
        pool.begin_step(Step((RequestRows(0, rows, RowKind.VERIFY, rows - 1), RequestRows(rows, 9, RowKind.PREFILL))))
        ids = torch.full((9, 3), 5)
        ids[:rows] = expert
        pool.observe(1, ids)
        pool.end_forward()
    pool.until_read()
    pool._loader.end_step(None)
    assert np.flatnonzero(pool.residency.slot_of >= 0).tolist() == [SHAPE.key(1, 2)]
    scores = pool._loader.prefetcher.scores
    assert scores[SHAPE.key(1, 2)] > 0 == scores[SHAPE.key(1, 5)]


def test_the_best_come_first_and_then_the_first_layers(make) -> None:
    pool, order = make(12, threads=1), []
    pool.store.gate(*range(SHAPE.total))
    pool.want(20, 2, 11, 5)
    for _ in range(4):
        until(lambda: pool.store.reads.total() == len(order) + 1)
        order.append(next(key for key in pool.store.reads if key not in order))
        pool.store.gates[order[-1]].set()
    assert order == [2, 5, 11, 20]
    pool.until_read()
    scores = np.zeros(SHAPE.total, dtype=np.int64)
    scores[[1, 9, 17]] = 1, 3, 3
    pool._loader.prefetcher.scores = scores
    pool._loader.end_step(None)
    assert list(pool.ahead.keys) == [9, 17, 1]


def test_never_a_better_one_for_a_worse_one(make) -> None:
    pool = make(3)
    pool.begin_step(VERIFY)
    pool.check(0, row(0, 1, 2))
    pool.end_forward()
    pool.want(0, 1, 2, 9, 10)
    assert pool.residency.resident == 3 and not pool.ahead.keys, "all that are there score as much"
    pool.want(0, 2, 9, 10)
    assert (
        (pool.residency.slot_of[[0, 2, 9]] >= 0).all() and pool.residency.slot_of[10] < 0 and not pool.residency._pinned
    )


def test_a_balancer_says_the_threshold(make) -> None:
    class Second:
        def threshold(self, layer: int) -> int:
            return 9 if layer == 0 else 1

    pool = make(12)
    pool._loader.prefetcher.balancer = Second()
    pool.want(2, 10, 18)
    assert set(pool.ahead.keys) | set(np.flatnonzero(pool.residency.slot_of >= 0).tolist()) == {10, 18}


class Backwards(UtilityEstimator):
    """Wants the experts that a step did not select; counts the steps that it sees."""

    def observe_step(self, counts: np.ndarray) -> None:
        self.scores = (counts == 0).astype(np.int64)


class OfRouters(UtilityEstimator):
    needs = frozenset({Signal.COUNTS, Signal.ROUTER_INPUT})


def prefetcher_of(prefetch: str, policy: str) -> ScorePrefetcher:
    settings = PrefetchSettings(prefetch=prefetch)
    chosen = components.build("policies", policy)
    transfers = SimpleNamespace(ahead=None, path="")
    residency = Residency(SHAPE.total, 6, chosen)
    predictor = settings.predictor_beside(chosen, SHAPE.total)
    return ScorePrefetcher(residency, transfers, Counters(), SHAPE.experts, predictor, settings)


@pytest.mark.parametrize("policy", ["lru", "utility"])
def test_scores_are_those_of_the_predictor_that_was_asked_for(policy: str) -> None:
    """Also where the policy keeps scores: it lends them to who wants the same predictor, and to nobody else."""
    counts = np.zeros(SHAPE.total, dtype=np.int64)
    counts[3] = 9
    for prefetch, hot in (("utility", [3]), (f"{__name__}:Backwards", np.flatnonzero(counts == 0).tolist())):
        prefetcher = prefetcher_of(prefetch, policy)
        assert not prefetcher.scores.any() and len(prefetcher.scores) == SHAPE.total
        prefetcher._residency.policy.observe(counts)
        prefetcher.observe(counts)
        assert np.flatnonzero(prefetcher.scores).tolist() == hot


@pytest.mark.parametrize(
    ("spec", "gamma"), [("utility", 2), ("utility@gamma=6", 6), ("utility@variant=literal", 8), ("off", 2)]
)
def test_gamma_is_the_number_of_drafts_whatever_the_policy(spec: str, gamma: int) -> None:
    """Unless it is given. Boundaries begin at gamma / 2: with two drafts one row is hot, with eight four are."""
    variant = "literal" if "literal" in spec else "paper"
    found = PrefetchSettings.of(spec, drafts=2).predictor_beside(components.build("policies", "lru"), 9)
    expected = UtilityEstimator(9, gamma, variant=variant)
    others = [UtilityEstimator(9, other, variant=variant) for other in {2, 6, 8} - {gamma}]
    for each in (expected, found, *others):
        each.observe_step(np.arange(9))
    assert (found.scores == expected.scores).all()
    assert all((found.scores != other.scores).any() for other in others)


def test_a_policy_lends_its_scores() -> None:
    lent = prefetcher_of("utility", "utility")
    counts = np.full(SHAPE.total, 9)
    lent._residency.policy.observe(counts)
    lent.observe(counts)
    assert lent.scores is lent._residency.policy.scores, "the estimator is not run twice"


def test_a_predictor_that_looks_at_more_is_refused() -> None:
    with pytest.raises(ConfigError, match="looks at router_input, which is not passed on"):
        PrefetchSettings(prefetch=f"{__name__}:OfRouters")


# -- a layer needs what is on its way ------------------------------------------------------------------------------


def test_a_read_that_has_begun_is_waited_for_and_not_repeated(make) -> None:
    pool = make(6)
    pool.store.gate(2)
    pool.want(2)
    assert pool.store.begun[2].wait(PATIENCE)
    pool.begin_step(VERIFY)
    thread, errors = in_thread(lambda: pool.check(0, row(2, 4, 5)))
    until(lambda: pool.store.reads[4] and pool.store.reads[5])  # what is missing is read meanwhile
    assert pool.residency.is_loading(2)
    pool.store.gates[2].set()
    finish(thread)
    pool.end_forward()
    assert errors == [] and pool.store.reads[2] == 1
    counters = pool.counters
    assert (counters.misses, counters.loads, counters.prefetch_hits, counters.prefetch_late) == (3, 2, 1, 1)
    assert counters.stall_seconds > 0


def test_a_read_that_has_not_begun_is_done_on_demand(make) -> None:
    pool = make(6, threads=1)
    pool.store.gate(2)
    pool.want(2, 3)
    assert pool.store.begun[2].wait(PATIENCE)
    pool.begin_step(VERIFY)
    pool.check(0, row(3, 4, 5))  # though the thread that reads ahead is stuck
    assert pool.store.reads[3] == 1 and pool.residency.is_loading(2)
    pool.end_forward()
    assert (pool.counters.loads, pool.counters.prefetches) == (3, 0)
    pool.store.gates[2].set()
    pool.check(0, row(2, 3, 4))


def test_a_thread_that_reads_ahead_stops_while_a_layer_waits_and_goes_on_afterwards(make) -> None:
    pool = make(6, threads=1)
    pool.store.gate(2)
    pool.want(2, 3)
    assert pool.store.begun[2].wait(PATIENCE)
    with pool.ahead.paused():
        pool.store.gates[2].set()
        until(lambda: pool.ahead._readers == 0)
        assert pool.store.reads[3] == 0
    assert pool.store.begun[3].wait(PATIENCE)


def test_a_read_that_is_cancelled_just_before_it_begins_does_not_write(make) -> None:
    """The thread has taken the ticket already; its slot may belong to another expert."""
    pool = make(6, threads=1)
    with pool.ahead.paused():
        pool.want(2)
        ticket = pool.ahead._tickets[2]
        pool._loader.prefetcher.cancel([2])
        pool.ahead._waiting.append(ticket)
    until(lambda: not pool.ahead._waiting and pool.ahead._readers == 0)
    assert pool.store.reads[2] == 0


def test_reads_ahead_do_not_starve_a_layer(make) -> None:
    """Every slot is promised, two reads have begun: the others make room at once, those when they are over."""
    pool = make(3, threads=4)
    pool.store.gate(2, 3, 4)
    pool.want(2, 3, 4)
    assert pool.store.begun[2].wait(PATIENCE) and pool.store.begun[3].wait(PATIENCE)
    assert set(pool.ahead.keys) == {2, 3, 4} and not pool.residency._free
    thread, errors = in_thread(lambda: pool.check(1, row(0, 1, 2)))
    until(lambda: 4 not in pool.ahead.keys)
    pool.store.gates[2].set()
    pool.store.gates[3].set()
    finish(thread)
    assert errors == [] and pool.store.reads[4] == 0
    assert pool.counters.prefetch_wasted == pool.counters.prefetches == 2


def test_what_has_been_passed_is_dropped(make) -> None:
    pool = make(12, threads=1)
    pool.store.gate(18)
    pool.want(18)
    assert pool.store.begun[18].wait(PATIENCE)
    pool.want(2, 10, 18)
    assert set(pool.ahead.keys) == {18, 2, 10}
    pool.check(1, row(3, 4, 5))
    assert set(pool.ahead.keys) == {18} and pool.residency.slot_of[10] < 0


def test_what_has_been_passed_is_not_asked_for(make) -> None:
    """When the only place is free again, the best that waits may belong to a layer that is over."""
    pool = make(12, depth=1)
    pool.store.gate(16)
    pool.want(16)
    assert pool.store.begun[16].wait(PATIENCE)
    pool.want(2, 10, 18)
    pool.store.gates[16].set()
    pool.until_read()
    pool.check(0, row(5, 6, 7))
    assert set(pool.ahead.keys) == {10} and pool.store.reads[2] == 0


def test_knob_for_the_reads_in_flight(make) -> None:
    assert [make(6, threads=4, background=n).ahead._threads for n in (1, 3, None)] == [1, 3, 2]


# -- failures ------------------------------------------------------------------------------------------------------


def test_a_read_ahead_that_fails_is_counted_and_tried_again_when_needed(make, caplog) -> None:
    pool = make(6)
    pool.store.failures[2] = [StoreError("two is gone")]
    pool.want(2)
    pool.until_read()
    pool.want(2)
    assert pool.counters.prefetch_failed == 1 and "two is gone" in caplog.text
    assert not pool.ahead.keys and pool.residency.slot_of[2] < 0, "not tried again for nobody"
    pool.begin_step(VERIFY)
    pool.check(0, row(2, 2, 2))
    assert pool.counters.prefetches == 0 and pool.counters.loads == 1


@pytest.mark.parametrize("times", [1, 2])
def test_a_failure_of_what_a_layer_waits_for_is_tried_again_and_then_told(times: int, make) -> None:
    pool = make(6)
    pool.store.gate(2)
    pool.store.failures[2] = [StoreError("two is gone")] * times
    pool.want(2)
    assert pool.store.begun[2].wait(PATIENCE)
    thread, errors = in_thread(lambda: pool.check(0, row(2, 3, 4)))
    until(lambda: pool.store.reads[3] and pool.store.reads[4])
    pool.store.gates[2].set()
    finish(thread)
    pool.residency.check_integrity()
    assert not pool.residency._pinned and not pool.residency._loading
    assert [str(error) for error in errors] == ["two is gone"] * (times - 1)
    pool.check(0, row(2, 3, 4))


def test_interrupt_in_the_callers_own_read(make) -> None:
    """What threads still read is over when it comes out, and nothing stays loading or pinned."""
    pool = make(6)
    pool.store.gate(4)
    pool.store.failures[2] = [KeyboardInterrupt()]
    thread, errors = in_thread(lambda: pool.check(0, row(2, 3, 4)))
    assert pool.store.begun[4].wait(PATIENCE)
    until(lambda: not pool.store.failures[2])
    assert thread.is_alive()
    pool.store.gates[4].set()
    finish(thread)
    assert [type(error) for error in errors] == [KeyboardInterrupt]
    pool.residency.check_integrity()
    assert not pool.residency._pinned and not pool.residency._loading and pool.residency.resident == 0
    pool.check(0, row(2, 3, 4))


def test_interrupt_while_a_read_ahead_is_waited_for(make, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(jobs):
        raise KeyboardInterrupt

    pool = make(6)
    pool.store.gate(2)
    pool.want(2)
    assert pool.store.begun[2].wait(PATIENCE)
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(transfers, "finish", interrupted)
        pool.check(0, row(2, 3, 4))
    pool.residency.check_integrity()
    assert not pool.residency._pinned and pool.residency._loading == {2} == set(pool.ahead.keys), "it is still read"
    pool.store.gates[2].set()
    pool.check(0, row(2, 3, 4))
    assert pool.store.reads[2] == 1


# -- shutdown ------------------------------------------------------------------------------------------------------


def test_close_in_the_middle_of_a_copy(make) -> None:
    before = threading.active_count()
    pool = make(12, threads=2)
    pool.store.gate(2)
    pool.want(2, 3, 4, 5)
    assert pool.store.begun[2].wait(PATIENCE)
    thread, errors = in_thread(pool._loader.close)
    until(lambda: pool.ahead._closed and not pool.ahead._waiting)
    assert thread.is_alive(), "the read in flight is waited for"
    pool.store.gates[2].set()
    finish(thread)
    assert errors == [] and set(pool.store.reads) == {2} and threading.active_count() == before
    pool._loader.close()


@pytest.mark.parametrize("needed", [(2, 3, 4), (3, 4, 5)])
def test_close_while_a_layer_waits(needed: tuple[int, ...], make) -> None:
    pool = make(12, threads=1)
    pool.store.gate(2, *needed)
    pool.want(2)
    assert pool.store.begun[2].wait(PATIENCE)
    forward, errors = in_thread(lambda: pool.check(0, row(*needed)))
    assert pool.store.begun[needed[1]].wait(PATIENCE)
    closing, problems = in_thread(pool._loader.close)
    until(lambda: pool._loader._transfers._pool._shutdown)
    for gate in pool.store.gates.values():
        gate.set()
    finish(closing)
    finish(forward)
    assert problems == [] and all("shutting down" in str(error) for error in errors)
    pool.residency.check_integrity()


def test_a_closed_pool_fails_and_does_not_hang(make) -> None:
    pool = make(6)
    pool.check(0, row(2, 3, 4))
    pool._loader.close()
    pool.check(0, row(2, 3, 4))
    with pytest.raises(StoreError, match="shutting down; start it again"):
        pool.check(1, row(2, 3, 4))
    pool.want(5, 6)
    pool.want(7)
    pool.residency.check_integrity()
    assert not pool.residency._pinned
