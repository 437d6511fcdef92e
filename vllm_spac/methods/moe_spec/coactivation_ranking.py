"""Ranking by marginal covered mass given co-activation: the oracle's greedy choice without the experts' outputs (ours).

Truncation drops sum_{i not in S} w_ti E_i(h_t) from row t. The squared norm of that loss is

    sum_{i, j not in S} w_ti w_tj <E_i, E_j>.

Outputs are not known before the experts are loaded. Assume that they have equal norms, and that two are similar as far
as the selections of one expert explain those of the other in the calibration, rho_ij in [0, 1] (``similarity``);
MoE-Spec's appendix D names this similarity as the reason why the oracle beats the router's ranking. Over the rows that
vote, with v [rows] their votes,

    loss(S) = sum_{i, j not in S} rho_ij G_ij,    G = W^T diag(v) W,    W [rows, N]: natural mixing weights,

and the covered mass loss({}) - loss(S) grows by

    gain(i | S) = G_ii + 2 sum_{j not in S + i} rho_ij G_ij

when i joins S: the more of i's partners are covered, the smaller the gain. With all rho_ij = 1 a row's loss is the
square of its uncovered mass; with rho = identity experts are scored one by one, by the square of their weights. The
greedy choice is ``least_residual`` with rho * G as its matrix of inner products.

Where the outputs of partners are not in fact similar, most of the gain over ``router`` comes from the squares: a few
large weights matter more than many small ones. Using the correlation instead of its square would then be harmful.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from vllm_spac.methods.moe_spec.calibration import Calibration
from vllm_spac.methods.moe_spec.rankings import LayerContext, Ranking, least_residual, router_mass, weighted


@dataclass(kw_only=True, eq=False)
class Coactivation(Ranking):
    """The experts chosen greedily by the gain defined in the module's docstring.

    Attributes:
        alike: float [L, N, N], ``similarity`` of each layer.
        top_k: experts per token; for calls without ``context.mixing``.
        prior: weight of the router's ranking in the gain. Above 0 it also orders experts that are in no row's top-k.
    """

    alike: Tensor
    top_k: int
    prior: float = 0.01
    needs_calibration: ClassVar[bool] = True
    needs_mixing: ClassVar[bool] = True

    @classmethod
    def _calibrated(cls, calibration: Calibration) -> dict[str, Any]:
        layers = [similarity(calibration.pairs[layer], calibration.tokens) for layer in range(len(calibration.pairs))]
        return {"alike": torch.stack(layers), "top_k": calibration.top_k}

    def rank(self, probs: Tensor, votes: Tensor | None, budget: int, context: LayerContext | None = None) -> Tensor:
        context = context or LayerContext()
        mass = router_mass(probs, votes)
        weights = (natural(probs, self.top_k) if context.mixing is None else context.mixing).to(torch.float64)
        counted = weights
        if votes is not None:
            weights, counted = weights.masked_fill(votes[:, None] == 0, 0), weighted(weights, votes)
        gram = self.alike[context.layer] * (counted.T @ weights)
        return least_residual(gram, budget, prior=self.prior * mass * gram.diagonal().sum() / mass.sum())


def similarity(pairs: Tensor, tokens: int) -> Tensor:
    """Similarity of the experts' selections: Pearson's correlation over tokens, negative values set to 0, squared.

    Args:
        pairs: int64 [N, N], tokens that selected both experts; on the diagonal, the selections of one expert.

    Returns:
        float64 [N, N] in [0, 1], symmetric, 1 on the diagonal.
    """
    both, alone = pairs.to(torch.float64), pairs.diagonal().to(torch.float64)
    spread = (alone * (tokens - alone)).sqrt()
    rho = (tokens * both - alone[:, None] * alone) / (spread[:, None] * spread).clamp(min=1)
    return rho.clamp(0, 1).square().fill_diagonal_(1)


def natural(probs: Tensor, top_k: int) -> Tensor:
    """float [rows, N]: the scores of each row's ``top_k`` best experts (ties: the lowest ids), 0 elsewhere."""
    ids = probs.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    return torch.zeros_like(probs).scatter(1, ids, probs.gather(1, ids))
