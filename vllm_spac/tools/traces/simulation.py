"""Simulates a policy, a balancer and a prefetcher on recorded routing: the serving code, on a virtual clock.

They are named as ``name`` or ``name@argument=value@...``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from vllm_spac import components
from vllm_spac.cache.host_tier import HostTier
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.config.types import PREFETCHING
from vllm_spac.decisions.balancers.base import Balancer
from vllm_spac.decisions.costs import Costs
from vllm_spac.decisions.policies.base import Policy, PolicyContext
from vllm_spac.decisions.predictors.base import Signal
from vllm_spac.errors import ConfigError
from vllm_spac.recording.trace_file import ROW_KINDS, Trace
from vllm_spac.tools.traces.replayed import Outcome, filling, parts, rows_of_records, uses
from vllm_spac.tools.traces.simulated_slots import SlotsReplay

EXECUTIONS = ("slots", "pointers")


def simulate(
    trace: Trace,
    slots: int,
    costs: Costs,
    *,
    execution: str = "slots",
    policy: str = "lru",
    balancer: str = "none",
    prefetch: str = "off",
    fill: bool = True,
    expert_bytes: int | None = None,
    host_bytes: int = 0,
    settled: int = 0,
    layer_ahead: bool = False,
) -> Outcome:
    """Replays ``trace`` with ``slots`` experts in fast memory.

    Args:
        execution: one of ``EXECUTIONS``; the assumptions for pointers are in ``simulated_pointers``.
        policy, balancer: names of components, optionally with arguments: ``utility@upper=1@variant=literal``.
        prefetch: with slots, ``off`` or the name of a predictor, optionally with its arguments and with ``threshold``,
            ``depth``, ``background`` and ``extra`` of ``PrefetchSettings``: ``utility@depth=8@upper=1``; without
            ``extra`` reads ahead are not limited. There are as many I/O threads as ``costs.load_at_once`` says, without
            the forward thread.
        fill: slots are filled at the start with an equal share of each layer, as serving does; else they are empty.
        host_bytes: host memory between the slots and the store, whose loads cost ``costs.host``.
        settled: with pointers, filled slots whose experts have them for good.
        layer_ahead: with slots, whether forwards with many rows read what the next layer is expected to use, as serving
            does; an offline policy has nothing read ahead.

    Raises:
        ConfigError: slots that no token of this model can run with, unknown names or arguments, experts of unknown
            size, an offline policy with a balancer, a prefetcher or pointers (it would have to foresee their
            decisions), a prefetcher with pointers or a balancer that goes by more than how many experts a layer misses,
            or pointers with costs of loads from a disk, and no host memory before it; a predictor that needs what a
            trace lacks.
    """
    facts = trace.facts
    nbytes = facts.expert_bytes if expert_bytes is None else expert_bytes
    _check(trace, slots, nbytes)
    outcome = Outcome(policy, balancer, slots, slots / facts.total, execution, prefetch=prefetch)
    if execution == "pointers":
        check_pointers(policy, balancer, prefetch, costs, tier=bool(host_bytes))
        chosen = build_policy(policy, trace, slots)
        from vllm_spac.execution.device.cpu_share import AWAY, shares_of  # torch, which takes a second
        from vllm_spac.tools.traces.simulated_pointers import PointersReplay

        link = costs if costs.host is None else costs.model_copy(update={"load": costs.host})
        built = build_balancer(balancer, trace, link, nbytes)
        shares, waiting = ([] if built is None else shares_of(built, facts.experts, reading) for reading in (0, AWAY))
        rows = _tier(policy, trace, costs, 0, host_bytes // nbytes) if host_bytes else None
        replay = PointersReplay(trace, costs, nbytes, outcome, chosen, shares, settled, rows, waiting)
        replay.fill(filling(trace, slots, settled) if fill else [])
        if rows is not None:
            replay.fill_host(filling(trace, min(facts.total, slots + rows.rows)) if fill else [])
        return replay.run(parts(trace, facts.total))
    if execution != "slots":
        raise ConfigError(f"no execution is called {execution!r}; use {' or '.join(EXECUTIONS)}")
    future = chain(filling(trace, slots) if fill else (), uses(trace, slots))
    chosen = build_policy(policy, trace, slots, balancer=balancer, prefetch=prefetch, future=lambda: future)
    beside = build_balancer(balancer, trace, costs, nbytes)
    tier = _tier(policy, trace, costs, slots, host_bytes // nbytes) if host_bytes else None
    next_layer = layer_ahead and not chosen.offline
    ahead = build_prefetch(prefetch, trace, next_layer)
    on_slots = SlotsReplay(trace, costs, nbytes, outcome, chosen, beside, ahead, tier)
    on_slots.fill(filling(trace, slots) if fill else [])
    if tier is not None and fill:
        on_slots.fill_host(filling(trace, min(facts.total, slots + tier.rows)))
    return on_slots.run(rows_of_records(trace))


def _tier(policy: str, trace: Trace, costs: Costs, slots: int, rows: int) -> HostTier:
    if costs.host is None:
        raise ConfigError(
            "the profile does not say what a load from host memory beside the store costs; use one of "
            "`vllm-spac check --measure --store disk`"
        )
    if rows == 0:
        raise ConfigError("host memory smaller than an expert holds none; give more")
    rows = min(rows, trace.facts.total)
    return HostTier(trace.facts.total, rows, slots, build_policy(policy, trace, rows))


def _check(trace: Trace, slots: int, nbytes: int) -> None:
    facts = trace.facts
    if not facts.top_k <= slots <= facts.total:
        raise ConfigError(f"{slots} slots: use from {facts.top_k} (one token's experts) to {facts.total} (all)")
    if nbytes <= 0:
        raise ConfigError("the trace does not say how large an expert is; give --expert-bytes")


def build_policy(
    spec: str,
    trace: Trace,
    slots: int,
    *,
    balancer: str = "none",
    prefetch: str = "off",
    future: Callable[[], Iterable[int]] = tuple,
) -> Policy:
    """Builds a policy for a replay of ``trace``.

    Args:
        future: returns the keys in order of use, for an offline policy.

    Raises:
        ConfigError: there is no such policy, it refuses its arguments, or is offline and with a balancer or prefetcher,
            whose decisions it would have to foresee.
    """
    name, knobs = components.parse(spec)
    kind, extra = components.find("policies", name), {}
    if kind.offline:
        if balancer != "none":
            raise ConfigError(f"policy {name} must know what will be used, and balancer {balancer} decides that later")
        if prefetch != "off":
            raise ConfigError(f"policy {name} must know what will be used, and prefetch {prefetch} guesses it")
        extra = {"future": list(future())}
    make = partial(kind.of, PolicyContext(slots, trace.facts.top_k, most_drafts(trace)))
    return components.build_with("policies", name, knobs, make, **extra)


def build_balancer(spec: str, trace: Trace, costs: Costs, nbytes: int) -> Balancer | None:
    """Builds a balancer for experts of ``nbytes``; its arguments take the place of what the trace and costs say."""
    if spec == "none":
        return None
    name, knobs = components.parse(spec)
    verifying, drafts = (int(np.count_nonzero(trace.row_kind == ROW_KINDS.index(kind))) for kind in ("verify", "draft"))
    facts: dict[str, Any] = {"layers": trace.facts.layers, "top_k": trace.facts.top_k, "expert_bytes": nbytes}
    facts |= {"rates": replace(costs.rates(nbytes), draft=0.0), "gamma": drafts / max(1, verifying)}  # as while serving
    extra = {argument: value for argument, value in facts.items() if argument not in knobs}
    return components.build_with("balancers", name, knobs, **extra)


def most_drafts(trace: Trace) -> int:
    """Returns the most draft tokens that a request has in a step; 0 without speculation."""
    request = np.cumsum(trace.row_kind == ROW_KINDS.index("verify"))  # drafts follow the row that verifies them
    return int(np.bincount(request[trace.row_kind == ROW_KINDS.index("draft")]).max(initial=0))


def build_prefetch(spec: str, trace: Trace, next_layer: bool = False) -> PrefetchSettings:
    """Builds the settings of the prefetcher, with a predictor that an engine lacks, if it is named.

    Args:
        spec: ``off`` or a predictor, with its arguments and those of ``PrefetchSettings``.

    Raises:
        ConfigError: there is no such predictor, or it needs what the trace does not have.
    """
    name, built = spec.partition("@")[0], None
    kind = components.find("predictors", name) if name in components.names("predictors") else None
    if kind is not None and kind.needs_file:
        raise _lacking(name, kind.needs - {Signal.ROUTING})
    if kind is not None and Signal.FUTURE in kind.needs:
        knobs = components.parse(spec)[1]
        own = {argument: knobs.pop(argument) for argument in set(knobs) - set(PREFETCHING)}
        built = components.build_with("predictors", name, own, kind, num_experts=trace.facts.total)
        spec = components.written(name, knobs)
    settings = PrefetchSettings.of(spec, built=built, next_layer=next_layer, drafts=most_drafts(trace))
    has = {Signal.FUTURE} | ({Signal.ROUTING} if trace.weights is not None else set())
    lacks = settings.build(trace.facts.total).needs - {Signal.COUNTS} - has
    if spec != "off" and lacks:
        raise _lacking(name, lacks)
    return settings


def _lacking(name: str, signals: Collection[Signal]) -> ConfigError:
    return ConfigError(f"prefetch {name} looks at {', '.join(sorted(signals))}, which a trace does not hold")


def check_pointers(policy: str, balancer: str, prefetch: str, costs: Costs, *, tier: bool = False) -> None:
    """Refuses what ``plane=pointers`` cannot be simulated with; ``ConfigError``: names the reason."""
    name = policy.partition("@")[0]
    kind = components.find("policies", name)
    if kind.offline:
        raise ConfigError(f"policy {name} must know what will be used, and pointers learn of that too late")
    if not kind.on_device:
        raise ConfigError(f"policy {name} has no formula, which pointers need; use lru")
    if balancer != "none" and not components.find("balancers", balancer.partition("@")[0]).by_number:
        raise ConfigError(
            f"balancer {balancer} divides a layer on the host, and with pointers the device does; use waterfill"
        )
    if prefetch != "off":
        raise ConfigError(f"prefetch {prefetch} is of plane=slots: pointers give them slots in their layer")
    if costs.provenance.store == "disk" and not tier:
        raise ConfigError(
            f"the profile {costs.name} is of loads from a disk, and pointers read host memory; name some before the "
            "disk, or run vllm-spac check --measure --store host"
        )
