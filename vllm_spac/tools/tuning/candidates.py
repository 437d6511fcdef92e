"""The ways to serve a model that are worth measuring on a machine, and budgets that ``quality`` has evaluated. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from vllm_spac import components
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.tuned_profile import DEFAULT, LRU, Candidate, Departure, Knob
from vllm_spac.config.types import SlotCount
from vllm_spac.errors import ConfigError
from vllm_spac.system.untrusted import parse_json, read_text
from vllm_spac.tools.evaluation.points import loads
from vllm_spac.tools.planning.planned_machine import PlannedMachine
from vllm_spac.tools.planning.planned_memory import NGRAM, Load, largest_percent, rows, slot_bytes, split
from vllm_spac.tools.planning.planned_model import ServedModel
from vllm_spac.tools.planning.planned_serving import stores, tier_bytes

_NGRAM_LENGTHS = (2, 4)
_EAGLE_LENGTHS = (2, 4, 8)
_TREES = (4, 8, 16)
_TREE_METHODS = ("eagle", "eagle3")
_TREE_ENGINE = {
    "enforce_eager": True,
    "attention_backend": "TRITON_ATTN",
}  # with a GPU, where nothing else is asked for
_REQUESTS, _REQUESTS_GPU = 128, 1024  # vLLM's largest default of --max-num-seqs
_THREADS = (2, 8)  # beside the default, 4
_CPU_EXPERTS = {"store": "host", "cpu_experts": "waterfill"}  # a balancer that is named is not checked meanwhile


@dataclass(frozen=True)
class Budget:
    """A lossy budget, and what ``vllm-spac quality`` found that it costs."""

    name: str
    knobs: Mapping[str, Knob]
    quality: str


@dataclass(frozen=True)
class Allowed:
    """What the user allows, and this process.

    Attributes:
        slots: as ``--spac-slots``, for all candidates; None: as many as fit.
        limited: whether the user limited fast memory, so that slots are counted and not left to the engine.
        context: tokens of a request that is planned for; None: the engine's own default.
        drafts: a ``speculative_config`` of the user's.
        budgets: that may be measured, with drafts; those of ``vllm-spac quality``.
        engine: further arguments of the engine, which are the same for all candidates.
        departures: from vLLM's tokens that the user agrees to.
    """

    slots: str | None = None
    limited: bool = False
    context: int | None = None
    drafts: Mapping[str, Any] | None = None
    eagle3: str | None = None
    predictor_file: str | None = None
    predictors: tuple[str, ...] = ()
    budgets: tuple[Budget, ...] = ()
    engine: Mapping[str, Any] = field(default_factory=dict)
    departures: frozenset[Departure] = frozenset()


def candidates(model: ServedModel, machine: PlannedMachine, allowed: Allowed) -> list[Candidate]:
    """Returns the default, ``policy=lru``, and each single change worth trying, the likeliest to be fast first.

    Args:
        machine: whose memory is divided, and whose disk and link decide which stores there are.

    Raises:
        ConfigError: not even the fewest slots fit.
    """
    percent = _percent(model, machine, allowed)
    base = _base(model, machine, allowed, percent)
    found = [Candidate(DEFAULT, "baseline", base)]
    if percent < 100:
        found.append(Candidate(LRU, "policy", base | {"policy": "lru"}))
        found += _stock(model, machine, percent)
    changes = [*_drafts(machine, allowed), *(_placed(model, machine, allowed, base, percent) if percent < 100 else ())]
    for name, group, knobs, drafts, note in changes:
        candidate = Candidate(name, group, base | knobs, drafts, note=note)
        if candidate.departures <= allowed.departures:
            found.append(candidate)
    return found


def left_out(model: ServedModel, machine: PlannedMachine, found: Sequence[Candidate]) -> str | None:
    """Returns why stock vLLM's own offloading is not measured; None if it is among the candidates that were found."""
    if any(candidate.is_stock for candidate in found):
        return None
    why = "it needs a GPU"
    if machine.gpu:
        fits = model.experts_bytes <= machine.spare
        why = "every expert fits into fast memory" if fits else "host memory has no room for the experts"
    return f"stock vLLM's own offloading is not measured: {why}"


def _percent(model: ServedModel, machine: PlannedMachine, allowed: Allowed) -> float:
    """Returns the share of the experts that have a slot, in percent; estimated for ``slots=auto``."""
    slots = SlotCount.parse(allowed.slots or "auto")
    if slots.share is not None:
        return float(100 * slots.share)
    if slots.per_layer is not None:
        return min(100.0, float(Fraction(100 * slots.per_layer, model.checkpoint.experts)))
    if slots.tokens is not None:
        total = model.layers * model.checkpoint.experts
        return min(100.0, float(Fraction(100 * slots.tokens * model.checkpoint.top_k, total)))
    return largest_percent(model, split(model, machine, _load(model, allowed)))


def _load(model: ServedModel, allowed: Allowed) -> Load:
    return Load(allowed.context or min(4096, model.architecture.longest or 4096), 1)


def _base(model: ServedModel, machine: PlannedMachine, allowed: Allowed, percent: float) -> dict[str, Knob]:
    """Returns the knobs of all candidates: slots that the user limits, a store where the default one has no room."""
    base: dict[str, Knob] = {}
    if allowed.slots is not None:
        base["slots"] = allowed.slots
    elif allowed.limited:
        base["slots"] = f"{percent:g}%"
    if machine.gpu and percent < 100 and "host" not in stores(model, machine, int(percent)):
        base["store"] = "disk"
    return base


_Change = tuple[str, str, dict[str, Knob], Mapping[str, Any] | None, str]


def _drafts(machine: PlannedMachine, allowed: Allowed) -> Iterator[_Change]:
    """Yields drafts by length, as chains and as trees, with the guard and without; then budgets of the longest."""
    sources: list[tuple[str, Mapping[str, Any], tuple[int, ...]]] = []
    if allowed.drafts is not None:
        length = int(allowed.drafts.get("num_speculative_tokens") or 0)
        lengths = tuple(sorted({length, max(1, length // 2)}, reverse=True)) if length else ()
        sources.append((str(allowed.drafts.get("method", "drafts")), allowed.drafts, lengths))
    if allowed.eagle3 is not None:
        sources.append(("eagle3", {"method": "eagle3", "model": allowed.eagle3}, _EAGLE_LENGTHS))
    if "ngram" not in [name for name, _, _ in sources]:
        sources.append(("ngram", NGRAM, _NGRAM_LENGTHS))
    for name, config, lengths in sources:
        for length in lengths or (0,):
            given = dict(config) | ({"num_speculative_tokens": length} if length else {})
            shown = f"{name} {length}" if length else name
            yield f"drafts={shown}", "drafts", {}, given, ""
        if config.get("method") in _TREE_METHODS:
            for nodes in trees(machine, allowed):
                given = dict(config) | {"num_speculative_tokens": nodes}
                yield f"tree={nodes}, {name}", "drafts", {"tree": nodes}, given, ""
    name, config, lengths = sources[0]
    longest = max(lengths, default=0)
    given = dict(config) | ({"num_speculative_tokens": longest} if longest else {})
    shown = f"{name} {longest}" if longest else name
    yield f"drafts={shown}, guard=off", "drafts", {"guard": "off"}, given, ""
    for budget in allowed.budgets:
        yield f"drafts={shown}, {budget.name}", "drafts", dict(budget.knobs), given, budget.quality


def _placed(
    model: ServedModel, machine: PlannedMachine, allowed: Allowed, base: dict[str, Knob], percent: float
) -> Iterator[_Change]:
    """Yields where the other experts are, who computes them, which are evicted, and which are read ahead."""
    for store in stores(model, machine, int(percent)):
        if store == "tiers":
            memory = f"{tier_bytes(model, machine, max(1, int(percent))) >> 20}MiB"
            yield f"host memory={memory}", "store", {"store": "disk", "host_memory": memory}, None, ""
        elif store == "disk" and machine.gpu and base.get("store") != "disk":
            yield "store=disk", "store", {"store": "disk"}, None, ""
        elif store == "host" and machine.gpu:
            yield "CPU experts", "cpu", dict(_CPU_EXPERTS), None, ""
            yield "decisions=device", "decisions", {"store": "host", "decisions": "device"}, None, ""
    room = split(model, machine, _load(model, allowed)).room
    if not machine.gpu and slot_bytes(model, int(percent)) + model.experts_bytes <= room:
        yield "CPU experts", "cpu", dict(_CPU_EXPERTS), None, ""
    for name in allowed.predictors:
        knobs: dict[str, Knob] = {"prefetch": name, "predictor_file": str(allowed.predictor_file)}
        yield f"prefetch={name}", "prefetch", knobs, None, ""
    yield "prefetch=utility", "prefetch", {"prefetch": "utility"}, None, ""
    for name in policies():
        yield f"policy={name}", "policy", {"policy": name}, None, ""
    if allowed.context is not None and "slots" not in base:
        what = f"slots={percent:g}%, KV cache for {allowed.context} tokens"
        yield what, "slots", {"slots": f"{percent:g}%"}, None, ""
    for count in _THREADS:
        yield f"io_threads={count}", "threads", {"io_threads": count}, None, ""


def trees(machine: PlannedMachine, allowed: Allowed) -> list[int]:
    """Returns the sizes of draft trees whose rows, of as many requests as the engine serves, fit a forward."""
    engine = allowed.engine
    if machine.gpu and any(engine.get(name, value) != value for name, value in _TREE_ENGINE.items()):
        return []
    requests = engine.get("max_num_seqs") or (_REQUESTS_GPU if machine.gpu else _REQUESTS)
    most = engine.get("max_num_batched_tokens") or rows(machine)
    found = []
    for nodes in _TREES:
        shape = SpacConfig.parse({"tree": nodes}).draft_tree
        assert shape is not None
        if requests * max(nodes + 1, shape.front) <= most:
            found.append(nodes)
    return found


def policies() -> list[str]:
    """Returns the policies that need nothing more and keep experts, without the default and the baseline."""
    found = {name: components.find("policies", name) for name in components.serving("policies")}
    return [
        name
        for name, kind in found.items()
        if name not in ("reuse", "lru") and kind.keeps and not kind.needs_calibration
    ]


def _stock(model: ServedModel, machine: PlannedMachine, percent: float) -> Iterator[Candidate]:
    """Yields stock vLLM's own offloading with as many bytes of experts on the GPU."""
    if not machine.gpu or model.experts_bytes > machine.spare:
        return
    moved = (1 - percent / 100) * model.experts_bytes / 2**30
    options = {"offload_backend": "uva", "cpu_offload_gb": moved, "cpu_offload_params": ["experts"]}
    yield Candidate("stock vLLM, its own offloading", "baseline", None, options=options)


AGREEMENT = 0.95  # least share of tokens that the model with a budget and without it agree on
MOST = 3
_FORMAT = "spac-quality-1"
_FIRST = "evaluate some first: vllm-spac quality MODEL --prompts FILE --budgets 16,24,32"


def budgets(path: Path, model: ServedModel) -> tuple[Budget, ...]:
    """Returns up to ``MOST`` budgets with uniform votes that need no calibration, those with the fewest experts first.

    One that was found to read more for a token than no budget reads is refused. Where that was not measured, because
    ``quality`` had no drafts, its note says so.

    Raises:
        ConfigError: the file cannot be read, is of another model, or has no budget that keeps the quality and reads no
            more.
    """
    try:
        found = parse_json(read_text(path), strict=False)
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise ValueError(f"it is no result of format {_FORMAT}")
        facts, points = found["facts"], found["points"]
        shape = int(facts["experts"]), int(facts["top_k"]), len(facts["layers"])
        good = [point for point in sorted(points, key=lambda point: point["distinct"]) if _keeps(point)]
        read = [loads(point, found["generation"]) for point in good]
        kept = [_budget(point, each) for point, each in zip(good, read, strict=True) if each is None or each <= 1]
    except FileNotFoundError as error:
        raise ConfigError(f"--lossy tries budgets whose quality is known, and there is no {path}; {_FIRST}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__} {error}" if isinstance(error, KeyError | TypeError) else str(error)
        raise ConfigError(f"--quality {path} cannot be read: {problem}; {_FIRST}") from error
    mine = model.checkpoint.experts, model.checkpoint.top_k, model.layers
    if shape != mine:
        raise ConfigError(
            "--quality {} is of a model of {} experts, top-{}, in {} layers, and this one has {}, top-{}, in {}; "
            "evaluate this one".format(path, *shape, *mine)
        )
    if good and not kept:
        raise ConfigError(
            f"--quality {path}: each budget that keeps {AGREEMENT:.0%} of the tokens costs more loads than it saves "
            f"({min(filter(None, read)):.2f} times the bytes per token without a budget, or more); drop --lossy, or "
            "evaluate others with vllm-spac quality"
        )
    if not kept:
        raise ConfigError(
            f"--quality {path} has no budget that keeps {AGREEMENT:.0%} of the tokens without a calibration; evaluate "
            "larger ones with vllm-spac quality"
        )
    return tuple(kept[:MOST])


def _keeps(point: Mapping[str, Any]) -> bool:
    if point["ranking"] not in components.names("rankings"):  # from outside: nothing is imported for a file
        return False
    kind = components.find("rankings", point["ranking"])
    usable = not kind.needs_calibration and not kind.offline and point.get("votes_alpha") is None
    return usable and float(point["agreement"]) >= AGREEMENT


def _budget(point: Mapping[str, Any], read: float | None) -> Budget:
    knobs: dict[str, Knob] = {"budget_ranking": str(point["ranking"]), "budget_coverage": str(point["coverage"])}
    of = "@of=scores" if point.get("mass_of") == "scores" else ""
    knobs["budget"] = int(point["budget"]) if point["budget"] is not None else f"{float(point['mass'])}{of}"
    name = f"budget={knobs['budget']} {point['ranking']}"
    change, agreement = 100 * float(point["perplexity_change"]), 100 * float(point["agreement"])
    name += "" if point["coverage"] == "substitution" else f" {point['coverage']}"
    cost = "bytes per token not measured" if read is None else f"{read:.2f} times the bytes per token"
    return Budget(name, knobs, f"LOSSY: {agreement:.1f}% of tokens agree, perplexity {change:+.2f}%, {cost}")
