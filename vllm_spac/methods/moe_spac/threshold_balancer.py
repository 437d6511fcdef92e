"""MoE-SpAc's balancer (Eq. 7 to 12, appendix C.2): chooses the score that separates hot from cold experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np

from vllm_spac.decisions.balancers.base import Balancer, LayerState, Plan, split

_HORIZON = 64  # forwards of a layer over which its means extend


def solve(
    r_c: Sequence[float],
    r_g: Sequence[float],
    n: Sequence[float],
    *,
    gamma: float,
    top_k: int,
    distinct: float,
    t_cpu: float,
    t_gpu: float,
    t_io: float,
    t_draft: float,
    layers: int,
    free_bytes: float,
    expert_bytes: float,
) -> int:
    """Returns the tau in [1, K] with the least abs(T_cpu - T_gpu), where T_cpu = r_c gamma k t_cpu and
    T_gpu = r_g b t_gpu, such that

        t_io n <= max(T_cpu, T_gpu) + gamma t_draft / layers    and    expert_bytes n <= free_bytes.

    Among equals the highest tau is returned, which moves the fewest experts; K when none is feasible. T_cpu - T_gpu
    rises with tau, so the best tau is next to the crossing, which a binary search finds. From the crossing on, the
    feasible values are an interval up to K. Below it they need not be one (n and T_gpu both fall), although the paper
    assumes so: there the search goes down past the values that I/O rules out, as far as memory allows.

    A step has the k activations of its own token at least: gamma counts as 1 or more in T_cpu.

    Args:
        r_c: [K], at tau = 1..K: share of the gamma * k activations on the CPU; non-decreasing.
        r_g: [K], share of the distinct activated experts in fast memory; non-increasing.
        n: [K], experts to fetch; non-increasing.
        gamma: draft tokens per step, a mean.
        distinct: distinct experts that a step activates in a layer (the paper's b).
        t_cpu, t_gpu, t_io, t_draft: seconds to compute an expert on the CPU, to compute one on the GPU, to move one,
            and to draft a token.
        layers: MoE layers of the target.
        free_bytes: fast memory that may be filled.
        expert_bytes: bytes of one expert.

    Raises:
        ValueError: the arrays differ in length, are empty or not monotone as above.
    """
    _check(r_c, r_g, n)
    cpu = [share * max(1, gamma) * top_k * t_cpu for share in r_c]
    gpu = [share * distinct * t_gpu for share in r_g]
    window = gamma * t_draft / layers

    def io_fits(i: int) -> bool:
        return t_io * n[i] <= max(cpu[i], gpu[i]) + window

    size = len(n)
    memory = _first(size, lambda i: expert_bytes * n[i] <= free_bytes)
    crossing = max(memory, _first(size, lambda i: cpu[i] > gpu[i]))
    left = next((i for i in range(crossing - 1, memory - 1, -1) if io_fits(i)), None)
    right = _first(size, io_fits, crossing)
    chosen = []
    if left is not None:
        chosen.append((gpu[left] - cpu[left], -left))
    if right < size:
        gap = cpu[right] - gpu[right]
        chosen.append((gap, 1 - _first(size, lambda i: cpu[i] - gpu[i] > gap, right)))
    return 1 - min(chosen)[1] if chosen else size


def _check(r_c: Sequence[float], r_g: Sequence[float], n: Sequence[float]) -> None:
    if not len(r_c) == len(r_g) == len(n) > 0:
        raise ValueError(f"r_c, r_g and n have {len(r_c)}, {len(r_g)} and {len(n)} values; each needs one per score")
    for name, values in (("r_c", r_c), ("r_g", [-x for x in r_g]), ("n", [-x for x in n])):
        if not all(a <= b for a, b in pairwise(values)):
            raise ValueError(f"{name} is not monotone; r_c must not fall, r_g and n must not rise with the threshold")


def _first(size: int, holds: Callable[[int], bool], start: int = 0) -> int:
    """Returns the first index in [start, size) from which on ``holds`` is true, ``size`` when there is none."""
    low, high = start, size
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


class Threshold(Balancer):
    """The CPU computes every missing expert; tau is the lowest score that is prefetched (MoE-SpAc, section 3).

    With ``misses="load"``, ours, a layer loads the missing experts that score at least tau, and waits for them.

    A layer's r_c, r_g, n and b are means over its forwards so far, in which the newest has a weight of at least 1/64;
    the first forward of a layer uses its own values. ``fixed`` is a constant tau (ablation "w/o HetWB": 2).
    """

    needs_scores: ClassVar[bool] = True

    def __init__(
        self, *, fixed: int | None = None, misses: Literal["compute", "load"] = "compute", **shape: Any
    ) -> None:
        super().__init__(**shape)
        if misses not in ("compute", "load"):
            raise ValueError(f"misses={misses!r}: use compute or load")
        self.loads = misses == "load"
        self._fixed = fixed
        self._forwards: dict[int, int] = {}
        self._means: dict[int, np.ndarray] = {}
        self._tau: dict[int, int] = {}

    def plan(self, state: LayerState) -> Plan:
        hit, missing = split(state)
        self._tau[state.layer] = tau = self._fixed or self._solve(state)
        hot = (state.scores[missing] >= tau) & self.loads
        return Plan(hit=hit, stream=tuple(missing[hot].tolist()), cpu=tuple(missing[~hot].tolist()))

    def threshold(self, layer: int) -> int:
        return self._tau.get(layer, self._fixed or 1)

    def _solve(self, state: LayerState) -> int:
        means = self._learn(state)
        rates = self.rates
        assert rates is not None, "it weighs costs"
        return solve(
            *means[:3].tolist(),
            gamma=self.gamma,
            top_k=self.top_k,
            distinct=float(means[3, 0]),
            t_cpu=rates.cpu,
            t_gpu=rates.fast,
            t_io=rates.stream,
            t_draft=rates.draft,
            layers=self.layers,
            free_bytes=state.free_slots * self.expert_bytes,
            expert_bytes=self.expert_bytes,
        )

    def _learn(self, state: LayerState) -> np.ndarray:
        """Updates the layer's means and returns them, float [4, K]: r_c, r_g, n and b."""
        hot = state.scores >= np.arange(1, self.upper + 1)[:, None]
        active = state.rows > 0
        distinct = max(1, int(active.sum()))
        sample = np.stack(
            (
                (~hot * state.rows).sum(axis=1) / max(1, int(state.rows.sum())),
                (hot & active).sum(axis=1) / distinct,
                (hot & ~state.resident).sum(axis=1),
                np.full(self.upper, distinct),
            )
        ).astype(np.float64)
        forwards = self._forwards[state.layer] = min(_HORIZON, self._forwards.get(state.layer, 0) + 1)
        mean = self._means.get(state.layer, sample)
        mean = mean + (sample - mean) / forwards
        mean[0] = np.maximum.accumulate(mean[0])  # as the samples are; rounding may have undone it
        mean[1:3] = np.minimum.accumulate(mean[1:3], axis=1)
        self._means[state.layer] = mean
        return mean
