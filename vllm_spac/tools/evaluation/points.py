"""The points of a quality sweep over budgets and speculated execution, and the verdict drawn from their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from vllm_spac.errors import ConfigError

COVERAGES = ("substitution", "truncation")
SPECULATED = "speculated"  # in place of a ranking: experts are run by prediction, and the coverage says how
MODES = ("restricted", "predicted")  # of speculated execution
AGREEMENT, PERPLEXITY = 0.99, 0.01


@dataclass(frozen=True)
class Point:
    """One setting of the budget: ``budget`` experts per layer, or ``mass``, the share of the mass ``mass_of``.

    Or, with the ranking ``SPECULATED``, speculated execution: the coverage is one of ``MODES``, and there is no bound.
    """

    ranking: str
    coverage: str
    budget: int | None = None
    mass: float | None = None
    mass_of: str | None = None

    @classmethod
    def of(cls, result: Mapping) -> Point:
        """Returns the point that a result was measured at."""
        values: dict[str, Any] = {each.name: result.get(each.name) for each in fields(cls)}
        return cls(**values)

    @property
    def speculated(self) -> bool:
        """Whether it is speculated execution."""
        return self.ranking == SPECULATED

    @property
    def bound(self) -> str:
        """The bound in words; ``-`` without one."""
        if self.speculated:
            return "-"
        return f"{self.mass:g} of {self.mass_of}" if self.budget is None else f"B={self.budget}"

    def __str__(self) -> str:
        if self.speculated:
            return f"speculated execution, {self.coverage}"
        return f"{self.ranking}, {self.coverage}, {self.bound}"

    def settings(self, when: str, window: int | None = None) -> dict:
        """Returns the arguments for ``spac_budget``."""
        if self.speculated:
            return {"speculate": self.coverage, "when": when, "window": window}
        bound = {name: value for name, value in asdict(self).items() if value is not None}
        return bound | {"when": when, "window": window}


def points(
    rankings: Sequence[str],
    coverages: Sequence[str],
    budgets: Sequence[int],
    masses: Sequence[float],
    facts: dict,
    mass_of: str = "selected",
    speculate: Sequence[str] = (),
) -> tuple[list[Point], list[str]]:
    """Returns the points that a sweep runs, and sentences on those skipped because the model cannot run them.

    Args:
        facts: ``experts``, ``top_k``, and ``custom``: whether the model routes by a function of its own.
        speculate: modes of speculated execution to run as well.

    Raises:
        ConfigError: a bound is out of range, or nothing is left.
    """
    from vllm_spac.methods.moe_spec.settings import check_budget, check_mass  # the command line starts without torch

    for budget in budgets:
        check_budget(budget, facts["experts"], facts["top_k"], "truncation")
    for mass in masses:
        check_mass(mass)
    kept, skipped = [], []
    for coverage in coverages:
        if coverage == "substitution" and facts["custom"]:
            skipped.append("substitution: the model routes by a function of its own")
            continue
        few = [b for b in budgets if coverage == "substitution" and b < facts["top_k"]]
        skipped += [f"substitution with B={b}: every token gets {facts['top_k']} experts" for b in few]
        for ranking in rankings:
            kept += [Point(ranking, coverage, budget=b) for b in budgets if b not in few]
            kept += [Point(ranking, coverage, None, mass, mass_of) for mass in masses]
    kept += [Point(SPECULATED, mode) for mode in speculate]
    if not kept:
        raise ConfigError(f"no budget is left to evaluate; {'; '.join(skipped) or 'name some with --budgets'}")
    return kept, skipped


def loads(point: Mapping, generation: Sequence[Mapping]) -> float | None:
    """Returns the bytes that a point reads per generated token over those without a budget; None: not measured.

    Both with the same drafts. A budget that shortens the accepted paths may read more for a token.

    Args:
        generation: that of a file, also without a budget.
    """
    exact = next((float(each["bytes_per_token"]) for each in generation if not each.get("ranking")), 0.0)
    same = [each for each in generation if Point.of(each) == Point.of(point)]
    return float(same[0]["bytes_per_token"]) / exact if same and exact else None


def verdict(results: Sequence[dict], generation: Sequence[Mapping] = ()) -> dict | None:
    """Returns the point with the fewest distinct experts among those that keep the quality, or None.

    Quality is kept at a top-1 agreement of at least 99 % and a perplexity within 1 %. A point that reads more for a
    token than no budget does is none of them.
    """
    good = [r for r in results if r["agreement"] >= AGREEMENT and abs(r["perplexity_change"]) <= PERPLEXITY]
    good = [r for r in good if (loads(r, generation) or 0.0) <= 1]
    return min(good, key=lambda r: (r["distinct"], -r["agreement"])) if good else None
