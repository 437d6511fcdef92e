"""The rungs of a scaled machine's ladder, engines that serve them in turns, and the rows of the result."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.scaled.machine import ScaledMachine
from benchmarks.scaled.scale import RESIDENT
from benchmarks.serving.cases import Case, Settings
from benchmarks.serving.turns import ratio_of, take_turns
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.presets import PRESETS
from vllm_spac.decisions.comparison import interval
from vllm_spac.errors import ConfigError

DISTURBED = 0.05  # of a deadline: a mean delay beyond it is reported
# Two I/O threads: while one sleeps until its load has passed the link, the next load is on it already.
PACED = {"store": "benchmarks.scaled.tiers:PacedStore", "io_threads": "2"}
WATERFILL = {"cpu_experts": "waterfill", "cpu_kernel": "benchmarks.scaled.executors:PacedExperts"}

NODES = 16
TREE = {"guard": "off", "tree": str(NODES), "budget": "16"}  # its drafts are verified in every step
_SPAC = ("policy", "prefetch", "cpu_experts", "guard")  # of the preset moe-spac; slots and store are the ladder's
BUDGET = {"budget": PRESETS["composed-lossy"].knobs["budget"]}
MOE_SPAC = {name: PRESETS["moe-spac"].knobs[name] for name in _SPAC} | {"cpu_kernel": WATERFILL["cpu_kernel"]}


@dataclass(frozen=True)
class Rung:
    """Knobs that are added to those of the rungs before it."""

    name: str
    adds: Mapping[str, str] = field(default_factory=dict)
    speculation: str = "none"
    draft_tokens: int | None = None
    rounds: bool = False  # its tokens equal those of the rungs before it only up to rounding
    lossy: bool = False  # its tokens are others, and how good they are is measured
    beside: bool = False  # later rungs are without its knobs, so that they do not carry what does not pay here


def rungs(names: Sequence[str], predictor: str, file: Path | None = None) -> list[Rung]:
    """Returns the rungs called ``names``, in the ladder's order.

    Two papers' arrangements are no steps of a ladder: ``moe_spac`` is that preset with 8 drafts of a draft model, and
    ``drop`` and ``executed`` with 2k slots are Speculating Experts' two buffers, on demand and with what was predicted.
    ``cpu`` with ``head`` are the preset ``composed``; ``drafts`` has n-grams beside these. To those ``budget`` adds the
    budget of ``composed-lossy``, ``budget_all`` to all drafts.

    Args:
        predictor, file: that of the prefetcher, and the file that it is read from if it is trained.

    Raises:
        ConfigError: there is no such rung or predictor.
    """
    prefetch = {"prefetch": f"{predictor}@file={file}" if file else predictor}
    every = [
        Rung("drop", {"policy": "drop"}),
        Rung("layer_lru", {"policy": "layer_lru"}),
        Rung("reuse", {"policy": "reuse"}),
        Rung("prefetch", prefetch, beside=True),
        Rung("executed", prefetch | {"speculate": "predicted"}, rounds=True, lossy=True, beside=True),
        Rung("cpu", WATERFILL, rounds=True),
        Rung("moe_spac", MOE_SPAC, speculation="draft", draft_tokens=8, rounds=True, beside=True),
        Rung("head", {"guard": "on@lookups=off"}, speculation="eagle3", rounds=True, beside=True),
        Rung("drafts", {"guard": "on@lookups=on"}, speculation="eagle3", rounds=True),
        Rung("budget", BUDGET, rounds=True, lossy=True, beside=True),
        Rung("budget_all", BUDGET | {"guard": "off"}, rounds=True, lossy=True, beside=True),
        Rung("tree", TREE, speculation="eagle3", draft_tokens=NODES, rounds=True, lossy=True),
    ]
    known = [rung.name for rung in every]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"no rung is called {', '.join(unknown)}; use {', '.join(known)}")
    if not names:
        raise ConfigError(f"a ladder needs a rung: {', '.join(known)}")
    SpacConfig.parse(prefetch)
    return [rung for rung in every if rung.name in names]


def cases(ladder: Sequence[Rung], slots: str) -> list[Case]:
    """Returns the engines of the rungs, each with the knobs of the rungs up to it that are not ``beside`` it."""
    knobs, speculation, found = {"slots": slots, **PACED}, "none", []
    for rung in ladder:
        mine = {**knobs, **rung.adds}
        drafts = rung.speculation if rung.speculation != "none" else speculation
        found.append(Case(rung.name, mine, drafts, rung.draft_tokens))
        if not rung.beside:
            knobs, speculation = mine, drafts
    return found


def groups(engines: int, at_once: int) -> list[list[int]]:
    """Returns which engines take turns together: all with the first two, the resident one and the first rung.

    Args:
        engines: number of engines.
        at_once: how many fit into memory, of which three are needed.
    """
    others, size = list(range(2, engines)), max(1, at_once - 2)
    return [[0, 1, *others[start : start + size]] for start in range(0, len(others), size)] or [[0, 1]]


def serve(
    ladder: Sequence[Rung],
    slots: str,
    settings: Settings,
    ids: list[list[int]],
    warm: int,
    at_once: int,
    advance: Callable[[str], object] = lambda what: None,
) -> list[dict]:
    """Serves every prompt on the resident engine and on each rung, in turns; returns a row for each of them.

    ``answers`` of a row are its tokens of each turn that counts.

    Args:
        ids: prompts; the first ``warm`` do not count.
        at_once: engines that fit into memory.
        advance: called with a description of the engines after each turn.

    Raises:
        EngineError: an engine failed.
    """
    engines, rows = [RESIDENT, *cases(ladder, slots)], {}
    for group in groups(len(engines), at_once):
        mine, turns = [engines[number] for number in group], []
        for answers in take_turns(mine, [[each] for each in ids], settings):
            turns.append(answers)
            advance(f"{slots}: {', '.join(case.name for case in mine)}")
        for place, number in enumerate(group):
            if number not in rows:
                rows[number] = row(engines[number], turns[warm:], place, settings.seed)
    found = [rows[number] for number in sorted(rows)]
    rounds = [False, *(any(rung.rounds for rung in ladder[: place + 1]) for place in range(len(ladder)))]
    return [{"slots": slots, **item, "rounds": rounded} for item, rounded in zip(found, rounds, strict=True)]


def row(case: Case, turns: list[list[dict]], which: int, seed: int) -> dict[str, Any]:
    """Returns what engine ``which`` of ``turns`` [turns][engines] did, compared with the first rung, number 1.

    Tokens are compared with the resident engine's as well, number 0.
    """
    mine = [turn[which] for turn in turns]
    tpot = [answer["tpot"][0] for answer in mine]
    speedups = [turn[1]["tpot"][0] / turn[which]["tpot"][0] for turn in turns]
    of_resident = [turn[0]["tpot"][0] / turn[which]["tpot"][0] for turn in turns]
    return {
        "rung": case.name,
        "knobs": case.knobs,
        "speculation": case.speculation,
        "tpot": tpot,
        "tpot_median": statistics.median(tpot),
        "tpot_interval": list(interval(tpot, seed)),
        **ratio_of(speedups, seed, "speedup"),
        "share_of_resident": statistics.median(of_resident),
        "ttft": statistics.median(answer["ttft"][0] for answer in mine),
        "turns": len(turns),
        "equal_to_resident": sum(turn[which]["tokens"] == turn[0]["tokens"] for turn in turns),
        "equal_to_first": sum(turn[which]["tokens"] == turn[1]["tokens"] for turn in turns),
        "counters": total([answer["counters"] for answer in mine]),
        "guard": mine[-1]["choices"].get("guard"),
        "answers": [answer["tokens"] for answer in mine],
    }


def total(counters: Sequence[dict]) -> dict:
    """Returns the sum of counters, and of dictionaries of counters, key by key."""
    found: dict[str, Any] = {}
    for item in counters:
        for name, value in item.items():
            if isinstance(value, dict):
                found[name] = total([found.get(name, {}), value])
            else:
                found[name] = found.get(name, 0) + value
    return found


def drafted(rows: Sequence[dict]) -> tuple[int, float]:
    """Returns the number of draft tokens over all rows, and the measured seconds per token: 0 if there are none."""
    own = total([row["counters"]["own"] for row in rows])
    return own["draft_tokens"], own["draft_seconds"] / max(1, own["draft_tokens"])


def disturbed(own: Mapping[str, float], machine: ScaledMachine) -> str:
    """Returns by how much deadlines of ``machine`` were exceeded if that changes the times; else nothing."""
    found = []
    for kind, what, deadline in (("load", "loads", machine.load_seconds), ("cpu", "CPU experts", machine.cpu_seconds)):
        count = own.get(f"{kind}_waits", 0) + own.get(f"{kind}_missed", 0)
        late = own.get(f"{kind}_overshoot_seconds", 0.0) + own.get(f"{kind}_missed_seconds", 0.0)
        if count and late / count > DISTURBED * deadline:
            found.append(f"{what} took {1e3 * late / count:.2f} ms too long in the mean, of {1e3 * deadline:.2f}")
    return f"{'; '.join(found)}: does something else run on this machine?" if found else ""
