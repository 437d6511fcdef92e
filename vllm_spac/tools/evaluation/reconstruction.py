"""Measures how well a shortlist of experts reconstructs a layer's full output (MoE-Spec, figure 6)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.methods.moe_spec.calibration import Calibration
from vllm_spac.methods.moe_spec.control import BudgetControl, BudgetedLayer
from vllm_spac.methods.moe_spec.settings import BudgetSettings

ORDER = ("oracle", "coactivation", "selected", "router", "static")  # by expected error, lowest first


def whole_step(rows: int) -> Step:
    """Returns a step whose rows all vote and are cut under ``when="all"``."""
    return Step((RequestRows(0, rows, RowKind.PREFILL),))


def combined(outputs: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Returns float64 [rows, d]: sum_j weights[t, j] outputs[t, ids[t, j]].

    Args:
        outputs: float [rows, N, d].
        weights, ids: [rows, k].
    """
    picked = outputs.gather(1, ids.long()[:, :, None].expand(-1, -1, outputs.shape[2]))
    return (picked.double() * weights.double()[:, :, None]).sum(1)


def recent(ids: Tensor, count: int, experts: int) -> Tensor:
    """Returns bool [N]: the ``count`` experts that int [rows, k] used last, as an LRU cache of that size would hold."""
    last = torch.full((experts,), -1, dtype=torch.long)
    for row, chosen in enumerate(ids.tolist()):
        last[chosen] = row
    best = last.sort(descending=True, stable=True).indices[:count]
    return torch.zeros(experts, dtype=torch.bool).index_fill(0, best, True) & (last >= 0)


class Reconstruction:
    """Computes the errors of rankings and coverages for windows of rows of one model."""

    def __init__(self, layers: Sequence[BudgetedLayer], calibration: Calibration | None) -> None:
        self._resident: Tensor | None = None
        mine = [replace(layer, resident=self._held) for layer in layers]
        self._control = BudgetControl(mine, calibration, offline=True)

    def errors(
        self,
        layer: int,
        points: Sequence[tuple[str, str, int]],
        outputs: Tensor,
        logits: Tensor,
        weights: Tensor,
        ids: Tensor,
        resident: Tensor,
    ) -> list[float]:
        """Returns ||O* - O_S||^2 / ||O*||^2 of one window for each of (ranking, coverage, budget).

        Args:
            outputs: float [rows, N, d], every expert's output of every row.
            logits: [rows, N]; weights, ids: [rows, k] of the unbudgeted router.
            resident: bool [N], for the ranking of that name.
        """
        self._resident, step = resident, whole_step(len(logits))
        target = combined(outputs, weights, ids)
        scale = float(target.square().sum())
        found = []
        for ranking, coverage, budget in points:
            asked = {"budget": budget, "ranking": ranking, "coverage": coverage}
            self._control.change(BudgetSettings.parse(asked | {"when": "all"}))
            kept = self._control.apply(layer, logits, weights, ids, step, outputs if ranking == "oracle" else None)
            found.append(float((target - combined(outputs, *kept)).square().sum()) / scale)
        return found

    def _held(self) -> Tensor:
        assert self._resident is not None, "called by ``errors`` alone"
        return self._resident


def together(studies: Sequence[dict], rankings: Sequence[str], coverages: Sequence[str]) -> dict:
    """Combines the studies of several layers.

    Args:
        studies: ``points`` (ranking, coverage, budget), ``errors`` [windows][points] and ``gap`` of each layer.
        rankings, coverages: those whose order is judged.

    Returns:
        ``windows`` of a layer, the largest ``kernel_gap``, ``points`` (see ``summarised``), ``order`` (``ordered``).
    """
    pairs = list(itertools.pairwise(name for name in ORDER if name in rankings))
    return {
        "windows": len(studies[0]["errors"]),
        "kernel_gap": max(study["gap"] for study in studies),
        "points": summarised(studies),
        "order": [item for coverage in coverages for pair in pairs for item in ordered(studies, *pair, coverage)],
    }


def summarised(studies: Sequence[dict]) -> list[dict]:
    """Returns relative reconstruction errors over all layers: the mean over layers of the mean over windows.

    Args:
        studies: ``points`` and ``errors`` [windows][points] of each layer.

    Returns:
        ranking, coverage, budget, error for each point, with the layers' own in ``by_layer``.
    """
    found = []
    for column, (ranking, coverage, budget) in enumerate(studies[0]["points"]):
        layers = [sum(row[column] for row in study["errors"]) / len(study["errors"]) for study in studies]
        name = {"ranking": ranking, "coverage": coverage, "budget": budget}
        found.append(name | {"error": sum(layers) / len(layers), "by_layer": layers})
    return found


def ordered(studies: Sequence[dict], better: str, worse: str, coverage: str) -> list[dict]:
    """Returns, for each budget, how much smaller the error of ``better`` is than that of ``worse`` in the same windows.

    Returns:
        ``difference``: worse - better in the mean, ``standard_error`` of it over windows of all layers (they are not
        quite independent), and ``holds``: no significant contradiction, difference >= -2 standard errors.
    """
    columns = {tuple(point): column for column, point in enumerate(studies[0]["points"])}
    found = []
    for budget in sorted({point[2] for point in studies[0]["points"]}):
        pair = columns.get((worse, coverage, budget)), columns.get((better, coverage, budget))
        if None in pair:
            continue
        gaps = [row[pair[0]] - row[pair[1]] for study in studies for row in study["errors"]]
        mean = sum(gaps) / len(gaps)
        error = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / max(1, len(gaps) - 1) / len(gaps))
        names = {"better": better, "worse": worse, "coverage": coverage, "budget": budget}
        found.append(names | {"difference": mean, "standard_error": error, "holds": mean >= -2 * error})
    return found
