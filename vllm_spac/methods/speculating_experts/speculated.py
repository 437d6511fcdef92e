"""Speculated execution (lossy): a prediction, made one layer earlier, decides which experts a layer runs.

``predicted`` runs the experts that a row was predicted to choose, with the predicted weights, whatever its router
chooses (Speculating Experts, section 3.2: execute predicted experts and their associated routing weights).
``restricted`` (ours) lets the router choose, by its own scores and weights, among the 2k experts that were predicted
first for the row and those that are in fast memory.

A layer without a prediction, such as the first one, runs its router's choice.

Where the device decides (``SpeculatedLaunches``), nothing of this is read on the host: the launches are over all rows,
and a CUDA graph can hold them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_spac.core import Step
from vllm_spac.decisions.predictors._trained import Trained
from vllm_spac.decisions.predictors.base import Predictor, PredictorInputs
from vllm_spac.errors import UnsupportedError
from vllm_spac.kernels.reference.cover import Chosen, substituted, where, within_groups
from vllm_spac.methods.moe_spec.launches import RoutedLayer
from vllm_spac.methods.moe_spec.replay import BudgetCounters, members
from vllm_spac.methods.moe_spec.settings import BudgetedLayer, BudgetSettings

_WIDE = 2  # times k: the predicted experts that ``restricted`` admits


class SpeculatedExecution:
    """Replaces the choice of routers by one that follows from predictions.

    Args:
        layers: in the order of execution, all of one shape.
        predictor: looks at layers and reaches one ahead; its scores stand for the router's logits.
        counters: count the rows and the routing weight of experts that were chosen and are not run.
        launches: takes the place of ``apply``, where the device decides.
    """

    def __init__(
        self,
        layers: Sequence[BudgetedLayer],
        predictor: Predictor,
        counters: BudgetCounters,
        launches: SpeculatedLaunches | None = None,
    ) -> None:
        assert predictor.reach > 0, "it sees no layer ahead"
        self._layers, self._predictor, self._counters, self.launches = layers, predictor, counters, launches
        self._guess: tuple[Step, int, Tensor] | None = None  # step, layer, scores [rows, N]

    def check(self, settings: BudgetSettings) -> None:
        """Refuses what cannot be speculated.

        Raises:
            UnsupportedError: a layer's choice or weights do not follow from predicted scores.
        """
        named = f"spac: speculate={settings.speculate} (--spac-speculate)"
        for layer in self._layers:
            if layer.rule.custom:
                raise UnsupportedError(
                    f"{named} cannot work here: {layer.name} routes by a function of its own; drop --spac-speculate"
                )
            if settings.speculate == "predicted" and (layer.rule.scoring != "softmax" or layer.rule.bias is not None):
                raise UnsupportedError(
                    f"{named} cannot work here: predicted scores give no weights for the {layer.rule.scoring} routing "
                    f"of {layer.name}; use --spac-speculate restricted"
                )

    def apply(
        self, routed: RoutedLayer, step: Step, groups: Sequence[slice | Tensor], settings: BudgetSettings
    ) -> Chosen:
        """Returns weights and ids [rows, k] of a layer, and predicts the next layer from them.

        Args:
            step: the rows by request; further rows are padding.
            groups: the rows whose experts are speculated, in parts that are counted apart; others keep theirs.
            settings: ``speculate`` is not off.
        """
        index, natural, hidden = routed.layer, routed.natural, routed.hidden
        assert hidden is not None
        if not groups:
            return natural
        weights, ids = natural
        if self._guess is not None and self._guess[0] is step and self._guess[1] == index:
            weights, ids = weights.clone(), ids.clone()
            for rows in groups:
                own = natural[0][rows], natural[1][rows]
                chosen = chosen_by(self._layers[index], self._guess[2][rows], routed.logits[rows], own, settings)
                run = (own[1][:, :, None] == chosen[1][:, None]).any(2)
                self._counters.add(own[0], run, *chosen)
                weights[rows], ids[rows] = chosen
        real = step.rows
        self._predict(index + 1, PredictorInputs(index, hidden[:real], ids[:real], weights[:real]), step)
        return weights, ids

    def _predict(self, target: int, inputs: PredictorInputs, step: Step) -> None:
        """Keeps the scores of layer ``target``, if there is such a layer and the predictor knows anything about it."""
        self._guess = None
        if target == len(self._layers):
            return
        experts = self._layers[target].experts
        for guess in self._predictor.guesses(inputs):
            if guess.first == target * experts:
                self._guess = step, target, guess.scores[:, :experts].expand(step.rows, -1)
                return


class SpeculatedLaunches:
    """What ``SpeculatedExecution`` does, as launches of fixed shapes over all rows of a forward.

    Args:
        layers, predictor: as of ``SpeculatedExecution``; on the device.
        rows: most rows of a forward.
        captured: most rows of one that a CUDA graph holds.
    """

    def __init__(self, layers: Sequence[BudgetedLayer], predictor: Trained, rows: int, captured: int) -> None:
        self._layers, self._predictor, self.rows, self.captured = layers, predictor, rows, captured
        self._experts = layers[0].experts
        self.guess: Tensor | None = None  # float32 [rows, N], scores of the layer behind the one that was launched last

    def end(self) -> None:
        """Called when the layers of a step have run, or failed."""
        self.guess = None

    def apply(self, routed: RoutedLayer, votes: Tensor, settings: BudgetSettings, counted: Tensor) -> Chosen:
        """Returns weights and ids [rows, k] of a layer, and predicts the next layer from them.

        Args:
            votes: float64 [rows]; a row with 0 keeps what its router chose, whatever else it holds.
            counted: float64 [5], to which the effect is added, as of ``BudgetCounters.on_device``.
        """
        index, natural, hidden = routed.layer, routed.natural, routed.hidden
        assert hidden is not None
        (weights, ids), guess = natural, self.guess if index else None
        there = ids.clamp(0, self._experts - 1)  # padding may have any
        if guess is not None:
            layer, speaks = self._layers[index], (votes > 0)[:, None]
            chosen = chosen_by(layer, guess, routed.logits, (weights, there), settings)
            counted += _effect(speaks, (weights, there), chosen, self._experts)
            weights, ids = torch.where(speaks, chosen[0], weights), torch.where(speaks, chosen[1], ids)
            there = ids.clamp(0, self._experts - 1)
        self.guess = None
        if index + 1 < len(self._layers):
            self.guess = self._predictor.of_next(PredictorInputs(index, hidden=hidden, ids=there, weights=weights))
        return weights, ids


def _effect(speaks: Tensor, natural: Chosen, chosen: Chosen, experts: int) -> Tensor:
    """What ``BudgetCounters`` adds for one layer, float64 [5] in the order of its ``snapshot``.

    Args:
        speaks: bool [rows, 1], rows that are counted.
        natural, chosen: weights and ids [rows, k], of the router, and of what is run.
    """
    kept = (natural[1][:, :, None] == chosen[1][:, None]).any(2)
    lost = natural[0].masked_fill(kept, 0).sum(1) / natural[0].sum(1).clamp_min(1e-30)
    used = members(chosen[1].where(speaks & (chosen[0] != 0), experts), experts + 1)[:experts]
    rows, real = speaks[:, 0], speaks.sum()
    dropped, emptied = lost.where(rows, 0).sum(dtype=torch.float64), (rows & ~kept.any(1)).sum()
    return torch.stack([real.double(), dropped, (real > 0).double(), used.sum().double(), emptied.double()])


def chosen_by(
    layer: BudgetedLayer, scores: Tensor, logits: Tensor, natural: Chosen, settings: BudgetSettings
) -> Chosen:
    """Returns weights and ids [rows, k] of rows with predicted ``scores`` and the router's ``logits`` [rows, N]."""
    every = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    if settings.speculate == "predicted":
        weights, ids = best_of(layer, scores, every)
        return weights.to(natural[0].dtype), ids.to(natural[1].dtype)
    likely = scores.sort(dim=1, descending=True, stable=True).indices[:, : _WIDE * layer.top_k]
    inside = torch.zeros_like(every).scatter_(1, likely, True)
    if layer.resident is not None and settings.when != "all":
        inside |= layer.resident()
    covered = inside.gather(1, natural[1].long()).all(1)
    return where(covered, natural, best_of(layer, logits, inside))


def best_of(layer: BudgetedLayer, logits: Tensor, inside: Tensor) -> Chosen:
    """Returns weights and ids [rows, k] as the layer's router would choose by ``logits`` among ``inside`` [rows, N]."""
    rule, probs = layer.rule, layer.rule.probs(logits)
    chosen_by, summed = (probs, 1) if rule.bias is None else (probs + rule.bias, 2)
    if rule.groups is not None and rule.top_groups is not None:
        inside = within_groups(inside, chosen_by, layer.top_k, rule.groups, rule.top_groups, summed)
    return substituted(probs, chosen_by, inside, layer.top_k, rule.renormalize, rule.scale)
