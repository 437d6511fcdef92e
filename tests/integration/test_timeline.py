"""What a running model records: each load with its bytes and thread, waits in layers; and nothing unless asked."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from compare import METHODS, TOY, compare
from engines import PROMPTS
from torch import Tensor

from vllm_spac import components
from vllm_spac.cache import transfers
from vllm_spac.cache.host_tier import HostTier
from vllm_spac.cache.prefetcher import PrefetchSettings
from vllm_spac.cache.transfers import HostRows
from vllm_spac.core import MoEShape, RequestRows, RowKind, Step, TensorSpec
from vllm_spac.cpu_kernels._thread import ExecutorThread
from vllm_spac.cpu_kernels.base import CpuExperts
from vllm_spac.execution.base import ExecutionContext
from vllm_spac.execution.host.slots_execution import SlotExecution
from vllm_spac.methods.moe_spec.control import BudgetControl
from vllm_spac.recording.timeline_file import TimelineFacts, TimelineWriter
from vllm_spac.recording.timeline_recorder import STEP_KINDS, Kind, Recording
from vllm_spac.recording.token_time import TokenTime
from vllm_spac.runtime import Runtime
from vllm_spac.storage.host import HostStore
from vllm_spac.system.host_blocks import HostBlock

LAYERS, EXPERTS, TOP_K, STEPS = 3, 8, 2, 24
SPECS = {"w": TensorSpec((4,), torch.float32)}
DECODE = Step((RequestRows(0, 1, RowKind.DECODE), RequestRows(1, 2, RowKind.DECODE)))
PREFILL = Step((RequestRows(0, 6, RowKind.PREFILL),))


class Slow(HostStore):
    """Reads take a moment, so that threads share them and reads ahead are in flight when they are needed."""

    def read(self, key: int, into) -> int:
        time.sleep(0.0005)
        return super().read(key, into)


class Zeros(CpuExperts):
    def run(self, x: Tensor, weights: Tensor, ids: Tensor, experts) -> Tensor:
        return torch.zeros_like(x)

    def describe(self) -> str:
        return "nothing"


class Kernel:
    activation, takes_slots, by_expert = "silu", True, False

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, slot_of=None, rows: int = 0) -> Tensor:
        return torch.zeros_like(x)


class Model:
    """Two executions, of layers with and without names of their own, whose rows choose experts at random."""

    def __init__(self, slots: int, host: int = 0, cpu: int = 0, prefetch: str = "off") -> None:
        self.executions = [self._execution(name, slots, host, cpu, prefetch) for name in ("a", "b")]
        self.facts = TimelineFacts(
            "toy", "store", (*self.executions[0].shape.layers, *self.executions[1].shape.layers), (8,) * 6
        )
        self.rng = np.random.default_rng(0)

    def _execution(self, name: str, slots: int, host: int, cpu: int, prefetch: str) -> SlotExecution:
        shape = MoEShape(tuple(f"{name}.{layer}" for layer in range(LAYERS)), EXPERTS, TOP_K, SPECS)
        store = Slow(shape, "")
        for key in range(shape.total):
            store.put(key, {"w": torch.full((4,), float(key))})
        tier = HostTier(shape.total, host, slots, components.build("policies", "lru")) if host else None
        execution = SlotExecution(
            ExecutionContext(
                shape,
                slots,
                components.build("policies", "lru"),
                store,
                {"w": torch.full((slots, 4), float("nan"))},
                io_threads=2,
                path="store",
                ahead=PrefetchSettings(prefetch=prefetch),
                host=None if tier is None else HostRows(tier, HostBlock(SPECS, host, pin=False)),
            )
        )
        list(execution.fill())
        execution.counters.reset()
        if cpu:
            balancer = components.build("balancers", "fixed", count=cpu, layers=LAYERS, top_k=TOP_K)
            execution.attach_balancer(balancer, ExecutorThread(Zeros(shape, 1, "silu")))
        return execution

    def run(self, runtime: Runtime, step: Step) -> None:
        runtime.begin_step(step)
        for execution in self.executions:
            for layer in range(LAYERS):
                ids = np.argsort(self.rng.random((step.rows, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
                x, weights = torch.ones(step.rows, 4), torch.ones(step.rows, TOP_K)
                runtime.forward(execution, layer, x, weights, torch.from_numpy(ids), Kernel())
        runtime.end_forward()
        runtime.end_step([1] * len(step.requests))


@pytest.fixture(params=["on demand", "host memory", "CPU", "ahead"])
def recorded(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Model, Recording]]:
    """Threads read, though the experts are so small that the forward would be faster alone."""
    monkeypatch.setattr(transfers, "_HAND_OFF", -1)
    options = {"host memory": {"host": 6}, "CPU": {"cpu": 1}, "ahead": {"prefetch": "utility"}}
    model = Model(9, **options.get(request.param, {}))
    writer = TimelineWriter(tmp_path / "run.timeline", model.facts, 100)
    runtime = Runtime(model.executions, BudgetControl([]), saved=writer)
    runtime.watch(writer.timeline)
    try:
        for number in range(STEPS):
            model.run(runtime, PREFILL if number % 8 == 0 else DECODE)
    finally:
        runtime.close()
    yield model, Recording.of(writer.timeline, 100)


def test_every_load_is_recorded_with_its_bytes(recorded) -> None:
    model, found = recorded
    counters = [execution.counters for execution in model.executions]
    loads = np.isin(found.kind, (Kind.LOAD, Kind.HOST_LOAD))
    ahead = np.array([name.startswith("spac-ahead") for name in found.threads])[found.thread]
    assert (loads & ~ahead).sum() == sum(each.loads for each in counters) > 20
    assert (found.kind == Kind.HOST_LOAD).sum() == sum(each.host_loads for each in counters)
    done = sum(each.prefetches for each in counters)
    assert done <= (loads & ahead).sum() <= done + 16, "those that were still in flight at the end are not counted"
    moved = sum(sum(each.bytes.values()) for each in counters)
    assert found.b[loads].sum() == moved + ((loads & ahead).sum() - done) * model.executions[0].shape.expert_bytes
    first = found.a[loads] < LAYERS * EXPERTS
    assert first.any() and not first.all(), "experts of the second execution follow those of the first"
    assert len(set(found.thread[loads].tolist())) > 1, "threads and the forward share them"


def test_steps_hold_layers_and_layers_hold_waits(recorded) -> None:
    model, found = recorded
    assert (found.kind == Kind.STEP).sum() == (found.kind == Kind.FORWARD).sum() == STEPS
    layers = found.a[found.kind == Kind.LAYER].tolist()
    assert layers == [*range(2 * LAYERS)] * STEPS, "in the order in which they ran, over both executions"
    forward = found.thread[found.kind == Kind.STEP][0]
    outer: list[tuple[int, int]] = []
    inside = {Kind.FORWARD: Kind.STEP, Kind.UPDATE: Kind.STEP, Kind.LAYER: Kind.FORWARD}
    inside |= dict.fromkeys((Kind.WAIT, Kind.WAIT_AHEAD, Kind.WAIT_CPU), Kind.LAYER)
    seen: Counter[Kind] = Counter()
    for index in np.flatnonzero(found.thread == forward):
        kind, start, end = Kind(found.kind[index]), found.start[index], found.end[index]
        while outer and outer[-1][1] <= start:
            outer.pop()
        assert not outer or end <= outer[-1][1], "an event ends after the one that it began in"
        if kind in inside:
            assert outer[-1][0] == inside[kind], f"{kind.name} in {outer[-1]}"
        outer.append((kind, end))
        seen[kind] += 1
    assert seen[Kind.WAIT] > 0
    assert bool(seen[Kind.WAIT_CPU]) == any(execution.counters.cpu_experts for execution in model.executions)
    time_of = TokenTime.of(found)
    assert time_of.steps == STEPS - STEPS // 8 and min(time_of.parts.values()) >= 0
    assert time_of.tokens == 2 * time_of.steps
    prompts = (found.kind == Kind.STEP) & (found.a == STEP_KINDS.index("prefill"))
    assert found.b[prompts].tolist() == [1] * (STEPS // 8)


def test_cpu_experts_are_recorded_in_their_thread(recorded) -> None:
    model, found = recorded
    names = {found.threads[thread] for thread in found.thread[found.kind == Kind.CPU]}
    if any(execution.counters.cpu_experts for execution in model.executions):
        assert names == {"spac-cpu_0"}
    else:
        assert names == set()


def test_nothing_is_recorded_unless_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(
        "vllm_spac.recording.timeline_recorder.Timeline.add", lambda *_: pytest.fail("somebody recorded")
    )
    model = Model(9, host=6, cpu=1, prefetch="utility")
    runtime = Runtime(model.executions, BudgetControl([]))
    try:
        for step in (PREFILL, DECODE, DECODE):
            model.run(runtime, step)
        assert runtime.recorder.timeline is None and not runtime.counts_tokens
    finally:
        runtime.close()


def test_recording_ends_and_begins_between_steps(tmp_path: Path) -> None:
    model = Model(9)
    writer = TimelineWriter(tmp_path / "run.timeline", model.facts, 100)
    runtime = Runtime(model.executions, BudgetControl([]))
    try:
        for timeline in (None, writer.timeline, None, writer.timeline):
            runtime.watch(timeline)
            before = len(writer.timeline.last()[2])
            for _ in range(3):
                model.run(runtime, DECODE)
            assert (len(writer.timeline.last()[2]) > before) is (timeline is not None), "loads are recorded as well"
        assert runtime.counts_tokens is False, "between steps nobody waits for tokens"
    finally:
        runtime.close()
    found = Recording.of(writer.timeline, 100)
    assert (found.kind == Kind.STEP).sum() == 6 and not (tmp_path / "run.timeline").exists()


def test_dummy_runs_and_failed_forwards_are_no_steps(tmp_path: Path) -> None:
    model = Model(9)
    writer = TimelineWriter(tmp_path / "run.timeline", model.facts, 100)
    runtime = Runtime(model.executions, BudgetControl([]), saved=writer)
    runtime.watch(writer.timeline)
    try:
        ids = torch.zeros(2, TOP_K, dtype=torch.int32)
        runtime.forward(model.executions[0], 0, torch.ones(2, 4), torch.ones(2, TOP_K), ids, Kernel())
        runtime.end_forward()
        runtime.begin_step(DECODE)  # fails before its tokens are sampled
        runtime.end_forward()
        model.run(runtime, DECODE)
    finally:
        runtime.close()
    found = Counter(event.get("cat") for event in json.loads((tmp_path / "run.timeline").read_text()))
    assert found["step"] == found["forward"] == 1 and found["layer"] == 2 * LAYERS


def test_an_engine_records_what_it_counts(tmp_path: Path) -> None:
    """The toy model with drafts: as many loads, bytes, steps and tokens as its counters have; and stock's tokens."""
    path, prompts = tmp_path / "run.timeline", PROMPTS[2:5]
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(tmp_path), "guard": "off", "record": f"timeline={path}"}
    options = {"speculative_config": METHODS["ngram"], "dtype": "float32"}
    stock, run = compare(TOY / "target", [None, spac], prompts=prompts, max_tokens=12, **options)
    events = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
    steps, loads, layers, drafted = (
        [e for e in events if e["cat"] == kind] for kind in ("step", "load", "layer", "draft")
    )
    assert sum(run.stats["steps"].values()) == len(steps) < 256
    assert len(loads) == run.stats["loads"] + run.stats["prefetches"] and min(run.stats["loads"], len(loads)) > 0
    assert sum(load["args"]["bytes"] for load in loads) == sum(run.stats["bytes"].values())
    assert set(run.stats["bytes"]) <= {"disk", "disk ahead"} and {load["args"]["from"] for load in loads} == {"disk"}
    assert {layer["args"]["layer"] for layer in layers} == set(range(run.stats["layers"]))
    assert len({layer["name"] for layer in layers}) == run.stats["layers"]
    most, tokens = sum(map(len, run.tokens)) + 4 * len(prompts), sum(step["args"]["tokens"] for step in steps)
    assert most - 4 * len(prompts) <= tokens <= most, "a request's last step may accept more than it may emit"
    assert len(drafted) == len(steps) and sum(draft["args"]["tokens"] for draft in drafted) > 0
    assert run.tokens == stock.tokens
