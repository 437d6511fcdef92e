"""Speculating Experts' quasi-hidden state: the later gate on the residual plus mean outputs of the chosen experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_spac.decisions.predictors._features import LayerFeatures
from vllm_spac.decisions.predictors._maps import Maps
from vllm_spac.decisions.predictors._trained import Material, Sizes, Trained, mixing
from vllm_spac.decisions.predictors.base import Seen, Signal
from vllm_spac.decisions.predictors.gate import folded


class QuasiHidden(Maps):
    """Scores of layer t on layer l are gate_t(norm_t(r_l + D_l)), D_l the weighted mean outputs of the chosen experts.

    The scores are, up to a factor of the row, rms(r_l) * h_l @ F + m_l @ P: F is ``gate.folded``, m_l [rows, N] the
    routing weights, and P [N, N] the experts' mean outputs (the paper's default vectors) through norm_t and gate_t. A
    layer does not have rms(r_l): one ratio of the two parts per pair of layers is fitted to the training rows instead.
    Outputs of shared experts are left out.
    """

    needs = frozenset({Signal.ROUTER_INPUT, Signal.ROUTING})

    def __init__(self, sizes: Sizes, tensors: Mapping[str, Tensor], beside: Mapping[str, Trained]) -> None:
        super().__init__(sizes, tensors, beside)
        self._features = LayerFeatures(sizes.width, sizes.experts)

    @classmethod
    def unfit(cls, material: Material) -> str:
        return material.gates if isinstance(material.gates, str) else ""

    @classmethod
    def features_of(cls, sizes: Sizes) -> int:
        return sizes.width + sizes.experts

    @classmethod
    def fit(cls, ahead: int, target: int, material: Material) -> tuple[Tensor, Tensor]:
        gates, samples, layer = material.gates, material.samples, target - ahead
        assert not isinstance(gates, str)
        through_gate = folded(gates.weight[target], gates.norm[target], gates.norm[layer])
        defaults = through_norm(material.outputs[layer], gates.weight[target], gates.norm[target])
        chosen = mixing(samples.ids[layer], samples.weights[layer], samples.experts)
        parts = [samples.hidden[layer].float() @ through_gate, chosen @ defaults]
        wanted = samples.logits[target] - gates.bias[target]
        factors = ratio(parts, wanted)
        return torch.cat([factors[0] * through_gate, factors[1] * defaults]), gates.bias[target]

    def features(self, seen: Seen) -> Tensor:
        return self._features.of(seen)


def through_norm(outputs: Tensor, gate: Tensor, norm: Tensor) -> Tensor:
    """Returns P [N', N]: ``outputs`` [N', d] times an RMSNorm's weight [d], through ``gate`` [N, d]."""
    return (outputs * norm) @ gate.T


def ratio(parts: list[Tensor], wanted: Tensor) -> Tensor:
    """Returns float [2], the factors of the two ``parts`` [rows, N] whose sum is closest to ``wanted``.

    Means of rows are removed first: they change no ranking.
    """
    columns = [(part - part.mean(1, keepdim=True)).flatten() for part in (*parts, wanted)]
    matrix = torch.stack(columns[:2], 1)
    return torch.linalg.lstsq(matrix.double(), columns[2][:, None].double()).solution[:, 0].float()
