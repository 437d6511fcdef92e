"""The simulator by hand on tiny traces, against what must hold on any, and its profiles."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spac import components
from vllm_spac.decisions import core_rates, costs
from vllm_spac.decisions.costs import Costs, HostWork, Rate
from vllm_spac.errors import ConfigError
from vllm_spac.execution.device.cpu_share import MOST_ROWS
from vllm_spac.execution.waves import row_waves
from vllm_spac.recording.trace_file import PREFILL, ROW_KINDS, STEP_KINDS, Trace, TraceFacts
from vllm_spac.tools.traces import trace_statistics
from vllm_spac.tools.traces.replayed import parts
from vllm_spac.tools.traces.simulated_pointers import LAUNCHES
from vllm_spac.tools.traces.simulation import simulate
from vllm_spac.tools.traces.synthetic import synthetic_trace

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ISA = "avx512_bf16"
COSTS = Costs(
    format="spac-profile-1",
    name="round numbers",
    provenance={"how": "calculated", "source": "a test"},
    fast=Rate(bytes_per_second=100),  # an expert of 100 bytes: 1 second
    load=Rate(fixed=1, bytes_per_second=10),  # 10 seconds, and 1 for each batch in flight
    cpu=Rate(bytes_per_second=20),  # 5 seconds
    load_at_once=2,
    other=3,
    draft=7,
)


def decoding(choices: list[list[list[list[int]]]], experts: int = 4, kind: str = "decode", **facts) -> Trace:
    """A trace from choices[step][layer][row][k]; the rows of a step are those of one request."""
    layers, top_k = len(choices[0]), len(choices[0][0][0])
    rows = [len(step[0]) for step in choices]
    first, others = (kind, "draft") if kind == "verify" else (kind, kind)
    kinds = [ROW_KINDS.index(first if row == 0 else others) for count in rows for row in range(count)]
    ids = [row for step in choices for layer in step for row in layer]
    return Trace.of(
        TraceFacts(layers, experts, top_k, **{"expert_bytes": 100} | facts),
        step_kind=np.full(len(choices), STEP_KINDS.index(kind), np.uint8),
        step_rows=np.array(rows, np.uint32),
        step_tokens=np.array([1] * len(choices), np.uint32),
        row_kind=np.array(kinds, np.uint8),
        record_step=np.repeat(np.arange(len(choices), dtype=np.uint32), layers),
        record_layer=np.tile(np.arange(layers, dtype=np.uint16), len(choices)),
        ids=np.array(ids, np.uint8).reshape(-1, top_k),
    )


def test_on_demand_by_hand():
    """Two slots, one layer, experts 0 1 | 1 2 | 1 2: two loads, one load, none."""
    trace = decoding([[[[0, 1]]], [[[1, 2]]], [[[2, 1]]]])
    outcome = simulate(trace, 2, COSTS, fill=False)
    assert (outcome.hits, outcome.misses, outcome.loads, outcome.cpu, outcome.parts) == (3, 3, 3, 0, 3)
    assert outcome.bytes == 300 and outcome.share == 0.5 and outcome.hit_rate == 0.5
    assert outcome.stall_seconds == pytest.approx((1 + 20) + (1 + 10))
    assert outcome.seconds == pytest.approx(3 * 3 + 32 + 6)
    assert outcome.bound_seconds == pytest.approx(3 * 3 + 20 + 10 + 2), "the slower of load and compute; no fixed parts"
    assert outcome.tpot == pytest.approx(outcome.seconds / 3)
    assert outcome.ratio == pytest.approx(outcome.seconds / outcome.bound_seconds)


def test_the_host_s_own_work_by_hand():
    """Layers that load, whatever their number of loads, that hit, and none where every expert has its slot."""
    trace = decoding([[[[0, 1]]], [[[1, 2]]], [[[2, 1]]]])
    works = COSTS.model_copy(update={"host_work": HostWork(layer=0.25, load=0.5, divide=100)})
    plain, outcome = (simulate(trace, 2, costs, fill=False) for costs in (COSTS, works))
    assert outcome.seconds - plain.seconds == pytest.approx(3 * 0.25 + 2 * 0.5)
    assert outcome.stall_seconds - plain.stall_seconds == pytest.approx(3 * 0.25 + 2 * 0.5)
    assert (outcome.hits, outcome.loads, outcome.bound_seconds) == (plain.hits, plain.loads, plain.bound_seconds)
    assert simulate(trace, 4, works).seconds == simulate(trace, 4, COSTS).seconds, "nothing is decided"
    assert simulate(trace, 4, works, execution="pointers").seconds == simulate(trace, 4, COSTS).seconds


def test_the_host_s_own_work_in_parts_and_beside_the_cpu():
    """Each part of a layer that loads, once; dividing a layer is added to the later of both sides."""
    works = COSTS.model_copy(update={"host_work": HostWork(layer=0.25, load=0.5, divide=2)})
    trace = decoding([[[[0, 1], [2, 3], [3, 2]]]])
    plain, outcome = (simulate(trace, 2, costs, fill=False) for costs in (COSTS, works))
    assert outcome.parts == 2 and outcome.seconds - plain.seconds == pytest.approx(0.25 + 2 * 0.5)
    trace = decoding([[[[0, 1, 2]]], [[[0, 1, 3]]]])
    for balancer, more in (("fixed@count=1", 2), ("fixed@count=0", 0.5)):  # of three slots two hold what both need
        plain, outcome = (simulate(trace, 3, costs, balancer=balancer) for costs in (COSTS, works))
        assert outcome.cpu == plain.cpu == (more == 2)
        assert outcome.seconds - plain.seconds == pytest.approx(2 * 0.25 + more)


def test_link_and_cpu_share_host_memory():
    """Four experts, of which two are loaded in 21 seconds and two computed in 10."""
    trace = decoding([[[[0, 1, 2, 3]]]])
    for bandwidth, seconds in ((None, 21), (20, 21), (10, 40)):
        known = COSTS.model_copy(update={"memory": bandwidth})
        found = simulate(trace, 4, known, balancer="fixed@count=2", fill=False)
        assert (found.loads, found.cpu) == (2, 2)
        assert found.stall_seconds + 2 == pytest.approx(max(21 + 2, seconds)), "two experts run where they were loaded"


def test_drafts_cost_time_and_rows_share_an_expert():
    trace = decoding([[[[0, 1], [0, 2], [0, 1]]]], kind="verify")
    outcome = simulate(trace, 3, COSTS, fill=False)
    assert (outcome.misses, outcome.parts) == (3, 1)
    assert outcome.seconds == pytest.approx(3 + 2 * 7 + (2 + 30) + 3)
    assert outcome.tpot == pytest.approx(outcome.seconds)


def test_prompts_are_no_part_of_tpot_and_teach_nothing():
    prompt = decoding([[[[0, 1], [2, 3]]]], kind="prefill")
    outcome = simulate(prompt, 4, COSTS)
    assert outcome.tpot is None and outcome.seconds > 0


def test_unknown_number_of_tokens_is_no_tpot():
    trace = decoding([[[[0, 1]]]])
    trace.step_tokens[:] = 0
    assert simulate(trace, 2, COSTS).tpot is None


def test_more_experts_than_slots_runs_in_parts():
    """Rows with the same experts run together; 0 is loaded twice, for 0 1 and for 0 2, though it misses once."""
    outcome = simulate(decoding([[[[0, 1], [2, 3], [0, 1]]]]), 2, COSTS, fill=False)
    assert (outcome.parts, outcome.misses, outcome.loads, outcome.hits) == (2, 4, 4, 0)
    trace = decoding([[[[0, 1], [1, 2], [0, 2]]]])
    outcome = simulate(trace, 2, COSTS, fill=False)
    assert (outcome.parts, outcome.misses, outcome.loads, outcome.hits) == (3, 3, 4, 0)
    assert simulate(trace, 3, COSTS, fill=False).parts == 1


@given(st.integers(2, 16), st.integers(0, 1000))
@settings(max_examples=examples(50), deadline=None)
def test_parts_are_the_waves_of_serving(slots, seed):
    trace = synthetic_trace(layers=2, experts=16, top_k=2, steps=3, drafts=7, skew=0, reuse=0, seed=seed)
    for record, found in enumerate(parts(trace, slots)):
        ids = trace.ids[trace.record_start[record] : trace.record_start[record + 1]].astype(int)
        first = 16 * int(trace.record_layer[record])
        for wave, part in zip(row_waves(ids, slots, 16), found, strict=True):
            keys, uses = np.unique(ids[wave] + first, return_counts=True)
            assert (part.keys, part.rows) == (keys.tolist(), uses.tolist())


@pytest.mark.parametrize("name", components.names("policies"))
def test_every_policy_runs_and_none_beats_belady(name):
    trace = synthetic_trace(layers=3, experts=16, top_k=4, steps=150, drafts=2, skew=1.0, reuse=0.7)
    for slots in (8, 12, 24, 48):
        outcome, best = (simulate(trace, slots, COSTS, policy=policy) for policy in (name, "belady"))
        distinct = sum(len(np.unique(np.concatenate([p.keys for p in ps]))) for ps in parts(trace, slots))
        assert outcome.hits + outcome.misses == distinct
        assert outcome.loads >= best.loads
        assert outcome.seconds >= outcome.bound_seconds > 0 and outcome.ratio >= 1
        assert outcome.misses == 0 or slots < 48
        assert outcome == simulate(trace, slots, COSTS, policy=name), "not deterministic"


@pytest.mark.parametrize("name", components.names("balancers"))
def test_every_balancer_runs(name):
    trace = synthetic_trace(layers=3, experts=16, top_k=4, steps=100, drafts=2, skew=1.0, reuse=0.7)
    outcome, plain = (simulate(trace, 12, COSTS, balancer=b) for b in (name, "none"))
    assert outcome.hits + outcome.misses + outcome.cpu == plain.hits + plain.misses
    assert (outcome.cpu == 0) == (name == "none")
    assert outcome.seconds >= outcome.bound_seconds


def test_waterfill_adds_the_processors_up():
    """Loads of 10 s against 5 s on the CPU: much quicker than loads alone."""
    trace = synthetic_trace(layers=3, experts=16, top_k=4, steps=100, drafts=2, skew=1.0, reuse=0.7)
    outcome, plain = (simulate(trace, 12, COSTS, balancer=b) for b in ("waterfill", "none"))
    assert outcome.tpot < 0.6 * plain.tpot


def test_an_expert_runs_on_one_side_of_a_layer():
    """Also in parts: the balancer decides once, for all rows."""
    trace = synthetic_trace(layers=2, experts=16, top_k=4, steps=60, drafts=7, skew=0.5, reuse=0)
    outcome = simulate(trace, 5, COSTS, balancer="waterfill")
    distinct = sum(len({key for part in found for key in part.keys}) for found in parts(trace, 5))
    assert outcome.parts > trace.records and outcome.cpu > 0
    assert outcome.hits + outcome.misses + outcome.cpu == distinct and outcome.hits >= 0


def test_requests_draft_side_by_side():
    """Two requests with two drafts each: two draft steps, not four."""
    trace = decoding([[[[0, 1]] * 6]], kind="verify")
    trace.row_kind[:] = [2, 3, 3, 2, 3, 3]
    one = decoding([[[[0, 1]] * 3]], kind="verify")
    assert simulate(trace, 4, COSTS).seconds == simulate(one, 4, COSTS).seconds


def test_reads_ahead_by_hand():
    """One layer; 2 and 3 are selected by nine rows, then evicted by a prompt, which does not change their scores.

    They are read one after the other, in 11 s each, while drafts are made. Without drafts, 3 s pass before the layer:
    2 has 8 of 10 s of bandwidth left, and 3 has not begun, so that it is loaded on demand. For 1 s 2 has the bandwidth,
    then both need 7 + 7 s and 3 another 3 s, in all 18 where two loads take 21.
    """
    trace = decoding([[[[2, 3]] * 9], [[[0, 1]] * 9], [[[2, 3]] * 9]], kind="verify")
    trace.row_kind[9:18] = PREFILL
    hasty = COSTS.model_copy(update={"draft": 0.0})
    for known, expected, saved in ((COSTS, (2, 4, 4, 2, 2, 0), 21), (hasty, (0, 6, 5, 1, 1, 1), 3)):
        off, ahead = (simulate(trace, 2, known, prefetch=name, fill=False) for name in ("off", "utility@gamma=2"))
        assert (off.hits, off.misses, off.loads, off.prefetches) == (0, 6, 6, 0)
        counts = ahead.hits, ahead.misses, ahead.loads, ahead.prefetches, ahead.prefetch_hits, ahead.prefetch_late
        assert counts == expected and ahead.prefetch_wasted == 0 and ahead.bytes == off.bytes == 600
        assert off.seconds - ahead.seconds == pytest.approx(saved)
        assert off.stall_seconds - ahead.stall_seconds == pytest.approx(saved)


def test_reads_ahead_beside_a_cpu_that_computes_all_misses():
    """As in serving, the limit counts what the CPU computes; there are no other misses."""
    trace = synthetic_trace(layers=3, experts=16, top_k=4, steps=60, drafts=3)
    options = {"policy": "utility", "balancer": "fixed@count=16"}
    limited, none = (simulate(trace, 12, COSTS, **options, prefetch=f"utility@extra={extra}") for extra in (0.1, 0.0))
    assert none.prefetches == none.misses == 0 < none.cpu and limited.prefetches > 0
    unused = limited.prefetches - limited.prefetch_hits
    assert unused + limited.prefetch_harmful <= 0.1 * (
        limited.cpu + limited.loads + limited.prefetch_hits - limited.prefetch_harmful
    )


def test_the_ceiling_of_predictors():
    """The oracle knows all, or as much as it is told to."""
    trace = synthetic_trace(layers=3, experts=16, top_k=4, steps=100, drafts=2, skew=1.0, reuse=0.3)
    found = {name: simulate(trace, 24, COSTS, prefetch=name) for name in ("off", "oracle")}
    used = found["off"].hits + found["off"].misses
    for outcome in found.values():
        assert outcome.hits + outcome.misses == used and outcome.seconds >= outcome.bound_seconds
    assert found["oracle"].hits > found["off"].hits and found["oracle"].seconds < found["off"].seconds
    assert found["oracle"].prefetch_wasted == 0
    one, right, half = (
        simulate(trace, 24, COSTS, prefetch=f"oracle@{knobs}")
        for knobs in ("reach=1", "reach=1@recall=1.0", "reach=1@recall=0.5")
    )
    assert (one.hits, one.prefetches, one.seconds) == (right.hits, right.prefetches, right.seconds)
    assert 0 < one.prefetches < found["oracle"].prefetches
    assert one.prefetch_wasted == 0 < half.prefetch_wasted and one.hits > found["off"].hits > half.hits
    limited = simulate(trace, 24, COSTS, prefetch="oracle@reach=1@recall=0.5@extra=0.05")
    unused = limited.prefetches - limited.prefetch_hits + limited.prefetch_harmful
    assert unused <= 0.06 * (limited.loads + limited.prefetch_hits - limited.prefetch_harmful)
    assert limited.prefetches < half.prefetches


@pytest.mark.parametrize(
    ("prefetch", "lacks"),
    [
        ("gate", "router_input"),
        ("neural", "router_input"),
        ("draft_gate", "draft_gates"),
        ("shadow@extra=0.1", "draft_routing"),
    ],
)
def test_predictors_that_a_trace_has_not_the_inputs_of(prefetch: str, lacks: str):
    trace, name = synthetic_trace(layers=3, experts=16, top_k=4, steps=2), prefetch.partition("@")[0]
    with pytest.raises(ConfigError, match=f"prefetch {name} looks at .*{lacks}, which a trace does not hold"):
        simulate(trace, 12, COSTS, prefetch=prefetch)


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"slots": 3}, "3 slots: use from 4"),
        ({"slots": 49}, "to 48"),
        ({"policy": "mru"}, "no 'mru'"),
        ({"policy": "lru@size=3"}, "lru has no argument 'size'; it has none"),
        ({"policy": "utility@variant=mine"}, "no variant is called 'mine'"),
        ({"policy": "utility@upper"}, "'upper' in .* sets nothing"),
        ({"balancer": "luck"}, "no 'luck'"),
        ({"policy": "belady", "balancer": "waterfill"}, "belady must know"),
        ({"expert_bytes": 0}, "--expert-bytes"),
        ({"prefetch": "luck"}, "prefetch='luck' is not known; use off or"),
        ({"prefetch": "utility@size=3"}, "prefetch='utility@size=3' cannot be built.*size"),
        ({"prefetch": "oracle@recall=2"}, "use reach >= 0 and recall from 0 to 1"),
        ({"prefetch": "utility@depth=0"}, "must be at least 1"),
        ({"prefetch": "oracle@upper=1"}, "oracle has no argument 'upper'"),
        ({"policy": "belady", "prefetch": "utility"}, "belady must know"),
        ({"execution": "pointers", "prefetch": "utility"}, "prefetch utility is of plane=slots"),
    ],
)
def test_refusals(knobs, named):
    trace = synthetic_trace(layers=3, experts=16, top_k=4, steps=2)
    with pytest.raises(ConfigError, match=named):
        simulate(trace, **{"slots": 12, "costs": COSTS} | knobs)


# --- pointers --------------------------------------------------------------------------------------------------------

ONLINE = [name for name in components.serving("policies") if components.find("policies", name).on_device]
MORE_AND_MORE = [[[[0, 1]]], [[[1, 2]]], [[[1, 2]]], [[[1, 2]]]]


def pointers(trace, slots, costs=COSTS, **options):
    return simulate(trace, slots, costs, execution="pointers", **options)


def test_prompts_decide_nothing():
    outcome = pointers(decoding(MORE_AND_MORE, kind="prefill"), 2)
    assert outcome.loads == 0 and outcome.misses == 3 and outcome.tpot is None


def test_the_cpu_s_share_of_what_pointers_miss():
    """Its share of a layer goes by how many are missing. Those with the fewest rows go, of those the least worth."""
    trace = decoding([[[[0, 1], [0, 2], [0, 3]]]])
    alone = pointers(trace, 2, fill=False)
    assert (alone.misses, alone.cpu, alone.seconds) == (4, 0, pytest.approx(3 + 40, abs=1e-3))
    # An expert crosses the bus in 10 seconds, or takes the CPU 5 for each row; expert 0 has three rows.
    for bandwidth, cpu, seconds in ((20, 3, 3 + 15), (100, 4, 3 + 1 + 1 + 1 + 3)):
        known = COSTS.model_copy(update={"cpu": Rate(bytes_per_second=bandwidth, flops_per_second=bandwidth)})
        found = pointers(trace, 2, known, balancer="waterfill", fill=False)
        assert (found.misses, found.cpu, found.hits) == (4 - cpu, cpu, 0)
        assert found.seconds == pytest.approx(seconds, abs=1e-3) and found.bound_seconds <= found.seconds
    cpu = Rate(bytes_per_second=20, flops_per_second=20)
    both = COSTS.model_copy(update={"cpu": cpu, "memory": 25.0})  # 4 seconds for each of 4 experts, whoever reads it
    found = pointers(trace, 2, both, balancer="waterfill", fill=False)
    assert (found.misses, found.cpu, found.seconds) == (1, 3, pytest.approx(3 + 16, abs=1e-3))
    slow = COSTS.model_copy(update={"cpu": Rate(bytes_per_second=2)})  # 50 seconds
    found = pointers(trace, 2, slow, balancer="waterfill", fill=False)
    assert (found.cpu, found.seconds) == (0, pytest.approx(alone.seconds))
    found = pointers(trace, 2, slow, balancer="fixed@count=1", fill=False)
    assert (found.cpu, found.seconds) == (1, pytest.approx(3 + 50, abs=1e-3))


def test_the_cpu_takes_no_part_in_prompts_and_wide_steps():
    trace = decoding([[[[0, 1], [0, 2], [0, 3]]]], kind="prefill")
    assert pointers(trace, 2, balancer="waterfill", fill=False).cpu == 0
    for requests, some in ((MOST_ROWS, True), (MOST_ROWS + 1, False)):
        trace = synthetic_trace(layers=3, experts=16, top_k=4, steps=5, requests=requests, expert_bytes=100)
        assert (pointers(trace, 12, balancer="fixed@count=1").cpu > 0) == some


def test_with_a_slot_for_each_it_takes_what_slots_take():
    trace = synthetic_trace(layers=3, experts=16, top_k=4, steps=50, drafts=2)
    ours, slots = pointers(trace, 48), simulate(trace, 48, COSTS)
    assert (ours.hits, ours.misses, ours.bytes, ours.streamed_bytes) == (slots.hits, 0, 0, 0)
    assert ours.seconds == pytest.approx(slots.seconds) and ours.stall_seconds == pytest.approx(0)


def test_admission_by_hand():
    """Two slots with 0 and 1; a hit takes 1 s, what is besides 3 s a step; 2 is copied for 10 s in the second step.

    Its other expert is computed meanwhile, and 2 is read in its slot when it has arrived.
    """
    outcome = pointers(decoding(MORE_AND_MORE), 2)
    assert (outcome.hits, outcome.misses, outcome.loads, outcome.parts) == (7, 1, 1, 4)
    assert (outcome.bytes, outcome.streamed_bytes) == (100, 0)
    assert outcome.seconds == pytest.approx(3 * (3 + 2) + (3 + 10 + 1) + 4 * LAUNCHES)
    assert outcome.stall_seconds == pytest.approx(10 - 1 + 4 * LAUNCHES)
    assert outcome.tpot == pytest.approx(outcome.seconds / 4)


def test_a_step_knows_what_the_last_one_used():
    """2 slots, 3 experts in turn: whoever was used in the last step is used again in the next one, and then never."""
    steps = [[[[0, 1]]], [[[1, 2]]], [[[2, 3]]], [[[3, 0]]], [[[0, 1]]], [[[1, 2]]]]
    outcome = pointers(decoding(steps), 2, policy="lru")
    assert (outcome.hits, outcome.misses) == (2 + 5, 5), "an order of a step ago would evict what is used"


def test_who_is_not_admitted_is_read_beside_the_hits():
    """Least frequently used: 0 and 1 were used twice, so that a first use of 2 is worth less than either."""
    outcome = pointers(decoding([[[[0, 1]]], [[[0, 2]]]]), 2, policy="lfu")
    assert (outcome.hits, outcome.misses, outcome.loads, outcome.streamed_bytes) == (3, 1, 0, 100)
    assert outcome.seconds == pytest.approx((3 + 2) + (3 + 10) + 2 * LAUNCHES)


@pytest.mark.parametrize("policy", ONLINE)
def test_what_holds_of_pointers_on_any_trace(policy: str):
    trace = synthetic_trace(layers=3, experts=16, top_k=4, steps=100, drafts=2, skew=1.0, reuse=0.7)
    used = simulate(trace, trace.facts.total, COSTS).hits
    for slots in (4, 24, 47):
        outcome = pointers(trace, slots, policy=policy)
        assert outcome.hits + outcome.misses == used and 0 < outcome.loads <= outcome.misses
        assert outcome.seconds >= outcome.bound_seconds > 0
        assert outcome.bytes + outcome.streamed_bytes == outcome.misses * trace.facts.expert_bytes, "each once"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"execution": "pointer"}, "no execution is called 'pointer'; use slots or pointers"),
        ({"policy": "belady"}, "belady must know what will be used"),
        ({"policy": "layer_lru"}, "layer_lru has no formula, which pointers need; use lru"),
        ({"policy": "mru"}, "no 'mru'"),
        ({"balancer": "threshold"}, "balancer threshold divides a layer on the host.*use waterfill"),
        ({"slots": 3}, "3 slots: use from 4"),
    ],
)
def test_what_pointers_refuse(options, named):
    trace = synthetic_trace(layers=3, experts=16, top_k=4, steps=2)
    with pytest.raises(ConfigError, match=named):
        simulate(trace, **{"slots": 12, "costs": COSTS, "execution": "pointers"} | options)


def test_a_disk_cannot_be_read_in_place():
    costs = COSTS.model_copy(update={"provenance": COSTS.provenance.model_copy(update={"store": "disk"})})
    trace = synthetic_trace(layers=3, experts=16, top_k=4, steps=2)
    with pytest.raises(ConfigError, match="vllm-spac check --measure --store host"):
        simulate(trace, 12, costs, execution="pointers")
    assert simulate(trace, 12, costs).seconds > 0


# --- what a trace says -----------------------------------------------------------------------------------------------


def test_uses_and_skew_by_hand():
    trace = decoding([[[[0, 1], [0, 2]], [[3, 1], [3, 1]]]])
    assert trace_statistics.uses(trace).tolist() == [[2, 1, 1, 0], [0, 2, 0, 2]]
    assert trace_statistics.skew(trace, 0.25).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("slots", [24, 48, 72, 96])
def test_curve_agrees_with_simulating_lru(slots):
    trace = synthetic_trace(layers=3, experts=32, top_k=4, steps=300, drafts=1, skew=0.8, reuse=0.8)
    curve = trace_statistics.lru_curve(trace_statistics.distances(trace)[0], trace.facts.total)
    assert curve[slots] == pytest.approx(simulate(trace, slots, COSTS, fill=False).hit_rate, abs=0.01)


@pytest.mark.parametrize("slots", [36, 48, 72])
def test_curve_of_layers_agrees_with_simulating_layer_lru(slots):
    trace = synthetic_trace(layers=3, experts=32, top_k=4, steps=300, drafts=1, skew=0.8, reuse=0.8)
    curve = trace_statistics.lru_curve(trace_statistics.distances(trace, by_layer=True)[0], trace.facts.experts)
    said = simulate(trace, slots, COSTS, policy="layer_lru", fill=False).hit_rate
    assert curve[slots // 3] == pytest.approx(said, abs=0.01)  # ties within a step, and slots that are free at first


# --- profiles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", costs.names())
def test_profiles_that_come_along_say_that_they_were_calculated(name):
    profile = Costs.read(name)
    assert profile.name == name and profile.provenance.how == "calculated"


def test_rates():
    rate = Rate(fixed=1, bytes_per_second=10, flops_per_second=20)
    assert rate.seconds(100, np.array([1, 2, 4])).tolist() == [11, 11, 21]
    assert rate.ideal(100) == 10 and Rate(bytes_per_second=10).seconds(100, np.array([1, 9])).tolist() == [10, 10]
    assert COSTS.loading(0, 100) == 0 and COSTS.loading(3, 100) == 2 * 1 + 30
    assert COSTS.bound(100, 4, 1, 1) == 10 and COSTS.bound(100, 40, 1, 1) == 40 and COSTS.bound(100, 0, 0, 3) == 15
    shared = COSTS.model_copy(update={"memory": 8.0})
    assert shared.bound(100, 0, 1, 3) == 50 and shared.bound(100, 0, 0, 3) == 15, "both read 4 experts, or one alone"
    assert (COSTS.rates(100).memory, shared.rates(100).memory) == (0, 12.5)


def test_experts_of_other_formats_take_the_cpu_longer():
    """As long as eight cores take to decode them, but not less than memory takes; measured bfloat16 is not replaced."""
    plain, rates = Costs.read("rtx4090").as_attained(), core_rates.CORE_RATES
    assert plain.with_experts("bf16").cpu == plain.cpu
    for kind, rate in rates.items():
        cpu = plain.with_experts(kind).cpu
        assert cpu.bytes_per_second == pytest.approx(min(core_rates.READ * plain.memory, 8 * rate.one))
        assert cpu.seconds(100, core_rates.ROWS) == pytest.approx(100 / (8 * rate.many))
    few = COSTS.model_copy(update={"cpu": Rate(bytes_per_second=10)}).with_experts("int4").cpu
    assert few.bytes_per_second == pytest.approx(10 * rates["int4"].one / rates["bf16"].one)
    assert few.flops_per_second is None


def test_rates_of_a_core_are_those_that_were_measured():
    measured = json.loads((RESULTS / "cpu_rates.json").read_text())["rows"]
    for kind, rate in core_rates.CORE_RATES.items():
        found = {row["rows"]: row for row in measured if (row["format"], row["isa"]) == (kind, ISA)}
        for rows, mine in ((1, rate.one), (core_rates.ROWS, rate.many)):
            row = found[rows]
            assert mine == pytest.approx(row["bytes"] / row["seconds"] / row["threads"], rel=0.01)
        if kind == core_rates.PLAIN:
            assert pytest.approx(found[1]["share_of_read"], abs=0.006) == core_rates.READ
    assert set(core_rates.CORE_RATES) == {row["format"] for row in measured}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: p.update(format="spac-profile-0"),
        lambda p: p.pop("provenance"),
        lambda p: p["provenance"].update(how="guessed"),
        lambda p: p["load"].update(bytes_per_second=0),
        lambda p: p.update(colour=1),
        lambda p: p.update(other=-1),
        lambda p: p.update(host_work={"load": -1}),
    ],
)
def test_malformed_profiles(tmp_path: Path, spoil):
    profile = json.loads(COSTS.model_dump_json())
    (tmp_path / "p").write_text(json.dumps(profile))
    assert Costs.read(tmp_path / "p") == COSTS
    (tmp_path / "p").write_text(json.dumps({name: value for name, value in profile.items() if name != "host_work"}))
    assert Costs.read(tmp_path / "p").host_work == HostWork(layer=0, load=0, divide=0), "of an older version"
    spoil(profile)
    (tmp_path / "p").write_text(json.dumps(profile))
    with pytest.raises(ConfigError, match="no profile of format spac-profile-1"):
        Costs.read(tmp_path / "p")


def test_no_profile(tmp_path: Path):
    (tmp_path / "p").write_text("{")
    with pytest.raises(ConfigError, match="Invalid JSON"):
        Costs.read(tmp_path / "p")
    with pytest.raises(ConfigError, match="h200, rtx3090, rtx4090, rtx5090"):
        Costs.read("rtx9090")
