"""Lower bounds on the time of a step and of a run on this machine, for comparison with measured times. Pure.

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
    """Counts of a run, over all layers and steps.

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
    """Returns a lower bound on the seconds of one step.

    T >= sum over layers of max(resident·W/fast, (distinct - resident - on_cpu)·W/slow, on_cpu·W/cpu) + T_other

    Args:
        distinct: for each layer, the distinct experts that the step needs.
        resident: those of them in fast memory.
        on_cpu: those of them that the CPU computes from host memory.
        expert_bytes: bytes of one expert (W).
        fast_rate: bytes per second of fast memory.
        slow_rate: bytes per second of the path over which missing experts come.
        cpu_rate: bytes per second at which the CPU reads host memory; ``math.inf`` if it computes none.
        other_seconds: time of everything except reading experts.
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
    """Returns a lower bound on the seconds of a run, from its sums alone.

    The sum of the layers' maxima is at least the maximum of the sums, so this never exceeds the sum of
    ``step_bound`` over the run, and it needs no counts per layer.
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


def run_in_turn(misses: int, expert_bytes: int, slow_rate: float, resident_seconds: float) -> float:
    """Returns the seconds of a run in which loads and computation take turns: all that a step of one row allows.

    vLLM's kernel needs all experts of a row before it starts, and the next layer needs its output; so only reads ahead
    of need overlap with anything. They count as hits here, and steps with more rows may be faster.

    Args:
        misses: experts that layers waited for, over all layers and steps.
        resident_seconds: duration of the same run with all experts resident.
    """
    return resident_seconds + misses * expert_bytes / slow_rate


def other_per_step(seconds: float, resident: Counts, expert_bytes: int, fast_rate: float) -> float:
    """Returns T_other per step, from a run with all experts resident.

    Args:
        seconds: duration of that run.
        resident: its counts, without misses.

    The time to read the experts from fast memory is subtracted, because the bound adds it again.
    """
    assert resident.misses == 0, "T_other needs a run without misses"
    return max(0.0, seconds - resident.hits * expert_bytes / fast_rate) / resident.steps
