"""Balancer that runs a fixed number of experts on the CPU, regardless of cost."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from vllm_spac.decisions.balancers.base import Balancer, LayerState, Plan, split


class Fixed(Balancer):
    """Runs at most ``count`` of the missing experts on the CPU: those with the fewest rows, among equals the first."""

    needs_rates: ClassVar[bool] = False
    by_number: ClassVar[bool] = True
    offline: ClassVar[str] = "its number of experts is --spac-cpu-experts N"

    def __init__(self, *, count: int = 1, **shape: Any) -> None:
        super().__init__(**shape)
        self._count = count

    def plan(self, state: LayerState) -> Plan:
        hit, missing = split(state)
        order = np.argsort(state.rows[missing], kind="stable")
        cpu, streamed = missing[order[: self._count]], missing[order[self._count :]]
        return Plan(hit=hit, stream=tuple(sorted(streamed.tolist())), cpu=tuple(sorted(cpu.tolist())))
