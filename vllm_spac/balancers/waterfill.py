"""Three processors: hits run in fast memory while misses are streamed or run on the CPU until both are done at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_spac.balancers.base import Balancer, LayerState, Plan, split


def solve(
    misses: Sequence[int],
    rows_per_expert: Sequence[int],
    *,
    t_stream: float,
    t_cpu: float,
    t_row: float = 0.0,
    stream_free: float = 0.0,
    cpu_free: float = 0.0,
) -> tuple[list[int], list[int]]:
    """Split the missing experts so that the later of the two processors finishes as early as possible.

    Streaming takes ``t_stream`` an expert, whatever its rows; the CPU takes max(t_cpu, rows * t_row). For any number
    of experts on the CPU those with the fewest rows are the quickest, so only the m + 1 numbers are compared: exact,
    O(m log m).

    Args:
        misses: experts, [m].
        rows_per_expert: rows of each, [m], same order.
        t_stream, t_cpu, t_row: seconds, >= 0.
        stream_free, cpu_free: seconds until each processor has finished what it is doing.

    Returns:
        (streamed, on the CPU), each ascending. Among equally good splits the one with the fewest on the CPU: a
        streamed expert stays.
    """
    rows = np.asarray(rows_per_expert, dtype=np.float64)
    assert len(rows) == len(misses), "one number of rows for each missing expert"
    if not len(misses):
        return [], []
    order = np.argsort(rows, kind="stable")
    cpu = np.concatenate(([0.0], cpu_free + np.cumsum(np.maximum(t_cpu, rows[order] * t_row))))
    left = np.arange(len(misses), -1, -1)
    stream = np.where(left > 0, stream_free + left * t_stream, 0.0)  # a processor without work has finished at 0
    best = int(np.argmin(np.maximum(cpu, stream)))  # the first of equals
    experts = np.asarray(misses)[order]
    return sorted(experts[best:].tolist()), sorted(experts[:best].tolist())


class Waterfill(Balancer):
    """PCIe and CPU bandwidth add up: the specification's split of hit, stream and CPU."""

    def plan(self, state: LayerState) -> Plan:
        hit, missing = split(state)
        rates = self.rates
        assert rates is not None, "it weighs costs"
        streamed, cpu = solve(
            missing.tolist(), state.rows[missing], t_stream=rates.stream, t_cpu=rates.cpu, t_row=rates.cpu_row
        )
        return Plan(hit=hit, stream=tuple(streamed), cpu=tuple(cpu))
