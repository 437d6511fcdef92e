"""Fits rates to measured seconds: a fixed part and a part that grows with bytes or rows."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import numpy as np

from vllm_spac.profiling.costs import HostWork, Network, Rate, VllmStep


def fit_load(points: Mapping[int, float], nbytes: int) -> Rate:
    """Fits ``fixed`` + loads at once * bytes / ``bytes_per_second`` by least squares; neither is negative."""
    counts, seconds = np.array(list(points), dtype=float), np.array(list(points.values()))
    slope, fixed = np.polyfit(counts, seconds, 1) if len(points) > 1 else (0.0, -1.0)
    if slope <= 0:  # more loads at once take no longer: only the total throughput can be fitted
        slope, fixed = float((seconds / counts).min()), 0.0
    elif fixed < 0:
        slope, fixed = float((counts * seconds).sum() / (counts**2).sum()), 0.0
    return Rate(fixed=float(fixed), bytes_per_second=float(nbytes / slope))


def fit_compute(points: Mapping[int, float], nbytes: int, fixed: float) -> Rate:
    """Fits a rate that is exact at the fewest and the most rows.

    Args:
        fixed: seconds of an expert without bytes; capped at half the seconds at the fewest rows.
    """
    fewest, most = min(points), max(points)
    fixed = min(fixed, points[fewest] / 2)
    memory = points[fewest] - fixed
    arithmetic = (points[most] - fixed) / most
    limited = arithmetic > 0 and most > fewest and points[most] > points[fewest]
    return Rate(
        fixed=fixed,
        bytes_per_second=nbytes / memory,
        flops_per_second=nbytes / min(arithmetic, memory / fewest) if limited else None,
    )


def fit_network(points: Mapping[int, float], peer: str) -> Network:
    """Fits 2 * (``latency`` + bytes / ``bandwidth``) to round trips; exact at the fewest and the most bytes.

    Where ``latency`` would be negative it is 0, and the fit is exact at the most bytes only.

    Args:
        points: bytes sent, and sent back -> seconds of the round trip.
        peer: what was measured.
    """
    fewest, most = min(points), max(points)
    slope = (points[most] - points[fewest]) / 2 / (most - fewest) if most > fewest else 0.0
    latency = points[fewest] / 2 - fewest * slope
    if slope <= 0 or latency < 0:
        return Network(latency=0.0, bandwidth=2 * most / points[most], peer=peer)
    return Network(latency=latency, bandwidth=1 / slope, peer=peer)


def fit_vllm_step(points: Mapping[int, float]) -> VllmStep:
    """Returns vLLM's own seconds from those per token by the number of layers, of which there are two."""
    (few, less), (many, more) = sorted(points.items())
    layer = max(0.0, (more - less) / (many - few))
    return VllmStep(step=max(0.0, less - few * layer), layer=layer)


def fit_host_work(
    resident: float, loading: Mapping[int, float], loads: Mapping[int, float], dividing: Mapping[int, float]
) -> HostWork:
    """Returns the medians over the numbers of missed experts; none is negative.

    Args:
        resident: seconds of a layer of which every expert has its slot.
        loading: missed experts -> seconds of a layer that loads them; 0 for a layer that misses none.
        loads: the same numbers, except 0 -> seconds of the loads alone.
        dividing: missed experts -> seconds of a layer that leaves them to the CPU.
    """
    hit = loading[0]
    load = median(loading[count] - hit - alone for count, alone in loads.items())
    divide = median(seconds - hit for seconds in dividing.values())
    return HostWork(layer=max(0.0, hit - resident), load=max(0.0, load), divide=max(0.0, divide))
