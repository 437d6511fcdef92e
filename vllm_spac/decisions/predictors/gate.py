"""The gate of a later layer on this layer's router input (SP-MoE and Speculating Experts use it as their baseline)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from vllm_spac.decisions.predictors._trained import Gates, Maps, Material, Sizes
from vllm_spac.decisions.predictors.base import PredictorInputs


class Gate(Maps):
    """Scores of layer t on layer l are gate_t(norm_t(r_l)), r_l the residual before layer l's experts.

    A layer has no r_l, only h_l = norm_l(r_l). With RMSNorm, norm_t(r_l) = h_l * w_t / w_l, so that one matrix does
    both: see ``folded``. It is computed from the checkpoint, not trained. No LayerNorm, and no router whose choice is
    not that of gate times input.
    """

    from_checkpoint: ClassVar[bool] = True

    @classmethod
    def unfit(cls, material: Material) -> str:
        return material.gates if isinstance(material.gates, str) else ""

    @classmethod
    def features_of(cls, sizes: Sizes) -> int:
        return sizes.width

    @classmethod
    def fit(cls, ahead: int, target: int, material: Material) -> tuple[Tensor, Tensor]:
        gates = material.gates
        assert not isinstance(gates, str)
        return _map(ahead, target, gates)

    @classmethod
    def computed(cls, sizes: Sizes, gates: Gates) -> dict[str, Tensor]:
        return cls.stored({jump: _map(*jump, gates) for jump in sizes.jumps()})

    def features(self, inputs: PredictorInputs) -> Tensor:
        assert inputs.hidden is not None
        return inputs.hidden.float()


def _map(ahead: int, target: int, gates: Gates) -> tuple[Tensor, Tensor]:
    """Returns map [d, N] and bias [N] for scores of layer ``target``, ``ahead`` layers earlier."""
    return folded(gates.weight[target], gates.norm[target], gates.norm[target - ahead]), gates.bias[target]


def folded(gate: Tensor, norm: Tensor, own: Tensor) -> Tensor:
    """Returns F [d, N] with (r / rms(r) * own) @ F = (r / rms(r) * norm) @ gate.T.

    Args:
        gate: [N, d], of the later layer.
        norm: [d], weight of the RMSNorm before it.
        own: [d], weight of this layer's RMSNorm; not 0.
    """
    return (gate * (norm / own)).T
