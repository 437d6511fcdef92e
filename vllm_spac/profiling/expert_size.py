"""Chooses the shape of an expert of a given number of bytes, for measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import ConfigError

WIDTH = 32  # sizes are multiples of it: kernels work in tiles


@dataclass(frozen=True)
class ExpertSize:
    """A bfloat16 expert with gate, up and down projections, 3 * hidden * intermediate * 2 bytes."""

    hidden: int
    intermediate: int

    @classmethod
    def of(cls, nbytes: int) -> ExpertSize:
        """Returns the size nearest to ``nbytes``: multiples of 32, hidden one to four times intermediate.

        Raises:
            ConfigError: ``nbytes`` is below 6144.
        """
        smallest = 6 * WIDTH**2
        if nbytes < smallest:
            raise ConfigError(f"an expert of {nbytes} bytes is too small to be measured; use at least {smallest}")
        least, most = (max(1, math.floor(math.sqrt(nbytes / 6 / ratio) / WIDTH)) for ratio in (4, 1))
        widths = (WIDTH * count for count in range(least, most + 1))
        sizes = [cls(max(WIDTH, round(nbytes / 6 / width / WIDTH) * WIDTH), width) for width in widths]
        return min(sizes, key=lambda size: abs(size.nbytes - nbytes))

    @property
    def nbytes(self) -> int:
        return 6 * self.hidden * self.intermediate

    def shape(self, experts: int) -> MoEShape:
        """Returns the shape of one layer of ``experts`` such experts."""
        tensors = {
            "w13": TensorSpec((2 * self.intermediate, self.hidden), torch.bfloat16),
            "w2": TensorSpec((self.hidden, self.intermediate), torch.bfloat16),
        }
        return MoEShape(("profile",), experts, 1, tensors)
