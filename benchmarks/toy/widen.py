"""Enlarges each tensor of a Qwen3-MoE checkpoint while the network computes the same function.

Extra expert neurons have random gate and up rows, so their bytes are real and do not compress, and
down-projection columns of zero, so they add nothing. A wider hidden state is [x repeated `copies` times,
zeros]: weights that write it get repeated and zero rows, weights that read it use W / copies for each copy.

An RMS norm takes its mean over more elements then. With old size H, new size N and copies m, let
c = sqrt(m H / N). The mean square shrinks by c^2, and

    (c w) x / sqrt(c^2 mean(x^2) + c^2 eps) = w x / sqrt(mean(x^2) + eps),

so norm weights are multiplied by c and epsilon by c^2. The norms of queries and keys share that epsilon
and keep their size: queries and keys are multiplied by c, and the same identity holds for them. m is 1, or 2
where that makes c a power of two, in which case no weight is rounded and only the order of sums differs.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """Old and new sizes; ``copies`` of the old hidden state, then zeros, make up the new one."""

    hidden: int
    intermediate: int
    new_hidden: int
    new_intermediate: int

    def __post_init__(self) -> None:
        if self.new_hidden < self.hidden or self.new_intermediate < self.intermediate:
            raise ValueError(f"can only grow: {self}")

    @property
    def copies(self) -> int:
        ratio = self.new_hidden / self.hidden
        exponent = math.log2(ratio)
        return 2 if exponent == int(exponent) and exponent % 2 else 1

    @property
    def norm_scale(self) -> float:
        return math.sqrt(self.copies * self.hidden / self.new_hidden)

    @property
    def padding(self) -> int:
        return self.new_hidden - self.copies * self.hidden

    def expert_bytes(self, element_size: int = 2) -> int:
        return 3 * self.new_hidden * self.new_intermediate * element_size


def plan_for(source: Path, intermediate: int | None, hidden: int | None, expert_bytes: int | None) -> Plan:
    """Returns the sizes for checkpoint ``source``; ``expert_bytes`` (in bf16) picks the nearest intermediate size."""
    config = json.loads((source / "config.json").read_text())
    new_hidden = hidden or config["hidden_size"]
    if expert_bytes is not None:
        if intermediate is not None:
            raise ValueError("expert_bytes and intermediate exclude each other")
        intermediate = 32 * max(1, round(expert_bytes / (3 * 2 * new_hidden * 32)))
    old = config["moe_intermediate_size"]
    return Plan(config["hidden_size"], old, new_hidden, intermediate or old)


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def _write_rows(plan: Plan, weight: Tensor) -> Tensor:
    """weight [hidden, n] that writes the hidden state -> [new_hidden, n]."""
    return torch.cat([weight] * plan.copies + [weight.new_zeros(plan.padding, weight.shape[1])])


def read_columns(plan: Plan, weight: Tensor, scale: float = 1.0) -> Tensor:
    """weight [n, hidden] that reads the hidden state -> [n, new_hidden], multiplied by ``scale``."""
    part = (weight.float() * (scale / plan.copies)).to(weight.dtype)
    return torch.cat([part] * plan.copies + [weight.new_zeros(weight.shape[0], plan.padding)], 1)


def _expert_rows(plan: Plan, weight: Tensor, name: str) -> Tensor:
    """Gate or up projection [intermediate, hidden] -> [new_intermediate, new_hidden], random where unused."""
    wide = torch.randn(plan.new_intermediate, plan.new_hidden, generator=_generator(name))
    wide *= weight.float().std()
    wide = wide.to(weight.dtype)
    used = plan.copies * plan.hidden
    wide[: plan.intermediate, :used] = (weight / plan.copies).repeat(1, plan.copies)
    return wide


def _norm(plan: Plan, weight: Tensor) -> Tensor:
    part = (weight.float() * plan.norm_scale).to(weight.dtype)
    return torch.cat([part] * plan.copies + [weight.new_ones(plan.padding)])


def inflate_tensor(plan: Plan, name: str, weight: Tensor) -> Tensor:
    """Returns one tensor of a Qwen3-MoE checkpoint in its new size."""
    rules: dict[str, Callable[[], Tensor]] = {
        "embed_tokens.weight": lambda: _write_rows(plan, weight.t()).t(),
        "o_proj.weight": lambda: _write_rows(plan, weight),
        "q_norm.weight": lambda: weight,
        "k_norm.weight": lambda: weight,
        "norm.weight": lambda: _norm(plan, weight),
        "q_proj.weight": lambda: read_columns(plan, weight, plan.norm_scale),
        "k_proj.weight": lambda: read_columns(plan, weight, plan.norm_scale),
        "v_proj.weight": lambda: read_columns(plan, weight),
        "mlp.gate.weight": lambda: read_columns(plan, weight),
        "lm_head.weight": lambda: read_columns(plan, weight),
        "gate_proj.weight": lambda: _expert_rows(plan, weight, name),
        "up_proj.weight": lambda: _expert_rows(plan, weight, name),
        "down_proj.weight": lambda: torch.nn.functional.pad(
            _write_rows(plan, weight), (0, plan.new_intermediate - plan.intermediate)
        ),
    }
    for suffix, rule in rules.items():
        if name.endswith(suffix):
            return rule().contiguous()
    raise ValueError(f"no rule for tensor {name}")


def new_shape(plan: Plan, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape that ``inflate_tensor`` gives the tensor ``name`` of ``shape``."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return shape
    if len(shape) == 1:
        return (plan.new_hidden,)
    if ".experts." in name:
        expert = (plan.new_intermediate, plan.new_hidden)
        return expert[::-1] if "down_proj" in name else expert
    return (plan.new_hidden, shape[1]) if "o_proj" in name else (shape[0], plan.new_hidden)
