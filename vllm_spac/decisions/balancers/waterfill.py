"""Balancer that splits the misses between PCIe and CPU so that both finish at the same time, while hits run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from vllm_spac.decisions.balancers.base import Balancer, LayerState, Plan, split


def solve(
    misses: Sequence[int],
    rows_per_expert: Sequence[int],
    *,
    t_stream: float,
    t_cpu: float,
    t_row: float = 0.0,
    busy: float = 0.0,
    t_memory: float = 0.0,
) -> tuple[list[int], list[int]]:
    """Splits the missing experts so that the later of the two processors finishes as early as possible.

    Streaming takes ``t_stream`` per expert, whatever its rows; the CPU takes max(t_cpu, rows * t_row) per expert. For
    any number of experts on the CPU those with the fewest rows are the fastest, so only the m + 1 numbers are compared:
    exact, O(m log m). Both read host memory: if each gets some, together they take at least m * t_memory.

    Args:
        misses: experts, [m].
        rows_per_expert: rows of each, [m], same order.
        t_stream, t_cpu: seconds per expert, >= 0.
        t_row: seconds per row of an expert on the CPU, >= 0.
        busy: seconds until the first expert can be streamed, >= 0.
        t_memory: seconds of host memory per expert, whoever reads it, >= 0.

    Returns:
        (streamed, on the CPU), each ascending. Among equally good splits the one with the fewest on the CPU,
        because a streamed expert stays resident.
    """
    rows = np.asarray(rows_per_expert, dtype=np.float64)
    assert len(rows) == len(misses), "one number of rows for each missing expert"
    if not len(misses):
        return [], []
    order = np.argsort(rows, kind="stable")
    cpu = np.concatenate(([0.0], np.cumsum(np.maximum(t_cpu, rows[order] * t_row))))
    stream = np.arange(len(misses), -1, -1) * t_stream + busy
    stream[-1] = 0.0  # nothing is streamed
    seconds = np.maximum(cpu, stream)
    seconds[1:-1] = np.maximum(seconds[1:-1], len(misses) * t_memory)  # where both read
    best = int(np.argmin(seconds))  # the first of equals
    experts = np.asarray(misses)[order]
    return sorted(experts[best:].tolist()), sorted(experts[:best].tolist())


class Waterfill(Balancer):
    """Splits misses between streaming and CPU by finishing time, so that their bandwidths add up.

    They do as far as host memory serves both.

    MoE-SpAc balances two processors, CPU and GPU. Here streaming is the third; without it the two-way rule remains.
    Of experts with equally many rows those run on the CPU that are least likely to be selected again, since a streamed
    one stays resident.

    Args:
        admit: whether experts that ran on the CPU get slots afterwards, see ``Balancer.admits``. Without it, slots go
            stale where the CPU computes most misses.
    """

    by_number: ClassVar[bool] = True

    def __init__(self, *, admit: bool = True, **shape: Any) -> None:
        super().__init__(**shape)
        self.admits = admit

    def plan(self, state: LayerState) -> Plan:
        hit, missing = split(state)
        rates = self.rates
        assert rates is not None, "it weighs costs"
        if len(state.likely):
            missing = missing[np.argsort(state.likely[missing], kind="stable")]  # ties as given
        streamed, cpu = solve(
            missing.tolist(),
            state.rows[missing],
            t_stream=rates.stream,
            t_cpu=rates.cpu,
            t_row=rates.cpu_row,
            busy=state.reading * rates.stream / 2,  # on average half of a read is left
            t_memory=rates.memory,
        )
        return Plan(hit=hit, stream=tuple(streamed), cpu=tuple(cpu))
