"""The fastest that a step can be on this machine: the limit that measured times are put beside. Pure.

A step reads every distinct expert that its tokens chose once: the resident ones from fast memory, the others
over the slow path. The two paths work at the same time, so a layer takes as long as the slower one.
On a machine without a GPU whose experts are on disk, fast memory is DRAM and the slow path is the disk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """What a run did, all layers and steps together.

    Attributes:
        hits: distinct experts of a layer and step that were resident.
        misses: those that were not.
        steps: forwards of the target model.
    """

    hits: int
    misses: int
    steps: int

    @property
    def distinct(self) -> int:
        return self.hits + self.misses


def step_bound(
    distinct: Sequence[int],
    resident: Sequence[int],
    on_cpu: Sequence[int],
    expert_bytes: int,
    fast_rate: float,
    slow_rate: float,
    cpu_rate: float,
    other_seconds: float,
) -> float:
    """Seconds that one step takes at least.

    T >= sum over layers of max(resident·W/fast, (distinct - resident - on_cpu)·W/slow, on_cpu·W/cpu) + T_other

    Args:
        distinct: for each layer, the distinct experts that the step needs.
        resident: those of them in fast memory.
        on_cpu: those of them that the CPU computes from host memory.
        expert_bytes: bytes of one expert (W).
        fast_rate: bytes a second of fast memory.
        slow_rate: bytes a second of the path over which missing experts come.
        cpu_rate: bytes a second at which the CPU reads host memory; ``math.inf`` where it computes none.
        other_seconds: everything that is not reading experts.
    """
    total = other_seconds
    for needed, held, computed in zip(distinct, resident, on_cpu, strict=True):
        assert 0 <= held + computed <= needed, f"{held} resident and {computed} on the CPU of {needed} experts"
        streamed = needed - held - computed
        total += max(
            held * expert_bytes / fast_rate,
            streamed * expert_bytes / slow_rate,
            computed * expert_bytes / cpu_rate,
        )
    return total


def run_bound(counts: Counts, expert_bytes: int, fast_rate: float, slow_rate: float, other_per_step: float) -> float:
    """Seconds that a whole run takes at least, from its sums alone.

    The sum of the layers' maxima is at least the maximum of the sums, so this never exceeds the sum of
    ``step_bound`` over the run, and it needs no counts by layer.
    """
    return step_bound(
        [counts.distinct],
        [counts.hits],
        [0],
        expert_bytes,
        fast_rate,
        slow_rate,
        math.inf,
        other_per_step * counts.steps,
    )


def other_per_step(seconds: float, resident: Counts, expert_bytes: int, fast_rate: float) -> float:
    """T_other of one step, from a run with all experts resident.

    Args:
        seconds: what that run took.
        resident: what it did; it has no misses.

    The time to read the experts from fast memory is taken off, because the bound adds it again.
    """
    assert resident.misses == 0, "a run with misses says nothing about the rest"
    return max(0.0, seconds - resident.hits * expert_bytes / fast_rate) / resident.steps
