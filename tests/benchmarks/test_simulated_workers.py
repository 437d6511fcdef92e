"""Workers on a virtual clock, against closed formulas and against a plain LRU."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.od_moe_clock import Cycle, ShadowTimes, cacheless, prefill
from benchmarks.papers.simulated_workers import LayerTimes, Network, cached
from vllm_spac.methods.od_moe.division import layers_of
from vllm_spac.tools.traces.synthetic import synthetic_trace

NET = Network(latency=1e-4, bandwidth=1e8)
TIMES = LayerTimes(main=2e-3, compute=1e-3, load=5e-3)
ROW = 8192


@pytest.fixture(scope="module")
def trace():
    return synthetic_trace(layers=4, experts=16, top_k=2, steps=60)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("load", [1e-3, 9e-3, 40e-3])
def test_cacheless_decoding_settles_at_the_formula(groups: int, load: float) -> None:
    """Time per layer is max(t_M + t_W, (t_load + t_W) / n), whether or not loads stall it."""
    times = LayerTimes(TIMES.main, TIMES.compute, load)
    cycle = Cycle(times.main, 2 * NET.hop(ROW) + times.compute, load)
    layers = 8
    runs = [cacheless(layers, 1, groups, NET, times, ROW, tokens=tokens) for tokens in (50, 150)]
    settled = (runs[1].seconds - runs[0].seconds) / (100 * layers)
    assert settled == pytest.approx(cycle.layer(groups), rel=1e-6)
    assert (runs[1].stalls == 0) == (cycle.stall(groups) == 0)


@settings(max_examples=examples(400))
@given(
    st.builds(Cycle, *[st.floats(1e-4, 1.0)] * 3),
    st.integers(1, 16),
)
def test_no_stall_if_and_only_if_a_load_fits_the_slack(cycle: Cycle, groups: int) -> None:
    """Against layers played one after another: a group begins its next load when it has answered."""
    clock, ready = 0.0, [0.0] * groups
    waited = 0.0
    for layer in range(20 * groups):
        clock += cycle.main
        stall = max(0.0, ready[layer % groups] - clock) if layer >= groups else 0.0
        waited = max(waited, stall)
        clock += stall + cycle.worker
        ready[layer % groups] = clock + cycle.load
    assert (waited > 1e-9) == (cycle.stall(groups) > 1e-9)
    if waited == 0:
        assert cycle.layer(groups) == pytest.approx(cycle.main + cycle.worker)


def test_the_paper_s_example() -> None:
    """Eight workers, two experts per token: four groups, so n t_M + (n - 1) t_W = 4 t_M + 3 t_W."""
    assert Cycle(main=2.0, worker=3.0, load=17.0).stall(4) == 0
    assert Cycle(main=2.0, worker=3.0, load=18.0).stall(4) == 1


def test_recall_costs_a_load_per_layer_with_a_wrong_guess() -> None:
    right, wrong = (cacheless(4, 2, 8, NET, TIMES, ROW, recall, fan=2) for recall in (1.0, 0.0))
    assert wrong.seconds - right.seconds == pytest.approx(64 * 4 * TIMES.load)
    assert (right.hits, wrong.hits) == (64 * 4 * 2, 0)


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_with_all_experts_in_memory_only_hops_and_computing_count(trace, workers: int) -> None:
    run = cached(trace, workers, 1.0, NET, TIMES, ROW)
    assert run.misses == 0
    assert run.seconds == pytest.approx(60 * 4 * (TIMES.main + TIMES.compute + 2 * NET.hop(ROW)))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_misses_are_those_of_lru_at_each_worker(trace, workers: int) -> None:
    share, experts = 0.25, trace.facts.experts
    memory = []
    for worker in range(workers):
        mine = layers_of(worker, 4, workers)
        slots = max(2, -(-len(mine) * experts // 4))
        first = sorted((rank, layer) for layer in mine for rank in range(experts))[:slots]
        held_first = sorted(layer * experts + rank for rank, layer in first)
        memory.append((slots, OrderedDict.fromkeys(held_first)))
    misses = 0
    for layer, (start, stop) in zip(trace.record_layer.tolist(), pairwise(trace.record_start.tolist()), strict=True):
        slots, held = memory[layer % workers]
        keys = sorted({int(each) + layer * experts for each in trace.ids[start:stop].ravel()})
        for key in keys:
            if key in held:
                held.move_to_end(key)
        for key in keys:
            if key not in held:
                misses += 1
                if len(held) == slots:
                    held.pop(next(other for other in held if other not in keys))
                held[key] = None
    run = cached(trace, workers, share, NET, TIMES, ROW)
    assert run.misses == misses and run.stalls == pytest.approx(misses * TIMES.load)
    alone = cached(trace, workers, 1.0, NET, TIMES, ROW)
    assert run.seconds - alone.seconds == pytest.approx(run.stalls)


def test_keys_beyond_the_trace_s_own_type() -> None:
    """A trace keeps experts in 8 bits; keys of many layers need more."""
    assert cached(synthetic_trace(layers=20, experts=32, steps=3), 2, 1.0, NET, TIMES, ROW).misses == 0


def test_a_layer_waits_for_the_shadow_that_departs_late() -> None:
    """Figures 4 and 5: loads of layer l begin l + 1 layers of the shadow after its departure, at the latest when the
    router has chosen; with a group per layer no load waits for another one."""
    layers, load = 6, 5e-3
    worker = 2 * NET.hop(ROW) + TIMES.compute
    for departs in (0.0, 1e-3, 9e-3):
        now = stalls = hits = 0
        for layer in range(layers):
            now += TIMES.main
            hits += departs + (layer + 1) * 5e-4 < now
            stalls += (stall := max(0.0, min(now, departs + (layer + 1) * 5e-4) + load - now))
            now += stall + worker
        run = cacheless(layers, 1, layers, NET, TIMES, ROW, tokens=1, shadow=ShadowTimes(5e-4, [departs]))
        assert (run.seconds, run.stalls) == (pytest.approx(now), pytest.approx(stalls))
        assert run.hits == hits, "what a router chose first is no hit"


def test_without_predictions_each_layer_waits_for_its_loads() -> None:
    """A router is never wrong, whatever the recall."""
    run = cacheless(4, 2, 8, NET, TIMES, ROW, recall=0.0, tokens=10, shadow=ShadowTimes(float("inf")))
    assert run.stalls == pytest.approx(10 * 4 * 2 * TIMES.load) and run.hits == 0


def test_alignments_by_hand() -> None:
    """Tokens every 2, keys and values of 4 tokens every 4: what travels before the shadow departs."""
    found = ShadowTimes.aligned(1e-3, NET, 50_000, tokens=2, kv=4).departs
    assert found == pytest.approx([NET.latency + 4 * 50_000 / NET.bandwidth, 0, NET.latency, 0])
    assert list(ShadowTimes.aligned(1e-3, NET, 50_000, None, None).departs) == [0]


def test_prompts_by_hand() -> None:
    """Three layers of four experts, four rows of two experts: loads of 5 ms decide. Of 400 rows the link decides."""
    hop = NET.hop(4 * 2 * ROW)
    few, load, compute = (3, 4, 4, 2, 4, NET, TIMES, ROW), TIMES.load, TIMES.compute
    assert prefill(*few) == pytest.approx(3 * (load + compute) + hop)
    assert prefill(*few, parts=2) == pytest.approx(3 * (load + 2 * compute) + NET.hop(2 * 2 * ROW))
    assert prefill(*few, groups=2) == pytest.approx(2 * (2 * load + 2 * compute) + hop), "layers 0 and 2, one group"
    many, hop = (3, 4, 400, 2, 4, NET, TIMES, ROW), NET.hop(400 * 2 * ROW)
    assert prefill(*many) == pytest.approx(3 * (TIMES.main + 2 * hop + compute))
    last = NET.latency + compute + NET.hop(100 * 2 * ROW)  # one part is computed and comes back behind the others
    assert prefill(*many, parts=4) == pytest.approx(3 * (TIMES.main + 400 * 2 * ROW / NET.bandwidth + last))


def test_od_moe_s_figure() -> None:
    """Mixtral at 3.69 tokens/s in the paper; the assumptions are in benchmarks/papers/od_moe.py."""
    times = LayerTimes(main=4.89e-3, compute=0.75e-3, load=22.4e-3)
    network = Network(latency=150e-6, bandwidth=117e6)
    shadow = ShadowTimes.aligned(3.2e-3, network, 256 << 10, 1, 1)
    run = cacheless(32, 2, 4, network, times, 4096 * 4, recall=0.9734, tokens=200, fan=2, shadow=shadow)
    assert run.per_second == pytest.approx(3.69, rel=0.05)
