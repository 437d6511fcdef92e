"""Workers on a virtual clock, against closed formulas."""

from __future__ import annotations

import pytest

from benchmarks.papers.simulated_workers import LayerTimes, Network, cacheless

NET = Network(latency=1e-4, bandwidth=1e8)
TIMES = LayerTimes(main=2e-3, compute=1e-3, load=5e-3)
ROW = 8192


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("load", [1e-3, 9e-3, 40e-3])
def test_cacheless_decoding_settles_at_the_formula(groups: int, load: float) -> None:
    """Time per layer is max(t_M + t_W, (t_load + t_W) / n), whether or not loads stall it."""
    times, layers = LayerTimes(TIMES.main, TIMES.compute, load), 8
    worker = 2 * NET.hop(ROW) + times.compute
    few, many = (tokens / cacheless(layers, 1, groups, NET, times, ROW, tokens=tokens) for tokens in (50, 150))
    assert (many - few) / (100 * layers) == pytest.approx(max(times.main + worker, (load + worker) / groups), rel=1e-6)


def test_recall_costs_a_load_per_layer_with_a_wrong_guess() -> None:
    right, wrong = (64 / cacheless(4, 2, 8, NET, TIMES, ROW, recall, fan=2) for recall in (1.0, 0.0))
    assert wrong - right == pytest.approx(64 * 4 * TIMES.load)


def test_od_moe_s_figure() -> None:
    """Mixtral in FP32 on eight workers at 1 Gbit/s: between the paper's 3.69, with a shadow's own delays, and 4.89."""
    times = LayerTimes(main=4.89e-3, compute=0.75e-3, load=22.4e-3)
    network = Network(latency=150e-6, bandwidth=117e6)
    assert 3.69 < cacheless(32, 2, 4, network, times, 4096 * 4, 0.9734, 200, fan=2) < 4.89
