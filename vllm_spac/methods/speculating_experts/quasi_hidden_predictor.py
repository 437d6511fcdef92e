"""Speculating Experts' quasi-hidden state: the later gate on the residual plus mean outputs of the chosen experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_spac.decisions.predictors._trained import Maps, Material, Sizes, Trained
from vllm_spac.decisions.predictors.base import PredictorInputs, Signal
from vllm_spac.decisions.predictors.gate import folded


class LayerFeatures:
    """[h_l | m_l] of a layer: router input and routing weights, 0 for the experts that were not chosen.

    One buffer is written anew for each layer, through views that are kept: each call of torch takes a microsecond or
    two in each layer of each token.

    Args:
        width, experts: d and N.
    """

    def __init__(self, width: int, experts: int) -> None:
        self._sizes = width, experts
        self._whole = self._hidden = self._chosen = self._zeros = torch.empty(0)

    def of(self, inputs: PredictorInputs) -> Tensor:
        """Returns float32 [rows, d + N] of the rows of a layer with ``hidden``, ``ids`` and ``weights``.

        It is valid until the next call.
        """
        assert inputs.hidden is not None and inputs.ids is not None and inputs.weights is not None
        if inputs.hidden.is_cuda:  # a graph refers to memory, which must not be that of another size's buffer
            chosen = inputs.hidden.new_zeros(len(inputs.hidden), self._sizes[1], dtype=torch.float32)
            chosen.scatter_(1, inputs.ids.long(), inputs.weights.float())
            return torch.cat([inputs.hidden.float(), chosen], 1)
        if len(inputs.hidden) != len(self._whole):
            with torch.inference_mode(False):  # buffers for calls inside and outside of it
                self._whole = torch.empty(len(inputs.hidden), sum(self._sizes))
                self._hidden, self._chosen = self._whole.split(self._sizes, 1)
                self._zeros = torch.zeros(self._chosen.shape)
        self._hidden.copy_(inputs.hidden)
        torch.scatter(self._zeros, 1, inputs.ids.long(), inputs.weights.float(), out=self._chosen)
        return self._whole


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

    def features(self, inputs: PredictorInputs) -> Tensor:
        return self._features.of(inputs)


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


def mixing(ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Returns float32 [rows, N]: the routing weights of the chosen experts, 0 for the others."""
    zeros = torch.zeros(len(ids), experts)
    return zeros.scatter_(1, ids.long(), weights.float())
