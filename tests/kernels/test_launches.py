"""Launches of the layers of a pool over pointers: their number, and no compilation in a capture or a request."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (there are no wheels for this platform)", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: kernels are interpreted, not compiled", allow_module_level=True)

from launches import D, Device, forward, pool, predictor  # noqa: E402
from looped_experts import Looped  # noqa: E402
from vllm_spac.kernels.cover import cover  # noqa: E402
from vllm_spac.kernels.formats import Format  # noqa: E402
from vllm_spac.kernels.shortlist import shortlist  # noqa: E402
from vllm_spac.kernels.tally import tally  # noqa: E402

from vllm_spac import components  # noqa: E402
from vllm_spac.cache.prefetch_settings import PrefetchSettings  # noqa: E402
from vllm_spac.core import RequestRows, RowKind, Step  # noqa: E402
from vllm_spac.cpu_kernels._thread import ExecutorThread  # noqa: E402
from vllm_spac.execution.device.layer_launches import LayerRows  # noqa: E402
from vllm_spac.execution.device.pointers_execution import PointerExecution, _compile  # noqa: E402
from vllm_spac.methods.moe_spec import replay  # noqa: E402
from vllm_spac.methods.moe_spec.control import BudgetControl, BudgetedLayer  # noqa: E402
from vllm_spac.methods.moe_spec.settings import (
    BudgetSettings,  # noqa: E402
    RoutingRule,  # noqa: E402
)
from vllm_spac.tools.traces import simulated_pointers  # noqa: E402


def ahead_by(named) -> PrefetchSettings:
    return PrefetchSettings(prefetch="gate", built=named)


MODELS = {
    "Mixtral": (8, 2),
    "Phi-MoE": (16, 2),
    "GPT-OSS-20b": (32, 4),
    "GPT-OSS-120b": (128, 4),
    "Qwen3-30B-A3B": (128, 8),
    "the toy": (64, 8),
    "DeepSeek-V3": (256, 8),
    "odd": (7, 3),  # tables and counts of its layers do not all begin on a multiple of 16 bytes
}
BATCHED = 2048  # rows of the forward that vLLM measures its memory with
BEFORE = ["admit"]


@pytest.fixture
def device(monkeypatch) -> Iterator[Device]:
    device = Device()
    device.patch(monkeypatch)
    yield device


def captured(most: int) -> list[int]:
    """vLLM's default sizes of graphs, in the order in which they are captured."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)]
    return sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("modes", "most"), [(("PIECEWISE", "FULL"), 256), (("FULL",), 512)], ids=["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"]
)
@pytest.mark.parametrize("model", MODELS)
def test_nothing_compiles_in_a_capture_or_in_a_request(device, model, modes, most):
    """As vLLM starts: a forward to measure memory; of each size, the largest first, one that warms up and a capture."""
    made = pool(*MODELS[model], BATCHED)
    forward(made, BATCHED)
    compiled = set(device.keys)
    for mode in modes:
        for rows in captured(most):
            forward(made, rows)
            device.capturing = mode == "FULL"  # our op runs between pieces, not captured
            forward(made, rows)
            device.capturing = False
    assert device.cold == []
    for rows in (1, 2, 3, 5, 7, 11, 17, 33, 65, 127, 129, 257, 1000, 1999):
        made.begin_step(Step((RequestRows(0, rows, RowKind.DECODE),)))
        forward(made, rows)
        made.end_forward()
    assert device.keys == compiled
    names = [name for name, *_ in compiled]
    assert names.count("combine") == 1
    assert names.count("admit") <= 2 and max(map(names.count, ("gate_up", "down", "align"))) <= 6
    made.close()


@pytest.mark.parametrize("warms_up", [True, False], ids=["a forward before each capture", "none"])
@pytest.mark.parametrize("name", ["gate", "quasi_hidden", None])
def test_no_operation_is_launched_for_the_first_time_in_a_capture(device, name, warms_up):
    """Neither a kernel nor one of torch's operations, of which libraries choose some by their sizes.

    vLLM runs a forward of each size before it captures that, by default. Where it does not, each operation and type has
    run at least once, for some size.
    """
    more = {} if name is None else {"ahead": ahead_by(predictor(name, *MODELS["the toy"]))}
    made = pool(*MODELS["the toy"], BATCHED, **more)
    with device:
        forward(made, BATCHED)
        before = set(map(of_any_size, device.ran))
        for rows in captured(256):
            if warms_up:
                forward(made, rows)
            device.capturing = True
            forward(made, rows)
            device.capturing = False
    assert ("aten::addmm" in device.launched) is ("aten::topk" in device.launched) is (name is not None)
    assert [key for key in device.cold if warms_up or of_any_size(key) not in before] == []
    made.close()


def of_any_size(key: tuple) -> tuple:
    """What was launched, of torch's operations without the sizes of tensors."""
    return tuple(part[0] if isinstance(part, tuple) else part for part in key)


@pytest.mark.parametrize(
    "packed", [Format("e2m1", 32), Format("e2m1", 16), Format("int4", 16, zeros=True), Format("e4m3")], ids=str
)
def test_nothing_of_packed_experts_compiles_in_a_capture(device, packed):
    made = pool(*MODELS["GPT-OSS-20b"], BATCHED, packed=packed)
    forward(made, BATCHED)
    compiled = set(device.keys)
    for rows in captured(512):
        device.capturing = True
        forward(made, rows)
        device.capturing = False
    for rows in (1, 7, 33, 129, 1999):
        made.begin_step(Step((RequestRows(0, rows, RowKind.DECODE),)))
        forward(made, rows)
        made.end_forward()
    assert device.cold == [] and device.keys == compiled
    names = [name for name, *_ in compiled]
    assert max(map(names.count, ("gate_up", "down", "align"))) <= 6
    made.close()


def test_what_is_compiled_decides_and_moves_nothing(device):
    """In a step that has offers and counts of other layers, and reads ahead: all is as it was."""
    made = pool(8, 2, 64, ahead=ahead_by(predictor("gate", 8, 2)))
    made.begin_step(Step((RequestRows(0, 4, RowKind.DECODE),)))
    admission = made.admission
    assert made.ahead.layers._votes.any()
    state = [*admission.experts, *admission.offers, admission.counts, made._live, made.ahead.layers._votes]
    before = [tensor.clone() for tensor in state]
    ids = torch.zeros(4, 2, dtype=torch.int32)
    rows = LayerRows.of(torch.zeros(4, D), torch.zeros(4, 2), ids, made._live, None, False, None)
    _compile(made, 0, rows, "silu")
    assert device.keys and all(map(torch.equal, state, before))
    made.close()


def test_a_capture_before_anything_ran_is_an_error(device):
    made = pool(8, 2, 64)
    device.capturing = True
    with pytest.raises(AssertionError, match="before one is captured"):
        forward(made, 4)
    made.close()


FEW, MANY = ["gate_up", "down", "combine"], ["align", "gate_up", "down", "combine"]


@pytest.mark.parametrize(("rows", "launched"), [(1, FEW), (8, FEW), (16, FEW), (17, MANY), (255, MANY)])
def test_launches_of_a_layer(device, rows, launched):
    """Captured, with padding and without it: the same few, and no operation of torch, until a step borrows slots."""
    made = pool(128, 8, BATCHED)
    forward(made, 1)
    for real, device.capturing in ((rows, False), (rows // 2, False), (rows, True)):
        made.begin_step(Step((RequestRows(0, real, RowKind.DECODE),)))
        assert launches(device, made, rows) == BEFORE + launched
        made.end_forward()
    made.close()


@pytest.mark.parametrize(("rows", "launched"), [(1, FEW), (16, FEW), (32, MANY), (33, None)])
def test_launches_of_a_layer_whose_CPU_takes_a_share(device, rows, launched):
    """Of few rows; nothing of torch is launched beside them."""
    made = pool(128, 8, BATCHED)
    share(made)
    forward(made, 1)
    for real, device.capturing in ((rows, False), (rows // 2, False), (rows, True)):
        made.begin_step(Step((RequestRows(0, real, RowKind.DECODE),)))
        whole = MANY if launched is None else [*launched[:-1], "await", *launched]
        assert launches(device, made, rows) == BEFORE + whole
        made.end_forward()
    made.close()


@pytest.mark.parametrize("model", MODELS)
def test_nothing_of_the_CPUs_share_compiles_in_a_capture_or_in_a_request(device, model):
    made = pool(*MODELS[model], BATCHED)
    forward(made, BATCHED)  # by which CPU and kernels are compared
    share(made)
    forward(made, BATCHED)
    compiled = set(device.keys)
    for rows in captured(256):
        device.capturing = True
        forward(made, rows)
        device.capturing = False
    for rows in (1, 2, 3, 5, 17, 31, 32, 33, 129):
        made.begin_step(Step((RequestRows(0, rows, RowKind.DECODE),)))
        forward(made, rows)
        made.end_forward()
    assert device.cold == [] and device.keys == compiled
    names = [name for name, *_ in compiled]
    assert names.count("combine") == 2 and names.count("await") == 1 and names.count("admit") <= 4
    made.close()


def share(made: PointerExecution) -> None:
    balancer = components.build("balancers", "fixed", layers=2, top_k=made.shape.top_k)
    made.attach_balancer(balancer, ExecutorThread(Looped(made.shape, 1, "silu")))


def test_launches_of_a_layer_with_a_slot_for_each(device):
    made = pool(128, 8, BATCHED, slots=1.0, layers=1)
    forward(made, 1)
    assert launches(device, made, 4) == FEW
    made.close()


def graph_of_a_layer(device: Device, made: PointerExecution, rows: int, layer: int = 0) -> list[str]:
    """The nodes of a captured graph that a layer adds, in order, in a step in which each row is of a request."""
    dtype = torch.float32 if made.shape.packed is None else torch.bfloat16
    x, ids = torch.zeros(rows, D, dtype=dtype), torch.zeros(rows, made.shape.top_k, dtype=torch.int32)
    weights, out = torch.ones(ids.shape), torch.empty_like(x)
    made.begin_step(Step((RequestRows(0, rows, RowKind.DECODE),)))
    for device.capturing in (False, True):
        device.launched.clear()
        with device:
            made.run(layer, x, weights, ids, "silu", out)
    made.end_forward()
    device.capturing = False
    return [name.removeprefix("aten::") for name in device.launched]


# Nodes of a layer of 128 experts, top-8, at 1 or 16 rows, and at 17 or 32; as ``execution/README.md`` has them.
NODES = {
    "slots and host memory": (4, 5),
    "slots and host memory, INT4": (4, 5),
    "slots and host memory, MXFP4": (4, 5),
    "each expert has its slot": (3, 4),
    "the CPU takes a share": (7, 9),
    "reads a layer ahead by `gate`": (28, 29),
    "reads a layer ahead by `quasi_hidden`": (30, 31),
}
BUDGET_NODES = {"number": 17, "router": 13, "selected mass": 21, "mass of scores": 18}  # before the layer's


@pytest.mark.parametrize("case", NODES)
def test_nodes_of_a_captured_graph(device, case):
    formats = {"INT4": Format("int4", 16), "MXFP4": Format("e2m1", 32)}
    more = {"packed": formats.get(case.split()[-1]), "slots": 1.0 if case.startswith("each") else 0.25}
    if case.startswith("reads"):
        more["ahead"] = ahead_by(predictor(case.split("`")[1], 128, 8))
    made = pool(128, 8, 64, **more)
    if case == "the CPU takes a share":
        share(made)
    forward(made, 64)
    found = [[graph_of_a_layer(device, made, rows) for rows in pair] for pair in ((1, 16), (17, 32))]
    made.close()
    assert all(first == second for first, second in found), "as many for all rows"
    assert tuple(len(first) for first, _ in found) == NODES[case], found


def test_the_simulator_counts_what_a_layer_launches_to_admit():
    """At what a launch took on an H100, where two of them were measured."""
    more, fewest = NODES["slots and host memory"], NODES["each expert has its slot"]
    assert {a - b for a, b in zip(more, fewest, strict=True)} == {simulated_pointers.ADMISSIONS}
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_h100.json"
    rows = json.loads(results.read_text(encoding="utf-8"))["kernels"]["admission"]
    two = median(row["seconds"]["nothing admitted"]["median"] for row in rows)
    assert two == pytest.approx(2 * simulated_pointers.LAUNCH, rel=0.03)


def test_the_document_has_these_numbers_of_nodes():
    text = (Path(__file__).parents[2] / "vllm_spac" / "execution" / "README.md").read_text(encoding="utf-8")
    found = dict(re.findall(r"^\| (.+?) \| ([\d, ]+ \| [\d, ]+) \|$", text[text.index("Launches of a layer") :], re.M))
    budgets = " | ".join([", ".join(str(count) for count in BUDGET_NODES.values())] * 2)
    expected = {
        case: f"{few} | {more}"
        for case, (few, more) in NODES.items()
        if not case.endswith("FP4") and "INT4" not in case
    }
    assert found == expected | {"before it, a budget of each kind": budgets}


CHOICE = ["masked_fill", "_to_copy", "zeros", "index_fill_", "clamp_"]  # who is selected
OWN = ["gather", "zeros", "index_add_", "sum", "stack"]  # the scores of the ranking
HELD = ["masked_fill", "mul", "zeros", "index_add_"]


@pytest.mark.parametrize("coverage", ["substitution", "truncation"])
@pytest.mark.parametrize(
    ("kind", "bound", "before"),
    [
        ("number", {"budget": 8}, OWN),
        ("router", {"budget": 8, "ranking": "router"}, ["sum"]),
        ("selected mass", {"mass": 0.9}, [*OWN, *HELD]),
        ("mass of scores", {"mass": 0.9, "mass_of": "scores"}, [*OWN, "sum"]),
    ],
)
@pytest.mark.parametrize("model", ["Mixtral", "GPT-OSS-120b", "Qwen3-30B-A3B", "DeepSeek-V3"])
def test_launches_of_a_budget(device, monkeypatch, model, kind, bound, before, coverage):
    """As few in a graph, whatever its size; and nothing compiles in a capture."""
    experts, top_k = MODELS[model]
    monkeypatch.setattr(replay.BudgetKernels, "on", lambda where: replay.BudgetKernels(shortlist, cover, tally))
    rule = RoutingRule(groups=8, top_groups=4) if model == "DeepSeek-V3" else RoutingRule()
    layers = [BudgetedLayer(str(layer), experts, top_k, rule) for layer in range(2)]
    budget = BudgetControl(layers)
    budget.update(BudgetSettings(**bound, coverage=coverage))
    budget.prepare_graphs(BATCHED)

    def routed(rows: int) -> tuple[torch.Tensor, ...]:
        return torch.zeros(rows, experts), torch.ones(rows, top_k), torch.zeros(rows, top_k, dtype=torch.int32)

    for layer in range(2):
        with device:
            budget.compile(layer, *routed(BATCHED))
    compiled, before_captures = set(device.keys), set(map(of_any_size, device.ran))
    for rows in captured(512):
        for layer in range(2):
            given = routed(rows)
            device.launched.clear()
            device.capturing = True
            with device:
                budget.capture(layer, *given)
            device.capturing = False
            names = [name.removeprefix("aten::") for name in device.launched]
            assert len(names) == BUDGET_NODES[kind]
            assert names == ["eq", "_softmax", "masked_fill_", "mul", *CHOICE, *before, "shortlist", "cover", "tally"]
    assert device.keys == compiled and {of_any_size(key) for key in device.cold} <= before_captures
    assert sorted(name for name, *_ in compiled) == ["cover", "shortlist", "tally"]


def launches(device: Device, made: PointerExecution, rows: int) -> list[str]:
    """Of the last layer, over rows that come as vLLM's routers give them."""
    x, ids = torch.zeros(rows, D), torch.zeros(rows, made.shape.top_k, dtype=torch.int32)
    weights, out = torch.ones(ids.shape), torch.empty_like(x)
    device.launched.clear()
    with device:
        assert made.run(len(made.shape.layers) - 1, x, weights, ids, "silu", out) is out
    return device.launched


def test_where_each_expert_has_its_slot_a_step_launches_the_kernel_and_counts(device):
    """No report is sent, taken or learned: the host learns the hits when it asks, and of misses there are none."""
    made = pool(*MODELS["the toy"], 64, slots=1)
    step = Step((RequestRows(0, 2, RowKind.DECODE),))
    forward(made, 64)

    def steps(count: int) -> list[str]:
        device.launched.clear()
        with device:
            for _ in range(count):
                made.begin_step(step)
                layers = launches(device, made, 2) if count == 1 else []
                made.end_forward()
        return layers

    steps(1)  # the first says how many rows are of requests
    assert steps(1) == [*FEW, "aten::count_nonzero", "aten::add_"], "of a layer, and what counts for all layers"
    assert not len(made.admission.reports)
    before = made.snapshot()["hits"]
    made.admission.counts.zero_()
    made.admission.counts[:3] = 1  # as kernels would write them
    steps(2)
    assert made.counters.hits == before, "nothing was asked of the device"
    assert made.snapshot()["hits"] == made.snapshot()["hits"] == before + 6
    assert made.counters.misses == 0 and made.counters.waves == 2 * 4
