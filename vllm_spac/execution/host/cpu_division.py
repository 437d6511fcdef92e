"""Which missing experts of a layer the CPU computes, where the host decides."""

from __future__ import annotations

import numpy as np

from vllm_spac.cache.loader import ExpertLoader
from vllm_spac.cache.residency import NOWHERE
from vllm_spac.decisions.balancers.base import Balancer, LayerState
from vllm_spac.execution.cpu_check import CpuCheck
from vllm_spac.recording.metrics import Counters


class CpuDivision:
    """Arguments as of ``SlotLayers``."""

    def __init__(self, loader: ExpertLoader, experts: int) -> None:
        self._loader, self._experts = loader, experts
        self._computed: list[int] = []  # keys that ran on the CPU and may get slots
        self._balancer: Balancer | None = None  # also in steps in which the CPU is stopped
        self._check: CpuCheck | None = None

    def attach_balancer(self, balancer: Balancer, check: CpuCheck | None) -> None:
        """The CPU computes what ``balancer`` selects, in the steps in which ``check`` does not stop it."""
        self._loader.prefetcher.balancer = self._balancer = balancer
        self._check = check

    def begin_step(self, rows: int) -> None:
        """As in ``CpuCheck``."""
        if self._check is not None:
            self._check.begin_step(rows)

    def end_step(self) -> None:
        """Decides whether the CPU computes experts in the next step."""
        if self._check is not None:
            self._check.end_step()
            self._loader.prefetcher.balancer = None if self._check.stopped else self._balancer

    def cold(
        self, layer: int, routed: np.ndarray, counters: Counters | None, real: int | None = None
    ) -> np.ndarray | None:
        """Returns which (row, expert) pairs run on the CPU: bool [rows, top_k], or None if there are none.

        Args:
            layer: number of the layer.
            routed: int [rows, top_k], experts of the layer, each in ``[0, experts)``.
            counters: receives the experts and pairs, if given.
            real: leading rows that belong to requests, if not all do: padding repeats a row and weighs nothing.
        """
        prefetcher = self._loader.prefetcher
        balancer = prefetcher.balancer
        if balancer is None:
            return None
        residency, here = self._loader.residency, slice(layer * self._experts, (layer + 1) * self._experts)
        counted = routed[:real]
        rows = np.bincount(counted.ravel(), minlength=self._experts)
        prefetcher.cancel_unbegun(here.start, rows)
        resident = residency.slot_of[here] != NOWHERE if balancer.loads else residency.ready(here)
        free = residency.slots - int(resident[rows > 0].sum())
        likely = residency.policy.likely
        scores, likely = prefetcher.scores[here], likely[here] if len(likely) else likely
        plan = balancer.plan(LayerState(layer, rows, resident, scores, free, likely, prefetcher.reading))
        if balancer.admits and not plan.stream:  # else the link has enough to do
            self._computed = [here.start + expert for expert in plan.cpu]
        if not plan.cpu:
            return None
        if residency.activity is not None:
            residency.activity.computed[here][list(plan.cpu)] = True
        on_cpu = np.zeros(self._experts, dtype=bool)
        on_cpu[list(plan.cpu)] = True
        pairs = on_cpu[routed]
        if counters is not None:
            counters.cpu_experts += len(plan.cpu)
            counters.cpu_rows += int(pairs[:real].sum())
            prefetcher.account.add_demand([here.start + expert for expert in plan.cpu])
            if not (plan.hit or plan.stream):  # nothing of the layer is held, by which the prefetcher would hear of it
                self._loader.observe_slotless(layer)
        return pairs

    def admit(self) -> None:
        """Starts to load what the CPU computed in the last layer, see ``Balancer.admits``; called when it has run."""
        if self._computed:
            self._loader.admit(self._computed)
            self._computed = []
