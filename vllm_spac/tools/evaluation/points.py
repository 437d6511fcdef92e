"""The points of a quality sweep over budgets and speculated execution, and the verdict drawn from their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from vllm_spac import components
from vllm_spac.errors import ConfigError
from vllm_spac.methods.moe_spec.settings import check_mass, validate
from vllm_spac.tools.evaluation.reconstruction import ORDER

COVERAGES = ("substitution", "truncation")
RANKINGS = (*ORDER, "resident")
SPECULATED = "speculated"  # in place of a ranking: experts are run by prediction, and the coverage says how
MODES = ("restricted", "predicted")  # of speculated execution
AGREEMENT, PERPLEXITY = 0.99, 0.01


@dataclass(frozen=True)
class Point:
    """One setting of the budget: ``budget`` experts per layer, or ``mass``, the share of the mass ``mass_of``.

    With ``votes_alpha`` rows count P ** votes_alpha, where P is the probability that they are reached; None: uniformly.
    Or, with the ranking ``SPECULATED``, speculated execution: the coverage is one of ``MODES``, and there is no bound.
    """

    ranking: str
    coverage: str
    budget: int | None = None
    mass: float | None = None
    mass_of: str | None = None
    votes_alpha: float | None = None

    @property
    def speculated(self) -> bool:
        """Whether it is speculated execution."""
        return self.ranking == SPECULATED

    @property
    def label(self) -> str:
        if self.speculated:
            return "-"
        bound = f"{self.mass:g} of {self.mass_of}" if self.budget is None else f"B={self.budget}"
        return bound if self.votes_alpha is None else f"{bound}, P^{self.votes_alpha:g}"

    def settings(self, when: str, window: int | None = None) -> dict:
        """Returns the arguments for ``spac_budget``."""
        if self.speculated:
            return {"speculate": self.coverage, "when": when, "window": window}
        bound = {name: value for name, value in asdict(self).items() if value is not None}
        votes = {} if self.votes_alpha is None else {"votes": "path"}
        return bound | votes | {"when": when, "window": window}


def rankings(text: str | None, calibrated: bool) -> list[str]:
    """Parses rankings from the command line; by default, all that can run.

    Raises:
        ConfigError: a name is unknown or twice, or needs a calibration and there is none.
    """
    known = components.names("rankings")
    needs = {name for name in known if components.find("rankings", name).needs_calibration}
    if text is None:
        return [name for name in RANKINGS if calibrated or name not in needs]
    asked = _listed(text, "--rankings")
    for name in asked:
        if name not in known:
            raise ConfigError(f"--rankings: there is no {name!r}; use some of {', '.join(known)}")
        if name in needs and not calibrated:
            raise ConfigError(f"--rankings: {name} needs --calibration FILE; write it with `vllm-spac calibrate`")
    return asked


def modes(text: str, predictor: bool) -> list[str]:
    """Parses modes of speculated execution from the command line; none by default.

    Raises:
        ConfigError: a mode is unknown or twice, or there is no predictor.
    """
    if not text.strip():
        return []
    asked = _listed(text, "--speculate")
    if unknown := [name for name in asked if name not in MODES]:
        raise ConfigError(f"--speculate: there is no {unknown[0]!r}; use {' or '.join(MODES)}")
    if not predictor:
        raise ConfigError("--speculate needs --predictor FILE; write it with `vllm-spac train-predictor`")
    return asked


def coverages(text: str) -> list[str]:
    """Parses coverages from the command line."""
    asked = _listed(text, "--coverages")
    if unknown := [name for name in asked if name not in COVERAGES]:
        raise ConfigError(f"--coverages: there is no {unknown[0]!r}; use {' or '.join(COVERAGES)}")
    return asked


def bounds(text: str, name: str, number: type) -> list:
    """Parses numbers from the command line, in ascending order."""
    try:
        return sorted({number(item) for item in _listed(text, name)}) if text.strip() else []
    except ValueError as error:
        raise ConfigError(f"{name}: {error}; use numbers with commas between them") from error


def points(
    rankings: Sequence[str],
    coverages: Sequence[str],
    budgets: Sequence[int],
    masses: Sequence[float],
    facts: dict,
    mass_of: str = "selected",
    alphas: Sequence[float] = (),
    speculate: Sequence[str] = (),
) -> tuple[list[Point], list[str]]:
    """Returns the points that a sweep runs, and sentences on those skipped because the model cannot run them.

    Args:
        rankings: those that need every expert's output are left to the reconstruction study.
        facts: ``experts``, ``top_k``, and ``custom``: whether the model routes by a function of its own.
        alphas: each point is also run with votes weighted by these powers.
        speculate: modes of speculated execution to run as well.

    Raises:
        ConfigError: a bound is out of range, or nothing is left.
    """
    for budget in budgets:
        validate(budget, facts["experts"], facts["top_k"], "truncation")
    for mass in masses:
        check_mass(mass)
    if wrong := [alpha for alpha in alphas if not 0 <= alpha <= 1]:
        raise ConfigError(f"--alphas: {wrong[0]:g}: use numbers from 0, which equals uniform votes, to 1")
    found, skipped = [], []
    for coverage in coverages:
        if coverage == "substitution" and facts["custom"]:
            skipped.append("substitution: the model routes by a function of its own")
            continue
        few = [b for b in budgets if coverage == "substitution" and b < facts["top_k"]]
        skipped += [f"substitution with B={b}: every token gets {facts['top_k']} experts" for b in few]
        for ranking in (r for r in rankings if not components.find("rankings", r).offline):
            for alpha in (None, *alphas):
                found += [Point(ranking, coverage, budget=b, votes_alpha=alpha) for b in budgets if b not in few]
                found += [Point(ranking, coverage, None, mass, mass_of, alpha) for mass in masses]
    found += [Point(SPECULATED, mode) for mode in speculate]
    if not found:
        raise ConfigError(f"no budget is left to evaluate; {'; '.join(skipped) or 'name some with --budgets'}")
    return found, skipped


_SAME = {"ranking", "coverage", "budget", "mass", "mass_of", "votes_alpha"}  # what tells points of one file apart


def loads(point: Mapping, generation: Sequence[Mapping]) -> float | None:
    """Returns the bytes that a point reads per generated token over those without a budget; None: not measured.

    Both with the same drafts. A budget that shortens the accepted paths may read more for a token.

    Args:
        generation: that of a file, also without a budget.
    """
    exact = next((float(each["bytes_per_token"]) for each in generation if not each.get("ranking")), 0.0)
    same = [each for each in generation if all(each.get(name) == point.get(name) for name in _SAME)]
    return float(same[0]["bytes_per_token"]) / exact if same and exact else None


def verdict(results: Sequence[dict], generation: Sequence[Mapping] = ()) -> dict | None:
    """Returns the point with the fewest distinct experts among those that keep the quality, or None.

    Quality is kept at a top-1 agreement of at least 99 % and a perplexity within 1 %. A point that reads more for a
    token than no budget does is none of them.
    """
    good = [r for r in results if r["agreement"] >= AGREEMENT and abs(r["perplexity_change"]) <= PERPLEXITY]
    good = [r for r in good if (loads(r, generation) or 0.0) <= 1]
    return min(good, key=lambda r: (r["distinct"], -r["agreement"])) if good else None


def _listed(text: str, name: str) -> list[str]:
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items or len(set(items)) < len(items):
        raise ConfigError(f"{name}: {text!r} is empty or names something twice; use names with commas between them")
    return items
