"""A layer that is divided between slots and the CPU gives what it gives in slots alone, up to rounding, whatever is
resident; and neither a slot that is being written nor a failure on either side ever shows as a number.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from looped_experts import Looped
from poison import poison_slots
from torch import Tensor

from vllm_spac import components
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.core import MoEShape, Rates, RequestRows, RowKind, Step, TensorSpec
from vllm_spac.cpu_kernels._thread import ExecutorThread
from vllm_spac.cpu_kernels.base import CpuExperts
from vllm_spac.decisions.guard import payback
from vllm_spac.errors import SpacError, StoreError
from vllm_spac.execution import cpu_check
from vllm_spac.execution.base import ExecutionContext, Rows
from vllm_spac.execution.host.slots_execution import SlotExecution
from vllm_spac.storage.host import HostStore

HIDDEN, EXPERTS, TOP_K, LAYERS = 4, 6, 2, 2
SPECS = {"w13_weight": TensorSpec((6, HIDDEN), torch.float32), "w2_weight": TensorSpec((HIDDEN, 3), torch.float32)}
SHAPE = MoEShape(("a", "b"), EXPERTS, TOP_K, SPECS)
TOTAL = SHAPE.total
RATES = Rates(fast=1e-4, stream=2e-4, cpu=1e-4, cpu_row=5e-5)
DECODE = Step((RequestRows(0, 1, RowKind.DECODE),))
PATIENCE = 300  # seconds, before what hangs is said to hang
BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


class Slow(HostStore):
    """Spoils a slot before it fills it; fails on demand."""

    def __init__(self, delay: float = 0.0) -> None:
        super().__init__(SHAPE, "")
        self.delay, self.failing = delay, False
        rng = torch.Generator().manual_seed(0)
        for key in range(TOTAL):
            self.put(key, {name: torch.randn(spec.shape, generator=rng) for name, spec in SPECS.items()})

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        for tensor in into.values():
            tensor.fill_(float("nan"))
        time.sleep(self.delay)
        if self.failing:
            raise StoreError("the store is gone")
        return super().read(key, into)


class Watched(Looped):
    """Fails on demand, waits on demand, and knows whether a kernel of the layer ran meanwhile."""

    exclusive = True

    def __init__(self) -> None:
        super().__init__(SHAPE, 1, "silu")
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Event()
        self.closed = False

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        self.inside.set()
        try:
            assert self.gate.wait(PATIENCE)
            if self.error is not None:
                raise self.error
            return super().run(x, weights, ids, experts)
        finally:
            self.inside.clear()

    def close(self) -> None:
        self.closed = True


class Early(Watched):
    """Releases the kernels of the layers when it has computed, and then waits for ``gate``."""

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        out = Looped.run(self, x, weights, ids, experts)
        self.released.set()
        assert self.gate.wait(PATIENCE)
        return out


class Layers:
    """The layers of a model with torch for a kernel."""

    activation = "silu"
    takes_slots, by_expert = True, False

    def __init__(
        self,
        slots: int,
        balancer: str = "fixed",
        delay: float = 0.0,
        policy: str = "lru",
        executor: type[Watched] = Watched,
        checked: bool = False,
        ahead: PrefetchSettings | None = None,
        **knobs,
    ) -> None:
        tensors = {name: torch.full((slots, *spec.shape), float("nan")) for name, spec in SPECS.items()}
        self.store, self.executor, self.calls = Slow(delay), executor(), 0
        built = components.build("policies", policy)
        options = {"io_threads": 2, "path": "double", "ahead": ahead or PrefetchSettings()}
        self.pool = SlotExecution(ExecutionContext(SHAPE, slots, built, self.store, tensors, **options))
        poison_slots(self.pool)
        chosen = components.build("balancers", balancer, rates=RATES, layers=LAYERS, top_k=TOP_K, **knobs)
        self.pool.attach_balancer(chosen, ExecutorThread(self.executor), checked)
        self.kernel = Looped(SHAPE, 1, "silu")

    def forward(self, layer: int, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return self.pool.forward(layer, x, weights, ids, self, Rows(len(x), as_routed=True))

    def cold(self, layer: int, ids: Tensor) -> np.ndarray | None:
        return self.pool._layers.cpu.cold(layer, ids.numpy(), None)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, slot_of=None, rows: int = 0) -> Tensor:
        assert not self.executor.inside.is_set(), "a kernel runs beside one that must be alone"
        self.calls += 1
        return self.kernel.run(x, weights, ids, self.pool.tensors)

    def all_hot(self, layer: int, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return self.kernel.run(x, weights, ids, self.store.layer(layer))


@pytest.fixture
def make() -> Iterator[type[Layers]]:
    made: list[Layers] = []

    def build(*args, **knobs) -> Layers:
        made.append(Layers(*args, **knobs))
        return made[-1]

    yield build
    for layers in made:
        layers.executor.gate.set()
        layers.pool.close()


def routed(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    ids = [torch.randperm(EXPERTS, generator=rng)[:TOP_K] for _ in range(rows)]
    weights = torch.rand(rows, TOP_K, generator=rng)
    return torch.randn(rows, HIDDEN, generator=rng), weights, torch.stack(ids).int()


forwards = st.lists(
    st.tuples(st.integers(0, LAYERS - 1), st.integers(1, 7), st.integers(0, 99)), min_size=1, max_size=6
)
balancers = st.sampled_from(
    [
        ("fixed", {"count": 1}),
        ("fixed", {"count": EXPERTS}),
        ("waterfill", {}),
        ("threshold", {}),
        ("threshold", {"misses": "load"}),
        ("none", {}),
    ]
)


@given(forwards, st.integers(TOP_K, TOTAL - 1), balancers, st.sampled_from(["lru", "utility"]))
@settings(max_examples=examples(80), **BUSY)
def test_hot_and_cold_are_all_hot(forwards, slots: int, balancer, policy: str) -> None:
    """In float32; of the few terms of an element each sum is rounded at most 16 times, by half an eps of what it adds,
    which is below 100 here."""
    layers = Layers(slots, balancer[0], policy=policy, **balancer[1])
    try:
        for layer, rows, seed in forwards:
            x, weights, ids = routed(rows, seed)
            before = layers.pool.residency.slot_of.copy()
            layers.pool.begin_step(DECODE)
            out = layers.forward(layer, x, weights, ids)
            layers.pool.end_forward()
            expected = layers.all_hot(layer, x, weights, ids)
            torch.testing.assert_close(out, expected, rtol=0, atol=16 * 100 * torch.finfo(torch.float32).eps / 2)
            layers.pool.residency.check_integrity()
            if balancer == ("fixed", {"count": EXPERTS}):
                assert (layers.pool.residency.slot_of == before).all(), "what runs on the CPU disturbs no slot"
        counters = layers.pool.counters
        used = sum(len(np.unique(routed(rows, seed)[2])) for _, rows, seed in forwards)
        assert counters.hits + counters.misses + counters.cpu_experts == used
        assert counters.cpu_rows >= counters.cpu_experts and (counters.cpu_experts == 0 or balancer[0] != "none")
    finally:
        layers.pool.close()


def test_policy_hears_of_what_ran_on_the_cpu(make) -> None:
    layers = make(4, count=EXPERTS, policy="utility")
    for _ in range(3):
        layers.pool.begin_step(DECODE)
        layers.forward(0, *routed(1, 0)[:2], torch.tensor([[0, 1]], dtype=torch.int32))
        layers.pool.end_forward()
    assert layers.pool.residency.resident == 0 and layers.pool.counters.cpu_experts == 6
    assert layers.pool.residency.policy._estimator is not None


def test_what_the_cpu_computes_is_needed_so_that_reads_ahead_may_begin(make) -> None:
    """MoE-SpAc's arrangement: the CPU computes each miss, and only what was to be read ahead has a slot."""
    ahead = PrefetchSettings(prefetch="utility", extra=0.1)
    layers = make(4, count=EXPERTS, policy="utility", ahead=ahead)
    for seed in range(44):
        layers.pool.begin_step(Step((RequestRows(0, 7, RowKind.VERIFY, 6),)))
        for layer in range(LAYERS):
            x, weights, _ = routed(7, seed)
            ids = torch.tensor([[0, 1]] * 7, dtype=torch.int32)
            out = layers.forward(layer, x, weights, ids)
            assert torch.equal(out, layers.all_hot(layer, x, weights, ids))
        layers.pool.end_forward()
    counters = layers.pool.counters
    assert counters.prefetch_hits > 0 and counters.cpu_experts > 0
    needed = counters.cpu_experts + counters.loads + counters.prefetch_hits - counters.prefetch_harmful
    in_flight = len(layers.pool._transfers.ahead.keys)
    assert counters.prefetches - counters.prefetch_hits + in_flight <= 0.1 * needed


VERIFY = Step((RequestRows(0, 7, RowKind.VERIFY, 6),))
PAIR = torch.tensor([[0, 1]] * 7, dtype=torch.int32)


def let_reads_end(layers) -> None:
    """On a busy machine a read may not have begun when its layer comes, which then gives it up."""
    for ticket in layers.pool._transfers.ahead._tickets.values():
        ticket.done.result(PATIENCE)


def test_in_the_paper_s_arrangement_only_reads_ahead_fill_slots(make) -> None:
    """No layer loads on demand, each miss runs on the CPU, and what was read ahead is used. Drafts are counted."""
    ahead = PrefetchSettings(prefetch="utility", extra=0.1)
    layers = make(4, "threshold", policy="utility@recycle=True", ahead=ahead, fixed=1)
    x, weights, _ = routed(7, 0)
    for _ in range(60):
        layers.pool.begin_step(VERIFY)
        for layer in range(LAYERS):
            torch.testing.assert_close(
                layers.forward(layer, x, weights, PAIR), layers.all_hot(layer, x, weights, PAIR), rtol=0, atol=1e-5
            )
            let_reads_end(layers)
        layers.pool.end_forward()
        let_reads_end(layers)
        layers.pool.residency.check_integrity()
    counters = layers.pool.counters
    assert counters.loads == counters.misses == 0, "nothing is loaded on demand or waited for"
    assert counters.prefetches == counters.prefetch_hits == 4 and counters.hits > counters.cpu_experts > 0
    assert layers.pool.balancer.gamma == pytest.approx(6), "the drafts of the steps"


def test_the_cpu_computes_what_is_still_being_read(make) -> None:
    """A read that has begun goes on for the next step; one that has not begun is given up."""
    layers = make(4, "threshold", policy="utility", ahead=PrefetchSettings(prefetch="utility", background=1))
    pool, gate, begun = layers.pool, threading.Event(), threading.Event()
    read = layers.store.read

    def gated(key: int, into: Mapping[str, Tensor]) -> int:
        begun.set()
        assert gate.wait(PATIENCE)
        return read(key, into)

    layers.store.read = gated
    pool._loader.prefetcher.scores = np.array([4, 4] + [0] * (TOTAL - 2))
    pool._loader.end_step(None)
    assert begun.wait(PATIENCE) and len(pool._transfers.ahead.keys) == 2
    x, weights, _ = routed(7, 0)
    pool.begin_step(VERIFY)
    out = layers.forward(0, x, weights, PAIR)
    torch.testing.assert_close(out, layers.all_hot(0, x, weights, PAIR), rtol=0, atol=1e-5)
    assert pool.counters.cpu_experts == 2 and pool.counters.hits == pool.counters.prefetch_late == 0
    assert list(pool._transfers.ahead.keys) == [0]
    pool.end_forward()
    pool.begin_step(VERIFY)
    gate.set()
    pool._transfers.ahead._tickets[0].done.result(PATIENCE)
    layers.forward(0, x, weights, PAIR)
    assert (pool.counters.prefetch_hits, pool.counters.hits, pool.counters.cpu_experts) == (1, 1, 3)


def test_the_cpu_may_compute_what_is_only_queued(make) -> None:
    """A read ahead that has not begun is worth no more than none: both experts are divided like other misses."""
    layers = make(4, "waterfill", policy="utility", ahead=PrefetchSettings(prefetch="utility"))
    pool, prefetcher = layers.pool, layers.pool._loader.prefetcher
    prefetcher.scores = np.array([4, 4] + [0] * (TOTAL - 2))
    with pool._transfers.ahead.paused():
        pool._loader.end_step(None)
        assert len(pool._transfers.ahead.keys) == 2 and not prefetcher.reading
        x, weights, _ = routed(7, 0)
        pool.begin_step(VERIFY)
        out = layers.forward(0, x, weights, PAIR)
    torch.testing.assert_close(out, layers.all_hot(0, x, weights, PAIR), rtol=0, atol=1e-5)
    assert (pool.counters.cpu_experts, pool.counters.misses, pool.counters.hits) == (1, 1, 0)
    assert not pool._transfers.ahead.keys


def test_layers_that_hit_nothing_let_the_prefetcher_go_on(make) -> None:
    """No expert of layer 0 is held, which is when it usually hears of a layer: reads for it are too late then."""
    layers = make(2, "threshold", policy="utility", ahead=PrefetchSettings(prefetch="utility", depth=1))
    pool = layers.pool
    prefetcher = pool._loader.prefetcher
    prefetcher.scores = np.array([0] * EXPERTS + [3] + [0] * (EXPERTS - 1))
    for key in (2, EXPERTS):
        prefetcher.queue.put(key, 3)
    pool.begin_step(VERIFY)
    layers.forward(0, *routed(7, 0)[:2], PAIR)
    assert not prefetcher.queue and set(pool._transfers.ahead.keys) <= {EXPERTS}
    assert pool.residency.slot_of[EXPERTS] >= 0 > pool.residency.slot_of[2]


def test_threshold_has_scores_where_neither_policy_nor_prefetcher_keeps_them(make) -> None:
    layers = make(4, "threshold", policy="lru")
    x, weights, _ = routed(7, 0)
    for first in (0, 2, 0):
        layers.pool.begin_step(Step((RequestRows(0, 7, RowKind.VERIFY, 6),)))
        layers.forward(0, x, weights, torch.tensor([[first, first + 1]] * 7, dtype=torch.int32))
        layers.pool.end_forward()
    assert layers.pool._loader.prefetcher.scores[:2].all() and not layers.pool._loader.prefetcher.scores[EXPERTS:].any()


@pytest.mark.parametrize(("times", "stops"), [(1.1, True), (0.9, False)])
def test_the_cpu_computes_only_while_steps_are_shorter_with_it(
    times: float, stops: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is the test's. Without the CPU the pool is one without a balancer; the change is logged once."""
    monkeypatch.setattr(payback, "PAUSE", 50)
    monkeypatch.setattr(payback, "KEEP", 50)
    layers, now, on_cpu = Layers(4, count=2, checked=True), 0.0, []
    pool, compared = layers.pool, 2 * cpu_check.BLOCK * payback.LEAST
    pool._layers.cpu._check._clock = lambda: now
    try:
        with caplog.at_level(logging.WARNING, "vllm.spac"):
            for number in range(2 * (compared + 50)):
                before = pool.counters.cpu_experts
                pool.begin_step(DECODE)
                for layer in range(LAYERS):
                    arguments = routed(3, number)
                    torch.testing.assert_close(layers.forward(layer, *arguments), layers.all_hot(layer, *arguments))
                on_cpu.append(pool.counters.cpu_experts > before)
                assert on_cpu[-1] == (pool._loader.prefetcher.balancer is not None)
                now += times if on_cpu[-1] else 1.0
                pool.end_forward()
    finally:
        pool.close()
    turns = [True] * cpu_check.BLOCK + [False] * 2 * cpu_check.BLOCK + [True] * cpu_check.BLOCK
    assert on_cpu[:compared] == turns * (compared // len(turns))
    assert on_cpu[compared : compared + 50] == [not stops] * 50
    assert pool.counters.cpu_stops == (2 if stops else 0)
    [said] = [record.getMessage() for record in caplog.records if "cpu_experts=auto" in record.getMessage()]
    assert ("stops computing" if stops else "goes on to compute") in said and f"took {times:.3f} (+-" in said


def test_steps_with_prompts_are_not_compared_and_a_balancer_that_is_named_is_not_checked(make) -> None:
    prompts = Step((RequestRows(0, 1, RowKind.PREFILL),))
    for checked, step in ((True, prompts), (False, DECODE)):
        layers = make(4, count=2, checked=checked)
        for number in range(2 * cpu_check.BLOCK):
            layers.pool.begin_step(step)
            layers.forward(0, *routed(1, number))
            layers.pool.end_forward()
        assert layers.pool._loader.prefetcher.balancer is not None and layers.pool.counters.cpu_stops == 0


# --- failures --------------------------------------------------------------------------------------------------------


def test_an_error_on_the_cpu_is_the_forward_s(make) -> None:
    layers, arguments = make(4, count=1), routed(3, 1)
    layers.executor.error = RuntimeError("no such instruction")
    with pytest.raises(SpacError, match="no such instruction") as raised:
        layers.forward(0, *arguments)
    assert raised.value.__cause__ is layers.executor.error
    layers.pool.residency.check_integrity()
    layers.executor.error = None
    torch.testing.assert_close(layers.forward(0, *arguments), layers.all_hot(0, *arguments))


def test_errors_on_both_sides_are_both_told(make) -> None:
    layers, arguments = make(4, count=1), routed(3, 1)
    layers.executor.error, layers.store.failing = RuntimeError("no such instruction"), True
    with pytest.raises(StoreError, match="the store is gone") as raised:
        layers.forward(0, *arguments)
    assert any("no such instruction" in note for note in raised.value.__notes__)
    layers.executor.error, layers.store.failing = None, False
    torch.testing.assert_close(layers.forward(0, *arguments), layers.all_hot(0, *arguments))


def test_loads_go_on_beside_and_kernels_wait(make) -> None:
    layers = make(4, count=1)
    layers.executor.gate.clear()
    with ThreadPoolExecutor(1) as thread:
        forward = thread.submit(layers.forward, 0, *routed(2, 3))
        deadline = time.monotonic() + PATIENCE
        while layers.pool.residency.resident == 0 and time.monotonic() < deadline:
            time.sleep(1e-3)
        assert layers.executor.inside.wait(PATIENCE) and layers.pool.residency.resident > 0, (
            "nothing was loaded meanwhile"
        )
        assert not forward.done()
        layers.executor.gate.set()
        torch.testing.assert_close(forward.result(PATIENCE), layers.all_hot(0, *routed(2, 3)))


def test_kernels_run_beside_an_executor_that_has_released_them(make) -> None:
    layers = make(4, count=1, executor=Early)
    for _ in range(2):  # what the first computation released does not release the kernels beside the second one
        layers.calls = 0
        layers.executor.gate.clear()
        with ThreadPoolExecutor(1) as thread:
            forward = thread.submit(layers.forward, 0, *routed(2, 3))
            deadline = time.monotonic() + PATIENCE
            while layers.calls == 0 and time.monotonic() < deadline:
                time.sleep(1e-3)
            assert layers.calls == 1 and not forward.done(), "the kernel waits although nothing is in its way"
            layers.executor.gate.set()
            torch.testing.assert_close(forward.result(PATIENCE), layers.all_hot(0, *routed(2, 3)))


def test_a_release_is_of_one_computation(make) -> None:
    layers = make(4, count=1)
    thread, experts = layers.pool._cpu, layers.store.layer(0)
    with thread.computing(*routed(2, 3), experts) as computation:
        computation.wait_for_turn()
    layers.executor.gate.clear()
    with ThreadPoolExecutor(1) as waiting, thread.computing(*routed(2, 3), experts) as computation:
        way = waiting.submit(computation.wait_for_turn)
        assert layers.executor.inside.wait(PATIENCE)
        time.sleep(0.01)
        assert not way.done(), "the first computation has released the kernels for the second one"
        layers.executor.gate.set()
        way.result(PATIENCE)


def test_a_cancelled_computation_releases_the_kernels(make) -> None:
    layers = make(4, count=1)
    pool, begun, over = layers.pool._cpu._pool, threading.Event(), threading.Event()
    pool.submit(lambda: (begun.set(), over.wait(PATIENCE)))
    assert begun.wait(PATIENCE)
    with layers.pool._cpu.computing(*routed(2, 3), layers.store.layer(0)) as computation:
        pool.shutdown(wait=False, cancel_futures=True)
        with ThreadPoolExecutor(1) as waiting:
            waiting.submit(computation.wait_for_turn).result(PATIENCE)
        with pytest.raises(SpacError, match="shutting down"):
            computation.result()
        over.set()


def test_shutdown_in_mid_computation_waits_for_it_and_leaves_no_thread(make) -> None:
    layers, before = make(4, count=1), threading.active_count()
    layers.executor.gate.clear()
    with ThreadPoolExecutor(2) as threads:
        forward = threads.submit(layers.forward, 0, *routed(2, 3))
        assert layers.executor.inside.wait(PATIENCE)
        closing = threads.submit(layers.pool.close)
        time.sleep(0.01)
        assert not closing.done() and not layers.executor.closed, "what is being computed is waited for"
        layers.executor.gate.set()
        closing.result(PATIENCE)
        error = forward.exception(PATIENCE)
        assert error is None or isinstance(error, SpacError)
    assert layers.executor.closed and threading.active_count() < before
    assert not any(thread.name.startswith("spac-cpu") for thread in threading.enumerate())
    with pytest.raises(SpacError, match="shutting down"), layers.pool._cpu.computing(*routed(1, 0), {}):
        pass


def test_an_executor_that_refuses_a_layer_leaves_no_thread() -> None:
    class Refuses(Watched):
        def prepare(self, experts) -> None:
            raise ValueError("not this layer")

    executor: CpuExperts = Refuses()
    with pytest.raises(ValueError, match="not this layer"):
        ExecutorThread(executor, [{}])
    assert executor.closed
    assert not any(thread.name.startswith("spac-cpu") for thread in threading.enumerate())
