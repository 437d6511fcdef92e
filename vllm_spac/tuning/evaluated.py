"""Budgets that ``vllm-spac quality`` has evaluated, with what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_spac import components
from vllm_spac.errors import ConfigError
from vllm_spac.planning.model import ServedModel
from vllm_spac.system.untrusted import parse_json, read_text
from vllm_spac.tuning.candidate import Knob
from vllm_spac.tuning.candidates import Budget

AGREEMENT = 0.95  # least share of tokens that the model with a budget and without it agree on
MOST = 3
_FORMAT = "spac-quality-1"
_FIRST = "evaluate some first: vllm-spac quality MODEL --prompts FILE --budgets 16,24,32"


def budgets(path: Path, model: ServedModel) -> tuple[Budget, ...]:
    """Returns up to ``MOST`` budgets with uniform votes that need no calibration, those with the fewest experts first.

    Args:
        path: ``quality.json``.
        model: that the file must be of.

    Raises:
        ConfigError: the file cannot be read, is of another model, or has no budget that keeps the quality.
    """
    try:
        found = parse_json(read_text(path), strict=False)
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise ValueError(f"it is no result of format {_FORMAT}")
        facts, points = found["facts"], found["points"]
        shape = int(facts["experts"]), int(facts["top_k"]), len(facts["layers"])
        kept = [_budget(point) for point in sorted(points, key=lambda point: point["distinct"]) if _keeps(point)]
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
    if not kept:
        raise ConfigError(
            f"--quality {path} has no budget that keeps {AGREEMENT:.0%} of the tokens without a calibration; evaluate "
            "larger ones with vllm-spac quality"
        )
    return tuple(kept[:MOST])


def _keeps(point: Mapping[str, Any]) -> bool:
    if point["ranking"] not in components.names("budget.rankings"):  # from outside: nothing is imported for a file
        return False
    kind = components.find("budget.rankings", point["ranking"])
    usable = not kind.needs_calibration and not kind.offline and point.get("votes_alpha") is None
    return usable and float(point["agreement"]) >= AGREEMENT


def _budget(point: Mapping[str, Any]) -> Budget:
    knobs: dict[str, Knob] = {"budget_ranking": str(point["ranking"]), "budget_coverage": str(point["coverage"])}
    if point["budget"] is not None:
        knobs["budget"] = int(point["budget"])
        name = f"budget={knobs['budget']} {point['ranking']}"
    else:
        knobs |= {"budget_mass": float(point["mass"]), "budget_mass_of": str(point.get("mass_of") or "selected")}
        name = f"budget_mass={knobs['budget_mass']:g} {point['ranking']}"
    change, agreement = 100 * float(point["perplexity_change"]), 100 * float(point["agreement"])
    name += "" if point["coverage"] == "substitution" else f" {point['coverage']}"
    return Budget(name, knobs, f"LOSSY: {agreement:.1f}% of tokens agree, perplexity {change:+.2f}%")
