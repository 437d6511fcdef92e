"""Expert parallelism: the parts of all ranks are the whole output; each rank counts and loads its own experts only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vllm_spac import components
from vllm_spac.core import NOT_RUN, MoEShape, RequestRows, RowKind, Step, TensorSpec
from vllm_spac.execution.base import Rows
from vllm_spac.execution.row_shares import numbered
from vllm_spac.execution.slots_execution import SlotExecution
from vllm_spac.storage.memory import MemoryStore

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


def rank_of(number: int, owners: list[int], slots: int) -> SlotExecution:
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
    execution = SlotExecution(shape, slots, policy, store, tensors, io_threads=1, path="m", local_of=local_of)
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


@given(cases(), st.integers(TOP_K, 2 * EXPERTS), st.integers(0, 1))
def test_the_parts_of_all_ranks_are_the_output(case, slots: int, layer: int) -> None:
    owners, ranks, ids, rows = case
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(len(ids), WIDTH, generator=generator, dtype=torch.float64)
    weights = torch.rand(len(ids), TOP_K, generator=generator, dtype=torch.float64)
    step = Step((RequestRows(0, rows, RowKind.VERIFY, rows - 1),))
    total, chosen = torch.zeros(rows, WIDTH, dtype=torch.float64), ids[:rows]
    for number in range(ranks):
        execution = rank_of(number, owners, slots)
        seen, recorded = [], []
        execution.residency.policy.observe = lambda counts, seen=seen: seen.append(counts)
        given = ids.clone()
        execution.begin_step(step)
        record = lambda *what, recorded=recorded: recorded.append(what)  # noqa: E731
        out = execution.forward(layer, x, weights, given, Kernel(execution, layer), Rows(rows, False, record))
        execution.end_forward()
        assert torch.equal(given, ids), "the router's ids were changed"
        assert not out[rows:].any() and not out.isnan().any()
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
