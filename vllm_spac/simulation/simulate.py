"""What a policy and a balancer would have done with recorded routing: the code that serves, on a virtual clock."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from vllm_spac import components
from vllm_spac.balancers.base import Balancer, LayerState
from vllm_spac.cache.residency import NOWHERE, Residency
from vllm_spac.errors import ConfigError
from vllm_spac.execution.pointers import admissions
from vllm_spac.execution.pointers.planner import STEP_BYTES
from vllm_spac.execution.waves import filled_experts, row_waves
from vllm_spac.policies.base import Policy
from vllm_spac.predictors.utility import UtilityEstimator
from vllm_spac.profiling.costs import Costs
from vllm_spac.simulation.pointers_by_step import PointersReplay
from vllm_spac.simulation.replay import Outcome, Part, Replay
from vllm_spac.traces.format import Trace

EXECUTIONS = ("slots", "pointers")


def simulate(
    trace: Trace,
    slots: int,
    costs: Costs,
    *,
    execution: str = "slots",
    policy: str = "lru",
    balancer: str = "none",
    overlap: bool = False,
    admission: str = admissions.DEFAULT,
    step_bytes: int = STEP_BYTES,
    fill: bool = True,
    expert_bytes: int | None = None,
) -> Outcome:
    """Replay ``trace`` with ``slots`` experts in fast memory.

    Args:
        execution: one of ``EXECUTIONS``; what the latter assumes is in ``simulate_pointers``.
        policy, balancer: names of components, with knobs if need be: ``utility@upper=1@variant=literal``.
        overlap: of slots: loads run beside the computing of hits; else a layer waits for its loads, as on-demand
            serving does. With pointers they always run beside one another.
        admission: of pointers: how missed experts get slots, a name of ``admissions``; what ``layer`` assumes is in
            ``simulate_admitted``.
        step_bytes: of admission ``step``: bytes that are on their way into slots at once, at most, but one expert; 0:
            none moves.
        fill: slots are filled at the start with an equal share of each layer, as serving does; else they are empty.
        expert_bytes: instead of what the trace says.

    Raises:
        ConfigError: slots that no token of this model can run with, unknown names or knobs, experts of unknown size,
            an offline policy beside a balancer or with pointers (it would have to foresee what they decide), a
            balancer with pointers or costs of loads from a disk, which pointers cannot read.
    """
    facts = trace.facts
    nbytes = facts.expert_bytes if expert_bytes is None else expert_bytes
    if not facts.top_k <= slots <= facts.total:
        raise ConfigError(f"{slots} slots: use from {facts.top_k} (one token's experts) to {facts.total} (all)")
    if nbytes <= 0:
        raise ConfigError("the trace does not say how large an expert is; give --expert-bytes")
    outcome = Outcome(policy, balancer, slots, slots / facts.total, execution)
    first = filling(trace, slots) if fill else []
    if execution == "pointers":
        work, outcome.admission = parts(trace, facts.total), admission
        outcome.step_bytes = step_bytes if admission == "step" else None
        replay: Replay = _pointers(trace, costs, nbytes, outcome)
    elif execution == "slots":
        work = parts(trace, slots)
        chosen = build_policy(
            policy, balancer, lambda: [*first, *(k for record in work for p in record for k in p.keys)]
        )
        replay = _SlotsReplay(trace, costs, nbytes, outcome, chosen, _balancer(balancer, trace, costs, nbytes), overlap)
    else:
        raise ConfigError(f"no execution is called {execution!r}; use {' or '.join(EXECUTIONS)}")
    replay.fill(first)
    return replay.run(work)


def parts(trace: Trace, slots: int) -> list[list[Part]]:
    """The parts of each record, in the order in which they run; see ``row_waves``."""
    experts = trace.facts.experts
    record = np.repeat(np.arange(trace.records), np.diff(trace.record_start))
    flat, counts = np.unique(trace.ids + (record * experts)[:, None], return_counts=True)
    bounds = np.searchsorted(flat, np.arange(trace.records + 1) * experts)
    base = trace.record_layer.astype(np.int64) * experts
    keys = flat % experts + np.repeat(base, np.diff(bounds))
    whole = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    return [
        [Part(keys[a:b].tolist(), counts[a:b].tolist())] if b - a <= slots else list(_split(trace, number, slots))
        for number, (a, b) in enumerate(whole)
    ]


class _SlotsReplay(Replay):
    def __init__(
        self,
        trace: Trace,
        costs: Costs,
        nbytes: int,
        outcome: Outcome,
        policy: Policy,
        balancer: Balancer | None,
        overlap: bool,
    ) -> None:
        super().__init__(trace, costs, nbytes, outcome)
        self.overlap, self.policy, self.balancer = overlap, policy, balancer
        self.residency = Residency(trace.facts.total, outcome.slots, policy)
        self.estimator = UtilityEstimator(trace.facts.total)
        self.cpu = np.asarray(costs.cpu.seconds(nbytes, np.arange(len(self.fast)))).tolist()
        self._counts = trace.step_counts()

    def fill(self, keys: Sequence[int]) -> None:
        self.make_resident(keys)

    def begin_step(self, step: int, drafting: float, layers: int) -> None:
        """Nothing is decided between steps."""

    def end_step(self) -> None:
        counts = next(self._counts)
        if counts is not None:
            self.policy.observe(counts)
            if self.balancer:
                self.estimator.update(counts)

    def make_resident(self, keys: Sequence[int]) -> list[int]:
        """Returns the keys that were loaded."""
        placement = self.residency.prepare(keys)
        for key, _ in placement.loads:
            self.residency.loaded(key)
        self.residency.release(keys)
        return [key for key, _ in placement.loads]

    def layer(self, layer: int, parts: list[Part]) -> None:
        outcome, missed, elsewhere, used = self.outcome, set(), set(), set()
        experts = self.trace.facts.experts
        self.policy.enter(range(layer * experts, (layer + 1) * experts))
        for part in parts:
            keys, cpu = (part.keys, ()) if self.balancer is None else self._plan(layer, part)
            loaded = self.make_resident(keys)
            self._pass_time(part, loaded, cpu)
            outcome.loads += len(loaded)
            missed.update(loaded)
            elsewhere.update(cpu)
            used.update(part.keys)
        elsewhere -= missed
        hits = len(used) - len(missed) - len(elsewhere)
        outcome.parts += len(parts)
        outcome.hits += hits
        outcome.misses += len(missed)
        outcome.cpu += len(elsewhere)
        outcome.bytes = outcome.loads * self.nbytes
        outcome.bound_seconds += self.costs.bound(self.nbytes, hits, len(missed), len(elsewhere))

    def _plan(self, layer: int, part: Part) -> tuple[list[int], set[int]]:
        """(keys that run in fast memory, keys that run on the CPU)."""
        experts = self.trace.facts.experts
        first = layer * experts
        rows = np.zeros(experts, dtype=np.int64)
        rows[np.array(part.keys) - first] = part.rows
        here = slice(first, first + experts)
        resident = self.residency.slot_of[here] != NOWHERE
        free = self.residency.slots - int(resident[rows > 0].sum())
        plan = self.balancer.plan(LayerState(layer, rows, resident, self.estimator.scores[here], free))
        cpu = {first + expert for expert in plan.cpu}
        return [key for key in part.keys if key not in cpu], cpu

    def _pass_time(self, part: Part, loaded: list[int], cpu: set[int] | tuple) -> None:
        late = set(loaded)
        computed = waiting = beside = 0.0
        for key, rows in zip(part.keys, part.rows, strict=True):
            if key in cpu:
                beside += self.cpu[rows]
            elif key in late:
                waiting += self.fast[rows]
            else:
                computed += self.fast[rows]
        load = self.costs.loading(len(loaded), self.nbytes)
        fast = (max(load, computed) if self.overlap else load + computed) + waiting
        took = max(fast, beside)
        self.outcome.seconds += took
        self.outcome.stall_seconds += took - computed - waiting


def _split(trace: Trace, record: int, slots: int) -> Iterator[Part]:
    experts = trace.facts.experts
    rows = trace.ids[trace.record_start[record] : trace.record_start[record + 1]]
    first = int(trace.record_layer[record]) * experts
    for start, stop in row_waves(rows, slots, experts):
        keys, counts = np.unique(rows[start:stop].astype(np.int64), return_counts=True)
        yield Part((keys + first).tolist(), counts.tolist())


def filling(trace: Trace, slots: int) -> list[int]:
    """The keys that are loaded at the start."""
    return list(chain.from_iterable(filled_experts(trace.facts.layers, trace.facts.experts, slots)))


def build_policy(spec: str, balancer: str, future) -> Policy:
    name, knobs = _parse(spec)
    if not components.find("policies", name).offline:
        return _build("policies", name, knobs)
    if balancer != "none":
        raise ConfigError(f"policy {name} must know what will be used, and balancer {balancer} decides that later")
    return _build("policies", name, {"future": future()} | knobs)


def _pointers(trace: Trace, costs: Costs, nbytes: int, outcome: Outcome) -> Replay:
    name, knobs = _parse(outcome.policy)
    policy = components.find("policies", name)
    if policy.needs_layers:
        raise ConfigError(f"policy {name} evicts from the layer that asks, and with pointers none asks; use lru")
    if policy.offline:
        raise ConfigError(f"policy {name} must know what will be used, and pointers learn of that too late")
    if outcome.balancer != "none":
        raise ConfigError(f"balancer {outcome.balancer} is of execution=slots: pointers read each expert where it lies")
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
    if outcome.step_bytes < 0:
        raise ConfigError(f"{outcome.step_bytes} bytes a step: use 0 (nothing moves) or more")
    return PointersReplay(trace, costs, nbytes, outcome, chosen)


def _balancer(spec: str, trace: Trace, costs: Costs, nbytes: int) -> Balancer | None:
    if spec == "none":
        return None
    name, knobs = _parse(spec)
    drafts = np.count_nonzero(trace.row_kind == 3) / max(1, np.count_nonzero(trace.row_kind == 2))
    shape = {"layers": trace.facts.layers, "top_k": trace.facts.top_k, "expert_bytes": nbytes}
    return _build("balancers", name, {"rates": costs.rates(nbytes), "gamma": max(1, round(drafts)), **shape} | knobs)


def _parse(spec: str) -> tuple[str, dict]:
    """``name@knob=value@...`` -> name and knobs; values are Python literals, or text."""
    name, *settings = spec.split("@")
    knobs = {}
    for setting in settings:
        knob, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"{setting!r} in {spec!r} is no knob; use name@knob=value")
        try:
            knobs[knob] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            knobs[knob] = value
    return name, knobs


def _build(family: str, name: str, knobs: dict):
    try:
        return components.build(family, name, **knobs)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{family}: {name} cannot be built with {sorted(knobs)}: {error}") from error
