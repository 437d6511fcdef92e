"""Forwards with many rows read what the next layer will use while a layer runs: every row sees its experts, whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from poison import poison_slots
from test_prefetcher import SHAPE, SPECS, Gated, making, until
from test_slots import BUSY
from torch import Tensor

from vllm_spac import components
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.errors import StoreError
from vllm_spac.execution.base import ExecutionContext
from vllm_spac.execution.host.slots_execution import SlotExecution

ROWS = 12  # 36 pairs for 8 experts
PROMPT = Step((RequestRows(0, ROWS, RowKind.PREFILL),))


class Pool(SlotExecution):
    """With poisoned slots and a store that spoils what it is about to fill."""

    def __init__(
        self, slots: int, policy: str = "lru", next_layer: bool = True, prefetch: str = "off", **store
    ) -> None:
        tensors = {name: torch.empty((slots, *spec.shape), dtype=spec.dtype) for name, spec in SPECS.items()}
        ahead = PrefetchSettings(prefetch=prefetch, next_layer=next_layer)
        made = components.build("policies", policy), Gated(**store), tensors
        super().__init__(ExecutionContext(SHAPE, slots, *made, io_threads=4, path="double", ahead=ahead))
        poison_slots(self)

    def run(self, layer: int, ids: Tensor, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Runs a layer and looks at what its rows would read."""
        self.observe(layer, ids)
        if (found := self._layers.together(layer, ids.numpy(), self._counted)) is not None:
            slots, pinned = found
            meanwhile()
            self.look(layer, ids, torch.from_numpy(slots))
            self._layers.release(pinned)
            return
        for wave in self.slots.waves(layer, ids, self._counted):
            meanwhile()
            self.look(layer, ids[wave.rows], wave.slot_ids)

    def look(self, layer: int, ids: Tensor, slot_ids: Tensor) -> None:
        keys = (ids.long() + layer * SHAPE.experts).flatten()
        for tensor in self.tensors.values():
            assert (tensor[slot_ids.long().flatten()].flatten(1).float() == keys[:, None]).all()
        self.residency.check_integrity()

    def prompt(self, ids: Tensor, meanwhile: Callable[[int], None] = lambda layer: None) -> None:
        self.begin_step(PROMPT)
        for layer in range(len(SHAPE.layers)):
            self.run(layer, ids, lambda layer=layer: meanwhile(layer))
        self.end_forward()
        self.residency.check_integrity()

    def until_read(self) -> None:
        until(lambda: all(ticket.done.done() for ticket in self._transfers.ahead._tickets.values()))


@pytest.fixture
def make() -> Iterator[Callable[..., Pool]]:
    yield from making(Pool)


def all_experts(rows: int = ROWS) -> Tensor:
    """Rows that use every expert."""
    start = torch.arange(rows)[:, None] * SHAPE.top_k
    return ((start + torch.arange(SHAPE.top_k)) % SHAPE.experts).int()


def test_the_next_layer_is_read_while_a_layer_runs(make) -> None:
    pool = make(2 * SHAPE.experts)
    for _ in range(4):
        pool.prompt(all_experts())
    loads, ahead = pool.counters.loads, pool.counters.prefetches
    pool.prompt(all_experts(), lambda layer: pool.until_read())
    assert pool.counters.loads - loads <= SHAPE.experts, "only the first layer waits"
    assert pool.counters.prefetches - ahead == (len(SHAPE.layers) - 1) * SHAPE.experts
    assert pool.counters.prefetch_wasted == 0


def test_nothing_is_read_ahead_where_it_is_switched_off_or_rows_are_few(make) -> None:
    for pool, rows in ((make(2 * SHAPE.experts, next_layer=False), ROWS), (make(2 * SHAPE.experts), 10)):
        for _ in range(6):
            pool.prompt(all_experts(rows))
        assert pool.counters.prefetches == 0 and not pool.queued


def test_prompts_that_use_other_experts_each_time_read_nothing_ahead(make) -> None:
    pool, rng = make(2 * SHAPE.experts), np.random.default_rng(0)
    for _ in range(12):
        few = rng.permutation(SHAPE.experts)[: SHAPE.experts // 2]
        pool.prompt(torch.from_numpy(np.stack([rng.permutation(few)[: SHAPE.top_k] for _ in range(ROWS)])).int())
    assert pool.counters.prefetches == 0


def test_a_read_ahead_that_fails_is_read_again_when_it_is_needed(make) -> None:
    pool = make(2 * SHAPE.experts)
    for _ in range(4):
        pool.prompt(all_experts())
    key = SHAPE.experts + 2
    pool.store.failures[key] = [StoreError("once")]
    before = pool.store.reads[key]
    pool.prompt(all_experts(), lambda layer: pool.until_read())
    assert pool.store.reads[key] == before + 2 and pool.counters.prefetch_failed == 1


def test_a_layer_waits_for_what_is_being_read_and_takes_over_what_is_not(make) -> None:
    """One read of the next layer hangs at its gate until that layer has asked for it."""
    pool = make(2 * SHAPE.experts)
    for _ in range(4):
        pool.prompt(all_experts())
    late = pool.counters.prefetch_late
    pool.store.gate(SHAPE.experts)
    opened = []

    def opening(layer: int) -> None:
        if layer == 0:
            until(lambda: pool.store.begun[SHAPE.experts].is_set())
            load = pool._transfers.ahead.wait
            pool._transfers.ahead.wait = lambda keys: (
                pool.store.gates[SHAPE.experts].set(),
                opened.append(keys),
                load(keys),
            )[2]

    pool.store.begun[SHAPE.experts].clear()
    pool.prompt(all_experts(), opening)
    assert opened and SHAPE.experts in opened[0] and pool.counters.prefetch_late > late


def test_what_the_next_layer_has_already_is_not_evicted_for_more_of_it(make) -> None:
    pool = make(4)
    pool.run(1, torch.tensor([[0, 1, 2]]))
    first = SHAPE.experts
    pool._loader.prefetcher.prefetch_next([first + 5, first + 6], range(first, 2 * first))
    assert (pool.residency.slot_of[first : first + 3] >= 0).all()
    assert pool.residency.is_loading(first + 5) and pool.residency.slot_of[first + 6] < 0, "there is one free slot"


@pytest.mark.parametrize("prefetch", ["off", "utility"])
def test_what_is_queued_is_not_cancelled(make, prefetch: str) -> None:
    """Two reads hang at their gates, as many as begin; a prefetcher plans meanwhile."""
    pool, keys = make(SHAPE.total, prefetch=prefetch), [8, 9, 10, 11]
    pool.store.gate(8, 9)
    pool._loader.prefetcher.prefetch_next(keys, range(8, 16))
    for key in (8, 9):
        until(pool.store.begun[key].is_set)
    pool._loader.end_step(np.zeros(SHAPE.total, dtype=np.int64))
    assert list(pool._transfers.ahead.keys) == keys


def test_nothing_is_read_ahead_where_the_cpu_may_compute_it(make) -> None:
    pool = make(2 * SHAPE.experts)
    pool._loader.prefetcher.balancer = SimpleNamespace(needs_scores=False)
    for _ in range(6):
        pool.prompt(all_experts())
    assert pool.counters.prefetches == 0


@settings(max_examples=examples(40), **BUSY)
@given(
    slots=st.integers(SHAPE.top_k, SHAPE.total - 1),
    policy=st.sampled_from(components.names("policies")),
    seeds=st.lists(st.integers(0, 2**16), min_size=1, max_size=8),
    delay=st.sampled_from([0.0, 1e-4]),
    prefetch=st.sampled_from(["off", "utility"]),
)
def test_any_prompts_over_any_slots(slots: int, policy: str, seeds: list[int], delay: float, prefetch: str) -> None:
    pool = Pool(slots, policy, prefetch=prefetch, delay=lambda: delay)
    try:
        for seed in seeds:
            rng = np.random.default_rng(seed)
            rows = int(rng.integers(1, 2 * ROWS))
            used = rng.permutation(SHAPE.experts)[: int(rng.integers(SHAPE.top_k, SHAPE.experts + 1))]
            ids = np.stack([rng.permutation(used)[: SHAPE.top_k] for _ in range(rows)]).astype(np.int32)
            pool.prompt(torch.from_numpy(ids))
        assert not pool.residency._pinned
    finally:
        pool.close()
