"""The simulator compared with the serving pool: the same hits, misses and moves for the same routing."""

from __future__ import annotations

import pytest
import torch
from looped_experts import Looped
from test_execution import EXPERTS, LAYERS, TOP_K, Pool, shape
from test_execution import made as made  # the fixture
from test_expert_delivery import FarPool

from vllm_spac import components
from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.cpu_kernels._thread import ExecutorThread
from vllm_spac.decisions.costs import Costs
from vllm_spac.decisions.policies.base import Policy, PolicyContext
from vllm_spac.recording.trace_file import PREFILL, STEP_KINDS, Trace
from vllm_spac.tools.traces.simulation import most_drafts, simulate
from vllm_spac.tools.traces.synthetic import synthetic_trace

STEPS, DRAFTS = 60, 3
ONLINE = [name for name in components.serving("policies") if components.find("policies", name).on_device]


def recorded(seed: int) -> Trace:
    """Steps of four rows: most verify, some are prompts, in some a prompt follows a request that verifies."""
    trace = synthetic_trace(
        layers=LAYERS,
        experts=EXPERTS,
        top_k=TOP_K,
        steps=STEPS,
        drafts=DRAFTS,
        reuse=0.8,
        expert_bytes=shape().expert_bytes,
        seed=seed,
    )
    kinds = trace.row_kind.reshape(STEPS, 1 + DRAFTS)
    kinds[7::9] = PREFILL
    kinds[4::9, 2:] = PREFILL
    trace.step_kind[7::9], trace.step_kind[4::9] = STEP_KINDS.index("prefill"), STEP_KINDS.index("mixed")
    return trace


def follow(pool: Pool, trace: Trace) -> dict:
    """Every step through the pool; returns its counters."""
    rng, rows = torch.Generator().manual_seed(0), 1 + DRAFTS
    for number, kinds in enumerate(trace.row_kind.reshape(STEPS, rows)):
        prompt = int((kinds != PREFILL).sum())  # where the prompt's rows begin
        requests = [RequestRows(0, prompt, RowKind.VERIFY, prompt - 1)] if prompt else []
        requests += [RequestRows(prompt, rows, RowKind.PREFILL)] if prompt < rows else []
        pool.begin_step(Step(tuple(requests)))
        for layer in range(LAYERS):
            record = number * LAYERS + layer
            ids = torch.from_numpy(trace.ids[trace.record_start[record] : trace.record_start[record + 1]].astype(int))
            x, weights = torch.randn(rows, 16, generator=rng), torch.rand(rows, TOP_K, generator=rng)
            pool.run(layer, x, weights, ids, "silu", torch.empty_like(x))
        pool.end_forward()
    return pool.snapshot()


def built(policy: str, slots: int, trace: Trace) -> Policy:
    """As an engine builds it, which knows its drafts."""
    return components.find("policies", policy).of(PolicyContext(slots, TOP_K, most_drafts(trace)))


@pytest.mark.parametrize("policy", ONLINE)
@pytest.mark.parametrize("slots", [TOP_K, 7, 18])
def test_as_the_pool_that_serves(made, policy: str, slots: int):
    trace = recorded(slots)
    stats = follow(made(slots, policy=built(policy, slots, trace)), trace)
    said = simulate(trace, slots, Costs.read("h200"), execution="pointers", policy=policy)
    assert (said.hits, said.misses, said.loads) == (stats["hits"], stats["misses"], stats["loads"])
    assert said.bytes == stats["bytes"]["host"] > 0 and said.streamed_bytes == stats["bytes"]["host streamed"]
    assert said.parts == stats["waves"] and said.steps == sum(stats["steps"].values())


@pytest.mark.parametrize("policy", ["lru", "reuse"])
@pytest.mark.parametrize("rows", [4, 11])
@pytest.mark.parametrize("cpu", [False, True])
def test_host_memory_before_a_disk_as_the_pool_that_serves(monkeypatch, policy: str, rows: int, cpu: bool):
    """Reads of the disk, too; the host learns a step late what was used, in both."""
    monkeypatch.setattr("vllm_spac.execution.device.cpu_share.PATIENCE", 2_000_000_000)
    trace = recorded(rows)
    pool = FarPool(7, rows=rows, policy=built(policy, 7, trace), tier_policy=built(policy, rows, trace))
    if cpu:
        balancer = components.build("balancers", "fixed", count=1, layers=LAYERS, top_k=TOP_K)
        pool.attach_balancer(balancer, ExecutorThread(Looped(pool.shape, 1, "silu")))
        nothing = torch.full((1, TOP_K), -1)
        pool.run(0, torch.zeros(1, 16), torch.zeros(1, TOP_K), nothing, "silu", torch.empty(1, 16))  # as an engine does
    reports, apply = pool.admission.reports, pool.admission.reports.apply

    def applied() -> None:
        """All but the last step's."""
        last = [reports._under_way.pop()] if reports._under_way else []
        apply()
        reports._under_way.extend(last)

    reports.apply = applied
    try:
        follow(pool, trace)
        reports.apply = apply
        stats = pool.snapshot()
    finally:
        pool.close()
    costs = Costs.read("h200")
    costs = costs.model_copy(update={"host": costs.load})
    beside = {"balancer": "fixed@count=1"} if cpu else {}
    memory = {"host_bytes": rows * trace.facts.expert_bytes}
    said = simulate(trace, 7, costs, execution="pointers", policy=policy, **memory, **beside)
    assert said.cpu == stats["cpu_experts"] and (said.cpu > 0) == cpu
    assert (said.hits, said.misses, said.loads) == (stats["hits"], stats["misses"], stats["loads"])
    assert said.disk_loads == pool.store.reads > 0
