"""What an engine says of itself: its line in the log at start-up, and the statistics of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_spac.cache.transfers import HostRows
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.types import ONLY_OURS_ON_A_GPU, ROUNDED, ROUNDED_ON_A_GPU
from vllm_spac.decisions.guard.chooser import Chooser
from vllm_spac.decisions.guard.lengths import LengthChooser
from vllm_spac.execution.base import Execution
from vllm_spac.methods.moe_spec.control import BudgetControl
from vllm_spac.runtime import Runtime
from vllm_spac.system.host_memory import gib


def mode(budget: BudgetControl, executions: Sequence[Execution]) -> str:
    """``exact``, ``exact up to rounding`` (CPU experts or pointers, not vLLM's kernel) or ``lossy`` (a budget)."""
    if budget.lossy:
        return "lossy"
    return "exact" if all(execution.keeps_bits for execution in executions) else ROUNDED


def shown_mode(mode: str, config: SpacConfig, on_cpu: bool, only_ours: bool = False) -> str:
    """What ``mode`` found, for the start-up line: of a GPU whose kernel is ours, with what gives stock's bits.

    Args:
        only_ours: vLLM's kernel does not read these experts in slots.
    """
    if mode != ROUNDED or config.execution_name != "pointers" or on_cpu:
        return mode
    return ONLY_OURS_ON_A_GPU if only_ours else ROUNDED_ON_A_GPU


def describe(execution: Execution) -> str:
    """Slots, bytes and store of an execution, for the log line at start-up."""
    shape, count = execution.shape, execution.residency.slots
    share, size, total = 100 * count / shape.total, count * shape.expert_bytes, shape.total * shape.expert_bytes
    return (
        f"slots={count} of {shape.total} experts ({share:.1f}%, {gib(size)} of {gib(total)}; "
        f"{len(shape.layers)} layers x {shape.experts} experts of {gib(shape.expert_bytes)}, top-{shape.top_k}), "
        f"store={execution.store.describe()}{_described(execution.host)}"
    )


def _described(host: HostRows | None) -> str:
    if host is None:
        return ""
    how = "inclusive of the slots" if host.tier.inclusive else "exclusive of the slots"
    return f", host memory={host.tier.rows} experts ({gib(host.block.nbytes)}, {how})"


def choices(config: SpacConfig, execution: Execution) -> str:
    """Plane, policy, predictor and tuned profile, for the start-up line."""
    details = execution.describe()
    ahead = "" if config.prefetch == "off" or execution.holds_all else f", prefetch={config.prefetch}"
    tuned = "" if config.tuned in ("off", "auto") else f", tuned={config.tuned}"
    shown = f" ({details})" if details else ""
    plane = f"executor={config.executor}" if config.has_workers else f"plane={config.execution_name}"
    return f"{plane}{shown}, policy={config.policy}{ahead}{tuned}"


def stats(
    runtime: Runtime, budget: BudgetControl, config: SpacConfig, store: str, guard: LengthChooser | Chooser | None
) -> dict:
    """Settings and counters of one worker, summed over executions, as plain data."""
    total: dict[str, Any] = {
        "mode": mode(budget, runtime.executions),
        "store": store if any(not execution.holds_all for execution in runtime.executions) else "resident",
        "execution": config.execution_name,
        "policy": config.policy,
    }
    total = _add(total, counts(runtime.executions)) | {"stopped": dict(runtime.recordings.stopped)}
    total["stalls"] = runtime.recorder.stalls
    if guard is not None:
        total["guard"] = guard.facts()
    return total | {"budget": {"setting": budget.describe(), **budget.counters.snapshot()}}


def counts(executions: Sequence[Execution]) -> dict[str, Any]:
    """Sizes and counters, summed over executions, as plain data."""
    total: dict[str, Any] = {}
    for execution in executions:
        total = _add(total, _facts(execution))
    return total


def _facts(execution: Execution) -> dict:
    shape, residency = execution.shape, execution.residency
    return {
        "layers": len(shape.layers),
        "experts": shape.total,
        "slots": residency.slots,
        "resident": residency.resident,
        "pinned": residency.pinned,
        "settled": len(execution.store.settled),
        "host_experts": 0 if execution.host is None else execution.host.tier.held,
        "slot_bytes": residency.slots * shape.expert_bytes,
        "expert_bytes": shape.expert_bytes,
        "host_bytes": _add(execution.store.host_bytes, {} if execution.host is None else execution.host.host_bytes),
        **execution.snapshot(),
    }


def _add(total: dict, facts: dict) -> dict:
    """Adds numbers, and dictionaries of numbers, key by key."""
    merged = dict(total)
    for name, value in facts.items():
        if isinstance(value, dict):
            merged[name] = _add(merged.get(name, {}), value)
        else:
            merged[name] = merged.get(name, 0) + value
    return merged
