"""The pool's one promise to the layers, for any routing: while a wave is held, the slots that it names hold exactly
the experts that were routed to. Every expert is filled with its own number, so a wrong or torn slot shows.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_store import MemoryStore
from torch import Tensor

from vllm_spac import components
from vllm_spac.core import NOT_RUN, MoEShape, RequestRows, RowKind, Step, TensorSpec
from vllm_spac.decisions.policies.base import Policy
from vllm_spac.errors import StoreError
from vllm_spac.execution.base import ExecutionContext
from vllm_spac.execution.host.slot_runner import Wave
from vllm_spac.execution.host.slots_execution import SlotExecution
from vllm_spac.recording.metrics import Counters

BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # the machine may be, and that is no failure
SPECS = {"w13": TensorSpec((3, 2), torch.float32), "w2": TensorSpec((2,), torch.bfloat16)}  # numbers < 256 are exact
SHAPE = MoEShape(("a", "b", "c"), experts=8, top_k=3, tensors=SPECS)
DECODE = Step((RequestRows(0, 1, RowKind.DECODE),))


class Torn(MemoryStore):
    """Takes its time between spoiling a slot and filling it, so that whoever reads too early sees NaN."""

    def __init__(self, shape: MoEShape, *, delay: float = 0.0) -> None:
        super().__init__(shape, "")
        self.delay = delay
        self.failures: dict[int, list[Exception]] = {}
        self.reads: Counter[int] = Counter()
        for key in range(shape.total):
            self.put(
                key,
                {name: torch.full(spec.shape, float(key), dtype=spec.dtype) for name, spec in shape.tensors.items()},
            )

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        self.reads[key] += 1
        for tensor in into.values():
            tensor.fill_(float("nan"))
        time.sleep(self.delay)  # also lets the other threads run
        if self.failures.get(key):
            raise self.failures[key].pop()
        return super().read(key, into)


class Pool(SlotExecution):
    """With poisoned slots and a torn store; ``check`` does what a layer does."""

    def __init__(
        self, slots: int, shape: MoEShape = SHAPE, policy: str | Policy = "lru", delay: float = 0.0, threads: int = 4
    ):
        tensors = {
            name: torch.full((slots, *spec.shape), float("nan"), dtype=spec.dtype)
            for name, spec in shape.tensors.items()
        }
        store = Torn(shape, delay=delay)
        chosen = components.build("policies", policy) if isinstance(policy, str) else policy
        super().__init__(ExecutionContext(shape, slots, chosen, store, tensors, io_threads=threads, path="double"))

    def assert_resident(self, layer: int, ids: Tensor, slot_ids: Tensor) -> None:
        """Each routed id's slot holds its expert, whole."""
        keys = (ids.long() + layer * self.shape.experts).flatten()
        for tensor in self.tensors.values():
            found = tensor[slot_ids.long().flatten()].flatten(1).float()
            assert (found == keys[:, None]).all()

    def waves(self, layer: int, ids: Tensor) -> Iterator[Wave]:
        return self.slots.waves(layer, ids, self._counted)

    def check(self, layer: int, ids: Tensor) -> list[list[int]]:
        """Run a layer; returns the rows of its waves."""
        before, parts = ids.clone(), []
        for wave in self.waves(layer, ids):
            rows = ids[wave.rows]
            assert wave.slot_ids.shape == rows.shape and wave.slot_ids.dtype == ids.dtype
            assert ((wave.slot_ids >= 0) & (wave.slot_ids < self.residency.slots)).all()
            assert len(rows.unique()) == len(wave.slot_ids.unique()) <= self.residency.slots
            self.assert_resident(layer, rows, wave.slot_ids)
            self.residency.check_integrity()
            parts.append(torch.arange(len(ids))[wave.rows].tolist())
        assert torch.equal(ids, before), "the router's ids were changed"
        assert sorted(row for part in parts for row in part) == list(range(len(ids))), "each row is in one wave"
        assert all(part and part == sorted(part) for part in parts)
        self.residency.check_integrity()
        self.assert_nothing_pinned()
        return parts

    def assert_nothing_pinned(self) -> None:
        """A copy of the books can give every slot to somebody else: no pin is left behind."""
        copy.deepcopy(self.residency).prepare(range(self.shape.total - self.residency.slots, self.shape.total))


@pytest.fixture
def pools() -> Iterator[list[Pool]]:
    made: list[Pool] = []
    yield made
    for pool in made:
        pool.close()


def all_experts(layer_experts: int = SHAPE.experts, top_k: int = SHAPE.top_k) -> Tensor:
    """Rows that use every expert of a layer."""
    ids = torch.arange(-(-layer_experts // top_k) * top_k) % layer_experts
    return ids.view(-1, top_k)


def routings(shape: MoEShape = SHAPE, rows: int = 9) -> st.SearchStrategy[Tensor]:
    """[rows, top_k]; rows that are padding hold the same expert several times."""
    expert = st.integers(0, shape.experts - 1)
    row = st.one_of(
        st.lists(expert, min_size=shape.top_k, max_size=shape.top_k, unique=True),
        expert.map(lambda one: [one] * shape.top_k),
    )
    dtype = st.sampled_from([torch.int32, torch.int64])
    table = st.lists(row, max_size=rows)
    return st.builds(lambda rows, dtype: torch.tensor(rows, dtype=dtype).view(-1, shape.top_k), table, dtype)


forwards = st.lists(st.tuples(st.integers(0, len(SHAPE.layers) - 1), routings()), min_size=1, max_size=8)


@given(forwards, st.integers(SHAPE.top_k, SHAPE.total), st.sampled_from(components.names("policies")))
@settings(max_examples=examples(120), **BUSY)
def test_every_row_sees_its_experts(forwards: list[tuple[int, Tensor]], slots: int, policy: str) -> None:
    pool = Pool(slots, policy=policy)
    try:
        for layer, ids in forwards:
            parts = pool.check(layer, ids)
            if 0 < len(ids.unique()) <= slots:
                assert parts == [list(range(len(ids)))], "split without need"
    finally:
        pool.close()


@given(forwards, st.integers(SHAPE.top_k, SHAPE.total), st.data())
@settings(max_examples=examples(60), **BUSY)
def test_counters_add_up(forwards: list[tuple[int, Tensor]], slots: int, data: st.DataObject) -> None:
    pool, experts, waves, steps = Pool(slots), 0, 0, 0
    try:
        for layer, ids in forwards:
            counted = data.draw(st.booleans())
            reads = pool.store.reads.copy()
            before = replace(pool.counters, bytes=dict(pool.counters.bytes), steps=dict(pool.counters.steps))
            if counted:
                pool.begin_step(DECODE)
            parts = pool.check(layer, ids)
            pool.end_forward()
            if not counted:
                assert pool.counters == before
                continue
            steps += 1
            waves += len(parts)
            experts += len(ids.unique())
            moved = pool.store.reads - reads
            assert pool.counters.misses - before.misses == len(moved)
            assert pool.counters.loads - before.loads == moved.total()
        counters = pool.counters
        assert counters.hits + counters.misses == experts
        assert sum(counters.bytes.values()) == counters.bytes.get("double", 0) == counters.loads * SHAPE.expert_bytes
        assert counters.waves == waves
        assert counters.steps == ({"decode": steps} if steps else {})
    finally:
        pool.close()


def test_long_prefill(pools: list[Pool]) -> None:
    """Thousands of rows: one wave where the experts fit, else several."""
    rng = np.random.default_rng(1)
    ids = torch.from_numpy(np.stack([rng.permutation(SHAPE.experts)[: SHAPE.top_k] for _ in range(2500)]))
    pools.append(pool := Pool(SHAPE.experts))
    assert pool.check(1, ids) == [list(range(2500))]
    pools.append(few := Pool(SHAPE.experts - 1))
    narrow = torch.where(ids == 7, 0, ids)
    assert few.check(1, narrow) == [list(range(2500))]
    assert len(few.check(0, torch.cat([narrow[:100], ids[:20], narrow[:100]]))) == 2


def test_experts_of_a_held_wave_stay_while_other_layers_run(pools: list[Pool]) -> None:
    pools.append(pool := Pool(2 * SHAPE.top_k))
    ids = torch.tensor([[6, 0, 3]])
    waves = pool.waves(0, ids)
    held = next(waves)
    for turn in range(8):
        other = torch.tensor([[turn % 8, (turn + 1) % 8, (turn + 2) % 8]])
        inner = next(pool.waves(1 + turn % 2, other))
        pool.assert_resident(1 + turn % 2, other, inner.slot_ids)
        pool.assert_resident(0, ids, held.slot_ids)
    assert next(waves, None) is None
    pool.assert_nothing_pinned()


# -- failures ----------------------------------------------------------------------------------------------------


@given(
    st.sets(st.integers(0, SHAPE.experts - 1), min_size=1, max_size=3),
    routings(),
    st.integers(SHAPE.top_k, SHAPE.total),
)
@settings(max_examples=examples(60), **BUSY)
def test_failed_read_is_told_and_can_be_tried_again(bad: set[int], ids: Tensor, slots: int) -> None:
    pool = Pool(slots)
    try:
        pool.check(2, all_experts())  # so that slots are taken
        pool.store.failures = {SHAPE.key(1, expert): [StoreError(f"expert {expert} is gone")] for expert in bad}
        needed = bad & set(ids.flatten().tolist())
        pool.begin_step(DECODE)
        failures = 0
        while True:
            try:
                pool.check(1, ids)
                break
            except StoreError as error:
                failures += 1
                assert any(f"expert {expert} is gone" in str(error) for expert in needed)
                assert failures <= len(needed), "it fails for ever"
                pool.residency.check_integrity()
                pool.assert_nothing_pinned()
        pool.end_forward()
        assert (failures > 0) == bool(needed)
        assert pool.counters.loads == pool.counters.bytes.get("double", 0) // SHAPE.expert_bytes
        assert pool.counters.misses <= pool.counters.loads, "a forward that failed is not counted, its loads are"
        pool.store.failures = {}
        for layer in range(3):
            pool.check(layer, all_experts())
    finally:
        pool.close()


def test_all_errors_of_a_wave_are_told(pools: list[Pool]) -> None:
    pools.append(pool := Pool(SHAPE.experts))
    pool.store.failures = {1: [StoreError("one is gone")], 5: [StoreError("five is gone")]}
    with pytest.raises(StoreError, match="one is gone; five is gone"):
        pool.check(0, all_experts())


@pytest.mark.parametrize("error", [OSError("the disk"), RuntimeError("the device"), MemoryError("the host")])
def test_any_error_of_a_store_is_a_store_error(error: Exception, pools: list[Pool]) -> None:
    pools.append(pool := Pool(SHAPE.experts))
    pool.store.failures = {1: [error], 5: [error]}
    with pytest.raises(StoreError, match=str(error)) as raised:
        pool.check(0, all_experts())
    assert raised.value.__cause__ is error
    pool.check(0, all_experts())


def test_wave_that_is_given_up_is_unpinned(pools: list[Pool]) -> None:
    pools.append(pool := Pool(SHAPE.top_k))
    waves = pool.waves(0, all_experts())
    next(waves)
    waves.close()
    pool.residency.check_integrity()
    pool.assert_nothing_pinned()
    pool.check(1, all_experts())


# -- filling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, experts=40)], ids=["8 experts", "40 experts: several batches"])
def test_slot_and_key_are_the_same_where_all_fit(shape: MoEShape, pools: list[Pool]) -> None:
    """A layer then takes its own slots without asking: one mistake is wrong for ever."""
    pools.append(pool := Pool(shape.total, shape))
    assert pool.holds_all
    pool.begin_step(DECODE)
    assert sum(pool.fill()) == shape.total
    assert pool.residency.resident == shape.total
    assert (pool.residency.slot_of == np.arange(shape.total)).all()
    for tensor in pool.tensors.values():
        assert (tensor.flatten(1).float() == torch.arange(shape.total)[:, None]).all()
    for layer in range(len(shape.layers)):
        for wave in pool.waves(layer, all_experts(shape.experts)):
            assert torch.equal(wave.slot_ids, all_experts(shape.experts) + layer * shape.experts)
    assert pool.store.reads.total() == shape.total, "nothing moves any more"


@given(st.integers(SHAPE.top_k, SHAPE.total))
@settings(max_examples=examples(22), **BUSY)
def test_filling_shares_the_slots_among_the_layers(slots: int) -> None:
    pool = Pool(slots)
    try:
        assert pool.holds_all == (slots == SHAPE.total)
        assert sum(pool.fill()) == slots == pool.residency.resident
        resident = [
            layer for layer in range(3) for key in range(8) if pool.residency.slot_of[SHAPE.key(layer, key)] >= 0
        ]
        shares = Counter(resident)
        assert max(shares.values()) - min(shares.get(layer, 0) for layer in range(3)) <= 1
        pool.residency.check_integrity()
        pool.assert_nothing_pinned()
        assert pool.counters == Counters(), "filling is no step"
        for layer in range(3):
            pool.check(layer, all_experts())
    finally:
        pool.close()


def test_fill_tells_a_failure(pools: list[Pool]) -> None:
    pools.append(pool := Pool(SHAPE.total))
    pool.store.failures = {9: [StoreError("nine is gone")]}
    with pytest.raises(StoreError, match="nine is gone"):
        list(pool.fill())


def test_routing_of_long_prompts_is_not_kept(pools: list[Pool], monkeypatch) -> None:
    """Where all fit, ids wait to be counted, in a GPU's memory: few forwards of many rows must not fill it."""
    monkeypatch.setattr("vllm_spac.execution.host.step_routing._COUNT_PAIRS", 12)
    pools.append(pool := Pool(SHAPE.total))
    list(pool.fill())
    for kept in (1, 2, 0):
        pool.begin_step(DECODE)
        pool.observe(0, torch.tensor([[0, 1], [2, 1]]))
        pool.end_forward()
        assert len(pool._routed) == kept
    assert pool.counters.hits == 3 * 3


def test_the_policy_is_told_the_end_of_prompts_whose_rows_all_layers_ran(pools: list[Pool], monkeypatch) -> None:
    """An expert worker's layers run the rows that chose its experts: they are no rows of one text."""
    pools.append(pool := Pool(4))
    told: list[np.ndarray] = []
    monkeypatch.setattr(pool.residency.policy, "observe_prompt", told.append)
    step = Step((RequestRows(0, 3, RowKind.PREFILL),))
    rows = torch.tensor([[0, 1, 2], [2, 1, 3], [0, 3, 1]])
    for ids in (rows, rows[1:]):
        pool.begin_step(step)
        pool.observe(0, rows)
        pool.observe(1, ids)
        pool.end_forward()
    assert [each.shape for each in told] == [(3, SHAPE.total)]
    assert np.flatnonzero(told[0][1]).tolist() == [1, 2, 3, *(SHAPE.experts + expert for expert in (1, 2, 3))]


def test_counting_where_all_fit(pools: list[Pool]) -> None:
    pools.append(pool := Pool(SHAPE.total))
    list(pool.fill())
    pool.observe(0, torch.tensor([[0, 1, 2]]))
    assert pool.snapshot() == asdict(Counters()), "outside a step"
    pool.begin_step(DECODE)
    pool.observe(0, torch.tensor([[0, 1, 2], [2, 1, 7]]))
    pool.observe(1, torch.tensor([[5, 5, 5]]))
    pool.end_forward()
    pool.begin_step(DECODE)
    pool.observe(0, torch.tensor([[0, 1, 2]]))
    pool.end_forward()
    pool.observe(0, torch.tensor([[0, 1, 2]]))
    assert pool.snapshot() == asdict(Counters(hits=8, waves=3, steps={"decode": 2})), "the same expert, another forward"


def test_policy_observes_what_a_step_selected(pools: list[Pool]) -> None:
    pools.append(pool := Pool(4))
    seen = []
    pool.residency.policy.observe = lambda counts: seen.append(counts.tolist())
    pool.observe(0, torch.tensor([[0, 1, 2]]))
    prompt, verify = RequestRows(1, 3, RowKind.PREFILL), RequestRows(3, 5, RowKind.VERIFY, 1)
    pool.begin_step(Step((RequestRows(0, 1, RowKind.DECODE), prompt, verify)))
    pool.observe(0, torch.tensor([[0, 1, 2], [5, 5, 5], [6, 6, 6], [2, 1, 7], [1, 3, 0]]))
    pool.observe(2, torch.tensor([[5, 5, 5], [1, 1, 1], [1, 1, 1], [0, 6, 5], [5, 0, 1], [4, 4, 4]]))
    pool.end_forward()
    pool.end_forward()
    pool.begin_step(Step((prompt,)))
    pool.observe(0, torch.tensor([[0, 1, 2]] * 3))
    pool.end_forward()
    expected = [2, 3, 2, 1, 0, 0, 0, 1] + [NOT_RUN] * 8 + [2, 1, 0, 0, 0, 5, 1, 0]
    assert seen == [expected], "prompts and padding do not count, and a prompt alone is no news"


def test_policy_observes_selections_by_the_votes_of_their_rows(pools: list[Pool]) -> None:
    pools.append(pool := Pool(4))
    seen = []
    pool.residency.policy.observe = lambda counts: seen.append(counts.tolist())
    decode, verify = RequestRows(0, 1, RowKind.DECODE), RequestRows(3, 5, RowKind.VERIFY, 1, (1.0, 0.25))
    pool.begin_step(Step((decode, RequestRows(1, 3, RowKind.PREFILL), verify)))
    pool.observe(0, torch.tensor([[0, 1, 2], [5, 5, 5], [6, 6, 6], [2, 1, 7], [1, 3, 0]]))
    pool.end_forward()
    assert seen == [[1.25, 2.25, 2, 0.25, 0, 0, 0, 1] + [NOT_RUN] * 16]


def test_close_gives_the_store_back(pools: list[Pool]) -> None:
    pool, closed = Pool(4), []
    pool.store.close = lambda: closed.append(True)
    pool.close()
    assert closed
