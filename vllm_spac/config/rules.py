"""Which knobs go together: what each combination that is refused lacks, or contradicts."""

from __future__ import annotations

from typing import Any

from vllm_spac import components
from vllm_spac.config.presets import PRESETS
from vllm_spac.config.types import AUTO, OF_DRAFTS, PREFETCHING
from vllm_spac.decisions.predictors.base import DRAFTING
from vllm_spac.errors import ConfigError, Remedy, add, drop, flag, use

# Knobs that apply to some executions only: the values that have no effect elsewhere, and why others are refused.
_OF_EXECUTION = {
    "prefetch": (("off",), "with {plane} nothing reads ahead"),
    "host_memory": (
        (None,),
        "host_memory (--spac-host-memory) holds experts between slots and disk, and with {plane} none is read from a "
        "disk",
    ),
    "speculate": (
        ("off",),
        "speculate (--spac-speculate) decides before a layer's router has chosen, and with {plane} rows are sent by "
        "what it chose",
    ),
}
# Why the device does not have these parts of papers, by simulation.
_FEWER_HITS = "and on average fewer hits than reuse (benchmarks/results/policies.md)"
_SLOWER = "and took 1.0 to 1.1 times as long as waterfill (benchmarks/results/moe_spac_tables.md)"
_PREDICTED = add(prefetch="gate")
WITHOUT_WORKERS = drop("executor")
_refused = ConfigError.refused


def plane(config: Any) -> str:
    """Returns the knob because of which layers run as they do, for an error."""
    name = "executor" if config.has_workers else "plane"
    return f"{name}={getattr(config, name)} ({flag(name)})"


def _check_idle(config: Any) -> None:
    """Refuses knobs that mean nothing to how layers run."""
    for name, (idle, problem) in _OF_EXECUTION.items():
        if name not in config.execution_class.knobs and getattr(config, name) not in idle:
            raise _refused(problem.format(plane=plane(config)), drop(name))


def _check_execution(config: Any) -> None:
    kind, named = config.execution_class, plane(config)
    if kind.reads_in_place:
        _check_store_in_reach(config, named)
    if not kind.needs_host and config.prefetch != "off":
        _check_device_prefetch(config, named)
    if not kind.needs_host and config.balancer is not None:
        _check_device_balancer(config, named)
    policy = components.find("policies", config.policy)
    if not kind.needs_host and not policy.on_device:
        less = f", {_FEWER_HITS}" if policy.__module__.startswith("vllm_spac.") and policy.keeps else ""
        raise _refused(
            f"policy={config.policy} (--spac-policy) has no formula that the device could compute with {named}{less}",
            use(plane="slots"),
            use(policy="reuse"),
        )


def _check_store_in_reach(config: Any, device: str) -> None:
    """Refuses a disk without host memory before it, from which layers read what they miss."""
    store = components.find("stores", config.store or ("host" if config.host_memory is None else "disk"))
    if store.addressable and config.disk_dir is not None:
        raise _refused(
            f"disk_dir={config.disk_dir} (--spac-disk-dir) means nothing with store={config.store or 'host'} "
            "(--spac-store)",
            drop("disk_dir"),
        )
    if not store.addressable and config.host_memory is None:
        memory = (add(host_memory="8GiB"),) if store.persistent else ()
        others = use(store="host", disk_dir=None), use(plane="slots")
        where = f"store={config.store} (--spac-store)"
        raise _refused(f"{device} reads missing experts in host memory, and {where} keeps none there", *memory, *others)


def _check_device_balancer(config: Any, device: str) -> None:
    """Refuses a balancer that must see which experts a layer misses."""
    balancer = components.find("balancers", config.balancer)
    if balancer.uses_cpu and not balancer.by_number:
        slower = f", {_SLOWER}" if balancer.__module__.startswith("vllm_spac.") else ""
        raise _refused(
            f"cpu_experts={config.cpu_experts} (--spac-cpu-experts) divides a layer by which experts it misses, of "
            f"which no layer tells the host with {device}{slower}",
            use(cpu_experts=AUTO),
            use(plane="slots"),
        )


def _check_device_prefetch(config: Any, device: str) -> None:
    """Refuses reads ahead that the device cannot decide, in layers or while drafts are made."""
    named = f"prefetch={config.prefetch} (--spac-prefetch)"
    others = use(plane="slots"), use(prefetch="gate"), drop("prefetch")
    kind = components.find("predictors", config.prefetch)
    name, given = components.parse(config.prefetch)
    if kind.on_device:
        wrong, of, why = given.keys() - {components.FILE}, "but a file", "its reads delay nothing, and none is queued"
    elif DRAFTING & kind.needs:
        wrong, of = given.keys() & {"threshold", "background", "extra"}, "background, extra and threshold"
        why = "its reads delay nothing, and none is queued"
    elif not kind.observes_layers():
        raise _refused(f"{named} names experts after a step, and with {device} no host moves them", *others)
    else:
        raise _refused(f"{named} is asked on the host in each layer, which waits for no host with {device}", *others)
    if wrong:
        alone = use(prefetch=components.written(name, {what: given[what] for what in given if what not in wrong}))
        raise _refused(f"{named} has no settings {of} with {device}: {why}", alone)
    if given.get("depth", 0) > (most := PREFETCHING["depth"].default):
        less = use(prefetch=components.written(name, given | {"depth": most}))
        raise _refused(f"{named} reads at most {most} experts while drafts are made with {device}", less)


def with_workers(config: Any, count: int) -> Remedy:
    """Returns the remedy of so many expert workers."""
    name, given = components.parse(config.executor)
    return use(executor=components.written(name, given | {"workers": count}))


def check_groups(config: Any, workers: int) -> None:
    """Raises ``ConfigError`` if so many workers do not form the groups of ``config``."""
    size = config.workers_per_layer
    if workers % size:
        raise _refused(
            f"spac: {workers} workers do not form groups of {size}, as executor={config.executor} (--spac-executor) "
            "asks for",
            with_workers(config, max(size, workers - workers % size)),
        )


def _check_workers(config: Any) -> None:
    named = f"executor={config.executor} (--spac-executor)"
    if not config.has_workers:
        return
    if config.workers is not None:
        check_groups(config, config.workers)
    idle_values: dict[str, str | None] = {"plane": AUTO, "cpu_experts": "off", "host_memory": None}
    for name, without in idle_values.items():
        if (value := getattr(config, name)) != without:
            raise _refused(f"{name}={value} ({flag(name)}) is not for {named}", drop(name))
    if config.store not in (None, "disk"):
        raise _refused(
            f"store={config.store} (--spac-store) is not for {named}: each worker packs its experts on its disk",
            drop("store").but(", and give --spac-slots 100% if they are to be in memory"),
        )


def _check_host_memory(config: Any) -> None:
    if config.host_memory is not None and config.store is not None:
        store = components.find("stores", config.store)
        if not store.persistent:
            raise _refused(
                f"host_memory (--spac-host-memory) holds a part of the experts, and store={config.store} "
                "(--spac-store) holds all of them in memory",
                use(store="disk"),
                drop("host_memory"),
            )


def _check_preset(config: Any) -> None:
    if config.preset is None or config.prefetch == "off":
        return
    if config.prefetch == PRESETS[config.preset].knobs.get("prefetch") and _needs_file(config.prefetch):
        raise _refused(
            f"preset={config.preset} (--spac-preset) prefetches by {config.prefetch}, which is trained for a model",
            with_file(config.prefetch),
            drop("preset"),
        )


def with_file(prefetch: str) -> Remedy:
    """Returns the remedy of naming the file of a trained predictor."""
    name, given = components.parse(prefetch)
    written = components.written(name, given | {components.FILE: "FILE"})
    return use(prefetch=written).but(", which `vllm-spac predictors train` writes")


def _needs_file(prefetch: str) -> bool:
    """Whether a predictor must be trained; others are computed from the checkpoint, or from what was counted."""
    kind = components.find("predictors", prefetch)
    return kind.needs_file and not kind.from_checkpoint


def check_draft_arguments(prefetch: str) -> None:
    """Raises ``ConfigError`` if ``prefetch`` has arguments of predictors that look at drafts, and looks at none."""
    name, given = components.parse(prefetch)
    wrong = [argument for argument in OF_DRAFTS if argument in given]
    if wrong and not DRAFTING & components.find("predictors", name).needs:
        others = {argument: value for argument, value in given.items() if argument not in OF_DRAFTS}
        raise _refused(
            f"spac: {wrong[0]} of prefetch={prefetch} (--spac-prefetch) is of predictors that look at drafts",
            use(prefetch=components.written(name, others)),
            use(prefetch="draft_gate"),
        )


def _check_prefetch(config: Any) -> None:
    check_draft_arguments(config.prefetch)
    if config.prefetch == "off":
        return
    named, (name, given) = f"prefetch={config.prefetch} (--spac-prefetch)", components.parse(config.prefetch)
    if components.FILE not in given and _needs_file(config.prefetch):
        raise _refused(f"{named} needs its file", with_file(config.prefetch), drop("prefetch"))
    kind = components.find("predictors", name)
    if components.FILE in given and not kind.needs_file:
        others = {argument: value for argument, value in given.items() if argument != components.FILE}
        moved = config.execution_class.needs_host or kind.observes_layers()  # else it is refused without a file, too
        raise _refused(
            f"file of {named} has no effect: this predictor is not trained",
            use(prefetch=components.written(name, others)) if moved else drop("prefetch"),
        )


def _check_speculate(config: Any) -> None:
    if config.speculate == "off":
        return
    named = f"speculate={config.speculate} (--spac-speculate)"
    if config.parsed_budget.bounds:
        raise _refused(
            f"{named} and budget={config.budget} (--spac-budget) both choose a layer's experts",
            drop("speculate"),
            drop("budget"),
        )
    if config.prefetch == "off" or not components.find("predictors", config.prefetch).names_ahead():
        raise _refused(
            f"{named} needs a predictor that looks one layer ahead, and prefetch={config.prefetch} (--spac-prefetch) "
            "names none",
            _PREDICTED,
            drop("speculate"),
        )


def untraced(config: Any) -> Remedy:
    """Returns the remedy of recording no trace."""
    return drop("record") if config.timeline is None else use(record=f"timeline={config.timeline}")


def uncontrolled(config: Any) -> Remedy:
    """Returns the remedy of a budget that no request changes."""
    return use(http="page") if config.page else drop("http")


def _check_cpu_experts(config: Any) -> None:
    named = f"cpu_experts={config.cpu_experts} (--spac-cpu-experts)"
    if config.balancer is not None and not components.find("balancers", config.balancer).uses_cpu:
        raise _refused(f"{named} computes none", use(cpu_experts=AUTO), use(cpu_experts="off"))
    if config.profile is not None and config.balancer is None:
        raise _refused(f"profile (--spac-profile) decides nothing with {named}", *_computing(config), drop("profile"))
    if config.cpu_kernel is not None and config.cpu_experts == "off":
        nothing = "cpu_kernel (--spac-cpu-kernel) computes nothing without CPU experts"
        raise _refused(nothing, *_computing(config), drop("cpu_kernel"))


def _computing(config: Any) -> tuple[Remedy, ...]:
    """The remedy of CPU experts, where there may be any."""
    return (add(cpu_experts="auto"),) if "cpu_experts" in config.execution_class.knobs else ()


_RULES = (
    _check_idle,
    _check_preset,
    _check_workers,
    _check_prefetch,
    _check_execution,
    _check_host_memory,
    _check_speculate,
    _check_cpu_experts,
)


def check(config: Any) -> None:
    """Raises ``ConfigError`` at the first rule that a ``SpacConfig`` breaks; it has the remedies."""
    for rule in _RULES:
        rule(config)
