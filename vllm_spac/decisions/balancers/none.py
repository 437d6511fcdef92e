"""Balancer that loads every missing expert; the CPU computes none."""

from __future__ import annotations

from typing import ClassVar

from vllm_spac.decisions.balancers.base import Balancer, LayerState, Plan, split


class StreamAll(Balancer):
    """The baseline, and the only choice where one processor does all work."""

    needs_rates: ClassVar[bool] = False
    uses_cpu: ClassVar[bool] = False
    offline: ClassVar[str] = "without CPU experts use --spac-cpu-experts off"

    def plan(self, state: LayerState) -> Plan:
        hit, missing = split(state)
        return Plan(hit=hit, stream=tuple(missing.tolist()))
