"""One way to serve a model that may be measured, and how exact it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_spac.config import SpacConfig
from vllm_spac.errors import ConfigError

Departure = Literal["rounding", "lossy"]  # from vLLM's tokens; none of them: exact
Knob = str | int | float | bool

DEFAULT, LRU = "default", "policy=lru"  # names of the baselines

# Knobs that candidates, and so a tuned profile, may set: those that decide speed, and none that writes anything.
MAY_SET = frozenset(
    {
        "slots", "store", "host_memory", "policy", "prefetch", "predictor_file", "guard", "tree", "cpu_experts",
        "balancer", "io_threads", "io_submit", "execution", "budget", "budget_mass", "budget_mass_of", "budget_ranking",
        "budget_coverage",
    }
)  # fmt: skip
_LOSSY = ("budget", "budget_mass", "budget_file")


def departures(knobs: Mapping[str, Any]) -> frozenset[Departure]:
    """Returns what knobs do to tokens: ``rounding`` other than vLLM's kernel's, a ``lossy`` budget, or nothing."""
    found: set[Departure] = set()
    if any(knobs.get(name) is not None for name in _LOSSY):
        found.add("lossy")
    if str(knobs.get("cpu_experts", "off")) != "off" or knobs.get("execution", "slots") != "slots":
        found.add("rounding")
    return frozenset(found)


@dataclass(frozen=True)
class Candidate:
    """One way to serve.

    Attributes:
        name: shown, and unique among the candidates of a run.
        group: what it changes; of each group one can be combined with those of others.
        knobs: of the plugin; None: stock vLLM.
        drafts: vLLM's ``speculative_config``; None: no drafts.
        options: further arguments of the engine, of stock vLLM alone.
        note: what it costs in quality, if it is lossy.
    """

    name: str
    group: str
    knobs: Mapping[str, Knob] | None
    drafts: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def is_stock(self) -> bool:
        return self.knobs is None

    @property
    def departures(self) -> frozenset[Departure]:
        return departures(self.knobs or {})

    @property
    def allowance(self) -> Departure | None:
        """What a server has to allow (``tuned_allow``) for the choice to be used; None: nothing."""
        return "lossy" if "lossy" in self.departures else "rounding" if "rounding" in self.departures else None

    @property
    def same_steps(self) -> bool:
        """Whether its steps have the rows that steps without drafts have, so that its tokens must be equal."""
        return self.drafts is None and not self.departures


def combine(default: Candidate, ranked: list[Candidate]) -> Candidate | None:
    """Returns the best candidate of each group together, or None if fewer than two groups changed anything.

    Args:
        default: what each of them changes.
        ranked: candidates that were faster than ``default``, the fastest first; stock vLLM left out.
    """
    chosen: dict[str, Candidate] = {}
    knobs = dict(default.knobs or {})
    drafts, notes = default.drafts, []
    for candidate in ranked:
        changed = {name: value for name, value in (candidate.knobs or {}).items() if name not in (default.knobs or {})}
        if candidate.group in chosen or (drafts is not None and candidate.drafts is not None):
            continue
        if any(knobs.get(name, value) != value for name, value in changed.items()) or not _valid(knobs | changed):
            continue
        chosen[candidate.group] = candidate
        knobs |= changed
        drafts = candidate.drafts or drafts
        notes += [candidate.note] if candidate.note else []
    if len(chosen) < 2:
        return None
    name = " + ".join(candidate.name for candidate in chosen.values())
    return Candidate(name, "combined", knobs, drafts, note="; ".join(notes))


def _valid(knobs: Mapping[str, Knob]) -> bool:
    try:
        SpacConfig.parse(dict(knobs))
    except ConfigError:  # these do not go together, which is no reason not to combine the others
        return False
    return True
