"""The simulator compared with the serving pool: the same hits, misses and moves for the same routing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_execution import EXPERTS, LAYERS, ROWS_MAX, TOP_K, Pool, shape
from test_execution import made as made  # the fixture

from vllm_spac import components
from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.decisions.costs import Costs
from vllm_spac.decisions.policies.base import Policy, PolicyContext
from vllm_spac.recording.trace_file import PREFILL, STEP_KINDS, Trace
from vllm_spac.tools.traces.simulation import most_drafts, simulate
from vllm_spac.tools.traces.synthetic import synthetic_trace

STEPS, DRAFTS = 60, 3
ONLINE = [
    name
    for name in components.serving("policies")
    if not components.find("policies", name).needs_layers  # pointers enter no layers
]


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


def with_long_prompts(trace: Trace, seed: int) -> Trace:
    """The same steps, but every other one with a prompt has as many rows as borrow slots, of half of the experts."""
    rng = np.random.default_rng(seed)
    kinds, ids = [], []
    for step, own in enumerate(np.split(trace.row_kind, trace.row_start[1:-1])):
        more = ROWS_MAX - len(own) if (own == PREFILL).any() and step % 2 else 0
        kinds.append(np.append(own, np.full(more, PREFILL, own.dtype)))
        for record in range(step * LAYERS, (step + 1) * LAYERS):
            chosen = [rng.permutation(EXPERTS // 2)[:TOP_K] for _ in range(more)]
            ids += [*trace.ids[trace.record_start[record] : trace.record_start[record + 1]], *chosen]
    columns = {name: getattr(trace, name) for name in ("step_kind", "step_tokens", "record_step", "record_layer")}
    rows = np.array([len(own) for own in kinds], dtype=np.uint32)
    return Trace.of(
        trace.facts, **columns, step_rows=rows, row_kind=np.concatenate(kinds), ids=np.array(ids, trace.ids.dtype)
    )


def follow(pool: Pool, trace: Trace) -> dict:
    """Every step through the pool; returns its counters."""
    rng = torch.Generator().manual_seed(0)
    for number, kinds in enumerate(np.split(trace.row_kind, trace.row_start[1:-1])):
        rows = len(kinds)
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
    said = simulate(trace, slots, Costs.read("h200"), execution="pointers", policy=policy, lag=0)
    assert (said.hits, said.misses, said.loads) == (stats["hits"], stats["misses"], stats["loads"])
    assert said.bytes == stats["bytes"]["host"] > 0 and said.streamed_bytes == stats["bytes"]["host streamed"]
    assert said.parts == stats["waves"] and said.steps == sum(stats["steps"].values())


@pytest.mark.parametrize("policy", ["lru", "reuse"])
@pytest.mark.parametrize("slots", [TOP_K, 7, 18])
def test_long_prompts_borrow_as_the_pool_does(made, policy: str, slots: int):
    trace = with_long_prompts(recorded(slots), slots)
    stats = follow(made(slots, policy=built(policy, slots, trace)), trace)
    said = simulate(trace, slots, Costs.read("h200"), execution="pointers", policy=policy, lag=0)
    staged = stats["bytes"]["host staged"]
    assert (said.hits, said.misses) == (stats["hits"], stats["misses"])
    assert said.loads == stats["loads"] + staged // shape().expert_bytes and staged > 0
    assert said.bytes == stats["bytes"]["host"] + staged and said.streamed_bytes == stats["bytes"]["host streamed"]
