"""Simulates a policy, a balancer and a prefetcher on recorded routing: the serving code, on a virtual clock."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from vllm_spac.cache.host_tier import HostTier
from vllm_spac.decisions.costs import Costs
from vllm_spac.errors import ConfigError
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.traces.replayed import Outcome, filling, parts, rows_of_records, uses
from vllm_spac.tools.traces.simulated_components import build_balancer, build_policy, build_prefetch, check_pointers
from vllm_spac.tools.traces.simulated_slots import OVERLAPS, SlotsReplay

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
    overlap: str = "none",
    fill: bool = True,
    expert_bytes: int | None = None,
    host_bytes: int = 0,
    predictor_file: Path | None = None,
    layer_ahead: bool = False,
) -> Outcome:
    """Replays ``trace`` with ``slots`` experts in fast memory.

    Args:
        execution: one of ``EXECUTIONS``; the assumptions for pointers are in ``simulated_pointers``.
        policy, balancer: names of components, optionally with arguments: ``utility@upper=1@variant=literal``. A policy
            that needs a calibration takes ``@calibration=FILE``, or ``@trace=FILE`` of another run.
        prefetch: with slots, ``off`` or the name of a predictor, optionally with its arguments and with ``threshold``,
            ``depth``, ``background`` and ``extra`` of ``PrefetchSettings``: ``utility@depth=8@upper=1``; without
            ``extra`` reads ahead are not limited. There are as many I/O threads as ``costs.load_at_once`` says, without
            the forward thread.
        overlap: one of ``OVERLAPS``; with pointers all loads overlap with hits.
        fill: slots are filled at the start with an equal share of each layer, as serving does; else they are empty.
        host_bytes: with slots, host memory between the slots and the store, whose loads cost ``costs.host``.
        predictor_file: file of trained predictors, of which ``prefetch`` names one.
        layer_ahead: with slots, whether forwards with many rows read what the next layer is expected to use, as serving
            does; an offline policy has nothing read ahead.

    Raises:
        ConfigError: slots that no token of this model can run with, unknown names or arguments, experts of unknown
            size, a policy without the calibration that it needs, an offline policy with a balancer, a prefetcher or
            pointers (it would have to foresee their decisions), a balancer or a prefetcher with pointers, or pointers
            with costs of loads from a disk, which they cannot read; a predictor that needs what a trace lacks.
    """
    if overlap not in OVERLAPS:
        raise ConfigError(f"loads overlap with none, rows or hits, not {overlap!r}")
    facts = trace.facts
    nbytes = facts.expert_bytes if expert_bytes is None else expert_bytes
    _check(trace, slots, nbytes)
    outcome = Outcome(policy, balancer, slots, slots / facts.total, execution, prefetch=prefetch)
    if execution == "pointers":
        check_pointers(policy, balancer, prefetch, costs)
        chosen = build_policy(policy, trace, slots)
        from vllm_spac.tools.traces.simulated_pointers import PointersReplay  # torch, which takes a second

        replay = PointersReplay(trace, costs, nbytes, outcome, chosen)
        replay.fill(filling(trace, slots, chosen.first()) if fill else [])
        return replay.run(parts(trace, facts.total))
    if execution != "slots":
        raise ConfigError(f"no execution is called {execution!r}; use {' or '.join(EXECUTIONS)}")
    future = chain(filling(trace, slots) if fill else (), uses(trace, slots))
    chosen = build_policy(policy, trace, slots, balancer=balancer, prefetch=prefetch, future=lambda: future)
    beside = build_balancer(balancer, trace, costs, nbytes)
    tier = _tier(policy, trace, costs, slots, host_bytes // nbytes) if host_bytes else None
    next_layer = layer_ahead and not chosen.offline
    ahead = build_prefetch(prefetch, trace, predictor_file, next_layer)
    on_slots = SlotsReplay(trace, costs, nbytes, outcome, chosen, beside, ahead, overlap, tier)
    on_slots.fill(filling(trace, slots, chosen.first()) if fill else [])
    if tier is not None and fill:
        on_slots.keep(filling(trace, min(facts.total, slots + tier.rows), chosen.first()))
    return on_slots.run(rows_of_records(trace))


def _tier(policy: str, trace: Trace, costs: Costs, slots: int, rows: int) -> HostTier:
    if costs.host is None:
        raise ConfigError(
            "the profile does not say what a load from host memory beside the store costs; use one of "
            "`vllm-spac profile --store disk`"
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
