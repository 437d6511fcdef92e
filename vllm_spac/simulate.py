"""What a policy and a balancer would have done with recorded routing: the code that serves, on a virtual clock."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_spac import components
from vllm_spac.balancers.base import Balancer, LayerState
from vllm_spac.costs import Costs
from vllm_spac.errors import ConfigError
from vllm_spac.policies.base import Policy
from vllm_spac.residency import NOWHERE, Residency
from vllm_spac.trace import STEP_KINDS, Trace
from vllm_spac.utility import UtilityEstimator

_PREFILL = STEP_KINDS.index("prefill")


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one layer in one step that need no more experts than there are slots.

    ``keys`` are ascending; ``rows`` says how many rows selected each.
    """

    keys: list[int]
    rows: list[int]


@dataclass
class Outcome:
    """What happened; experts are counted once a layer and step, as in ``metrics.Counters``.

    Attributes:
        hits, misses, cpu: experts that were in fast memory, were loaded, were computed on the CPU.
        loads, bytes: what moved; more loads than misses when parts of a step evict one another.
        parts: parts in which layers ran.
        seconds: virtual time of all steps; ``bound_seconds``: the least they can take (specification §8).
        stall_seconds: of it, time in which fast memory computed no expert although a layer's experts were due.
        tpot, bound_tpot: seconds a token over the steps that emit tokens; None when the trace does not say how many.
    """

    policy: str
    balancer: str
    slots: int
    share: float
    steps: int = 0
    hits: int = 0
    misses: int = 0
    cpu: int = 0
    loads: int = 0
    bytes: int = 0
    parts: int = 0
    seconds: float = 0.0
    stall_seconds: float = 0.0
    bound_seconds: float = 0.0
    tpot: float | None = None
    bound_tpot: float | None = None
    hit_rate: float = field(init=False, default=0.0)
    ratio: float = field(init=False, default=1.0)


def simulate(
    trace: Trace,
    slots: int,
    costs: Costs,
    *,
    policy: str = "lru",
    balancer: str = "none",
    overlap: bool = False,
    fill: bool = True,
    expert_bytes: int | None = None,
) -> Outcome:
    """Replay ``trace`` with ``slots`` experts in fast memory.

    Args:
        policy, balancer: names of components, with knobs if need be: ``utility@upper=1@variant=literal``.
        overlap: loads run beside the computing of hits; else a layer waits for its loads, as on-demand serving does.
        fill: slots are filled at the start with an equal share of each layer, as serving does; else they are empty.
        expert_bytes: instead of what the trace says.

    Raises:
        ConfigError: slots that no token of this model can run with, unknown names or knobs, experts of unknown size,
            an offline policy beside a balancer (it would have to foresee its plans).
    """
    facts = trace.facts
    nbytes = facts.expert_bytes if expert_bytes is None else expert_bytes
    if not facts.top_k <= slots <= facts.total:
        raise ConfigError(f"{slots} slots: use from {facts.top_k} (one token's experts) to {facts.total} (all)")
    if nbytes <= 0:
        raise ConfigError("the trace does not say how large an expert is; give --expert-bytes")
    work = parts(trace, slots)
    first = _filling(trace, slots) if fill else []
    chosen = _policy(policy, balancer, lambda: [*first, *(k for record in work for part in record for k in part.keys)])
    replay = _Replay(trace, slots, costs, nbytes, chosen, _balancer(balancer, trace, costs, nbytes), overlap)
    replay.outcome.policy, replay.outcome.balancer = policy, balancer
    replay.make_resident(first)
    return replay.run(work)


def parts(trace: Trace, slots: int) -> list[list[Part]]:
    """The parts of each record, in the order in which they run; the rule of ``ExpertPool.waves``."""
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


class _Replay:
    def __init__(
        self,
        trace: Trace,
        slots: int,
        costs: Costs,
        nbytes: int,
        policy: Policy,
        balancer: Balancer | None,
        overlap: bool,
    ) -> None:
        self.trace, self.costs, self.nbytes, self.overlap = trace, costs, nbytes, overlap
        self.policy, self.balancer = policy, balancer
        self.residency = Residency(trace.facts.total, slots, policy)
        self.estimator = UtilityEstimator(trace.facts.total)
        self.outcome = Outcome("", "", slots, slots / trace.facts.total, steps=trace.steps)
        most = np.arange(int(trace.step_rows.max(initial=0)) + 1)
        self.fast = np.asarray(costs.fast.seconds(nbytes, most)).tolist()
        self.cpu = np.asarray(costs.cpu.seconds(nbytes, most)).tolist()

    def run(self, work: list[list[Part]]) -> Outcome:
        trace, outcome = self.trace, self.outcome
        bounds = np.searchsorted(trace.record_step, np.arange(trace.steps + 1)).tolist()
        layers = trace.record_layer.tolist()
        emitted, seconds, least = 0, 0.0, 0.0
        known = True
        for step, counts in enumerate(trace.step_counts()):
            before, before_bound = outcome.seconds, outcome.bound_seconds
            self._outside(step)
            for number in range(bounds[step], bounds[step + 1]):
                self._layer(layers[number], work[number])
            if counts is not None:
                self.policy.observe(counts)
                if self.balancer:
                    self.estimator.update(counts)
            if trace.step_kind[step] != _PREFILL:
                tokens = int(trace.step_tokens[step])
                known, emitted = known and tokens > 0, emitted + tokens
                seconds, least = seconds + outcome.seconds - before, least + outcome.bound_seconds - before_bound
        if known and emitted:
            outcome.tpot, outcome.bound_tpot = seconds / emitted, least / emitted
        asked = outcome.hits + outcome.misses + outcome.cpu
        outcome.hit_rate = outcome.hits / asked if asked else 1.0
        outcome.ratio = outcome.seconds / outcome.bound_seconds if outcome.bound_seconds else 1.0
        return outcome

    def make_resident(self, keys: Sequence[int]) -> list[int]:
        """Returns the keys that were loaded."""
        placement = self.residency.prepare(keys)
        for key, _ in placement.loads:
            self.residency.loaded(key)
        self.residency.release(keys)
        return [key for key, _ in placement.loads]

    def _outside(self, step: int) -> None:
        """What a step takes besides its experts: drafting, attention, the head."""
        kinds = self.trace.row_kind[self.trace.row_start[step] : self.trace.row_start[step + 1]]
        verifying, drafts = np.count_nonzero(kinds == 2), np.count_nonzero(kinds == 3)
        draft_steps = -(-drafts // max(1, verifying))  # requests draft side by side
        self.outcome.seconds += self.costs.other + draft_steps * self.costs.draft
        self.outcome.bound_seconds += self.costs.other + draft_steps * self.costs.draft

    def _layer(self, layer: int, parts: list[Part]) -> None:
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
    """As many rows as the slots allow, then the next ones."""
    experts = trace.facts.experts
    rows = trace.ids[trace.record_start[record] : trace.record_start[record + 1]].astype(np.int64)
    first = int(trace.record_layer[record]) * experts
    uses = np.zeros((len(rows), experts), dtype=bool)
    np.put_along_axis(uses, rows, True, axis=1)
    start = 0
    while start < len(rows):
        needed = np.logical_or.accumulate(uses[start:], axis=0).sum(axis=1)
        stop = start + int(np.searchsorted(needed, slots, side="right"))
        assert stop > start, "one row needs more experts than there are slots"
        keys, counts = np.unique(rows[start:stop], return_counts=True)
        yield Part((keys + first).tolist(), counts.tolist())
        start = stop


def _filling(trace: Trace, slots: int) -> list[int]:
    """What ``ExpertPool.fill`` loads at the start."""
    layers, experts = trace.facts.layers, trace.facts.experts
    shares = [slots // layers + (layer < slots % layers) for layer in range(layers)]
    return [layer * experts + expert for layer, share in enumerate(shares) for expert in range(share)]


def _policy(spec: str, balancer: str, future) -> Policy:
    name, knobs = _parse(spec)
    if not components.find("policies", name).offline:
        return _build("policies", name, knobs)
    if balancer != "none":
        raise ConfigError(f"policy {name} must know what will be used, and balancer {balancer} decides that later")
    return _build("policies", name, {"future": future()} | knobs)


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
