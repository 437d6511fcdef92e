"""Builds the parts that serve one model from its knobs, and describes them for the log and the statistics."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_spac import components
from vllm_spac.cache.host_tier import HostTier, useful_rows
from vllm_spac.cache.measured_costs import RowsStore, serving_rates
from vllm_spac.cache.transfers import HostRows
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.types import AUTO
from vllm_spac.core import MoEShape, Rates
from vllm_spac.cpu_kernels._thread import ExecutorThread, threads_of
from vllm_spac.cpu_kernels.base import check_same
from vllm_spac.decisions.balancers.base import Balancer
from vllm_spac.decisions.costs import Costs, ExpertSize
from vllm_spac.decisions.guard.chooser import Chooser
from vllm_spac.decisions.guard.device_chooser import DeviceChooser
from vllm_spac.decisions.guard.lengths import LengthChooser
from vllm_spac.decisions.policies.base import Policy, PolicyContext
from vllm_spac.decisions.predictors._trained import Trained
from vllm_spac.decisions.predictors.base import Predictor
from vllm_spac.errors import ConfigError, PinError, UnsupportedError
from vllm_spac.execution.base import Execution, Rows
from vllm_spac.integration.hooks import drafts, graphs
from vllm_spac.integration.layers import cpu_kernel
from vllm_spac.integration.loading.runner_choice import adapter_of
from vllm_spac.methods.moe_spec.control import NO_DRAFTS, BudgetControl
from vllm_spac.methods.moe_spec.replay import BudgetCounters
from vllm_spac.methods.moe_spec.settings import BudgetedLayer, BudgetSettings
from vllm_spac.methods.speculating_experts.speculated import SpeculatedExecution, SpeculatedLaunches
from vllm_spac.recording.timeline_file import TimelineFacts, TimelineWriter
from vllm_spac.recording.trace_file import TraceFacts
from vllm_spac.recording.trace_writer import TraceWriter
from vllm_spac.storage.base import allocate
from vllm_spac.system.host_blocks import HostBlock
from vllm_spac.system.host_memory import available_host_bytes, gib, pin_remedy
from vllm_spac.system.processors import binding

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_spac.integration.layers.managed_experts import ManagedExperts

logger = logging.getLogger("vllm.spac")

_TIMELINE_STEPS = 256  # the last ones, which a timeline has
HOST_RESERVE = 1 << 30  # of host memory, left to the rest of the machine


def budget(
    config: SpacConfig,
    vllm_config: VllmConfig,
    layers: Sequence[ManagedExperts],
    device: torch.device,
    predictor: Predictor | None,
) -> BudgetControl:
    """Builds the budget's control with the configured budget; possible before any weight is loaded.

    Args:
        layers: the managed layers, in the order of execution.
        predictor: trained, if ``prefetch`` names one.

    Raises:
        ConfigError: the budget does not fit a layer.
    """
    known = [layer.budgeted() for layer in layers]
    counters = BudgetCounters()
    there, unweighted = drafts.weighs_on_device(vllm_config), drafts.unweighted(vllm_config, config.cuts_in_graphs)
    why = None if unweighted is None else str(unweighted)
    if there and why is None and config.parsed_budget.alpha is None:
        why = "V2 keeps the probabilities of drafts for engines alone that start with it; restart with this flag"
    control = BudgetControl(
        known,
        device=device,
        unweighted=why,
        weighed_on_device=there,
        speculation=_speculation(config, vllm_config, known, predictor, counters),
        counters=counters,
        drafts=vllm_config.speculative_config is not None,
    )
    control.update(BudgetSettings.at_start(config))
    if graphs.hold_budget(config):
        control.prepare_graphs(graphs.most_rows(vllm_config))
    if control.idle:
        logger.warning("spac: %s", NO_DRAFTS)
    return control


def _speculation(
    config: SpacConfig,
    vllm_config: VllmConfig,
    layers: Sequence[BudgetedLayer],
    predictor: Predictor | None,
    counters: BudgetCounters,
) -> SpeculatedExecution | None:
    """Builds what runs experts by prediction, also if it is switched on later; None without such a predictor."""
    if predictor is None or not predictor.reach:
        return None
    launches = None
    if not config.execution_class.needs_host:
        assert isinstance(predictor, Trained), "of others, a device that decides reads nothing ahead"
        captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        launches = SpeculatedLaunches(layers, predictor, graphs.most_rows(vllm_config), captured)
    return SpeculatedExecution(layers, predictor, counters, launches)


def policy(config: SpacConfig, shape: MoEShape, slots: int, most_drafts: int) -> Policy:
    """Builds the eviction policy of the layers of ``shape``; ``most_drafts``: of a request in a step."""
    kind, context = components.find("policies", config.policy), PolicyContext(slots, shape.top_k, most_drafts)
    return components.build("policies", config.policy, kind.of, context=context)


def check_host_memory(config: SpacConfig, total: int, share: float = 1) -> None:
    """Refuses more host memory than there is.

    Args:
        total: bytes of all experts of a rank, of which no more than all are held.
        share: of the memory, that this rank may take.

    Raises:
        ConfigError: the message says how much can be given.
    """
    if config.host_memory is None:
        return
    needed, available = min(config.host_memory, int(total / share)), available_host_bytes()
    if needed + HOST_RESERVE > available:
        most = max(0, available - HOST_RESERVE) >> 20
        raise ConfigError(
            f"spac: host_memory (--spac-host-memory) needs {gib(needed)}, and {gib(available)} are available, of which "
            f"{gib(HOST_RESERVE)} are left to the system; use at most --spac-host-memory {most}MiB"
        )


def host_rows(
    config: SpacConfig, shape: MoEShape, slots: int, most_drafts: int, share: float, device: torch.device
) -> HostRows | None:
    """Allocates the host memory between the slots and the store of the layers of ``shape``; None if there is none.

    Args:
        share: part of ``config.host_memory`` that these layers get.

    Raises:
        ConfigError: it does not hold one expert.
        StoreError: it cannot be allocated.
    """
    if config.host_memory is None:
        return None
    if slots == shape.total:
        logger.info("spac: host_memory (--spac-host-memory) is not used: every expert has a slot")
        return None
    given, in_place = int(share * config.host_memory), config.execution_class.reads_in_place
    slots = 0 if in_place else slots  # no device copies experts back, so rows have those that have slots, too
    rows = min(shape.total, given // shape.expert_bytes)
    if rows == 0:
        raise ConfigError(
            f"spac: host_memory (--spac-host-memory) of {gib(given)} holds no expert of {gib(shape.expert_bytes)}; "
            "give more, or drop it"
        )
    # a load of a layer moves at most all of its experts
    if (useful := useful_rows(shape.total, rows, slots, shape.experts)) < rows:
        needed, rows = gib(useful * shape.expert_bytes), useful
        text = "spac: of host_memory (--spac-host-memory) %s are taken, not %s: slots and host memory hold all experts"
        logger.info(text, needed, gib(given))
    if in_place:
        block, refused = _as_pinned(shape, rows)
        rows = len(next(iter(block.tensors.values())))
    else:
        block = HostBlock(shape.tensors, rows, device.type == "cuda")
        refused = block.refused
    if refused:
        what = f"{gib(block.nbytes)} are taken" if in_place else "none is pinned, and is copied from more slowly"
        logger.warning(
            "spac: of %s of host_memory (--spac-host-memory) %s (%s); %s", gib(given), what, refused, pin_remedy()
        )
    tier = HostTier(shape.total, rows, slots, policy(config, shape, rows, most_drafts))
    return HostRows(tier, block)


def _as_pinned(shape: MoEShape, rows: int) -> tuple[HostBlock, str]:
    """Returns memory of as many rows as the driver pins, by halves, and why not of all; ``PinError``: of none."""
    refused = ""
    while True:
        try:
            return HostBlock.staging(shape.tensors, rows), refused
        except PinError as error:
            refused = error.problem.removeprefix("spac: ")
            if rows == 1:
                raise
        rows //= 2


def guard(config: SpacConfig, vllm_config: VllmConfig) -> LengthChooser | Chooser | None:
    """Builds what decides how many drafts a step has; None without speculation, or if that cannot be changed.

    V2's scheduler plans a number for all requests, of trees all nodes or none (``LengthChooser``); V1's runner has the
    drafts before a step is planned (``Chooser``).
    """
    speculation = vllm_config.speculative_config
    if speculation is None or not config.guards:
        return None
    if (reason := drafts.unguarded(vllm_config, config.tree_nodes > 0)) is not None:
        logger.info("spac: guard=on has no effect here: %s", reason)
        return None
    most = config.tree_nodes or speculation.num_speculative_tokens
    return adapter_of(vllm_config).guard(most, config)


def cuts(config: SpacConfig, vllm_config: VllmConfig, executions: Sequence[Execution]) -> DeviceChooser | None:
    """Builds the host's part of cutting drafts on the device, with V2; None where they are verified as planned."""
    speculation = vllm_config.speculative_config
    if speculation is None or not config.guards or not drafts.plans_drafts(vllm_config):
        return None
    if reason := _uncut(config, vllm_config, executions):
        logger.info("spac: drafts are verified as planned, and none is cut on the device: %s", reason)
        return None
    shape = config.draft_tree
    return DeviceChooser(speculation.num_speculative_tokens if shape is None else shape.depth)


def _uncut(config: SpacConfig, vllm_config: VllmConfig, executions: Sequence[Execution]) -> str:
    if config.trace is not None:
        return "a trace (--spac-record) has the experts of all of them"
    if any(execution.holds_all for execution in executions):
        return "each expert has its slot, so that none is loaded for a draft"
    reason = drafts.uncut(vllm_config, config.cuts_in_graphs)
    return "" if reason is None else str(reason)


def trace(config: SpacConfig, vllm_config: VllmConfig, executions: Sequence[Execution]) -> TraceWriter | None:
    """Builds the writer that records the routing, if configured; ``ConfigError`` for layers of several shapes."""
    if config.trace is None:
        return None
    if len(executions) != 1:
        count = len(executions)
        raise ConfigError(f"spac: a trace (--spac-record) needs MoE layers of one shape, this model has {count}")
    shape, path = executions[0].shape, config.trace.absolute()
    model = vllm_config.model_config.model
    logger.info("spac: routing is recorded in %s", path)
    local_of = executions[0].local_of
    experts = shape.experts if local_of is None else len(local_of)
    return TraceWriter(path, TraceFacts(len(shape.layers), experts, shape.top_k, shape.expert_bytes, model))


def timeline(config: SpacConfig, facts: TimelineFacts) -> TimelineWriter | None:
    """Builds the writer that saves what each thread does and when, if configured."""
    if config.timeline is None:
        return None
    path = config.timeline.absolute()
    logger.info("spac: the last steps are recorded in %s", path)
    return TimelineWriter(path, facts, _TIMELINE_STEPS)


def timeline_facts(vllm_config: VllmConfig, executions: Sequence[Execution], store: str) -> TimelineFacts:
    """Returns what a timeline of these executions states about the model; ``store``: name of their store."""
    layers = [(name, execution.shape.experts) for execution in executions for name in execution.shape.layers]
    names, experts = zip(*layers, strict=True)
    return TimelineFacts(vllm_config.model_config.model, store, names, experts)


def attach_balancer(config: SpacConfig, vllm_config: VllmConfig, execution: Execution, layer: ManagedExperts) -> None:
    """Sets ``execution`` to run missing experts on the CPU; ``layer`` is the first of its layers, attached.

    Raises:
        ConfigError, UnsupportedError: this machine's CPU cannot compute these experts as the layer does.
    """
    if execution.holds_all:
        return
    thread = _executor_thread(config, execution, layer)
    try:
        balancer = _balancer(config, vllm_config, execution, layer, thread, _compared(execution, layer, thread))
    except BaseException:
        thread.close()
        raise
    execution.attach_balancer(balancer, thread, _is_checked(config))


def _is_checked(config: SpacConfig) -> bool:
    """Whether the CPU computes experts only while steps are shorter with it: unless a balancer was named."""
    return config.cpu_experts == AUTO


def _executor_thread(config: SpacConfig, execution: Execution, layer: ManagedExperts) -> ExecutorThread:
    if layer.apply_router_weight_on_input:
        raise UnsupportedError(
            f"spac: {layer.layer_name} applies routing weights to the input of an expert, so partial results cannot be "
            "added; use --spac-cpu-experts off"
        )
    kernel = None if execution.layout == "plain" else cpu_kernel.of(layer)
    kind = components.find("cpu_kernels", config.cpu_kernel or ("simd" if kernel is None else "native"))
    if kind.layout == "plain" and kernel is not None:
        raise ConfigError(
            f"spac: cpu_kernel={config.cpu_kernel} (--spac-cpu-kernel) cannot read the layout that experts have on a "
            "CPU machine; use native"
        )
    if execution.shape.packed is not None and not kind.reads_packed:
        raise ConfigError(
            f"spac: cpu_kernel={config.cpu_kernel} (--spac-cpu-kernel) cannot read experts that are packed for our "
            f"kernels ({execution.shape.packed.describe()}); use simd"
        )
    if kernel is None and layer.spac_activation is None:
        raise UnsupportedError(
            f"spac: the CPU kernel simd does not compute {layer.activation.value} with limit {layer.swiglu_limit} of "
            f"{layer.layer_name}; use --spac-cpu-experts off"
        )
    layers = execution.cpu_layers()
    if kernel is not None and (name := binding(os.environ)) is not None:
        logger.warning(
            "spac: %s binds the threads that compute CPU experts to the cores of those that stream the others; "
            "set VLLM_CPU_OMP_THREADS_BIND=nobind",
            name,
        )
    activation = layer.spac_activation or layer.activation.value
    executor = kind(execution.shape, threads_of(layer.spac.device), activation, kernel)
    return ExecutorThread(executor, layers)


def _compared(execution: Execution, layer: ManagedExperts, thread: ExecutorThread) -> Callable[[], torch.Tensor]:
    """Checks that ``thread`` computes a row of ``layer`` as fast memory does; ``ConfigError`` if not.

    Returns a function that runs this row in fast memory.
    """
    (x, weights, ids), in_slots = one_row(execution, layer)
    if (store := execution.store).addressable:
        experts = store.layer(layer.spac_index)
    else:
        experts = allocate(store.shape.tensors, store.shape.top_k, "cpu")
        for number in range(store.shape.top_k):
            key = store.shape.key(layer.spac_index, number)
            store.read(key, {name: tensor[number] for name, tensor in experts.items()})
    with thread.computing(x, weights, ids, experts) as computation:
        found = computation.result()
    check_same(found, in_slots().cpu(), x.dtype, x.shape[1], "CPU experts compared with vLLM's kernel")
    return in_slots


def one_row(execution: Execution, layer: ManagedExperts) -> tuple[tuple[Tensor, Tensor, Tensor], Callable[[], Tensor]]:
    """Returns (x, weights, ids) of a row on the CPU, and a function that runs it through ``layer`` in fast memory.

    The row's experts are the first ones of this process.
    """
    top_k, hidden = execution.shape.top_k, layer.moe_config.hidden_dim
    x = torch.randn(1, hidden, generator=torch.Generator().manual_seed(0)).to(layer.moe_config.in_dtype)
    weights = torch.full((1, top_k), 1 / top_k, dtype=torch.float32)
    held, own = execution.local_of, torch.arange(top_k, dtype=torch.int32)
    named = own if held is None else held.argsort(stable=True)[(held < 0).sum() :][:top_k].int()
    row = x, weights, own[None]
    there, routed, chosen = (tensor.to(layer.spac.device) for tensor in (x, weights, named[None]))
    rows = Rows(1, as_routed=True)
    return row, partial(execution.forward, layer.spac_index, there, routed, chosen, layer.spac_kernel, rows)


def _balancer(
    config: SpacConfig,
    vllm_config: VllmConfig,
    execution: Execution,
    layer: ManagedExperts,
    thread: ExecutorThread,
    in_slots: Callable[[], torch.Tensor],
) -> Balancer:
    shape = execution.shape
    knobs: dict[str, Any] = {
        "layers": len(shape.layers),
        "top_k": shape.top_k,
        "gamma": max(1, drafts.most(vllm_config)),
        "expert_bytes": shape.expert_bytes,
    }
    if (count := config.cpu_expert_count) is not None:
        logger.info("spac: up to %s missing experts of a layer run on the CPU: %s", count, thread.describe())
        return components.build("balancers", "fixed", count=count, **knobs)
    name = config.balancer
    assert name is not None, "no CPU experts"
    rates, costs = None, "weighs no costs"
    if components.find("balancers", name).needs_rates:
        rates, origin = _rates(config, execution, layer, thread, in_slots)
        known = {what: value for what, value in asdict(rates).items() if value or what != "draft"}
        costs = ", ".join(f"{what} {1e3 * value:.3f} ms" for what, value in known.items()) + f"; {origin}"
        costs += "" if "draft" in known else ", draft while serving"
    while_serving = ", while steps are shorter with them" if _is_checked(config) else ""
    logger.info("spac: CPU experts by %s%s (%s): %s", name, while_serving, thread.describe(), costs)
    if "gamma" in components.parse(name)[1]:
        del knobs["gamma"]  # the user's
    return components.build("balancers", name, rates=rates, **knobs)


def _rates(
    config: SpacConfig,
    execution: Execution,
    layer: ManagedExperts,
    thread: ExecutorThread,
    in_slots: Callable[[], torch.Tensor],
) -> tuple[Rates, str]:
    """Returns (costs for the balancer, their origin): the profile's if it matches this machine and these experts."""
    nbytes, missing = execution.shape.expert_bytes, ""
    if config.profile is not None:
        try:
            costs = Costs.read(config.profile, here=True)
            costs.check_experts(config.profile, ExpertSize.of(nbytes).nbytes, "host")
            return costs.rates(nbytes), f"from {config.profile}"
        except ConfigError as error:
            missing = f", because {error}"
    moe = layer.moe_config
    store, rows = execution.store, execution.host
    rates = serving_rates(
        store if store.addressable or rows is None else RowsStore(store.shape, rows.tensors),
        thread,
        in_slots,
        hidden=moe.hidden_dim,
        dtype=moe.in_dtype,
        device=layer.spac.device,
        io_threads=config.io_threads,
    )
    return rates, f"measured now{missing}"
