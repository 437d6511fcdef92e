"""Limits of a budget: valid shares of a mass, and valid numbers of experts per layer."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_spac.errors import ConfigError, Remedy, use
from vllm_spac.kernels.reference.shortlist import mass_count

MASSES = ("selected", "scores")  # the mass that a share refers to: ``selected_mass`` or ``router_mass``


def check_mass(mass: float) -> None:
    """Raises ``ConfigError`` unless ``mass`` is above 0 and at most 1."""
    if not 0 < mass <= 1:
        raise ConfigError(
            f"spac: budget_mass={mass} (--spac-budget-mass): use a share of the mass above 0 and at most 1, e.g. 0.98"
        )


def mass_cut(order: Tensor, scores: Tensor, mass: float, least: int = 1) -> int:
    """The smallest B whose first B experts of a full ranking hold a share of the mass.

    Args:
        order: int64 [N], all experts, the best first.
        scores: float [N], the mass of each (``selected_mass`` or ``router_mass``).
        mass: share of the sum of ``scores``; 1.0 always gives N.
        least: lower bound of B: ``top_k`` under substitution, which needs that many.

    Raises:
        ConfigError: ``mass`` is not in (0, 1].
    """
    check_mass(mass)
    assert len(order) == len(scores) and 1 <= least <= len(order)
    return int(mass_count(order, scores, torch.tensor(mass, dtype=torch.float64, device=scores.device), least))


def check_mass_of(mass_of: str) -> None:
    """Raises ``ConfigError`` unless ``mass_of`` is one of ``MASSES``."""
    if mass_of not in MASSES:
        raise ConfigError(f"spac: budget_mass_of={mass_of!r} (--spac-budget-mass-of): use {' or '.join(MASSES)}")


def validate(budget: int, experts: int, top_k: int, coverage: str) -> None:
    """Raises ``ConfigError`` unless a layer of ``experts`` experts can run with ``budget`` of them."""
    if coverage not in ("truncation", "substitution"):
        raise ConfigError(
            f"spac: budget_coverage={coverage!r} (--spac-budget-coverage): use truncation or substitution"
        )
    least = top_k if coverage == "substitution" else 1
    problem = f"spac: budget={budget} (--spac-budget): "
    if 1 <= budget < least:
        raise ConfigError.refused(
            f"{problem}substitution gives every token {top_k} experts",
            use(budget=least).but(f" to {experts}"),
            use(budget_coverage="truncation"),
        )
    if not least <= budget <= experts:
        fits = Remedy(f"use {least} to {experts}", {"budget": max(least, min(budget, experts))})
        raise ConfigError.refused(f"{problem}a layer has {experts} experts", fits)
