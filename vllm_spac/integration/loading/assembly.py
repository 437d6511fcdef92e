"""From the knobs of one model to the parts that serve it, and what they say of themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import torch

from vllm_spac import components
from vllm_spac.balancers.base import Balancer
from vllm_spac.budget.calibration import Calibration, read_budgets
from vllm_spac.budget.control import BudgetControl
from vllm_spac.config import SpacConfig
from vllm_spac.core import Rates
from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.execution.pointers import admissions
from vllm_spac.execution.pointers.execution import StreamedPool
from vllm_spac.execution.pointers.staging import staging_bytes
from vllm_spac.execution.slots import ExpertPool
from vllm_spac.executors._thread import CpuGroup, binding, threads_of
from vllm_spac.executors.base import check_same
from vllm_spac.integration import graphs
from vllm_spac.integration.layers import cpu_kernel
from vllm_spac.integration.stepping import drafts
from vllm_spac.profiling.costs import Costs
from vllm_spac.profiling.measure import ExpertSize
from vllm_spac.profiling.serving import serving_rates
from vllm_spac.runtime import Pool, Runtime
from vllm_spac.speculation.guard import Guard
from vllm_spac.system.host_memory import gib
from vllm_spac.traces.format import TraceFacts
from vllm_spac.traces.writer import TraceWriter

logger = logging.getLogger("vllm.spac")


def budget(config: SpacConfig, vllm_config, layers, device: torch.device, model: Callable[[], str]) -> BudgetControl:
    """The budget's control, set to what the user asked for; possible before any weight is loaded.

    ``model`` names the weights, which may take long.

    Raises:
        ConfigError: a file is of another model, or the budget does not fit a layer.
    """
    known = [layer.budgeted() for layer in layers]
    names, experts = [layer.name for layer in known], max(layer.experts for layer in known)
    calibration, bound = None, config.budget
    if config.calibration is not None or config.budget_file is not None:
        name = model()
        if config.calibration is not None:
            calibration = Calibration.load(config.calibration, name, names, experts)
        if config.budget_file is not None:
            bound = read_budgets(config.budget_file, name, names, experts)
    control = BudgetControl(known, calibration, device=device)
    control.change(config.budget_settings(bound))
    if graphs.hold_budget(config):
        control.hold_in_graphs(graphs.most_rows(vllm_config))
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
    if (reason := drafts.unguarded(vllm_config)) is not None:
        logger.info("spac: guard=on has no effect here: %s", reason)
        return None
    return Guard(speculation.num_speculative_tokens)


def trace(config: SpacConfig, vllm_config, pools: Sequence[Pool]) -> TraceWriter | None:
    """What records the routing, if asked for; ``ConfigError`` for layers of several shapes."""
    if config.trace is None:
        return None
    if len(pools) != 1:
        raise ConfigError(f"spac: trace (--spac-trace) needs MoE layers of one shape, this model has {len(pools)}")
    shape, path = pools[0].shape, config.trace.absolute()
    model = vllm_config.model_config.model
    logger.info("spac: routing is recorded in %s", path)
    return TraceWriter(path, TraceFacts(len(shape.layers), shape.experts, shape.top_k, shape.expert_bytes, model))


def balance(config: SpacConfig, vllm_config, pool: ExpertPool, layer) -> None:
    """Let missing experts of ``pool`` run on the CPU, if asked for; ``layer`` is the first of its layers, attached.

    Raises:
        ConfigError, UnsupportedError: they cannot be computed here as the layer does.
    """
    if config.cpu_experts == "off" or pool.holds_all:
        return
    group = _cpu_group(config, pool, layer)
    try:
        balancer = _balancer(config, vllm_config, pool, layer, group, _compared(pool, layer, group))
    except BaseException:
        group.close()
        raise
    pool.balance(balancer, group)


def _cpu_group(config: SpacConfig, pool: ExpertPool, layer) -> CpuGroup:
    if layer.apply_router_weight_on_input:
        raise UnsupportedError(
            f"spac: {layer.layer_name} weighs what goes into an expert, so its parts cannot be added; "
            "use --spac-cpu-experts off"
        )
    kernel = cpu_kernel.of(layer)
    kind = components.find("executors", config.cpu_kernel or ("torch" if kernel is None else "native"))
    if kind.layout == "plain" and kernel is not None:
        raise ConfigError(
            f"spac: cpu_kernel={config.cpu_kernel} (--spac-cpu-kernel) cannot read the layout that experts have on a "
            "CPU machine; use native"
        )
    layers = [pool.store.layer(number) for number in range(len(pool.shape.layers))]
    if kernel is not None and (name := binding()) is not None:
        logger.warning(
            "spac: %s binds the threads that compute CPU experts to the cores of those that stream the others; "
            "set VLLM_CPU_OMP_THREADS_BIND=nobind",
            name,
        )
    executor = kind(pool.shape, threads_of(layer.spac.device), layer.activation.value, kernel)
    return CpuGroup(executor, layers)


def _compared(pool: ExpertPool, layer, group: CpuGroup) -> Callable[[], torch.Tensor]:
    """What runs a row of ``layer`` in fast memory, after ``group`` has given the same for it; else ``ConfigError``."""
    top_k, hidden = pool.shape.top_k, layer.moe_config.hidden_dim
    x = torch.randn(1, hidden, generator=torch.Generator().manual_seed(0)).to(layer.w13_weight.dtype)
    ids, weights = torch.arange(top_k, dtype=torch.int32)[None], torch.full((1, top_k), 1 / top_k)
    in_slots = partial(layer.spac_in_slots, x.to(layer.spac.device), weights.to(layer.spac.device), ids)
    with group.computing(x, weights, ids, pool.store.layer(0)) as computation:
        found = computation.result()
    check_same(found, in_slots().cpu(), x.dtype, hidden, "CPU experts beside vLLM's kernel")
    return in_slots


def _balancer(config: SpacConfig, vllm_config, pool: ExpertPool, layer, group: CpuGroup, in_slots) -> Balancer:
    shape = pool.shape
    speculation = vllm_config.speculative_config
    knobs = {
        "layers": len(shape.layers),
        "top_k": shape.top_k,
        "gamma": 1 if speculation is None else speculation.num_speculative_tokens,
        "expert_bytes": shape.expert_bytes,
    }
    if config.cpu_experts != "auto":
        logger.info(
            "spac: up to %s missing experts of a layer run on the CPU: %s", config.cpu_experts, group.describe()
        )
        return components.build("balancers", "fixed", count=int(config.cpu_experts), **knobs)
    rates, origin = _rates(config, pool, layer, group, in_slots)
    name = config.balancer or "waterfill"
    seconds = ", ".join(f"{what} {1e3 * value:.3f} ms" for what, value in asdict(rates).items())
    logger.info("spac: CPU experts by %s (%s): %s; %s", name, group.describe(), seconds, origin)
    return components.build("balancers", name, rates=rates, **knobs)


def _rates(config: SpacConfig, pool: ExpertPool, layer, group: CpuGroup, in_slots) -> tuple[Rates, str]:
    """(what the balancer weighs, where it comes from): the profile's if it is of this machine and these experts."""
    nbytes, missing = pool.shape.expert_bytes, ""
    if config.profile is not None:
        try:
            costs = Costs.read(config.profile, here=True)
            costs.check_experts(config.profile, ExpertSize.of(nbytes).nbytes, "host")
            return costs.rates(nbytes), f"from {config.profile}"
        except ConfigError as error:
            missing = f", because {error}"
    options = {"device": layer.spac.device, "io_threads": config.io_threads, "hidden": layer.moe_config.hidden_dim}
    return serving_rates(pool.store, group, in_slots, **options), f"measured now{missing}"


def mode(budget: BudgetControl, pools: Sequence[Pool]) -> str:
    """``exact``, ``exact up to rounding`` (CPU experts, pointers: not vLLM's kernel) or ``lossy`` (a budget)."""
    if budget.settings.active:
        return "lossy"
    return "exact" if all(pool.keeps_bits for pool in pools) else "exact up to rounding"


def describe(pool: Pool) -> str:
    """Slots, bytes and store of a pool, for the start-up line."""
    shape, count = pool.shape, pool.residency.slots
    share, size, total = 100 * count / shape.total, count * shape.expert_bytes, shape.total * shape.expert_bytes
    return (
        f"slots={count} of {shape.total} experts ({share:.1f}%, {gib(size)} of {gib(total)}; "
        f"{len(shape.layers)} layers x {shape.experts} experts of {gib(shape.expert_bytes)}, top-{shape.top_k}), "
        f"store={pool.store.describe()}"
    )


def choices(config: SpacConfig, pool: ExpertPool | StreamedPool) -> str:
    """How a pool is run, for the start-up line."""
    execution = f"execution={config.execution}"
    if config.execution == "pointers" and not pool.holds_all:
        size = gib(staging_bytes(pool.shape))
        staged = f"prompts staged in {size}" if pool.staged else "prompts read in place"
        execution += f" (admission={config.admission or admissions.DEFAULT}, {staged})"
    return f"{execution}, policy={config.policy}"


def stats(runtime: Runtime, config: SpacConfig, store: str, guard: Guard | None) -> dict:
    """Choices and counters of one worker, summed over pools, as plain data."""
    settings = runtime.budget.settings
    total = {
        "mode": mode(runtime.budget, runtime.pools),
        "store": store if any(not pool.holds_all for pool in runtime.pools) else "resident",
        "execution": config.execution,
        "policy": config.policy,
    }
    for pool in runtime.pools:
        total = _add(total, _facts(pool))
    if guard is not None:
        total["guard"] = guard.facts()
    return total | {"budget": {"setting": settings.describe(), **runtime.budget.counters.snapshot()}}


def _facts(pool: Pool) -> dict:
    shape = pool.shape
    return {
        "layers": len(shape.layers),
        "experts": shape.total,
        "slots": pool.residency.slots,
        "resident": pool.residency.resident,
        "pinned": pool.residency.pinned,
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
