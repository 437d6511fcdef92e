"""From the knobs of one model to the parts that serve it, and what they say of themselves."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from vllm_spac.budgeting import BudgetControl
from vllm_spac.calibration import Calibration, read_budgets
from vllm_spac.config import SpacConfig
from vllm_spac.errors import ConfigError
from vllm_spac.guard import Guard
from vllm_spac.integration import runners
from vllm_spac.integration.fingerprint import model_fingerprint
from vllm_spac.memory import gib
from vllm_spac.pool import ExpertPool
from vllm_spac.runtime import Runtime
from vllm_spac.trace import TraceFacts
from vllm_spac.trace_writer import TraceWriter

logger = logging.getLogger("vllm.spac")


def budget(config: SpacConfig, vllm_config, layers, device: torch.device) -> BudgetControl:
    """The budget's control, set to what the user asked for; possible before any weight is loaded.

    Raises:
        ConfigError: a file is of another model, or the budget does not fit a layer.
    """
    known = [layer.budgeted() for layer in layers]
    names, experts = [layer.name for layer in known], max(layer.experts for layer in known)
    calibration, bound = None, config.budget
    if config.calibration is not None or config.budget_file is not None:
        model = model_fingerprint(vllm_config)
        if config.calibration is not None:
            calibration = Calibration.load(config.calibration.expanduser(), model, names, experts)
        if config.budget_file is not None:
            bound = read_budgets(config.budget_file.expanduser(), model, names, experts)
    control = BudgetControl(known, calibration, device=device)
    control.change(config.budget_settings(bound))
    if control.active and config.budget_when == "verify" and vllm_config.speculative_config is None:
        logger.warning(
            "spac: the budget is for verify steps and this engine does not speculate, so it never applies; "
            "add --speculative-config or --spac-budget-when decode"
        )
    return control


def guard(config: SpacConfig, vllm_config) -> Guard | None:
    """The guard of speculation, where there is any and its length can be changed."""
    speculation = vllm_config.speculative_config
    if speculation is None or config.guard == "off":
        return None
    if not runners.can_guard(vllm_config):
        asked = "guard" in config.model_fields_set
        logger.log(
            logging.WARNING if asked else logging.INFO,
            "spac: guard=on has no effect here: vLLM plans the drafts of a step before the last one is over; add "
            "--no-async-scheduling (and on a GPU VLLM_USE_V2_MODEL_RUNNER=0), or --spac-guard off to say so",
        )
        return None
    return Guard(speculation.num_speculative_tokens)


def trace(config: SpacConfig, vllm_config, pools: Sequence[ExpertPool]) -> TraceWriter | None:
    """What records the routing, if asked for; ``ConfigError`` for layers of several shapes."""
    if config.trace is None:
        return None
    if len(pools) != 1:
        raise ConfigError(f"spac: trace (--spac-trace) needs MoE layers of one shape, this model has {len(pools)}")
    shape, path = pools[0].shape, config.trace.expanduser().absolute()
    model = vllm_config.model_config.model
    logger.info("spac: routing is recorded in %s", path)
    return TraceWriter(path, TraceFacts(len(shape.layers), shape.experts, shape.top_k, shape.expert_bytes, model))


def describe(pool: ExpertPool) -> str:
    """Slots, bytes and store of a pool, for the start-up line."""
    shape, count = pool.shape, pool.residency.slots
    share, size, total = 100 * count / shape.total, count * shape.expert_bytes, shape.total * shape.expert_bytes
    return (
        f"slots={count} of {shape.total} experts ({share:.1f}%, {gib(size)} of {gib(total)}; "
        f"{len(shape.layers)} layers x {shape.experts} experts of {gib(shape.expert_bytes)}, top-{shape.top_k}), "
        f"store={pool.store.describe()}"
    )


def stats(runtime: Runtime, config: SpacConfig, store: str) -> dict:
    """Choices and counters of one worker, summed over pools, as plain data."""
    settings = runtime.budget.settings
    total = {
        "mode": "lossy" if settings.active else "exact",
        "store": store if any(not pool.holds_all for pool in runtime.pools) else "resident",
        "execution": config.execution,
        "policy": config.policy,
    }
    for pool in runtime.pools:
        total = _add(total, _facts(pool))
    if runtime.guard is not None:
        total["guard"] = runtime.guard.facts()
    return total | {"budget": {"setting": settings.describe(), **runtime.budget.counters.snapshot()}}


def _facts(pool: ExpertPool) -> dict:
    shape = pool.shape
    return {
        "layers": len(shape.layers),
        "experts": shape.total,
        "slots": pool.residency.slots,
        "resident": pool.residency.resident,
        "slot_bytes": pool.residency.slots * shape.expert_bytes,
        "expert_bytes": shape.expert_bytes,
        **pool.snapshot(),
    }


def _add(total: dict, facts: dict) -> dict:
    """Sum numbers, and dictionaries of numbers, key by key."""
    merged = dict(total)
    for name, value in facts.items():
        if isinstance(value, dict):
            merged[name] = _add(merged.get(name, {}), value)
        else:
            merged[name] = merged.get(name, 0) + value
    return merged
