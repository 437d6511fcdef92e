"""Expert parallelism: the parts of all ranks are the whole output; each rank counts and loads its own experts only."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemoryStore
from torch import Tensor

from vllm_spac import components
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.core import NOT_RUN, MoEShape, RequestRows, RowKind, Step, TensorSpec
from vllm_spac.decisions.predictors._trained import Sizes
from vllm_spac.execution.base import Execution, ExecutionContext, Rows
from vllm_spac.execution.device.pointers_execution import PointerExecution
from vllm_spac.execution.exchange import Exchange
from vllm_spac.execution.host.slots_execution import SlotExecution
from vllm_spac.execution.row_shares import local_numbers, localised_on_device, numbered

EXPERTS, TOP_K, WIDTH = 12, 3, 2
WHOLE = MoEShape(("a", "b"), EXPERTS, TOP_K, {"w": TensorSpec((1,), torch.float64)})


class Kernel:
    """An expert multiplies by the number in its slot, of all layers or, if each expert has one, of this layer."""

    activation, takes_slots, by_expert = "silu", True, False

    def __init__(self, execution: SlotExecution, layer: int) -> None:
        first = layer * execution.shape.experts if execution.holds_all else 0
        self._slots = execution.tensors["w"][first:]

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, slot_of: Tensor | None = None, rows: int = 0) -> Tensor:
        assert len(x) and int(ids.min()) >= 0
        return x * (weights * self._slots[ids.long()].squeeze(-1)).sum(1, keepdim=True)


class MapKernel(Kernel):
    """As vLLM's on a GPU: experts of the model, and a map to slots in which those of other ranks have none.

    If each expert has a slot, it has a map of its own.
    """

    takes_slots = False

    def __init__(self, execution: SlotExecution, layer: int) -> None:
        super().__init__(execution, layer)
        self._own = execution.local_of

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, slot_of: Tensor | None = None, rows: int = 0) -> Tensor:
        slot_of = self._own if slot_of is None else slot_of
        assert len(slot_of) == EXPERTS
        slots = slot_of[ids.clamp(min=0).long()].masked_fill(ids < 0, -1)
        return super().__call__(x, weights.masked_fill(slots < 0, 0), slots.clamp(min=0))


def rank_of(number: int, owners: list[int], slots: int, exchange: Exchange | None = None) -> SlotExecution:
    """Rank ``number``, with the experts that ``owners`` gives it; expert e of layer l multiplies by 100 l + e + 1."""
    own = [expert for expert, owner in enumerate(owners) if owner == number]
    local_of = torch.full((EXPERTS,), -1)
    local_of[own] = torch.arange(len(own))
    shape = replace(WHOLE, experts=len(own))
    store = MemoryStore(shape, "")
    for key in range(shape.total):
        layer, expert = shape.split(key)
        store.put(key, {"w": torch.tensor([100.0 * layer + own[expert] + 1], dtype=torch.float64)})
    slots = min(slots, shape.total)
    tensors = {"w": torch.full((slots, 1), float("nan"), dtype=torch.float64)}
    policy = components.build("policies", "lru")
    execution = SlotExecution(
        ExecutionContext(
            shape, slots, policy, store, tensors, io_threads=1, path="m", exchange=exchange, local_of=local_of
        )
    )
    list(execution.fill())
    return execution


@st.composite
def cases(draw):
    ranks = draw(st.integers(1, 3))
    owners = draw(st.permutations([number % ranks for number in range(EXPERTS)]))
    rows = draw(st.integers(1, 6))
    chosen = st.permutations(range(EXPERTS)).map(lambda order: order[:TOP_K])
    ids = torch.tensor(draw(st.lists(chosen, min_size=rows, max_size=rows)), dtype=torch.int32)
    junk = draw(st.sampled_from([[], [[-1] * TOP_K], [[123456, -9, 3]]]))
    skipped = draw(st.booleans())
    if skipped:  # as a budget that truncates does
        ids[0, 1] = -1
    return owners, ranks, torch.cat([ids, torch.tensor(junk, dtype=torch.int32).reshape(-1, TOP_K)]), rows


@given(cases(), st.integers(TOP_K, 2 * EXPERTS), st.integers(0, 1), st.booleans())
def test_the_parts_of_all_ranks_are_the_output(case, slots: int, layer: int, mapped: bool) -> None:
    """``mapped``: as on a GPU; there a kernel may compute padding, too."""
    owners, ranks, ids, rows = case
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(len(ids), WIDTH, generator=generator, dtype=torch.float64)
    weights = torch.rand(len(ids), TOP_K, generator=generator, dtype=torch.float64)
    step = Step((RequestRows(0, rows, RowKind.VERIFY, rows - 1),))
    total, chosen = torch.zeros(rows, WIDTH, dtype=torch.float64), ids[:rows]
    for number in range(ranks):
        exchange = Exchange(torch.device("cpu")) if mapped else None
        execution = rank_of(number, owners, slots, exchange)
        kernel = (MapKernel if mapped else Kernel)(execution, layer)
        if mapped and execution.holds_all:
            ids = ids.clamp(-1, EXPERTS - 1)  # vLLM's padding
        seen, recorded = [], []
        execution.residency.policy.observe = lambda counts, seen=seen: seen.append(counts)
        given = ids.clone()
        execution.begin_step(step)
        record = lambda *what, recorded=recorded: recorded.append(what)  # noqa: E731
        out = execution.forward(layer, x, weights, given, kernel, Rows(rows, False, record))
        execution.end_forward()
        assert torch.equal(given, ids), "the router's ids were changed"
        assert (mapped or not out[rows:].any()) and not out.isnan().any()
        total += out[:rows]
        own = [expert for expert, owner in enumerate(owners) if owner == number]
        counted = [int((chosen == expert).sum()) for expert in own]
        counters = execution.snapshot()
        assert counters["hits"] + counters["misses"] == sum(count > 0 for count in counted)
        assert torch.equal(recorded[0][1], chosen), "a trace has the model's experts"
        if not execution.holds_all:
            expected = np.full((2, len(own)), NOT_RUN)
            expected[layer] = counted
            assert [counts.tolist() for counts in seen] == [expected.ravel().tolist()]
        execution.close()
    factors = torch.where(chosen < 0, 0, 100 * layer + chosen + 1).double()
    assert torch.allclose(total, x[:rows] * (weights[:rows] * factors).sum(1, keepdim=True))


def test_numbers_of_another_process_are_none() -> None:
    local_of = torch.tensor([-1, 0, -1, 1])
    ids = torch.tensor([[0, 1], [3, -1], [77, 3]], dtype=torch.int32)
    assert numbered(ids, local_of, 2).tolist() == [[-1, 0], [1, -1], [-1, -1]]
    assert numbered(ids[:0], local_of, 0).shape == (0, 2)


@given(st.permutations(range(6)), st.integers(0, 5), st.lists(st.integers(-9, 99), min_size=1, max_size=8))
def test_experts_are_numbered_on_the_device_as_on_the_host(order: list[int], held: int, ids: list[int]) -> None:
    local_of, given = torch.full((6,), -1), torch.tensor(ids, dtype=torch.int32)[:, None]
    local_of[order[:held]] = torch.arange(held)
    found = localised_on_device(given, local_numbers(local_of, torch.device("cpu")))
    assert found.dtype == torch.int32
    assert torch.equal(found, numbered(given.masked_fill(given >= 6, -1), local_of, len(given)))


FF = 4
PLAIN = {"w13_weight": TensorSpec((2 * FF, 8), torch.float32), "w2_weight": TensorSpec((8, FF), torch.float32)}


def pointers(own: list[int], slots: int, weights: dict[str, Tensor], **options) -> PointerExecution:
    """A rank that holds the experts ``own`` of each layer: ``weights`` are [2, EXPERTS, ...]."""
    local_of = torch.full((EXPERTS,), -1)
    local_of[own] = torch.arange(len(own))
    shape = MoEShape(("a", "b"), len(own), TOP_K, PLAIN)
    store = components.build("stores", "host", shape=shape, fingerprint="")
    for key in range(shape.total):
        layer, expert = shape.split(key)
        store.put(key, {name: tensor[layer, own[expert]] for name, tensor in weights.items()})
    slots = min(slots, shape.total)
    tensors = {name: torch.full((slots, *spec.shape), float("nan")) for name, spec in PLAIN.items()}
    policy = components.build("policies", "lru")
    numbers = None if len(own) == EXPERTS else local_of  # it has all experts, as without divided ones
    execution = PointerExecution(
        ExecutionContext(shape, slots, policy, store, tensors, path="host", rows=9, local_of=numbers, **options)
    )
    list(execution.fill())
    return execution


@given(cases(), st.integers(TOP_K, 2 * EXPERTS))
def test_the_parts_of_ranks_whose_devices_decide_are_the_output(case, slots: int) -> None:
    """For three steps, so that slots change hands. Padding has any experts, and is not computed."""
    owners, ranks, ids, rows = case
    generator = torch.Generator().manual_seed(0)
    shape = {name: (2, EXPERTS, *spec.shape) for name, spec in PLAIN.items()}
    experts = {name: torch.randn(size, generator=generator) for name, size in shape.items()}
    every: list[Execution] = [pointers(list(range(EXPERTS)), 2 * EXPERTS, experts)]
    held = [[expert for expert, owner in enumerate(owners) if owner == number] for number in range(ranks)]
    every += [pointers(own, slots, experts) for own in held]
    for shift in range(3):
        chosen = torch.where(ids[:rows] < 0, -1, (ids[:rows] + shift) % EXPERTS)
        routed = torch.cat([chosen, ids[rows:]])
        for layer in range(2):
            x, weights = torch.randn(len(ids), 8, generator=generator), torch.rand(len(ids), TOP_K, generator=generator)
            found = []
            for execution in every:
                if layer == 0:
                    execution.begin_step(Step((RequestRows(0, rows, RowKind.VERIFY, rows - 1),)))
                found.append(execution.run(layer, x, weights, routed, "silu", torch.full_like(x, float("nan"))))
                if layer == 1:
                    execution.end_forward()
            whole, *parts = found
            assert not any(part[rows:].any() for part in parts)
            assert torch.allclose(sum(parts)[:rows], whole[:rows], atol=1e-5)
        counted = [execution.snapshot() for execution in every]
        used = [counters["hits"] + counters["misses"] for counters in counted]
        assert used[0] == sum(used[1:])
    for execution in every[1:]:
        execution.admission.check_integrity()
        execution.close()


class Foresight(SimpleNamespace):
    """Names what it is told to."""

    @classmethod
    def observes_layers(cls) -> bool:
        return True


def test_a_rank_reads_ahead_its_own_of_the_experts_that_are_named() -> None:
    """A predictor names the model's experts, here those that the next layer chooses: whatever is read is used."""
    chosen = torch.zeros(2, 2, TOP_K, dtype=torch.long)  # of each layer
    foresight = Foresight(
        sizes=Sizes(2, EXPERTS, TOP_K, 8, 1),
        reach=1,
        on_device=True,
        needs=frozenset(),
        of_next=lambda seen: torch.zeros(2, EXPERTS).scatter_(1, chosen[1], 1.0),
    )
    generator = torch.Generator().manual_seed(0)
    experts = {name: torch.randn(2, EXPERTS, *spec.shape, generator=generator) for name, spec in PLAIN.items()}
    execution = pointers(
        [7, 2, 3, 10, 5, 0], 8, experts, ahead=PrefetchSettings(prefetch="gate", built=foresight, extra=1.0)
    )
    for _ in range(20):
        chosen.copy_(torch.rand(2, 2, EXPERTS, generator=generator).topk(TOP_K).indices)
        execution.begin_step(Step((RequestRows(0, 2, RowKind.DECODE),)))
        for layer in range(2):
            x = torch.randn(2, 8, generator=generator)
            execution.run(layer, x, torch.ones(2, TOP_K), chosen[layer].int(), "silu", torch.empty_like(x))
        execution.end_forward()
        execution.admission.check_integrity()
    counters = execution.snapshot()
    assert counters["prefetch_hits"] == counters["prefetches"] > 0
    execution.close()
