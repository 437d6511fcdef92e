"""Simulates a policy, a balancer and a prefetcher on recorded routing: the serving code, on a virtual clock."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from vllm_spac import components
from vllm_spac.balancers.base import Balancer
from vllm_spac.cache.prefetcher import PrefetchSettings
from vllm_spac.errors import ConfigError
from vllm_spac.execution.pointers import admissions
from vllm_spac.execution.pointers.planner import STEP_BYTES
from vllm_spac.policies.base import Policy
from vllm_spac.profiling.costs import Costs
from vllm_spac.simulation.parts import Part, filling, parts, rows_of_records
from vllm_spac.simulation.pointers_by_step import PointersReplay
from vllm_spac.simulation.replay import Outcome, Replay
from vllm_spac.simulation.slots import SlotsReplay
from vllm_spac.traces.format import ROW_KINDS, Trace

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
    overlap: bool = False,
    admission: str = admissions.DEFAULT,
    step_bytes: int = STEP_BYTES,
    fill: bool = True,
    expert_bytes: int | None = None,
) -> Outcome:
    """Replays ``trace`` with ``slots`` experts in fast memory.

    Args:
        execution: one of ``EXECUTIONS``; the assumptions for pointers are in ``pointers_by_step``.
        policy, balancer: names of components, optionally with knobs: ``utility@upper=1@variant=literal``.
        prefetch: with slots, ``off`` or the name of a predictor, optionally with its knobs and with ``threshold``,
            ``depth`` and ``background`` of ``PrefetchSettings``: ``utility@depth=8@upper=1``. There are as many I/O
            threads as ``costs.load_at_once`` says, without the forward thread.
        overlap: with slots, loads run concurrently with the computation of hits; else a layer waits for its loads, as
            on-demand serving does. With pointers they always overlap.
        admission: with pointers, how missed experts get slots, a name of ``admissions``; the assumptions for ``layer``
            are in ``pointers_by_layer``.
        step_bytes: with admission ``step``, the most bytes in flight into slots at once, but at least one expert; 0:
            none moves.
        fill: slots are filled at the start with an equal share of each layer, as serving does; else they are empty.
        expert_bytes: overrides the size in the trace.

    Raises:
        ConfigError: slots that no token of this model can run with, unknown names or knobs, experts of unknown size,
            an offline policy with a balancer, a prefetcher or pointers (it would have to foresee their decisions), a
            balancer or a prefetcher with pointers, or pointers with costs of loads from a disk, which they cannot read.
    """
    facts = trace.facts
    nbytes = facts.expert_bytes if expert_bytes is None else expert_bytes
    _check(trace, slots, nbytes)
    outcome = Outcome(policy, balancer, slots, slots / facts.total, execution, prefetch=prefetch)
    first = filling(trace, slots) if fill else []
    if execution == "pointers":
        work, outcome.admission = parts(trace, facts.total), admission
        outcome.step_bytes = step_bytes if admission == "step" else None
        replay = _pointers(trace, costs, nbytes, outcome)
        replay.fill(first)
        return replay.run(work)
    if execution != "slots":
        raise ConfigError(f"no execution is called {execution!r}; use {' or '.join(EXECUTIONS)}")
    chosen = build_policy(policy, balancer, lambda: [*first, *_uses(trace, slots)], prefetch=prefetch)
    beside, ahead = _balancer(balancer, trace, costs, nbytes), prefetch_settings(prefetch)
    on_slots = SlotsReplay(trace, costs, nbytes, outcome, chosen, beside, ahead, overlap)
    on_slots.fill(first)
    return on_slots.run(rows_of_records(trace))


def _check(trace: Trace, slots: int, nbytes: int) -> None:
    facts = trace.facts
    if not facts.top_k <= slots <= facts.total:
        raise ConfigError(f"{slots} slots: use from {facts.top_k} (one token's experts) to {facts.total} (all)")
    if nbytes <= 0:
        raise ConfigError("the trace does not say how large an expert is; give --expert-bytes")


def build_policy(spec: str, balancer: str, future: Callable[[], Iterable[int]], *, prefetch: str = "off") -> Policy:
    """Builds the policy ``name@knob=value``; ``future`` returns the keys in order of use, for an offline policy."""
    name, knobs = _parse(spec)
    if not components.find("policies", name).offline:
        return _build("policies", name, knobs)
    if balancer != "none":
        raise ConfigError(f"policy {name} must know what will be used, and balancer {balancer} decides that later")
    if prefetch != "off":
        raise ConfigError(f"policy {name} must know what will be used, and prefetch {prefetch} guesses it")
    return _build("policies", name, {"future": future()} | knobs)


def prefetch_settings(spec: str) -> PrefetchSettings:
    """Returns the settings ``name@knob=value``; what is no setting of the prefetcher is a knob of the predictor."""
    name, knobs = _parse(spec)
    own = {knob: knobs.pop(knob) for knob in ("threshold", "depth", "background") if knob in knobs}
    try:
        return PrefetchSettings(prefetch=name, options=knobs, **own)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"prefetch {name} cannot be built with {sorted(knobs | own)}: {error}") from error


def _uses(trace: Trace, slots: int) -> Iterator[int]:
    """Yields the keys in the order in which layers use them without a balancer."""
    return (key for record in parts(trace, slots) for part in record for key in part.keys)


def _pointers(trace: Trace, costs: Costs, nbytes: int, outcome: Outcome) -> Replay[list[Part]]:
    name, knobs = _parse(outcome.policy)
    policy = components.find("policies", name)
    if policy.needs_layers:
        raise ConfigError(f"policy {name} evicts from the layer that asks, and with pointers none asks; use lru")
    if policy.offline:
        raise ConfigError(f"policy {name} must know what will be used, and pointers learn of that too late")
    if outcome.balancer != "none":
        raise ConfigError(f"balancer {outcome.balancer} is of execution=slots: pointers read each expert where it lies")
    if outcome.prefetch != "off":
        raise ConfigError(f"prefetch {outcome.prefetch} is of execution=slots: pointers move experts by admission")
    if costs.provenance.store == "disk":
        raise ConfigError(
            f"the profile {costs.name} is of loads from a disk, and pointers read host memory; run vllm-spac profile "
            "--store host"
        )
    chosen = _build("policies", name, knobs)
    if outcome.admission == "layer":
        from vllm_spac.simulation.pointers_by_layer import AdmittedReplay  # torch, which takes a second

        return AdmittedReplay(trace, costs, nbytes, outcome, chosen)
    if outcome.admission != "step":
        known = " or ".join(components.names("execution.pointers.admissions"))
        raise ConfigError(f"no admission is called {outcome.admission!r}; use {known}")
    assert outcome.step_bytes is not None, "given to admission step"
    if outcome.step_bytes < 0:
        raise ConfigError(f"{outcome.step_bytes} bytes per step: use 0 (nothing moves) or more")
    return PointersReplay(trace, costs, nbytes, outcome, chosen)


def _balancer(spec: str, trace: Trace, costs: Costs, nbytes: int) -> Balancer | None:
    if spec == "none":
        return None
    name, knobs = _parse(spec)
    verifying, drafts = (int(np.count_nonzero(trace.row_kind == ROW_KINDS.index(kind))) for kind in ("verify", "draft"))
    facts: dict[str, Any] = {"layers": trace.facts.layers, "top_k": trace.facts.top_k, "expert_bytes": nbytes}
    facts |= {"rates": costs.rates(nbytes), "gamma": max(1, round(drafts / max(1, verifying)))}
    return _build("balancers", name, facts | knobs)


def _parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Splits ``name@knob=value@...`` into name and knobs; values are Python literals, or text."""
    name, *settings = spec.split("@")
    knobs: dict[str, Any] = {}
    for setting in settings:
        knob, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"{setting!r} in {spec!r} is no knob; use name@knob=value")
        try:
            knobs[knob] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            knobs[knob] = value
    return name, knobs


def _build(family: str, name: str, knobs: dict[str, Any]) -> Any:
    try:
        return components.build(family, name, **knobs)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{family}: {name} cannot be built with {sorted(knobs)}: {error}") from error
