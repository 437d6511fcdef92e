"""MoE layers with experts at scattered addresses, and error bounds for kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from vllm_spac.kernels.reference import grouped_gemm as reference

EMPTY = 3  # an expert that gets no token and is poisoned, to prove that nobody reads it
UNIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of roundings to x's dtype; see bound
TINY = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-25}  # half the least subnormal number


@dataclass
class Layer:
    """One layer and its routed input. Each weight of each expert is an allocation of its own."""

    x: Tensor
    w13: list[Tensor]
    w2: list[Tensor]
    weights: Tensor
    ids: Tensor
    b13: list[Tensor] | None
    b2: list[Tensor] | None
    activation: str = "silu"

    @property
    def intermediate(self) -> int:
        return self.w2[0].shape[1]

    def tables(self) -> dict[str, Tensor | None]:
        """The tables of addresses, on the device of the weights."""
        return {name: table(getattr(self, name)) for name in ("w13", "w2", "b13", "b2")}

    def call(self, function, **options) -> Tensor:
        """``function`` is ``grouped_gemm`` or its twin."""
        tables = self.tables()
        return function(
            self.x, tables["w13"], tables["w2"], self.weights, self.ids, self.intermediate, tables["b13"], tables["b2"],
            self.activation, **options,
        )  # fmt: skip

    def to(self, device: str) -> Layer:
        def move(value):
            return [part.to(device) for part in value] if isinstance(value, list) else value.to(device)

        names = ("x", "w13", "w2", "weights", "ids", "b13", "b2")
        moved = {name: None if getattr(self, name) is None else move(getattr(self, name)) for name in names}
        return Layer(**moved, activation=self.activation)


def table(parts: list[Tensor] | None) -> Tensor | None:
    return None if parts is None else torch.tensor([part.data_ptr() for part in parts], device=parts[0].device)


def make(
    rows: int, d: int, ff: int, dtype: torch.dtype = torch.bfloat16, *, experts: int = 6, k: int = 2,
    activation: str = "silu", bias: bool = False, seed: int = 0,
) -> Layer:  # fmt: skip
    """Gate and up are of the order of 3, with a limit of 10 of 5, so that activations bend and clamps are met."""
    rng = torch.Generator().manual_seed(seed + 1000 * rows + d)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    size = 5 if activation == "silu_clamped" else 3
    others = torch.tensor([expert for expert in range(experts) if expert != EMPTY])
    ids = torch.stack([others[torch.randperm(len(others), generator=rng)[:k]] for _ in range(rows)])
    layer = Layer(
        x=normal(rows, d).to(dtype),
        w13=[(size * normal(2 * ff, d) / d**0.5).to(dtype) for _ in range(experts)],
        w2=[(normal(d, ff) / ff**0.5).to(dtype) for _ in range(experts)],
        weights=torch.rand(rows, k, generator=rng) + 0.1,
        ids=ids.int(),
        b13=[normal(2 * ff).to(dtype) for _ in range(experts)] if bias else None,
        b2=[normal(d).to(dtype) for _ in range(experts)] if bias else None,
        activation=activation,
    )
    poison(layer, EMPTY)
    return layer


def poison(layer: Layer, expert: int) -> None:
    for parts in (layer.w13, layer.w2, layer.b13, layer.b2):
        if parts is not None:
            parts[expert].fill_(float("nan"))


def truth(layer: Layer) -> Tensor:
    """[M, d] float64, on the CPU. Pairs that do not count are given to no expert."""
    layer = layer.to("cpu")
    out = torch.zeros_like(layer.x, dtype=torch.float64)
    for row, (weights, ids) in enumerate(zip(layer.weights.double(), layer.ids.tolist(), strict=True)):
        for weight, expert in zip(weights, ids, strict=True):
            if 0 <= expert < len(layer.w13) and weight != 0:
                hidden, result = _expert(layer, row, expert)
                del hidden
                out[row] += weight * result
    return out


def _expert(layer: Layer, row: int, expert: int) -> tuple[Tensor, Tensor]:
    hidden = layer.w13[expert].double() @ layer.x[row].double()
    if layer.b13 is not None:
        hidden = hidden + layer.b13[expert].double()
    result = layer.w2[expert].double() @ reference.activate(hidden, layer.activation)
    return hidden, result if layer.b2 is None else result + layer.b2[expert].double()


def bound(layer: Layer) -> Tensor:
    """The most that a right kernel can be off ``truth``, element by element: [M, d] float64.

    u = 2**-24 for float32, U for the dtype of x: 8 significant bits of bfloat16 make 2**-8, 11 of float16 2**-11.
    A float32 sum of n terms is off by (n + 1) u sum|terms| in any order; 64 u covers the exponential (2 ulp of the
    GPU's, less on a CPU), the quotient and the product of the activation. Rounded to dtype, U each: gate, up,
    act(gate), h, y, out. The slope of the activations in gate is at most 1.13 |up or up + 1|, in up at most |gate|.
    """
    layer = layer.to("cpu")
    u, unit, tiny = 2.0**-24, UNIT[layer.x.dtype], TINY[layer.x.dtype]
    total = torch.zeros_like(layer.x, dtype=torch.float64)
    size = torch.zeros_like(total)
    for row, (weights, ids) in enumerate(zip(layer.weights.double(), layer.ids.tolist(), strict=True)):
        for weight, expert in zip(weights, ids, strict=True):
            if not 0 <= expert < len(layer.w13) or weight == 0:
                continue
            hidden, result = _expert(layer, row, expert)
            terms = layer.w13[expert].double().abs() @ layer.x[row].double().abs() + 1.0
            lost = (layer.x.shape[1] + 2) * u * (terms + hidden.abs()) + unit * hidden.abs() + tiny
            gate, up = reference.gate_up(hidden, layer.activation)
            lost_gate, lost_up = reference.gate_up(lost, layer.activation)
            factor = up.clamp(-7, 7) + 1 if layer.activation.startswith("swigluoai") else up
            acted = reference.activate(hidden, layer.activation).abs()
            off = 1.13 * factor.abs() * lost_gate + gate.abs() * lost_up + 1.13 * lost_gate * lost_up
            off = (off + (64 * u + 2 * unit) * acted) * (1 + 3 * unit) + tiny * (1 + up.abs())
            w2 = layer.w2[expert].double().abs()
            products = w2 @ (acted + off) + 1.0
            pair = weight * (w2 @ off + (layer.intermediate + 3) * u * products)
            total[row] += pair * (1 + unit) + unit * weight * result.abs() + tiny
            size[row] += weight * result.abs() + pair
    total += layer.ids.shape[1] * u * size
    return total + unit * (truth(layer).abs() + total) + tiny
