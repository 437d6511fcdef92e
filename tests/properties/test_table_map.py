"""Our kernel over slots on a device: it gets experts and a map to slots, and computes what it does with slots."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from memory_store import MemoryStore
from test_execution import EXPERTS, LAYERS, TOP_K, D, drawn, shape
from vllm_spac.kernels.reference import grouped_gemm as reference

from vllm_spac import components
from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.cpu_kernels.base import check_same
from vllm_spac.execution.base import ExecutionContext, Rows
from vllm_spac.execution.exchange import Exchange
from vllm_spac.execution.host.table_execution import TableExecution, TableKernel


class Silu:
    activation = "silu"


@pytest.mark.parametrize("slots", [TOP_K, 7, LAYERS * EXPERTS])
def test_a_map_leads_to_the_same_experts_as_slots(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    init = TableKernel.__init__

    def on_device(kernel: TableKernel, *arguments: object) -> None:
        init(kernel, *arguments)
        kernel.takes_slots = False

    monkeypatch.setattr(TableKernel, "__init__", on_device)
    layout, rng = shape(), torch.Generator().manual_seed(1)
    experts = [{name: drawn(spec, rng) for name, spec in layout.tensors.items()} for _ in range(layout.total)]
    store = MemoryStore(layout, "")
    for key, expert in enumerate(experts):
        store.put(key, expert)
    tensors = {name: torch.full((slots, *spec.shape), float("nan")) for name, spec in layout.tensors.items()}
    exchange = Exchange(torch.device("cpu"))
    policy = components.build("policies", "lru")
    made = TableExecution(
        ExecutionContext(layout, slots, policy, store, tensors, io_threads=1, path="host", exchange=exchange)
    )
    with closing(made):
        list(made.fill())
        for _ in range(10):
            made.begin_step(Step((RequestRows(0, 3, RowKind.DECODE),)))
            for layer in range(LAYERS):
                x, weights = torch.randn(3, D, generator=rng), torch.rand(3, TOP_K, generator=rng)
                ids = torch.stack([torch.randperm(EXPERTS, generator=rng)[:TOP_K] for _ in range(3)]).int()
                found = made.forward(layer, x, weights, ids, Silu(), Rows(3, as_routed=True))
                mine = experts[layer * EXPERTS : (layer + 1) * EXPERTS]
                tables = {name: torch.tensor([expert[name].data_ptr() for expert in mine]) for name in mine[0]}
                biases = tables["w13_bias"], tables["w2_bias"]
                given = x, tables["w13_weight"], tables["w2_weight"], weights, ids
                expected = reference.grouped_gemm(*given, D // 2, *biases, "silu")
                check_same(found, expected, torch.float32, 4 * D, "a layer over slots")
            made.end_forward()
