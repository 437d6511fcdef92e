"""Where the time of a decode step goes, of one engine: its link, the GPU's memory, and what is idle."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

NO_GPU = "no GPU: a profile is of its kernels"
_KERNELS = 12  # that are named, those that take longest
_COPIED = 256 << 20  # bytes of a copy by which a rate is measured


def profile(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Runs ``step`` so many times without a profiler and as often with one; returns milliseconds per step.

    ``busy``: at least one kernel or copy runs; ``idle``: of the steps with the profiler, what is left of ``profiled``.
    """
    if not torch.cuda.is_available():
        return {"left_out": NO_GPU}
    plain = _timed(step, steps)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        profiled = _timed(step, steps)
    spans = list(_spans(profiler.profiler.kineto_results.events()))
    busy = 1e-9 * covered((start, end) for _, start, end in spans)
    taken: Counter[str] = Counter()
    for name, start, end in spans:
        taken[name] += end - start
    ms = 1e3 / steps
    return {
        "steps": steps,
        "ms": plain * ms,
        "profiled_ms": profiled * ms,
        "busy_ms": busy * ms,
        "idle_ms": (profiled - busy) * ms,
        "launches": len(spans) / steps,
        "kernels_ms": {name[:80]: 1e-9 * count * ms for name, count in taken.most_common(_KERNELS)},
    }


def _timed(step: Callable[[], Any], steps: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _spans(events: Iterable[Any]) -> Iterable[tuple[str, int, int]]:
    """Yields name, start and end in ns of what ran on the GPU."""
    for event in events:
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0:
            yield event.name(), event.start_ns(), event.start_ns() + event.duration_ns()


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of ``spans``, each (start, end)."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def rates() -> dict[str, float]:
    """Returns bytes per second of a copy over the link and of one within the GPU's memory, reads and writes counted."""
    device = torch.empty(_COPIED, dtype=torch.uint8, device="cuda")
    other, pinned = torch.empty_like(device), torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    return {
        "link": _COPIED / _fastest(lambda: device.copy_(pinned, non_blocking=True)),
        "hbm": 2 * _COPIED / _fastest(lambda: other.copy_(device)),
    }


def _fastest(copy: Callable[[], Any]) -> float:
    copy()
    return min(_timed(copy, 1) for _ in range(5))


def divide(found: dict[str, Any], counters: dict[str, Any], expert: int, others: int) -> dict[str, Any]:
    """Adds to a profile what its bytes take at the rates of copies, in milliseconds per step.

    Args:
        found: of ``profile``, with ``rates``.
        counters: of the plugin's, per step: ``hits``, and ``bytes`` over the link; empty for stock.
        expert: bytes of one; ``others``: of the weights that each step reads.
    """
    found["link_bytes"] = sum(counters.get("bytes", {}).values())
    found["hbm_bytes"] = others + counters.get("hits", 0) * expert  # calculated: weights, without the KV cache
    for name, rate in found["rates"].items():
        found[f"{name}_ms"] = 1e3 * found[f"{name}_bytes"] / rate
    return found
