"""The pool over pointers: a layer's result is bit-identical wherever its experts are and whatever moves meanwhile."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from poison import poison_borrowed
from replay import Graph
from vllm_spac.kernels.formats import Format
from vllm_spac.kernels.reference import grouped_gemm as reference
from vllm_spac.kernels.types import ADMITTED, Quantised

from vllm_spac import components
from vllm_spac.cache.residency import NOWHERE
from vllm_spac.core import MoEShape, RequestRows, RowKind, Step, TensorSpec
from vllm_spac.decisions.policies.base import Policy
from vllm_spac.errors import SpacError, UnsupportedError
from vllm_spac.execution.address_table import MANY_ROWS
from vllm_spac.execution.base import ExecutionContext
from vllm_spac.execution.device import pointers_execution
from vllm_spac.execution.device.borrowed_slots import Loan
from vllm_spac.execution.device.pointers_execution import PointerExecution

LAYERS, EXPERTS, TOP_K, D, FF = 3, 8, 2, 16, 8
DECODE = Step((RequestRows(0, 3, RowKind.DECODE),))
PROMPT = Step((RequestRows(0, 2, RowKind.DECODE), RequestRows(2, 9, RowKind.PREFILL)))
ROWS_MAX = MANY_ROWS * EXPERTS // TOP_K
LONG = Step((RequestRows(0, 2, RowKind.DECODE), RequestRows(2, ROWS_MAX, RowKind.PREFILL)))


def shape(dtype: torch.dtype = torch.float32, bias: bool = True, **others) -> MoEShape:
    specs = {"w13_weight": TensorSpec((2 * FF, D), dtype), "w2_weight": TensorSpec((D, FF), dtype)}
    if bias:
        specs |= {"w13_bias": TensorSpec((2 * FF,), dtype), "w2_bias": TensorSpec((D,), dtype)}
    return MoEShape(tuple("abc"), **{"experts": EXPERTS, "top_k": TOP_K, "tensors": specs, **others})


INT4 = Format("int4", 8, zeros=True)


def packed() -> MoEShape:
    """Experts of four bits, whose tensors are other than those of plain ones."""
    specs = {}
    for name, size in {"w13": (2 * FF, D), "w2": (D, FF)}.items():
        specs[f"{name}_weight"] = TensorSpec(INT4.code_shape(*size), torch.uint8)
        specs[f"{name}_scale"] = TensorSpec(INT4.scale_shape(*size), INT4.scale_dtype)
    return MoEShape(tuple("abc"), EXPERTS, TOP_K, specs, INT4)


def drawn(spec: TensorSpec, rng: torch.Generator) -> torch.Tensor:
    """Plain weights, codes, or words of a scale in bfloat16 and a zero point."""
    if spec.dtype == torch.uint8:
        return torch.randint(0, 256, spec.shape, dtype=torch.uint8, generator=rng)
    if spec.dtype == torch.int32:
        halves = torch.rand(spec.shape, generator=rng).bfloat16().view(torch.int16)
        zeros = torch.randint(0, 16, spec.shape, dtype=torch.int16, generator=rng)
        return torch.stack([halves, zeros], -1).view(torch.int32).squeeze(-1)
    return torch.randn(spec.shape, generator=rng).to(spec.dtype)


class Pool(PointerExecution):
    """With a filled store; slots that nobody may read are NaN. ``check`` does what a step's layers do."""

    def __init__(
        self, slots: int, layout: MoEShape | None = None, policy: str | Policy = "lru", store="host", **options
    ):
        layout = layout or shape()
        store = components.build("stores", store, shape=layout, fingerprint="")
        rng = torch.Generator().manual_seed(1)
        self.experts = [{name: drawn(spec, rng) for name, spec in layout.tensors.items()} for _ in range(layout.total)]
        for key, expert in enumerate(self.experts):
            store.put(key, expert)
        tensors = getattr(store, "tensors", None) or {
            name: torch.full((slots, *spec.shape), float("nan") if spec.dtype.is_floating_point else 255).to(spec.dtype)
            for name, spec in layout.tensors.items()
        }
        policy = components.build("policies", policy) if isinstance(policy, str) else policy
        super().__init__(ExecutionContext(layout, slots, policy, store, tensors, path="host", rows=ROWS_MAX, **options))
        if self.prompts is not None:
            poison_borrowed(self.prompts)
        for _ in self.fill():
            pass

    def expected(self, layer: int, x, weights, ids, activation: str) -> torch.Tensor:
        mine = self.experts[layer * EXPERTS : (layer + 1) * EXPERTS]
        tables = {name: torch.tensor([expert[name].data_ptr() for expert in mine]) for name in mine[0]}
        biases = tables.get("w13_bias"), tables.get("w2_bias")
        kind = self.shape.packed
        quantised = None if kind is None else Quantised(kind, tables["w13_scale"], tables["w2_scale"])
        return reference.grouped_gemm(
            x, tables["w13_weight"], tables["w2_weight"], weights, ids, FF, *biases, activation, quantised=quantised
        )

    def check(self, step: Step, rng: torch.Generator, activation: str = "silu", ids=None) -> int:
        """Run a step over as many rows as it has; returns the distinct experts that it used."""
        rows, used = max(request.stop for request in step.requests), 0
        self.begin_step(step)
        self.admission.check_integrity()
        for layer in range(LAYERS):
            dtype = torch.bfloat16 if self.shape.packed else self.shape.tensors["w2_weight"].dtype
            x = torch.randn(rows, D, generator=rng).to(dtype)
            weights = torch.rand(rows, TOP_K, generator=rng)
            routed = torch.randint(-1, EXPERTS, (rows, TOP_K), generator=rng) if ids is None else ids
            out = torch.full_like(x, float("nan"))
            assert self.run(layer, x, weights, routed, activation, out) is out
            assert torch.equal(out, self.expected(layer, x, weights, routed, activation))
            used += len(set(routed.flatten().tolist()) - {-1})
        self.end_forward()
        return used

    def latest_order(self) -> np.ndarray:
        """Of the experts that have slots, as the next step finds it; the least valuable first."""
        self.admission._updates.begin(to_layers=False)
        return self.admission.residency.owner[self.admission.offers.slots.numpy()]

    def settle(self) -> None:
        """What is being copied is there at the next step."""
        self._copy.record().wait()


@pytest.fixture
def made():
    pools: list[Pool] = []
    yield lambda *args, **options: pools.append(Pool(*args, **options)) or pools[-1]
    for pool in pools:
        pool.close()


POLICIES = [name for name in components.serving("policies") if components.find("policies", name).on_device]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("slots", "layout", "activation"),
    [
        (TOP_K, shape(), "silu"),
        (7, shape(torch.bfloat16), "swigluoai"),
        (23, shape(torch.float16, bias=False), "gelu"),
        (7, packed(), "silu"),
    ],
    ids=["minimum", "some", "all but one", "quantised"],
)
def test_same_bits_whatever_moves(made, policy, slots, layout, activation):
    pool = made(slots, layout, policy)
    rng, choice, used = torch.Generator().manual_seed(0), random.Random(0), 0
    for _ in range(40):
        used += pool.check(DECODE if choice.random() < 0.8 else PROMPT, rng, activation)
        if choice.random() < 0.5:
            pool.settle()
    stats = pool.snapshot()
    assert stats["hits"] + stats["misses"] == used and stats["waves"] == 40 * LAYERS
    assert stats["hits"] > 0 and moved(stats, layout)


def test_no_step_follows_a_layer_that_could_not_be_launched(made):
    """Its kernel would have copied what the layer has admitted, and later steps would read it."""
    pool, rng = made(7), torch.Generator().manual_seed(0)
    kernels = pool.launches.kernels

    def fails(*given, **more):
        raise MemoryError("no room for h")

    pool.check(DECODE, rng)
    pool.check_results()
    pool.launches.kernels = kernels._replace(grouped_gemm=fails)
    with pytest.raises(MemoryError):
        pool.check(DECODE, rng)
    assert int((pool.admission.reports.sources == ADMITTED).sum()), "nothing was admitted"
    pool.launches.kernels = kernels
    pool.end_forward()
    with pytest.raises(SpacError, match="no room for h"):
        pool.check_results()
    with pytest.raises(SpacError, match="no room for h"):
        pool.check(DECODE, rng)


def moved(stats: dict, layout: MoEShape) -> bool:
    """Whether experts got slots; every byte of the counters is accounted for."""
    streamed = stats["misses"] - stats["loads"]
    assert stats["bytes"].get("host streamed", 0) == streamed * layout.expert_bytes >= 0
    assert stats["bytes"].get("host", 0) == stats["loads"] * layout.expert_bytes
    return stats["loads"] > 0


@pytest.mark.parametrize(
    ("slots", "layout"), [(TOP_K, shape()), (10, shape()), (LAYERS * EXPERTS - 1, shape()), (10, packed())]
)
def test_long_prompts_borrow_slots_and_have_the_same_bits(made, slots, layout):
    """Layers run whole or in parts; experts get slots between long and short steps."""
    pool = made(slots, layout)
    rng, choice, staged, read = torch.Generator().manual_seed(0), random.Random(0), 0, 0
    parts = 0
    for _ in range(30):
        step = choice.choice([DECODE, PROMPT, LONG])
        before = pool.snapshot()["bytes"].get("host streamed", 0)
        slot_of = pool.admission.slots().reshape(LAYERS, EXPERTS).copy()
        loan = Loan.of(slot_of, pool.latest_order())
        pool.check(step, rng)
        streamed = pool.snapshot()["bytes"].get("host streamed", 0) - before
        if step is LONG:
            staged += len(loan.keys)
            parts = max(parts, len(loan.parts))
            assert streamed == 0
            after, last = pool.admission.slots(), loan.keys[-len(loan.ring) :]
            assert set(after[last].tolist()) == set(loan.ring.tolist()), "who is there keeps the slot"
        pool.admission.check_integrity()
        read += streamed
        if choice.random() < 0.5:
            pool.settle()
    stats = pool.snapshot()
    assert stats["bytes"]["host staged"] == staged * layout.expert_bytes > 0
    assert slots == LAYERS * EXPERTS - 1 or read > 0, "short steps read in place"
    assert parts > LAYERS


@pytest.mark.parametrize("slots", [TOP_K, 10, 23])
@pytest.mark.parametrize("layers", [(0,), (0, 0, 1, 1, 2, 2), (1, 0, 2), (2,), ()], ids=str)
def test_layers_may_come_again_in_any_order_or_not_at_all(made, slots, layers):
    """Each place that was borrowed has an owner afterwards, of whom host and device know."""
    pool, rng = made(slots), torch.Generator().manual_seed(0)
    for step in (DECODE, LONG, DECODE, LONG, LONG):
        if step is DECODE:
            pool.check(step, rng)
            continue
        pool.begin_step(step)
        for number, layer in enumerate(layers):
            rows = ROWS_MAX if number == 0 else 3  # the first one decides
            x, weights = torch.randn(rows, D, generator=rng), torch.rand(rows, TOP_K, generator=rng)
            ids = torch.randint(-1, EXPERTS + 2, (rows, TOP_K), generator=rng)
            out = pool.run(layer, x, weights, ids, "silu", torch.full_like(x, float("nan")))
            assert torch.equal(out, pool.expected(layer, x, weights, ids, "silu"))
        pool.end_forward()
        pool.admission.check_integrity()
    assert pool.snapshot()["bytes"].get("host staged", 0) > 0 or not layers


@pytest.mark.parametrize("slots", [TOP_K, 10, 23])
def test_all_rows_of_a_layer_in_parts_are_counted_and_padding_is_not(made, slots):
    """Rows after those of requests run nothing, whatever they select."""
    pool, rng = made(slots), torch.Generator().manual_seed(0)
    rows, used = ROWS_MAX - 5, 0
    step = Step((RequestRows(0, 2, RowKind.DECODE), RequestRows(2, rows, RowKind.PREFILL)))
    for _ in range(4):
        pool.begin_step(step)
        for layer in range(LAYERS):
            x, weights = torch.randn(ROWS_MAX, D, generator=rng), torch.rand(ROWS_MAX, TOP_K, generator=rng)
            ids = torch.randint(0, EXPERTS - 1, (ROWS_MAX, TOP_K), generator=rng)
            ids[rows:] = EXPERTS - 1
            out = pool.run(layer, x, weights, ids, "silu", torch.full_like(x, float("nan")))
            own = slice(0, rows)
            assert torch.equal(out[own], pool.expected(layer, x[own], weights[own], ids[own], "silu"))
            expected = torch.bincount(ids[own].flatten(), minlength=EXPERTS)
            assert torch.equal(pool.launches.counts[layer].long(), expected)
            used += int((expected > 0).sum())
        pool.end_forward()
    stats = pool.snapshot()
    assert stats["hits"] + stats["misses"] == used and stats["loads"] == 0


def test_with_a_slot_for_each_nothing_is_borrowed(made):
    assert made(LAYERS * EXPERTS, store="resident").prompts is None


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_beside_a_prompt_get_slots_and_the_prompt_none(made, policy):
    """What the first rows need gets slots, and nothing else does; all experts are counted."""
    pool, rng = made(10, policy=policy), torch.Generator().manual_seed(0)
    used = 0
    for _ in range(30):
        before = set(np.flatnonzero(pool.admission.slots() != NOWHERE).tolist())
        ids = torch.randint(0, EXPERTS, (9, TOP_K), generator=rng)
        used += pool.check(PROMPT, rng, ids=ids)
        after = set(np.flatnonzero(pool.admission.slots() != NOWHERE).tolist())
        wanted = {layer * EXPERTS + expert for layer in range(LAYERS) for expert in ids[:2].flatten().tolist()}
        assert after - before <= wanted
        pool.admission.check_integrity()
    stats = pool.snapshot()
    assert stats["hits"] + stats["misses"] == used
    assert moved(stats, shape())


def test_hits_beside_a_prompt_are_those_of_the_same_rows_alone(made):
    """Four rows that choose among few experts, and one of a prompt, which chooses among others."""

    def loads(steps: list[Step]) -> tuple[int, int]:
        pool, rng = made(10), torch.Generator().manual_seed(0)
        for number, step in enumerate(steps):
            if number == 20:
                before = pool.snapshot()["loads"], pool.snapshot()["misses"]
            mine = torch.randint(0, 3, (4, 1), generator=rng)
            ids = 5 + torch.cat((mine, (mine + 1) % 3), 1)  # not those that slots are filled with
            others = torch.randint(0, 5, (step.rows - 4, TOP_K), generator=rng)
            pool.check(step, rng, ids=torch.cat((ids, others)))
            pool.admission.slots()
        slots = pool.admission.slots().reshape(LAYERS, EXPERTS)
        assert (slots[:, 5:] != NOWHERE).all(), "what the rows choose has slots"
        after = pool.snapshot()
        return after["loads"] - before[0], after["misses"] - before[1]

    rows = tuple(RequestRows(row, row + 1, RowKind.DECODE) for row in range(4))
    alone, mixed = Step(rows), Step((*rows, RequestRows(4, 5, RowKind.PREFILL)))
    assert loads([alone] * 40) == (0, 0), "all are there after a while"
    moved, missed = loads([mixed] * 40)
    assert moved == 0 < missed, "the same with a prompt, whose own experts are read where they are"


def test_dummy_runs_are_not_counted_and_decide_nothing(made):
    """Before the first step, and after one that has left offers."""
    pool, rng = made(10), torch.Generator().manual_seed(0)
    pool.end_forward()
    assert pool.snapshot()["waves"] == 0
    pool.check(DECODE, rng, ids=torch.tensor([[6, 7]] * 3))
    pool.settle()
    before, slots = pool.snapshot(), pool.admission.slots().copy()
    for layer in range(LAYERS):
        x, weights, ids = torch.ones(1, D), torch.ones(1, TOP_K), torch.tensor([[4, 5]])
        out = pool.run(layer, x, weights, ids, "silu", torch.empty_like(x))
        assert torch.equal(out, pool.expected(layer, x, weights, ids, "silu"))
    pool.end_forward()
    assert pool.snapshot() == before and (pool.admission.slots() == slots).all()
    pool.admission.check_integrity()


def test_in_the_layer_an_expert_crosses_the_bus_once(made):
    """By hand: 24 experts, 6 slots of experts 0 and 1 of each layer; each layer needs 6 and 7, then again."""
    pool, rng, ids = made(6), torch.Generator().manual_seed(0), torch.tensor([[6, 7]])
    one = Step((RequestRows(0, 1, RowKind.DECODE),))
    pool.check(one, rng, ids=ids)
    stats = pool.snapshot()
    assert (stats["hits"], stats["misses"], stats["loads"]) == (0, 6, 6)
    assert stats["bytes"] == {"host": 6 * shape().expert_bytes, "host streamed": 0}
    pool.check(one, rng, ids=ids)
    after = pool.snapshot()
    assert (after["hits"], after["misses"]) == (6, 6) and after["bytes"] == stats["bytes"]


class Late:
    """An event that is not seen before there are four more, those of two steps, or before the host waits for it."""

    made = 0

    def __init__(self) -> None:
        Late.made += 1
        self.seen_at = Late.made + 4

    def done(self) -> bool:
        return Late.made >= self.seen_at

    def wait(self) -> None:
        if threading.current_thread() is threading.main_thread():  # else a stream waits
            Late.made = max(Late.made, self.seen_at)


def late(pool: Pool, patch) -> None:
    """The host hears of steps late; who asks for the slots waits, so nobody does here but those who must."""
    patch.setattr(pool._compute, "record", Late)
    patch.setattr(pool.admission, "check_integrity", lambda: None)


def test_a_host_that_hears_late_counts_what_was(made, monkeypatch):
    """Its reports are of steps long ago, and bits stay the same."""
    pool, rng = made(8, policy="reuse"), torch.Generator().manual_seed(0)
    with monkeypatch.context() as patch:
        late(pool, patch)
        used = sum(pool.check(DECODE, rng) for _ in range(60))
        assert len(pool.admission.reports) == 3, "it was told at once"
        Late.made += 4
    stats = pool.snapshot()
    assert stats["hits"] + stats["misses"] == used and moved(stats, shape())
    pool.admission.check_integrity()


def test_who_borrows_waits_for_the_device(made, monkeypatch):
    """Which experts must be copied is known only when the steps before are over."""
    pool, rng = made(8), torch.Generator().manual_seed(0)
    late(pool, monkeypatch)
    for _ in range(10):
        for _ in range(3):
            pool.check(DECODE, rng)
        pool.check(LONG, rng)
    monkeypatch.undo()
    pool.admission.check_integrity()
    assert pool.snapshot()["loads"] > 0


# -- full graphs -------------------------------------------------------------------------------------------


class Replayed:
    """The layers of a decode step of up to ``rows`` rows as one graph, on buffers that stay where they are."""

    def __init__(self, pool: Pool, rows: int, monkeypatch) -> None:
        self.pool, self.rows, self.graph = pool, rows, Graph()
        self.x, self.out = torch.zeros(LAYERS, rows, D), torch.zeros(LAYERS, rows, D)
        self.weights = torch.zeros(LAYERS, rows, TOP_K)
        self.ids = torch.zeros(LAYERS, rows, TOP_K, dtype=torch.int32)
        kernels = type(pool.launches.kernels)(*map(self.graph.kernel, pool.launches.kernels))
        pool.launches.kernels = pool.admission._kernels = kernels
        if pool.ahead.layers is not None:
            pool.ahead.layers.parts._kernels = kernels
        monkeypatch.setattr(pointers_execution, "capturing", lambda tensor: self.graph.capturing)
        with self.graph:
            for layer in range(LAYERS):
                pool.run(layer, self.x[layer], self.weights[layer], self.ids[layer], "silu", self.out[layer])

    def check(self, rows: int, rng: torch.Generator) -> int:
        """A step of so many rows, the rest left as it was; returns the distinct experts that it used."""
        for tensor in (self.x, self.weights):
            tensor[:, :rows] = torch.rand(LAYERS, rows, tensor.shape[-1], generator=rng)
        self.ids[:, :rows] = torch.randint(0, EXPERTS, (LAYERS, rows, TOP_K), generator=rng, dtype=torch.int32)
        self.out.fill_(float("nan"))
        self.pool.begin_step(Step((RequestRows(0, rows, RowKind.DECODE),)))
        self.graph.replay()
        self.pool.end_forward()
        used = 0
        for layer in range(LAYERS):
            given = self.x[layer, :rows], self.weights[layer, :rows], self.ids[layer, :rows]
            assert torch.equal(self.out[layer, :rows], self.pool.expected(layer, *given, "silu"))
            assert not self.out[layer, rows:].any(), "padding runs nothing"
            used += len(self.ids[layer, :rows].unique())
        return used


@pytest.mark.parametrize("slots", [TOP_K, 10, LAYERS * EXPERTS - 1])
def test_a_replayed_step_has_the_same_bits_and_counts(made, monkeypatch, slots):
    """Experts move between replays or in them, and steps have other rows than the one that was captured."""
    pool, choice, rng = made(slots), random.Random(0), torch.Generator().manual_seed(0)
    step = Replayed(pool, 5, monkeypatch)
    assert pool.snapshot()["waves"] == 0, "a capture is nobody's"
    used = 0
    for _ in range(40):
        used += step.check(choice.randint(1, 5), rng)
        if choice.random() < 0.5:
            pool.settle()
    stats = pool.snapshot()
    assert stats["hits"] + stats["misses"] == used and stats["waves"] == 40 * LAYERS
    assert stats["hits"] > 0 and moved(stats, shape())
    pool.admission.check_integrity()


def test_replayed_and_launched_steps_take_turns(made, monkeypatch):
    """A padded step that is launched masks what a replay masks; both count alike."""
    pool, rng = made(6), torch.Generator().manual_seed(0)
    step, used = Replayed(pool, 4, monkeypatch), 0
    for rows in (4, 2, 3, 1, 4):
        used += step.check(rows, rng)
        used += pool.check(DECODE, rng)
        x, weights = torch.rand(8, D, generator=rng), torch.rand(8, TOP_K, generator=rng)
        ids = torch.arange(16).view(8, 2) % EXPERTS
        pool.begin_step(Step((RequestRows(0, rows, RowKind.DECODE),)))
        out = pool.run(0, x, weights, ids, "silu", torch.empty_like(x))
        pool.end_forward()
        assert torch.equal(out[:rows], pool.expected(0, x[:rows], weights[:rows], ids[:rows], "silu"))
        assert not out[rows:].any()
        assert int((pool.launches.counts[0] > 0).sum()) == len(ids[:rows].unique())


@pytest.mark.parametrize("slots", [10, LAYERS * EXPERTS])
def test_a_graph_sees_what_is_resident(made, monkeypatch, slots):
    """As the table says when it is replayed, and the host once it has heard of all."""
    pool, rng = made(slots), torch.Generator().manual_seed(0)
    step, graph = Replayed(pool, 4, monkeypatch), Graph()
    with graph:
        found = [pool.resident(layer) for layer in range(LAYERS)]
    before = None
    for _ in range(10):
        step.check(4, rng)
        pool.settle()
        graph.replay()
        expected = torch.from_numpy(pool.admission.slots() != NOWHERE).view(LAYERS, -1)
        assert torch.equal(torch.stack(found), expected)
        before, moved_on = expected, before is not None and not torch.equal(before, expected)
        if moved_on:
            break
    assert moved_on == (slots == 10)


def test_a_graph_borrows_nothing(made, monkeypatch):
    """Who is missing is for the host to say, and a replay does not ask it: the rows of a wide one are read in place."""
    pool, rng = made(10), torch.Generator().manual_seed(0)
    step = Replayed(pool, ROWS_MAX, monkeypatch)
    used = sum(step.check(rows, rng) for rows in (ROWS_MAX, 3, ROWS_MAX))
    stats = pool.snapshot()
    assert stats["hits"] + stats["misses"] == used and "host staged" not in stats["bytes"]


def plain(*sizes: tuple[int, int]) -> dict[str, TensorSpec]:
    names = ("w13_weight", "w2_weight")
    return {name: TensorSpec(size, torch.float32) for name, size in zip(names, sizes, strict=True)}


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (shape(tensors=plain((8, 16), (16, 8))), "no gate"),
        (shape(tensors=plain((6, 3), (3, 3))), "no multiple of 16"),
        (shape(tensors={**shape().tensors, "w2_scale": TensorSpec((4,), torch.float32)}), "w2_scale"),
        (shape(packed=INT4), "experts of w13_bias"),
        (shape(tensors=packed().tensors), "w13_scale"),
        (shape(experts=1025), "1024 experts"),
    ],
    ids=["no gate", "odd sizes", "scales", "no scales", "scales of plain weights", "many experts"],
)
def test_what_the_kernels_cannot_read_is_refused(layout, named):
    with pytest.raises(UnsupportedError, match=f"{named}.*--spac-plane slots"):
        pointers_execution.PointerExecution.check_shape(layout)
