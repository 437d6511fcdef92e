"""A layer's experts divided between engine, CPU and workers on a virtual clock, against workers alone and formulas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vllm_spac.cache.residency import NOWHERE
from vllm_spac.decisions.costs import Costs, Network, Provenance, Rate
from vllm_spac.tools.traces.simulated_divided import Setup, costs_of_layer, divided
from vllm_spac.tools.traces.simulated_workers import LayerTimes, cached, filled
from vllm_spac.tools.traces.synthetic import synthetic_trace

BYTES = 1 << 20
ROW = 8192
NET = Network(latency=1e-4, bandwidth=1e8)
COSTS = Costs(
    format="spac-profile-1",
    name="test",
    provenance=Provenance(how="calculated", source="test"),
    fast=Rate(fixed=1e-5, bytes_per_second=BYTES / 1e-4),
    load=Rate(bytes_per_second=BYTES / 1e-3),
    cpu=Rate(bytes_per_second=BYTES / 6e-4, flops_per_second=BYTES / 3e-4),
    other=4e-3,
)
SETUP = Setup(("workers",), 2, 1, 1.0, 0.25, NET, ROW, BYTES)


@pytest.fixture(scope="module")
def trace():
    return synthetic_trace(layers=4, experts=16, top_k=2, steps=40)


@pytest.fixture(scope="module")
def several():
    return synthetic_trace(layers=4, experts=16, top_k=2, steps=20, requests=5)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_alone_with_all_experts_in_memory_take_what_whole_layers_take(trace, workers: int) -> None:
    run = divided(trace, COSTS, replace(SETUP, workers=workers))
    whole = cached(trace, workers, 1.0, NET, LayerTimes.of(COSTS, trace.facts, BYTES), ROW)
    assert run.seconds == pytest.approx(whole.seconds) and run.sent == run.experts == 40 * 4 * 2
    assert run.waited == 0 and run.exact == run.layers == 160


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_an_engine_whose_workers_are_far_loads_what_lru_misses(trace, share: float) -> None:
    far = Network(latency=1e3, bandwidth=1e8)
    run = divided(trace, COSTS, replace(SETUP, among=("engine", "workers"), engine_share=share, network=far))
    alone = cached(trace, 1, share, NET, LayerTimes.of(COSTS, trace.facts, BYTES), ROW)
    assert (run.hits, run.loads, run.sent) == (alone.hits, alone.misses, 0)
    assert run.loads and run.hits


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_workers_load_what_lru_misses(trace, share: float) -> None:
    run = divided(trace, COSTS, replace(SETUP, share=share))
    whole = cached(trace, 2, share, NET, LayerTimes.of(COSTS, trace.facts, BYTES), ROW)
    assert run.waited == whole.misses > 0
    assert run.seconds <= whole.seconds, "a worker computes what it has while it loads"


@pytest.mark.parametrize(
    "among", [("workers",), ("cpu", "workers"), ("engine", "workers"), ("engine", "cpu", "workers")]
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_expert_is_computed_once(several, among: tuple[str, ...], size: int) -> None:
    setup = replace(SETUP, among=among, workers=4, size=size, share=0.1)
    run = divided(several, COSTS, setup)
    starts = several.record_start
    used = sum(len(np.unique(several.ids[a:b])) for a, b in zip(starts[:-1], starts[1:], strict=True))
    assert run.experts == used and run.layers == 80 and run.waited <= run.sent
    assert bool(run.hits + run.loads) == ("engine" in among) and bool(run.cpu) == ("cpu" in among)
    assert (run.exact == run.layers) == (len(among) + size <= 5), "up to four processors"


def test_more_processors_are_faster(several) -> None:
    """With the same experts in memory at each, which is so if nobody loads any."""
    slow = COSTS.model_copy(update={"load": Rate(fixed=10.0, bytes_per_second=1e9)})
    setup = replace(SETUP, engine_share=0.5)
    kinds = [("workers",), ("engine", "workers"), ("engine", "cpu", "workers")]
    runs = [divided(several, slow, replace(setup, among=among)) for among in kinds]
    assert all(run.loads == run.waited == 0 for run in runs)
    assert runs[0].seconds > runs[1].seconds > runs[2].seconds


def test_costs_of_a_layer(trace) -> None:
    """Engine with slots for two experts per layer, CPU, and a worker with half of the layer's experts."""
    engine, worker = filled(trace, range(4), 0.125), filled(trace, [1, 3], 0.5)
    keys, rows = np.array([16, 17, 20, 28]), np.array([1, 3, 1, 3])
    assert (engine.slot_of[keys] != NOWHERE).tolist() == [True, True, False, False]
    setup = replace(SETUP, among=("engine", "cpu", "workers"))
    work = costs_of_layer(COSTS, setup, keys, rows, 3, [engine, None, worker])
    inf = float("inf")
    assert np.allclose(work.compute[0], 1.1e-4)
    assert np.allclose(work.compute[1], [inf, inf, 6e-4, 9e-4]) and np.allclose(work.compute[2, 2:], 1.1e-4)
    assert work.compute[2, 0] == inf, "hits run where they are"
    assert np.allclose(work.load, [[0, 0, 1e-3, 1e-3], [0] * 4, [0, 0, 0, 1e-3]])
    assert work.fixed.tolist() == [0, 0, 2e-4] and np.allclose(work.wire, [0, 0, 2 * 3 * ROW / 1e8])


def test_fewer_slots_than_a_layer_needs(several) -> None:
    """Experts are loaded in turns; all are counted."""
    setup = replace(SETUP, share=0.01)
    run = divided(several, COSTS, setup)
    assert run.waited > 0.5 * run.sent and run.seconds > divided(several, COSTS, SETUP).seconds
