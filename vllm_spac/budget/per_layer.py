"""Budgets per layer chosen from a calibration, and the JSON file that holds them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_spac.budget.calibration import Calibration
from vllm_spac.budget.limits import check_mass, check_mass_of
from vllm_spac.errors import ConfigError
from vllm_spac.system import ownership
from vllm_spac.system.atomic_write import replacing
from vllm_spac.system.untrusted import parse_json, read_text

FORMAT = "spac-budgets-1"
_AGAIN = "write it again with `vllm-spac budgets`"


def choose(
    calibration: Calibration, mass: float, coverage: str = "substitution", mass_of: str = "selected"
) -> dict[str, int]:
    """The smallest budget per layer whose best experts hold ``mass`` of a window's mass on average.

    Args:
        calibration: of the model.
        mass: share in (0, 1]; 1.0 gives N.
        coverage: budgets are at least ``top_k`` under ``substitution``, and at least 1 under ``truncation``.
        mass_of: the mass that ``mass`` is a share of, one of ``MASSES``.

    Returns:
        layer name -> budget.

    Raises:
        ConfigError: ``mass`` is out of range, ``mass_of`` or ``coverage`` unknown, or the calibration saw no whole
            window.
    """
    check_mass(mass)
    check_mass_of(mass_of)
    if coverage not in ("truncation", "substitution"):
        raise ConfigError(f"spac: coverage={coverage!r}: use truncation or substitution")
    curves = calibration.curve(mass_of)
    if not bool((curves[:, -1] > 0).all()):
        raise ConfigError(
            f"spac: the calibration saw {calibration.tokens} tokens and no window of {calibration.window}; calibrate "
            "with more text"
        )
    least = calibration.top_k if coverage == "substitution" else 1
    if mass == 1.0:
        return dict.fromkeys(calibration.layers, calibration.experts)
    needed = 1 + (curves[:, :-1] < torch.tensor(mass, dtype=torch.float32)).sum(1)
    return {name: max(least, budget) for name, budget in zip(calibration.layers, needed.tolist(), strict=True)}


def write_budgets(path: str | Path, fingerprint: str, budgets: dict[str, int], asked: dict[str, Any]) -> None:
    """Writes a budget file atomically; ``ConfigError`` when it cannot be written.

    Args:
        fingerprint: of the model.
        budgets: layer name -> B.
        asked: the targets that the budgets were tuned to (``mass``, ``mass_of``, ``coverage``); for information only.
    """
    content = {"format": FORMAT, "fingerprint": fingerprint, "tuned_to": asked, "budgets": budgets}
    text = json.dumps(content, indent=2) + "\n"
    try:
        with replacing(Path(path)) as partial:
            partial.write_text(text)
    except OSError as error:
        raise ConfigError(f"spac: {path} cannot be written: {error}; name another file") from error


def read_budgets(
    path: str | Path, fingerprint: str | None, layers: Sequence[str] | None, experts: int
) -> dict[str, int]:
    """Reads the budget of each layer, in the order of ``layers``.

    Args:
        path: the budget file.
        fingerprint: of the model; None if not known yet, then it is not compared.
        layers: names of the MoE layers; None if not known yet.
        experts: routed experts per layer (N).

    Raises:
        ConfigError: the file cannot be read, is no budget file, belongs to another model or revision, lacks a layer,
            names an unknown one, or has a budget that is no number from 1 to ``experts``.
    """
    if problem := ownership.refusal(Path(path)):
        raise ConfigError(f"spac: budget_file (--spac-budget-file): {problem}")
    try:
        content = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"spac: {path} (--spac-budget-file) cannot be read: {error}; {_AGAIN}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(f"spac: {path} (--spac-budget-file) is no budget file of {FORMAT}; {_AGAIN}")
    budgets = content.get("budgets")
    other = fingerprint is not None and content.get("fingerprint") != fingerprint
    if other or not isinstance(budgets, dict) or (layers is not None and set(budgets) != set(layers)):
        raise ConfigError(
            f"spac: {path} (--spac-budget-file) was made for another model or revision: {content.get('fingerprint')}, "
            f"not {fingerprint}, or its layers differ; run `vllm-spac calibrate` and `vllm-spac budgets` for this one"
        )
    for name, budget in budgets.items():
        if type(budget) is not int or not 1 <= budget <= experts:
            raise ConfigError(
                f"spac: {path} (--spac-budget-file): the budget of {name} is {budget!r}; use 1 to {experts}"
            )
    return {name: budgets[name] for name in (budgets if layers is None else layers)}
