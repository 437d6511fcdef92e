"""Predictors that are made from samples of a model and kept in a file."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from vllm_spac.decisions.predictors._samples import Samples
from vllm_spac.decisions.predictors.base import START, Guess, Predictor, PredictorInputs, Signal

Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]

_ROUNDING = 0.05  # relative difference between a router as read from the checkpoint and as it ran, in bf16
_CHECKED = 256  # rows that are compared


@dataclass(frozen=True)
class Sizes:
    """Sizes that the tensors of trained predictors follow from.

    Attributes:
        layers, experts, top_k, width: of the model: L, N, k, d.
    """

    layers: int
    experts: int
    top_k: int
    width: int
    reach: int  # layers that maps look ahead, at least 1 and below ``layers``

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 1 or self.top_k > self.experts or self.reach >= max(2, self.layers):
            raise ValueError("impossible sizes")

    def jumps(self) -> list[tuple[int, int]]:
        """Returns (layers ahead, layer that is predicted) of every map."""
        return [(ahead, target) for ahead in range(1, self.reach + 1) for target in range(ahead, self.layers)]

    def jumps_from(self, layer: int) -> list[tuple[int, int]]:
        """Returns those of ``jumps`` that start in ``layer``, the nearest first."""
        return [(ahead, layer + ahead) for ahead in range(1, self.reach + 1) if layer + ahead < self.layers]


@dataclass(frozen=True, eq=False)
class Gates:
    """The routers of a model and the norms before them: router logits are norm(r) @ weight.T + bias, with RMSNorm."""

    weight: Tensor  # float32 [L, N, d]
    bias: Tensor  # float32 [L, N]
    norm: Tensor  # float32 [L, d], weights of the RMSNorm whose output a router reads

    def problem(self, samples: Samples) -> str:
        """Returns why these are not the routers and norms that ``samples`` come from; empty if they are."""
        for layer in range(samples.layers):
            hidden, logits = samples.hidden[layer, :_CHECKED].float(), samples.logits[layer, :_CHECKED]
            ours = hidden @ self.weight[layer].T + self.bias[layer]
            if (ours - logits).norm() > _ROUNDING * logits.norm():
                return f"the scores of router {layer} are not its gate times its input"
            if not self.norm[layer].all():
                return f"the norm before router {layer} has a weight of 0"
            size = (hidden / self.norm[layer]).square().mean(-1).sqrt()
            if (size - 1).abs().mean() > _ROUNDING:
                return f"the input of router {layer} is not the output of an RMSNorm with the checkpoint's weight"
        return ""


@dataclass(frozen=True, eq=False)
class Material:
    """What predictors are made from."""

    sizes: Sizes
    samples: Samples
    others: Samples  # samples of other texts, by which choices between predictors are made
    gates: Gates | str  # the model's routers, or why they are not known or cannot be used
    outputs: Tensor  # float32 [L, N, d], mean output of each expert for the rows of ``samples`` that selected it


class Trained(Predictor):
    """A predictor whose tensors ``train`` makes, stage by stage. It looks from one layer at those behind it.

    Args:
        beside: of one that ``chooses``, all others by name, which look one layer ahead.

    Raises:
        ValueError: a tensor has values that it cannot have.
    """

    needs_file: ClassVar[bool] = True
    on_device: ClassVar[bool] = True
    chooses: ClassVar[bool] = False  # it is trained after all that do not choose, and asks them
    reach = 1

    def __init__(self, sizes: Sizes, tensors: Mapping[str, Tensor], beside: Mapping[str, Trained]) -> None:
        self.sizes = sizes

    @abstractmethod
    def of_next(self, inputs: PredictorInputs) -> Tensor:
        """Returns float32 [rows, N], logits of the router behind the layer ``inputs``, which is not the last one.

        With a greater reach, those of all layers that it sees, side by side. On a device these are launches of fixed
        shapes, which read nothing on the host, so that CUDA graphs can hold them.
        """

    def guesses(self, inputs: PredictorInputs) -> Iterable[Guess]:
        if START != inputs.layer < self.sizes.layers - 1:
            yield Guess((inputs.layer + 1) * self.sizes.experts, self.of_next(inputs), logits=True)

    @classmethod
    def unfit(cls, material: Material) -> str:
        """Returns why it cannot predict this model; empty if it can."""
        return ""

    @classmethod
    def computed(cls, sizes: Sizes, gates: Gates) -> dict[str, Tensor]:
        """Returns all tensors of a predictor that needs no samples; one that sets ``from_checkpoint`` has it."""
        raise NotImplementedError

    @classmethod
    @abstractmethod
    def specs(cls, sizes: Sizes) -> Specs:
        """Returns dtype and shape of each tensor by its name."""

    @classmethod
    def stages(cls, sizes: Sizes) -> int:
        """Returns the number of parts in which it is trained; training can be interrupted between them."""
        return 1

    @classmethod
    @abstractmethod
    def train(cls, stage: int, material: Material, beside: Mapping[str, Trained]) -> dict[str, Tensor]:
        """Returns the tensors that a stage makes; no tensor depends on another stage.

        Args:
            stage: from 0 to ``stages`` - 1.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds, with those of the predictors that it asks."""
        return sum(_storages(self).values())


def _storages(value: Any) -> dict[int, int]:
    """Returns address -> bytes of all memory of tensors in ``value``: a tensor, a mapping or a predictor."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    inner = vars(value) if isinstance(value, Trained) else value if isinstance(value, Mapping) else {}
    return {address: count for item in inner.values() for address, count in _storages(item).items()}


class Maps(Trained):
    """Shared by predictors that score a later layer with one matrix.

    Scores of layer l + a = features of layer l @ map(a, l + a) + bias(a, l + a), for a = 1 .. reach.

    Maps are stored in bfloat16, and computed with in float32: those of a layer side by side, so that one product gives
    the scores of all layers that it sees.
    """

    needs = frozenset({Signal.ROUTER_INPUT})

    def __init__(self, sizes: Sizes, tensors: Mapping[str, Tensor], beside: Mapping[str, Trained]) -> None:
        super().__init__(sizes, tensors, beside)
        self.reach = sizes.reach
        self._maps: dict[int, Tensor] = {}  # layer l -> [features, N * layers ahead], from layer l + 1 on
        self._bias: dict[int, Tensor] = {}
        for layer in range(sizes.layers - 1):
            names = ["{}.{}".format(*jump) for jump in sizes.jumps_from(layer)]
            self._maps[layer] = torch.cat([tensors[f"map.{name}"].float() for name in names], 1)
            self._bias[layer] = torch.cat([tensors[f"bias.{name}"] for name in names])

    @classmethod
    def specs(cls, sizes: Sizes) -> Specs:
        shape = cls.features_of(sizes), sizes.experts
        found: Specs = {f"map.{ahead}.{target}": (torch.bfloat16, shape) for ahead, target in sizes.jumps()}
        return found | {f"bias.{ahead}.{target}": (torch.float32, shape[1:]) for ahead, target in sizes.jumps()}

    @classmethod
    def stages(cls, sizes: Sizes) -> int:
        return len(sizes.jumps())

    @classmethod
    def train(cls, stage: int, material: Material, beside: Mapping[str, Trained]) -> dict[str, Tensor]:
        ahead, target = material.sizes.jumps()[stage]
        return cls.stored({(ahead, target): cls.fit(ahead, target, material)})

    @staticmethod
    def stored(maps: Mapping[tuple[int, int], tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """Returns the tensors of a file for maps and biases by (layers ahead, layer that is predicted)."""
        found: dict[str, Tensor] = {}
        for (ahead, target), (weight, bias) in maps.items():
            found |= {f"map.{ahead}.{target}": weight.bfloat16(), f"bias.{ahead}.{target}": bias.float().clone()}
        return found

    def of_next(self, inputs: PredictorInputs) -> Tensor:
        return torch.addmm(self._bias[inputs.layer], self.features(inputs), self._maps[inputs.layer])

    @classmethod
    @abstractmethod
    def features_of(cls, sizes: Sizes) -> int:
        """Returns the number of features."""

    @classmethod
    @abstractmethod
    def fit(cls, ahead: int, target: int, material: Material) -> tuple[Tensor, Tensor]:
        """Returns map [features, N] and bias [N] for scores of layer ``target``, ``ahead`` layers earlier."""

    @abstractmethod
    def features(self, inputs: PredictorInputs) -> Tensor:
        """Returns float32 [rows, features] of a layer, valid until the next call."""
