"""The managed layer between vLLM's parts, which are stand-ins here: padding, and the op that graphs are split at."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from memory_store import MemoryStore

from vllm_spac import components, runtime
from vllm_spac.core import MoEShape, RequestRows, RowKind, Step, TensorSpec
from vllm_spac.errors import SpacError, UnsupportedError
from vllm_spac.execution.base import ExecutionContext
from vllm_spac.execution.device.pointers_execution import PointerExecution
from vllm_spac.execution.exchange import Exchange
from vllm_spac.execution.host.localised import Routed
from vllm_spac.execution.host.slots_execution import SlotExecution
from vllm_spac.execution.row_shares import runnable
from vllm_spac.integration.hooks.graphs import with_moe_layer
from vllm_spac.integration.layers import custom_ops, triton_tiles
from vllm_spac.integration.layers.managed_experts import ManagedExperts, SlotKernel
from vllm_spac.methods.moe_spec.control import BudgetControl
from vllm_spac.runtime import Runtime

EXPERTS, TOP_K, WIDTH = 8, 2, 3
SHAPE = MoEShape(("layer",), EXPERTS, TOP_K, {"w": TensorSpec((1,), torch.float32)})
IDS = torch.tensor([[0, 1], [1, 2], [0, 2]], dtype=torch.int32)  # of the rows that count: experts 0, 1, 2


class Kernel:
    """An expert multiplies by its number, which its slot holds: a wrong slot shows."""

    def forward_modular(self, x, topk_weights, topk_ids):
        assert topk_ids.min() >= 0, "a CPU kernel writes past its heap"
        self.ran.append(len(x))
        slots = topk_ids if self._expert_map is None else self._expert_map[topk_ids.long()]
        scale = self.spac_execution.tensors["w"][slots.long()].squeeze(-1)
        self.seen.append(topk_ids)
        return x * (topk_weights * scale).sum(1, keepdim=True)


class Layer(ManagedExperts, Kernel):
    def __init__(self, slots: int, on_cpu: bool = True, layers: int = 1) -> None:
        shape = replace(SHAPE, layers=tuple(f"layer {i}" for i in range(layers)))
        store = MemoryStore(shape, "")
        for key in range(shape.total):
            store.put(key, {"w": torch.tensor([key + 1.0])})
        self.exchange = None if on_cpu else Exchange(torch.device("cpu"))
        execution = SlotExecution(
            ExecutionContext(
                shape,
                slots,
                components.build("policies", "lru"),
                store,
                {"w": torch.empty(slots, 1)},
                io_threads=1,
                path="memory",
                exchange=self.exchange,
            )
        )
        list(execution.fill())
        self.spac = SimpleNamespace(runtime=Runtime([execution], BudgetControl([])), device="cpu")
        _BUILT.append(self.spac.runtime)
        self.spac_execution, self.spac_index, self.layer_name, self.ran = execution, 0, "layer", []
        self.activation, self._expert_map, self.seen = SimpleNamespace(value="silu"), None, []
        self.swiglu_limit = self.swiglu_alpha = self.swiglu_beta = None
        self.quant_method = SimpleNamespace()
        self.spac_kernel = SlotKernel(self, lambda *given: Kernel.forward_modular(self, *given), on_cpu)

    def in_slots(self, x, weights, ids):
        return self.spac_execution.slots.run(self.spac_index, Routed(x, weights, ids), self.spac_kernel, None)


def padded(rows: int, junk: list[int]) -> torch.Tensor:
    return torch.cat([IDS, torch.tensor([junk] * rows, dtype=torch.int32).reshape(rows, TOP_K)])


@pytest.mark.parametrize("junk", [[-1, -1], [6, 7], [123456, -9]], ids=["skipped", "of an earlier step", "garbage"])
@pytest.mark.parametrize("slots", [3, EXPERTS], ids=["some", "all"])
def test_padding_needs_no_experts(junk: list[int], slots: int) -> None:
    layer = Layer(slots)
    ids, x = padded(5, junk), torch.rand(8, WIDTH)
    weights = torch.rand(8, TOP_K)
    layer.spac.runtime.begin_step(Step((RequestRows(0, 1, RowKind.DECODE), RequestRows(1, 3, RowKind.VERIFY, 1))))
    out = layer.spac_forward(x, weights, ids)
    layer.spac.runtime.end_forward()
    expected = x[:3] * (weights[:3] * (IDS + 1)).sum(1, keepdim=True)
    assert torch.allclose(out[:3], expected)
    assert layer.ran == [8], "as many rows as without the plugin: a GPU's kernel rounds by the size of its batch"
    counted = layer.spac_execution.snapshot()
    assert (counted["hits"], counted["misses"], counted["loads"]) == (3, 0, 0)


def test_a_dummy_run_may_be_padding_alone() -> None:
    layer = Layer(3)
    out = layer.spac_forward(torch.ones(4, WIDTH), torch.ones(4, TOP_K), torch.full((4, TOP_K), -1))
    assert out.shape == (4, WIDTH) and layer.spac_execution.snapshot()["waves"] == 0


def test_an_expert_that_is_skipped_in_a_row_that_counts_adds_nothing() -> None:
    layer = Layer(EXPERTS)
    ids = torch.tensor([[2, -1]])
    out = layer.spac_forward(torch.ones(1, WIDTH), torch.tensor([[0.5, 0.5]]), ids)
    assert torch.equal(out, torch.full((1, WIDTH), 1.5))


def test_off_the_cpu_experts_keep_their_ids_and_a_map_has_their_slots() -> None:
    layer = Layer(3, on_cpu=False)
    ids, x, weights = torch.tensor([[7, 5], [5, 6], [4, 3]]), torch.rand(3, WIDTH), torch.rand(3, TOP_K)
    out = layer.in_slots(x, weights, ids)
    assert torch.allclose(out, x * (weights * (ids + 1)).sum(1, keepdim=True))
    assert torch.equal(torch.cat(layer.seen), ids) and len(layer.seen) == 2, "vLLM sorts rows by a layer's experts"


@pytest.mark.parametrize("slots", [3, EXPERTS - 1], ids=["waves", "one wave"])
def test_off_the_cpu_ids_that_all_count_stay_where_they_are(slots: int) -> None:
    """What the router chose goes down to the host; up go maps, rows of waves, and the ids that padding has changed."""
    layer, up = Layer(slots, on_cpu=False), []
    to_device = layer.exchange.to_device
    layer.exchange.to_device = lambda tensor: up.append(tensor.shape) or to_device(tensor)
    layer.spac.runtime.begin_step(Step((RequestRows(0, 3, RowKind.PREFILL),)))
    ids, x, weights = torch.tensor([[7, 5], [5, 6], [4, 3]]), torch.rand(3, WIDTH), torch.rand(3, TOP_K)
    out = layer.spac_forward(x, weights, ids)
    layer.spac.runtime.end_forward()
    assert torch.allclose(out, x * (weights * (ids + 1)).sum(1, keepdim=True))
    waves = [(rows,) for rows in layer.ran] if slots == 3 else []
    assert sorted(up) == sorted([*waves, *[(EXPERTS,)] * len(layer.ran)])
    assert waves or layer.seen[0].untyped_storage().data_ptr() == ids.untyped_storage().data_ptr()
    layer.spac.runtime.begin_step(Step((RequestRows(0, 3, RowKind.DECODE),)))
    layer.spac_forward(torch.rand(4, WIDTH), torch.rand(4, TOP_K), padded(1, [-1, -1]))
    assert up[-2:] == [(4, TOP_K), (EXPERTS,)]


_BUILT: list[Runtime] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Closes what a test built, at its end: a garbage collection while a thread starts cannot wait for threads."""
    yield
    while _BUILT:
        _BUILT.pop().close()


@pytest.fixture
def unhooked(monkeypatch):
    """vLLM's functions as they are, and again behind the test."""
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.model_executor.layers.fused_moe.experts import triton_moe

    for module in (fused_moe, triton_moe):
        for name in ("try_get_optimal_moe_config", "moe_align_block_size"):
            monkeypatch.setattr(module, name, inspect.unwrap(getattr(module, name)))
    monkeypatch.setattr(triton_tiles, "install", functools.cache(triton_tiles.install.__wrapped__))


def align_on_cuda(ids, experts, block, sorted_ids, expert_ids, padded_rows, expert_map=None, scatter=None) -> None:
    """``moe_align_block_size`` as vLLM's CUDA kernel orders it: mapped first, then counted by ``experts`` counts."""
    flat = ids.flatten().long()
    numbers = flat if expert_map is None else expert_map[flat].long()
    assert numbers.max() < experts, f"number {numbers.max()} is written beyond {experts} counts"
    sorted_ids.fill_(ids.numel())
    expert_ids.fill_(-1)
    start = 0
    for number in range(experts):
        rows = (numbers == number).nonzero().flatten()
        stop = start + -(-len(rows) // block) * block
        sorted_ids[start : start + len(rows)] = rows
        expert_ids[start // block : stop // block] = number
        start = stop
    padded_rows.fill_(start)


def sorted_as_unquantised(ids, config, experts, expert_map):
    """As ``TritonExperts.apply`` does, also for FP8."""
    from vllm.model_executor.layers.fused_moe.experts import triton_moe

    sizes = (len(ids), TOP_K, experts, expert_map)
    return triton_moe._prepare_expert_assignment(ids, config, *sizes, ignore_invalid_experts=True)


def sorted_as_int4(ids, config, experts, expert_map):
    """As ``TritonWNA16Experts.apply`` does."""
    from vllm.model_executor.layers.fused_moe.experts import triton_moe

    return triton_moe.moe_align_block_size(ids, config["BLOCK_SIZE_M"], experts, expert_map)


@pytest.mark.parametrize("sort", [sorted_as_unquantised, sorted_as_int4])
def test_off_the_cpu_vllm_sorts_by_experts_and_finds_their_slots(unhooked, monkeypatch, sort) -> None:
    """With vLLM's own functions around the CUDA kernel, and slots that are numbered far beyond a layer's experts."""
    from vllm import _custom_ops

    class Sorting(Layer):
        def kernel(self, x, weights, ids):
            order, blocks, count = sort(ids, {"BLOCK_SIZE_M": 4}, EXPERTS, self._expert_map)
            out = torch.zeros_like(x)
            for place in range(int(count)):
                pair, slot = int(order[place]), blocks[place // 4]
                if pair < ids.numel():
                    row = pair // TOP_K
                    out[row] += x[row] * weights.flatten()[pair] * self.spac_execution.tensors["w"][slot]
            return out

    monkeypatch.setattr(_custom_ops, "moe_align_block_size", align_on_cuda)
    monkeypatch.setattr(Kernel, "forward_modular", Sorting.kernel)
    layer = Sorting(5 * EXPERTS - 1, on_cpu=False, layers=5)
    x, weights = torch.rand(3, WIDTH), torch.rand(3, TOP_K)
    ids = torch.tensor([[7, 5], [5, 6], [4, 3]], dtype=torch.int32)
    for index in (0, 4):
        layer.spac_index = index
        out = layer.in_slots(x, weights, ids)
        expected = x * (weights * (ids + 1 + index * EXPERTS)).sum(1, keepdim=True)
        assert torch.allclose(out, expected)
    assert layer._expert_map.max() >= EXPERTS


@pytest.mark.parametrize("name", ["try_get_optimal_moe_config", "moe_align_block_size"])
@pytest.mark.parametrize("found", [None, lambda topk_ids, block_size, num_experts, expert_map=None: None])
def test_a_vllm_whose_kernels_cannot_be_told_is_refused(unhooked, monkeypatch, name: str, found) -> None:
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.model_executor.layers.fused_moe.experts import triton_moe

    before = fused_moe.moe_align_block_size
    if found is None:
        monkeypatch.delattr(triton_moe, name)
    else:
        monkeypatch.setattr(triton_moe, name, found)
    with pytest.raises(UnsupportedError, match=rf"triton_moe:{name}.*use a vLLM that it was tested with"):
        triton_tiles.install()
    assert fused_moe.moe_align_block_size is before, "all or nothing"


def test_off_the_cpu_tiles_are_those_of_a_whole_layer(unhooked, monkeypatch) -> None:
    """vLLM's rule gives few experts and many rows other tiles; the second wave has one row, of three."""
    from vllm.model_executor.layers.fused_moe.experts import triton_moe

    layer, chosen = Layer(3, on_cpu=False), []
    run = Kernel.forward_modular

    def kernel(self, x, weights, ids):
        chosen.append(triton_moe.try_get_optimal_moe_config((3, 64, 32), (3, 32, 32), TOP_K, None, len(x)))
        return run(self, x, weights, ids)

    def choose(w1_shape, w2_shape, top_k, dtype, M, block_shape=None):  # noqa: N803
        return w1_shape, w2_shape, M

    monkeypatch.setattr(Kernel, "forward_modular", kernel)
    monkeypatch.setattr(triton_moe, "try_get_optimal_moe_config", choose)
    layer.in_slots(torch.rand(3, WIDTH), torch.rand(3, TOP_K), torch.tensor([[7, 5], [5, 6], [4, 3]]))
    assert chosen == 2 * [((EXPERTS, 64, 32), (EXPERTS, 32, 32), 3)]
    assert triton_moe.try_get_optimal_moe_config((3, 64, 32), (3, 32, 32), TOP_K, None, 1)[2] == 1, (
        "others choose as ever"
    )


def test_off_the_cpu_vllms_own_ids_reach_its_kernel_untouched() -> None:
    layer = Layer(EXPERTS, on_cpu=False)
    seen = []
    layer.spac_execution.observe = lambda index, ids, partly: seen.append(ids)
    ids = padded(2, [7, 7])
    layer.spac.runtime.begin_step(Step((RequestRows(0, 3, RowKind.PREFILL),)))
    layer.spac_forward(torch.ones(5, WIDTH), torch.ones(5, TOP_K), ids)
    assert torch.equal(seen[0], IDS) and layer.ran == [5]


@pytest.mark.parametrize(("slots", "on_cpu"), [(3, True), (3, False), (EXPERTS, True)])
def test_a_graph_holds_no_layer_that_loads(monkeypatch, slots: int, on_cpu: bool) -> None:
    layer = Layer(slots, on_cpu)
    monkeypatch.setattr(runtime, "capturing", lambda tensor: True)
    with pytest.raises(SpacError, match="--enforce-eager"):
        layer.spac_forward(torch.ones(1, WIDTH), torch.ones(1, TOP_K), torch.zeros(1, TOP_K, dtype=torch.int64))


def test_a_graph_holds_a_layer_whose_experts_all_have_a_slot(monkeypatch) -> None:
    """vLLM's kernel runs what the router chose, and nothing waits for the host or is kept for it."""
    layer, ids = Layer(EXPERTS, on_cpu=False), padded(2, [7, 7])
    monkeypatch.setattr(runtime, "capturing", lambda tensor: True)
    with monkeypatch.context() as graph:
        for name in ("cpu", "numpy", "item", "tolist", "nonzero"):
            graph.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"{name} waits for the device"))
        layer.spac_forward(torch.ones(5, WIDTH), torch.ones(5, TOP_K), ids)
    assert layer.seen == [ids] and layer.spac_execution.snapshot()["hits"] == 0
    with pytest.raises(UnsupportedError, match="a budget"):
        layer.spac.runtime.rerouter.check_host("a budget")


def test_a_layer_over_pointers_that_is_captured_is_closed_to_the_host(monkeypatch) -> None:
    layer, ids = Layer(3), torch.tensor([[1, 2]])
    layer.spac_execution = SimpleNamespace(
        waits_for_host=lambda kernel: PointerExecution.needs_host,
        forward=lambda index, x, weights, ids, *rest: x * ids.sum(),
    )
    x, weights, closed = torch.ones(1, WIDTH), torch.ones(1, TOP_K), layer.spac.runtime
    layer.spac_forward(x, weights, ids)
    closed.rerouter.check_host("a budget")
    monkeypatch.setattr(runtime, "capturing", lambda tensor: True)
    assert torch.equal(layer.spac_forward(x, weights, ids), 3 * x)
    with pytest.raises(UnsupportedError, match="a budget"):
        closed.rerouter.check_host("a budget")


def test_runnable_keeps_what_counts() -> None:
    ids = padded(3, [7, 7])
    assert torch.equal(runnable(ids, 6), ids)
    assert torch.equal(runnable(ids, 3), padded(3, [0, 1])), "padding takes the experts of the first row"
    assert runnable(ids, 3).dtype == torch.int32


# -- the op ------------------------------------------------------------------------------------------------


@pytest.fixture
def runner(monkeypatch):
    """A ``MoERunner`` that returns memory of its own, as vLLM's kernels do."""
    found = SimpleNamespace(
        _forward_impl=lambda hidden, logits, shared, input_ids: (
            hidden * 2 if shared is None else (shared + 1, hidden * 2 + logits.sum())
        )
    )
    monkeypatch.setattr(custom_ops.moe_runner, "get_layer_from_name", lambda name: found)
    return found


@pytest.mark.parametrize("shared", [False, True])
def test_the_op_gives_what_the_layer_gives(runner, shared: bool) -> None:
    hidden, logits = torch.rand(4, 6), torch.rand(4, EXPERTS)
    given = hidden if shared else None
    name = custom_ops.layer_argument("layer")
    got = custom_ops.moe_layer(shared)(hidden, logits, given, None, name, 0)
    want = runner._forward_impl(hidden, logits, given, None)
    assert all(map(torch.equal, got, want)) if shared else torch.equal(got, want)


def test_an_output_may_be_narrower(runner) -> None:
    runner._forward_impl = lambda hidden, *rest: hidden[:, :4]
    hidden = torch.rand(2, 6)
    got = custom_ops.moe_layer(False)(hidden, hidden, None, None, custom_ops.layer_argument("layer"), 4)
    assert torch.equal(got, hidden[:, :4])


def test_a_graph_is_split_at_the_op_and_its_output_comes_from_before(runner) -> None:
    """What follows is replayed on the addresses that it was captured with."""
    from vllm.compilation.partition_rules import should_split

    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph.graph)
        return graph.forward

    forward, name = custom_ops.moe_layer(shared=False), custom_ops.layer_argument("layer")

    def model(hidden):
        return forward(hidden.sin(), hidden, None, None, name, 0).cos()

    hidden = torch.rand(4, 6)
    got = torch.compile(model, backend=backend, fullgraph=True)(hidden)
    assert torch.allclose(got, (hidden.sin() * 2).cos())
    (graph,) = graphs
    ours = [node for node in graph.nodes if should_split(node, with_moe_layer([]))]
    assert [str(node.target) for node in ours] == ["vllm.spac_moe_layer"]
    (last,) = [node for node in graph.nodes if "cos" in str(node.target)]
    made = last.args[0] if last.args else last.all_input_nodes[0]
    assert made is not ours[0] and list(graph.nodes).index(made) < list(graph.nodes).index(ours[0])
