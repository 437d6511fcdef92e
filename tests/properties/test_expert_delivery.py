"""Experts that the device cannot address: layers order them, and have stock's bits or the step has an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from looped_experts import Looped
from memory_store import MemoryStore
from test_execution import DECODE, EXPERTS, LAYERS, LONG, PROMPT, TOP_K, D, Pool, Replayed, packed, shape
from torch import Tensor

from vllm_spac import components
from vllm_spac.cache.host_tier import HostTier
from vllm_spac.cache.residency import NOWHERE
from vllm_spac.cache.transfers import HostRows
from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.cpu_kernels._thread import ExecutorThread
from vllm_spac.cpu_kernels.base import check_same
from vllm_spac.decisions.policies.base import Policy
from vllm_spac.errors import StoreError
from vllm_spac.execution import expert_delivery
from vllm_spac.execution.device import cpu_share
from vllm_spac.execution.expert_delivery import ExpertDelivery
from vllm_spac.storage.base import allocate
from vllm_spac.system.host_blocks import HostBlock

SOME, ALL = (1,), tuple(range(LAYERS))  # layers whose experts are out of reach


class FarStore(MemoryStore):
    """Of the layers ``far`` nothing can be addressed, and ``read`` does what a test says."""

    far: tuple[int, ...] = ALL

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.gate, self.error, self.reads = threading.Event(), None, 0
        self.gate.set()
        self._far: Mapping[str, Tensor] | None = None

    def in_reach(self, key: int) -> bool:
        return key // self.shape.experts not in self.far

    def staging(self) -> Mapping[str, Tensor]:
        self._far = self._far or allocate(self.shape.tensors, self.shape.experts, "cpu")
        return self._far

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        self.reads += 1
        for name, tensor in super().view(key).items():
            into[name].copy_(tensor)
        return self.shape.expert_bytes

    def view(self, key: int) -> dict[str, Tensor]:
        assert self.in_reach(key), "it has no address"
        return super().view(key)

    def layer(self, number: int) -> Mapping[str, Tensor]:
        assert self.addressable, "a disk has no layers in memory"
        return super().layer(number)


class FarPool(Pool):
    """A pool whose store has layers out of reach; what an earlier layer had staged is no longer there."""

    def __init__(
        self,
        slots: int,
        far: tuple[int, ...] = ALL,
        layout=None,
        rows: int = 0,
        disk: bool = True,
        tier_policy: Policy | None = None,
        **options: Any,
    ) -> None:
        if rows:
            layout = layout or shape()
            built = components.build("policies", options.get("policy", "lru")) if tier_policy is None else tier_policy
            tier = HostTier(layout.total, rows, 0, built)
            options["host"] = HostRows(tier, HostBlock(layout.tensors, rows, pin=False))
        build, store = components.build, type("Far", (FarStore,), {"far": far, "addressable": far != ALL or not disk})
        made = lambda family, name, **given: store(**given) if family == "stores" else build(family, name, **given)  # noqa: E731
        components.build = made
        try:
            super().__init__(slots, layout, io_threads=3, **options)
        finally:
            components.build = build
        assert self.admission.delivery is not None
        self.store.reads = 0
        answer = self.admission.delivery._answer

        def poisoned(order: int) -> None:
            for tensor in self.store.staging().values():
                tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 255)
            if rows:  # free ones, too
                self.admission.delivery._release()
                for tensor in self.host.tensors.values():
                    tensor[self.host.tier._free] = float("nan") if tensor.dtype.is_floating_point else 255
            answer(order)

        self.admission.delivery._answer = poisoned


@pytest.fixture
def far() -> Iterator[Callable[..., FarPool]]:
    pools: list[FarPool] = []
    yield lambda *args, **options: pools.append(FarPool(*args, **options)) or pools[-1]
    for pool in pools:
        pool.store.gate.set()
        pool.close()


# -- tokens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [SOME, ALL])
@pytest.mark.parametrize("policy", ["lru", "reuse"])
@pytest.mark.parametrize(("slots", "layout"), [(TOP_K, None), (7, packed()), (LAYERS * EXPERTS - 1, None)])
def test_layers_give_the_bits_that_they_give_over_memory(far, layers, policy: str, slots: int, layout) -> None:
    pool, rng = far(slots, layers, layout, policy=policy), torch.Generator().manual_seed(0)
    for number in range(12):
        pool.check((DECODE, PROMPT, LONG)[number % 3], rng)
        pool.admission.check_integrity()
    stats = pool.snapshot()
    assert (pool.store.reads > 0) == (stats["stall_seconds"] > 0)
    assert pool.store.reads > 0 or slots == LAYERS * EXPERTS - 1


def test_what_has_a_slot_is_not_read_again(far) -> None:
    pool, ids = far(LAYERS * TOP_K, policy="lru"), torch.arange(TOP_K)[None]
    one = Step((RequestRows(0, 1, RowKind.DECODE),))
    for _ in range(3):
        pool.check(one, torch.Generator().manual_seed(0), ids=ids)
    before = pool.store.reads
    for _ in range(3):
        pool.check(one, torch.Generator().manual_seed(0), ids=ids)
    assert pool.store.reads == before


@pytest.mark.parametrize("layers", [SOME, ALL])
def test_a_graph_waits_in_its_replays(far, monkeypatch, layers) -> None:
    pool, rng = far(7, layers, policy="reuse"), torch.Generator().manual_seed(0)
    step = Replayed(pool, 4, monkeypatch)
    before = pool.store.reads
    for number in range(16):
        step.check(1 + number % 4, rng)
    assert pool.store.reads > before


@pytest.mark.parametrize("rows", [0, 4, 9])
@pytest.mark.parametrize("late", [False, True])
def test_beside_a_share_of_the_CPU_and_where_that_is_late(far, monkeypatch, late: bool, rows: int) -> None:
    """What the CPU does not answer is delivered, too, before the device computes it; ``rows``: of a disk."""
    monkeypatch.setattr(cpu_share, "PATIENCE", 1_000_000 if late else 20_000_000_000)
    pool, gate = far(7, policy="reuse", disk=rows > 0, rows=rows), threading.Event()
    rng, held = torch.Generator().manual_seed(0), pool.host.tier.row_of if rows else np.zeros(0)

    class Gated(Looped):
        def run(self, *given: Any) -> Tensor:
            assert not late or gate.wait(60)
            return super().run(*given)

    balancer = components.build("balancers", "fixed", count=2, layers=LAYERS, top_k=TOP_K)
    pool.attach_balancer(balancer, ExecutorThread(Gated(pool.shape, 1, "silu")))
    before, moved = held.copy(), 0
    for number in range(30 if rows else 12):
        if rows and number == 20:
            gate.set()  # it computes from a row that has another expert by now
        many = 1 + number % 4
        pool.begin_step(Step((RequestRows(0, many, RowKind.DECODE),)))
        for layer in range(LAYERS):
            x, weights = torch.randn(many, D, generator=rng), torch.rand(many, TOP_K, generator=rng)
            ids = torch.randint(0, EXPERTS, (many, TOP_K), generator=rng)
            out = pool.run(layer, x, weights, ids, "silu", torch.full_like(x, float("nan")))
            check_same(out, pool.expected(layer, x, weights, ids, "silu"), x.dtype, D, "with deliveries")
        pool.end_forward()
        if rows:
            check_rows(pool)
            moved += int((held != before).sum())
            before = held.copy()
    stats = pool.snapshot()
    assert moved > 10 or rows == 0
    assert (stats["cpu_late"] > 0) == late and pool.store.reads > 0
    assert (stats["cpu_experts"] > 0) != late or (rows and late)
    gate.set()


def test_what_is_out_of_reach_is_not_read_ahead(far) -> None:
    """No layer has ordered it, and nobody waits."""
    pool = far(7, SOME, policy="reuse")
    without = (pool.admission.experts.slot_of < 0).view(LAYERS, -1)
    assert without.any(1).all(), "each layer has some"
    for layer in range(LAYERS):
        assert pool.admission.far(layer)[:EXPERTS].tolist() == (without[layer] & (layer not in SOME)).tolist()


# -- rows of host memory ------------------------------------------------------------------------------------------


def check_rows(pool: FarPool) -> None:
    """Host and device agree on what is in rows, between two steps; each row has one expert, or is free."""
    delivery, tier = pool.admission.delivery, pool.host.tier
    delivery._rows.insert()
    delivery._release()
    tier.check_integrity()
    places = np.where(tier.row_of == NOWHERE, -1, EXPERTS + tier.row_of)
    assert (delivery._place_of.numpy() == places).all()
    for key in np.flatnonzero(tier.row_of != NOWHERE).tolist():
        for name, tensor in pool.host.tensors.items():
            assert torch.equal(tensor[tier.row_of[key]], pool.experts[key][name])


@pytest.mark.parametrize("policy", ["lru", "reuse"])
@pytest.mark.parametrize("rows", [1, 5, LAYERS * EXPERTS // 2, LAYERS * EXPERTS])
@pytest.mark.parametrize(("slots", "layout"), [(TOP_K, None), (7, packed())])
def test_layers_give_their_bits_with_rows_of_any_number(far, rows: int, policy: str, slots: int, layout) -> None:
    pool, rng = far(slots, ALL, layout, rows=rows, policy=policy), torch.Generator().manual_seed(0)
    assert pool.host.tier.held == min(rows, LAYERS * EXPERTS - slots)
    for number in range(30):
        pool.check((DECODE, DECODE, PROMPT, DECODE, LONG)[number % 5], rng)
        pool.admission.check_integrity()
        check_rows(pool)
    assert pool.store.reads > 0 and (pool.store.reads <= slots) == (rows == LAYERS * EXPERTS), "of all each once"


def test_rows_keep_what_was_read(far) -> None:
    """What a step ordered is read once: rows that nobody used give way to it."""
    pool, ids = far(TOP_K, rows=3 * LAYERS * TOP_K, policy="lru"), torch.arange(EXPERTS - TOP_K, EXPERTS)[None]
    one, rng = Step((RequestRows(0, 1, RowKind.DECODE),)), torch.Generator().manual_seed(0)
    for _ in range(8):
        pool.check(one, rng, ids=ids)
    before = pool.store.reads
    assert before > 0
    for _ in range(3):
        pool.check(one, rng, ids=ids)
    assert pool.store.reads == before


def test_a_graph_finds_its_experts_in_other_rows(far, monkeypatch) -> None:
    pool, rng = far(7, rows=6, policy="reuse"), torch.Generator().manual_seed(0)
    step, moved = Replayed(pool, 4, monkeypatch), 0
    before = pool.host.tier.row_of.copy()
    for number in range(30):
        step.check(1 + number % 4, rng)
        check_rows(pool)
        moved += int((pool.host.tier.row_of != before).sum())
        before = pool.host.tier.row_of.copy()
    assert moved > 10 and pool.store.reads > 0


# -- failures ---------------------------------------------------------------------------------------------------


def one_step(pool: FarPool, seed: int = 0) -> None:
    rng = torch.Generator().manual_seed(seed)
    pool.begin_step(DECODE)
    for layer in range(LAYERS):
        ids = torch.randint(0, EXPERTS, (3, TOP_K), generator=rng)
        pool.run(
            layer, torch.randn(3, D, generator=rng), torch.rand(3, TOP_K, generator=rng), ids, "silu", torch.empty(3, D)
        )
    pool.end_forward()


@pytest.mark.parametrize("error", [StoreError("spac: the disk is gone"), OSError(5, "bad sector"), SystemExit(3)])
def test_a_failed_read_ends_the_step_with_its_error(far, error: BaseException) -> None:
    """All layers end, whatever ends the thread, and the tokens of that step and of others are not given away."""
    pool = far(TOP_K)
    one_step(pool)
    pool.check_results()
    pool.store.error = error
    one_step(pool, 1)  # no wait stands still
    with pytest.raises(StoreError, match="the disk is gone|bad sector|SystemExit"):
        pool.check_results()
    pool.store.error = None
    with pytest.raises(StoreError):
        one_step(pool, 2)


def test_a_thread_that_dies_ends_the_step_with_an_error(far, monkeypatch) -> None:
    pool = far(TOP_K)
    pool.admission.delivery._answer = lambda order: 1 // 0
    one_step(pool)
    with pytest.raises(StoreError, match="ZeroDivisionError"):
        pool.check_results()


@pytest.mark.parametrize("layers", [SOME, ()])
def test_no_rank_gives_away_what_another_could_not_read(far, layers) -> None:
    """Nor does one that orders nothing itself."""
    word = torch.zeros(1, dtype=torch.int32)
    pool, other = far(TOP_K, failed=word), (FarPool if layers else Pool)(TOP_K, *filter(None, [layers]), failed=word)
    delivery: ExpertDelivery = pool.admission.delivery
    seen: list[int] = []

    class Ending(Noted):
        def __setitem__(self, at: Any, value: Any) -> None:
            seen.append(int(word))
            super().__setitem__(at, value)

    delivery._ended = Ending(delivery._ended, "ended", [])
    one_step(other)
    other.check_results()
    pool.store.error = OSError(5, "bad sector")
    one_step(pool)
    assert seen == [1], "others know before its own layers go on"
    with pytest.raises(StoreError, match="bad sector"):
        pool.check_results()
    with pytest.raises(StoreError, match="another rank"):
        other.check_results()
    other.close()


def test_an_engine_that_ends_is_no_failure_to_others(far) -> None:
    pool = far(TOP_K, failed=(word := torch.zeros(1, dtype=torch.int32)))
    one_step(pool)
    pool.admission.delivery.close()
    assert not word


def test_an_engine_that_ends_while_a_layer_waits(far) -> None:
    pool, ended = far(TOP_K), threading.Event()
    pool.store.gate.clear()

    def step() -> None:
        one_step(pool)
        ended.set()

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    assert not ended.wait(0.2), "it waits as long as a read takes"
    threading.Timer(0.2, pool.store.gate.set).start()  # a read that is under way ends some time
    pool.admission.delivery.close()
    assert ended.wait(60)
    thread.join()
    with pytest.raises(StoreError):
        pool.check_results()


def test_a_slow_disk_costs_time_and_no_token(far) -> None:
    pool, rng = far(TOP_K), torch.Generator().manual_seed(0)
    pool.store.gate.clear()
    threading.Timer(0.5, pool.store.gate.set).start()
    pool.check(DECODE, rng)
    assert pool.snapshot()["stall_seconds"] > 0.3


# -- every order of the two sides' memory operations ----------------------------------------------------------------


def device(orders: list[list[str]], bug: str) -> Iterator[Any]:
    """What the kernels of layers do, as generator of single operations on ``memory``; yields before each."""
    memory = yield
    for number, keys in enumerate(orders, 1):
        if bug == "asked before the keys":
            memory["asked"] = number
            yield
        memory["keys"] = keys
        yield
        memory["asked"] = number
        yield
        while memory["answered"] != number and not memory["ended"]:
            yield "waits"
        if memory["answered"] != number and not memory["ended"]:
            continue
        arrived = memory["answered"] == number
        for place, key in enumerate(keys):
            yield
            read = memory["places"][place]
            if arrived and not memory["ended"]:
                assert read == key, f"a layer that wanted {key} read {read}"
        if not arrived:
            assert memory["failure"], "a layer went on without its experts before anyone knew"


def host(orders: list[list[str]], fails: int, bug: str) -> Iterator[Any]:
    """What ``ExpertDelivery`` does; order ``fails`` cannot be read."""
    memory, last = (yield), 0
    while last < len(orders):
        order = memory["asked"]
        if order == last:
            yield "waits"
            continue
        yield
        keys = memory["keys"]
        if order == fails:
            for name in ("ended", "failure") if bug == "ended before the failure" else ("failure", "ended"):
                yield
                memory[name] = True
            return
        if bug == "answered before the bytes":
            memory["answered"] = order
            yield
        for place, key in enumerate(keys):
            memory["places"][place] = key
            yield
        if bug == "reads the next ones early" and order < len(orders):
            memory["answered"] = order
            yield
            memory["places"][0] = orders[order][0]
            yield
        memory["answered"] = order
        last = order
        yield


def explored(orders: list[list[str]], fails: int = 0, bug: str = "") -> int:
    """Runs both sides in every order of their operations, two waits in a row at most; returns the number of ends."""
    ends, paths = 0, [()]
    seen = set()
    while paths:
        path = paths.pop()
        memory = {"asked": 0, "answered": 0, "ended": False, "failure": False, "keys": [], "places": ["?"] * 3}
        sides = [device(orders, bug), host(orders, fails, bug)]
        said: list[Any] = [None, None]
        for side in sides:
            next(side)
        over = [False, False]
        at = [0, 0]
        for number, side in enumerate(sides):
            said[number] = side.send(memory)
        for who in path:
            try:
                said[who] = next(sides[who])
                at[who] += said[who] != "waits"
            except StopIteration:
                over[who] = True
        if all(over) or (over[0] and said[1] == "waits"):
            ends += 1
            continue
        state = (*at, *over, *said, repr(memory))
        if state in seen:
            continue
        seen.add(state)
        able = [who for who in (0, 1) if not over[who]]
        assert able != [0] or said[0] != "waits" or memory["ended"] or memory["answered"] == memory["asked"], "it hangs"
        paths += [(*path, who) for who in able]
    return ends


ORDERS = [["a", "b"], ["c"], ["b", "d", "e"]]


@pytest.mark.parametrize("fails", [0, 1, 2, 3])
def test_every_order_of_operations_ends_right(fails: int) -> None:
    assert explored(ORDERS, fails) > 0


@pytest.mark.parametrize(
    ("bug", "fails"),
    [
        ("asked before the keys", 0),
        ("answered before the bytes", 0),
        ("reads the next ones early", 0),
        ("ended before the failure", 2),
    ],
)
def test_the_explorer_finds(bug: str, fails: int) -> None:
    with pytest.raises(AssertionError):
        explored(ORDERS, fails, bug)


class Noted:
    """An array that notes what is stored to it."""

    def __init__(self, array: Any, name: str, log: list[str]) -> None:
        self.array, self.name, self.log = array, name, log

    def __setitem__(self, at: Any, value: Any) -> None:
        self.log.append(self.name)
        self.array[at] = value


def test_the_host_stores_in_the_order_that_was_explored(far, monkeypatch) -> None:
    """Bytes, places, number; and a failure is known before any wait ends."""
    pool, log = far(TOP_K, policy="reuse"), []
    delivery: ExpertDelivery = pool.admission.delivery
    delivery._given, delivery._answered = (
        Noted(delivery._given, "places", log),
        Noted(delivery._answered, "number", log),
    )
    read, order = pool.store.read, expert_delivery._order_stores
    pool.store.read = lambda key, into: (read(key, into), log.append("bytes"))[0]
    monkeypatch.setattr(expert_delivery, "_order_stores", lambda: (log.append("fence"), order()))
    one_step(pool)
    text = " ".join(log).replace("bytes bytes", "bytes").replace("bytes bytes", "bytes").replace("bytes bytes", "bytes")
    assert set(text.split(" number")) <= {"bytes places fence", " bytes places fence", ""} and "number" in text
    log.clear()
    delivery._ended = Noted(delivery._ended, "ended", log)
    known = lambda: (log.append("failure" if delivery._failure else "none"), order())  # noqa: E731
    monkeypatch.setattr(expert_delivery, "_order_stores", known)
    pool.store.error = StoreError("spac: gone")
    one_step(pool, 1)
    assert log[-2:] == ["failure", "ended"]
