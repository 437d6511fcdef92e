"""One component per family as in a user's package: written against the base alone, and selected by a knob.

``CALLS`` counts what an engine called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cpu_kernels.base import CpuExperts, Kernel
from vllm_spac.decisions.balancers.base import Balancer, LayerState, Plan, split
from vllm_spac.decisions.policies.base import Formula, Policy
from vllm_spac.decisions.predictors.base import START, Guess, Predictor, PredictorInputs
from vllm_spac.errors import StoreError
from vllm_spac.methods.moe_spec.rankings import LayerContext, Ranking
from vllm_spac.storage.base import ExpertStore

CALLS: Counter[str] = Counter()


class Arrivals(Formula):
    """As ``Fifo``."""

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        super().__init__(layers, experts, device)
        self.used.fill_(torch.inf)

    def touch(self, touched: Tensor, came: Tensor) -> None:
        CALLS["policy"] += 1
        super().touch(torch.zeros_like(touched), came)


class Fifo(Policy):
    """The victim is the expert that has been resident for longest."""

    on_device: ClassVar[bool] = True

    def __init__(self) -> None:
        self._order: dict[int, None] = {}

    def formula(self, layers: int, experts: int, device: torch.device) -> Formula:
        return Arrivals(layers, experts, device)

    def insert(self, key: int) -> None:
        assert key not in self._order
        self._order[key] = None

    def touch(self, key: int) -> None:
        assert key in self._order

    def remove(self, key: int) -> None:
        del self._order[key]

    def evict(self, count: int, pinned: Container[int]) -> list[int]:
        CALLS["policy"] += 1
        victims = [key for key in self._order if key not in pinned][:count]
        if len(victims) < count:
            raise LookupError(f"{count} victims wanted, {len(victims)} are not in use")
        for key in victims:
            del self._order[key]
        return victims

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: int) -> bool:
        return key in self._order


class Blocks(ExpertStore):
    """One tensor for all experts of a layer, in memory that nobody pins."""

    addressable: ClassVar[bool] = True

    def __init__(self, shape, fingerprint, folder=None) -> None:
        super().__init__(shape, fingerprint, folder)
        self._blocks = [
            {name: torch.zeros(shape.experts, *spec.shape, dtype=spec.dtype) for name, spec in shape.tensors.items()}
            for _ in shape.layers
        ]
        self._packed = np.zeros(shape.total, dtype=bool)

    def holds(self, key: int) -> bool:
        return bool(self._packed[key])

    def reserve(self, experts: int) -> None:
        pass

    def put(self, key: int, tensors: Mapping[str, Tensor]) -> None:
        self._packed[key] = True
        for name, place in self.view(key).items():
            place.copy_(tensors[name])

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        CALLS["store"] += 1
        for name, tensor in self.view(key).items():
            into[name].copy_(tensor)
        return self.shape.expert_bytes

    def view(self, key: int) -> Mapping[str, Tensor]:
        if not self._packed[key]:
            raise StoreError(f"expert {key} was never packed")
        layer, expert = self.shape.split(key)
        return {name: block[expert] for name, block in self._blocks[layer].items()}

    def layer(self, number: int) -> Mapping[str, Tensor]:
        return self._blocks[number]

    def describe(self) -> str:
        return "blocks"


class EverySecond(Balancer):
    """Every second of the missing experts runs on the CPU."""

    needs_rates: ClassVar[bool] = False

    def plan(self, state: LayerState) -> Plan:
        CALLS["balancer"] += 1
        hit, missing = split(state)
        return Plan(hit=hit, stream=tuple(missing[1::2].tolist()), cpu=tuple(missing[::2].tolist()))


class RowByRow(CpuExperts):
    """The kernel of the slots, one row at a time."""

    layout: ClassVar[Literal["plain", "kernel"]] = "kernel"
    exclusive: ClassVar[bool] = True

    def __init__(self, shape, threads: int, activation: str, kernel: Kernel | None = None) -> None:
        super().__init__(shape, threads, activation, kernel)
        self._kernel = kernel

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        CALLS["executor"] += 1
        rows = zip(x.split(1), weights.split(1), ids.split(1), strict=True)
        return torch.cat([self._kernel(*row, experts) for row in rows])

    def describe(self) -> str:
        return "row by row"


class Loudest(Ranking):
    """The experts with the highest score of any row, times its vote."""

    def scores(self, probs: Tensor, context: LayerContext) -> Tensor:
        CALLS["ranking"] += 1
        return probs.amax(0)


class Same(Predictor):
    """What the last step selected."""

    def __init__(self, num_experts: int) -> None:
        self.scores = np.zeros(num_experts, dtype=np.int64)

    def observe_step(self, counts: np.ndarray) -> None:
        CALLS["predictor"] += 1
        self.scores = np.where(counts < 0, self.scores, counts > 0).astype(np.int64)

    def guesses(self, seen: PredictorInputs) -> Iterable[Guess]:
        return [Guess(0, torch.from_numpy(self.scores)[None])] if seen.layer == START else []
