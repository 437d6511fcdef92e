"""Which knobs go together: what each combination that is refused lacks, or contradicts."""

from __future__ import annotations

from typing import Any

from vllm_spac import components
from vllm_spac.knobs.types import AUTO, flag
from vllm_spac.system.untrusted import path_of

# Knobs that apply to some executions only: the values that have no effect elsewhere, and why others are refused.
_OF_EXECUTION = {
    "cpu_experts": (
        ("off",),
        "execution={execution} (--spac-execution) computes missing experts itself; drop --spac-cpu-experts",
    ),
    "prefetch": (
        ("off",),
        "execution={execution} (--spac-execution) moves experts ahead of need itself; drop --spac-prefetch",
    ),
    "host_memory": (
        (None,),
        "host_memory (--spac-host-memory) holds experts between slots and disk, and execution={execution} "
        "(--spac-execution) reads none from a disk; drop --spac-host-memory",
    ),
    "io_submit": (
        ("threads",),
        "io_submit (--spac-io-submit) is how missed experts are read from a disk into slots, and execution={execution} "
        "(--spac-execution) reads none; drop --spac-io-submit",
    ),
    "layer_ahead": (
        ("on",),
        "layer_ahead (--spac-layer-ahead) reads experts into slots, and execution={execution} (--spac-execution) moves "
        "experts ahead of need itself; drop --spac-layer-ahead",
    ),
    "speculate": (
        ("off",),
        "speculate (--spac-speculate) decides before a layer's experts are loaded, and execution={execution} "
        "(--spac-execution) loads none before it runs; drop --spac-speculate",
    ),
    "staging": (
        ("auto", "off"),
        "staging (--spac-staging) applies to execution=pointers only: with slots, prompts pass through the slots; "
        "add --spac-execution pointers",
    ),
    "admission": (
        (None,),
        "admission (--spac-admission) applies to execution=pointers only: with slots, each missing expert is loaded "
        "before its layer computes; add --spac-execution pointers",
    ),
}


def _check_budget(config: Any) -> None:
    given = [name for name in ("budget", "budget_mass", "budget_file") if getattr(config, name) is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} bound the same thing; use one of them")
    if config.budget_mass_of is not None and config.budget_mass is None:
        raise ValueError(
            f"budget_mass_of={config.budget_mass_of} (--spac-budget-mass-of) has no effect without a share; "
            "add --spac-budget-mass 0.98"
        )
    if config.budget_votes_alpha is not None and config.budget_votes != "path":
        raise ValueError(
            f"budget_votes_alpha={config.budget_votes_alpha} (--spac-budget-votes-alpha) has no effect on uniform "
            "votes; add --spac-budget-votes path"
        )
    if config.budget_rescue and config.budget_coverage != "truncation":
        raise ValueError(
            "budget_rescue (--spac-budget-rescue) has no effect with substitution, which gives every row experts; "
            "add --spac-budget-coverage truncation"
        )
    if (
        given
        and config.calibration is None
        and components.find("budget.rankings", config.budget_ranking).needs_calibration
    ):
        raise ValueError(
            f"budget_ranking={config.budget_ranking} (--spac-budget-ranking) needs calibration (--spac-calibration "
            "FILE); write the file with `vllm-spac calibrate`"
        )


def _check_execution(config: Any) -> None:
    kind, named = config.execution_class, f"execution={config.execution} (--spac-execution)"
    if kind.needs_addressable_store:
        store = None if config.store is None else components.find("tiers", config.store)
        if config.disk_dir is not None or (store is not None and not store.addressable):
            where = f"store={config.store}" if store is not None and not store.persistent else "a disk"
            raise ValueError(
                f"{named} reads missing experts in place, and {where} has no "
                "addresses; use --spac-store host without --spac-disk-dir, or --spac-execution slots"
            )
    for name, (idle, problem) in _OF_EXECUTION.items():
        if name not in kind.knobs and getattr(config, name) not in idle:
            raise ValueError(problem.format(execution=config.execution))
    if not kind.needs_host and config.prefetch != "off":
        _check_device_prefetch(config, named)
    if not kind.needs_host and components.find("policies", config.policy).needs_layers:
        raise ValueError(
            f"policy={config.policy} (--spac-policy) evicts from the layer that misses, and no layer asks the host "
            f"for experts with {named}; use --spac-policy lru, or --spac-execution slots"
        )


def _check_device_prefetch(config: Any, execution: str) -> None:
    """Refuses reads ahead that cannot be decided on the device."""
    named = f"prefetch={config.prefetch} (--spac-prefetch)"
    if config.prefetch == AUTO or not components.find("predictors", config.prefetch).on_device:
        names = [name for name in components.names("predictors") if components.find("predictors", name).on_device]
        raise ValueError(
            f"{named} is decided on the host, which no layer waits for with {execution}; use one of {', '.join(names)} "
            "with --spac-predictor-file FILE, or drop --spac-prefetch"
        )
    if components.parse(config.prefetch)[1]:
        raise ValueError(f"{named} has no settings with {execution}, which has no queue of reads; give the name alone")
    if (given := config.admission) and not components.find("execution.pointers.admissions", given).looks_ahead:
        raise ValueError(
            f"{named} gives slots to experts before their layer, and admission={given} (--spac-admission) between "
            "steps; use --spac-admission layer"
        )
    if config.soft_pins is not None:
        raise ValueError(f"soft_pins (--spac-soft-pins) has no effect with {execution}; drop it")


def groups_problem(config: Any, workers: int) -> str | None:
    """Returns why so many workers do not form the groups and replicas of ``config``; None if they do."""
    size, replicas = config.workers_per_layer, config.replicas
    if workers % size:
        fits = size * -(-workers // size)
        return (
            f"{workers} workers (--spac-workers) do not form groups of workers_per_layer={size} "
            f"(--spac-workers-per-layer); use {fits} workers"
        )
    if replicas > workers - size:
        whom = "workers" if size == 1 else "workers than a layer's own"
        return (
            f"replicas={replicas} (--spac-replicas) are other {whom}, and there are {workers} (--spac-workers); use at "
            f"most --spac-replicas {workers - size}"
        )
    return None


def _check_workers(config: Any) -> None:
    named = f"executor={config.executor} (--spac-executor)"
    if config.executor == "local":
        for name, idle in (("workers", None), ("cluster", None), ("replicas", 0), ("workers_per_layer", 1)):
            if getattr(config, name) != idle:
                raise ValueError(f"{name} ({flag(name)}) has no effect with {named}; add --spac-executor processes")
        return
    if config.executor == "ray" and config.workers is None:
        raise ValueError(f"{named} needs workers (--spac-workers 2)")
    if config.workers is None and config.cluster is None:
        raise ValueError(f"{named} needs workers (--spac-workers 2), or cluster (--spac-cluster FILE)")
    if config.executor == "processes" and config.cluster is not None:
        path_of(config.cluster)
    if config.workers is not None and (problem := groups_problem(config, config.workers)) is not None:
        raise ValueError(problem)
    idle_values: dict[str, str | None] = {"execution": "slots", "cpu_experts": "off", "host_memory": None}
    idle_values |= {"io_submit": "threads", "layer_ahead": "on"}
    for name, without in idle_values.items():
        if (value := getattr(config, name)) != without:
            raise ValueError(f"{name}={value} ({flag(name)}) is not for {named}; drop {flag(name)}")
    named_prefetch = f"prefetch={config.prefetch} (--spac-prefetch)"
    if config.prefetch == AUTO:
        raise ValueError(f"{named_prefetch} measures this process's loads, and {named} has none; name a predictor")
    if config.prefetch != "off" and not components.find("predictors", config.prefetch).looks_at_layers():
        raise ValueError(
            f"{named_prefetch} guesses after a step, and with {named} workers are told within it; use --spac-prefetch "
            "linear --spac-predictor-file FILE, or drop --spac-prefetch"
        )
    if config.store not in (None, "disk"):
        raise ValueError(
            f"store={config.store} (--spac-store) is not for {named}: each worker packs its experts on its disk; drop "
            "--spac-store, and give --spac-slots 100% if they are to be in memory"
        )
    if components.find("policies", config.policy).needs_calibration:
        raise ValueError(f"policy={config.policy} (--spac-policy) is not for {named}; use --spac-policy lru")
    if components.find("budget.rankings", config.budget_ranking).needs_resident:
        raise ValueError(
            f"budget_ranking={config.budget_ranking} (--spac-budget-ranking) asks which experts are in fast memory, "
            f"and with {named} that is the workers'; use --spac-budget-ranking selected"
        )


def _check_tree(config: Any) -> None:
    given = [name for name in ("tree_shape", "tree_depth", "tree_width") if getattr(config, name) is not None]
    if given and not config.tree:
        raise ValueError(f"{given[0]} ({flag(given[0])}) has no effect without a tree; add --spac-tree 16")
    if config.tree == 1:
        raise ValueError("tree=1 (--spac-tree) is a chain of one token; use 2 or more, or drop it")
    if config.tree_shape not in (None, "static", "dynamic") and (set(given) - {"tree_shape"}):
        raise ValueError(f"{given[-1]} ({flag(given[-1])}) has no effect on a list of paths; drop it")
    _ = config.draft_tree


def _check_host_memory(config: Any) -> None:
    if config.host_memory is not None and config.store is not None:
        store = components.find("tiers", config.store)
        if not store.persistent:
            raise ValueError(
                f"host_memory (--spac-host-memory) holds a part of the experts, and store={config.store} "
                "(--spac-store) holds all of them in memory; use --spac-store disk, or drop --spac-host-memory"
            )


def _check_io_submit(config: Any) -> None:
    if config.io_submit == "threads":
        return
    asked = f"io_submit={config.io_submit} (--spac-io-submit)"
    if config.host_memory is not None:
        raise ValueError(
            f"{asked} reads straight into slots, and with host_memory (--spac-host-memory) experts are also copied "
            "from and to host memory; drop one of them"
        )
    if config.store is not None and not components.find("tiers", config.store).persistent:
        raise ValueError(
            f"{asked} reads from a disk, and store={config.store} (--spac-store) is in memory; use --spac-store disk, "
            "or drop --spac-io-submit"
        )


def _check_calibration(config: Any) -> None:
    if config.calibration is None and components.find("policies", config.policy).needs_calibration:
        raise ValueError(
            f"policy={config.policy} (--spac-policy) needs calibration (--spac-calibration FILE); write the file "
            "with `vllm-spac calibrate`"
        )


def _check_prefetch(config: Any) -> None:
    named, off = f"prefetch={config.prefetch} (--spac-prefetch)", config.prefetch == "off"
    auto = config.prefetch == AUTO
    kind = None if off or auto else components.find("predictors", config.prefetch)
    trained = auto or (kind is not None and kind.needs_file)
    looks = auto or (kind is not None and kind.looks_at_layers())
    if trained and config.predictor_file is None:
        raise ValueError(
            f"{named} needs predictor_file (--spac-predictor-file FILE); write the file with "
            "`vllm-spac train-predictor`"
        )
    if config.predictor_file is not None and not trained:
        raise ValueError(
            f"predictor_file (--spac-predictor-file) has no effect with {named}; add --spac-prefetch linear, or "
            "another predictor of the file"
        )
    if config.soft_pins is not None and not looks:
        raise ValueError(
            f"soft_pins={config.soft_pins} (--spac-soft-pins) has no effect with {named}, which does not look at "
            "layers; add --spac-prefetch linear --spac-predictor-file FILE"
        )
    if config.prefetch_extra is not None and off:
        raise ValueError(
            "prefetch_extra (--spac-prefetch-extra) limits nothing with prefetch=off (--spac-prefetch); drop it"
        )


def _check_speculate(config: Any) -> None:
    if config.speculate == "off":
        return
    named = f"speculate={config.speculate} (--spac-speculate)"
    if given := [name for name in ("budget", "budget_mass", "budget_file") if getattr(config, name) is not None]:
        raise ValueError(f"{named} and {given[0]} ({flag(given[0])}) both choose a layer's experts; drop one of them")
    if config.tree:
        raise ValueError(f"{named} was not tried with draft trees; drop --spac-tree")
    off = config.prefetch in ("off", AUTO)
    if off or not components.find("predictors", config.prefetch).needs_file:
        raise ValueError(
            f"{named} needs a predictor that looks one layer ahead, and prefetch={config.prefetch} (--spac-prefetch) "
            "names none; add --spac-prefetch linear --spac-predictor-file FILE"
        )


def _check_trace(config: Any) -> None:
    if config.trace_overwrite and config.trace is None:
        raise ValueError("trace_overwrite (--spac-trace-overwrite) replaces nothing without --spac-trace FILE")
    if config.timeline_steps is not None and config.timeline is None:
        raise ValueError("timeline_steps (--spac-timeline-steps) keeps nothing without --spac-timeline FILE")
    if config.timeline is not None and config.timeline == config.trace:
        raise ValueError("timeline (--spac-timeline) and trace (--spac-trace) would replace each other; name two files")


def _check_cpu_experts(config: Any) -> None:
    decides = config.balancer is not None and components.find("balancers", config.balancer).uses_cpu
    if config.cpu_experts == "auto" and config.balancer is not None and not decides:
        raise ValueError(
            f"cpu_experts=auto (--spac-cpu-experts) lets the balancer decide, and balancer={config.balancer} "
            "(--spac-balancer) computes none; use --spac-balancer waterfill, or --spac-cpu-experts off"
        )
    weighed = config.profile is not None and config.prefetch != AUTO
    for name, given in (("balancer", decides), ("profile", weighed)):
        if config.cpu_experts != "auto" and given:
            raise ValueError(
                f"{name} ({flag(name)}) decides nothing with cpu_experts={config.cpu_experts}; "
                "add --spac-cpu-experts auto"
            )
    if config.cpu_kernel is not None and config.cpu_experts == "off":
        raise ValueError("cpu_kernel (--spac-cpu-kernel) computes nothing without --spac-cpu-experts auto or N")


_RULES = (
    _check_budget,
    _check_workers,
    _check_execution,
    _check_tree,
    _check_host_memory,
    _check_io_submit,
    _check_calibration,
    _check_prefetch,
    _check_speculate,
    _check_trace,
    _check_cpu_experts,
)


def check(config: Any) -> None:
    """Raises ``ValueError`` at the first rule that a ``SpacConfig`` breaks; the message says what to change."""
    for rule in _RULES:
        rule(config)
