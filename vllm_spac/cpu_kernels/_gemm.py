"""The grouped GEMM of experts at given addresses, by the compiled kernels: what a CPU runs in place of Triton's."""

from __future__ import annotations

import ctypes
import math
from ctypes import POINTER, c_uint64

import torch
from torch import Tensor

from vllm_spac.cpu_kernels._library import Pool, Table, Tables, isas, spec_of
from vllm_spac.kernels.reference.route import routed
from vllm_spac.kernels.types import Quantised
from vllm_spac.system.processors import asked, described, places, processors


class CompiledGemm:
    """``vllm_spac.kernels.grouped_gemm.grouped_gemm`` on a CPU; called by one thread, which computes too.

    The sum over a row's experts is of float32, in the order of experts, and rounded once.

    Args:
        threads: None: as many as OpenMP is given, else one per core.

    Raises:
        ConfigError: the kernels were not compiled, or there are not so many processors.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._facts = facts = processors()
        self._pool = Pool(places(facts, asked(facts) if threads is None else threads), isas()[-1])

    def describe(self) -> str:
        """Returns a few words for the start-up line."""
        count = len(self._pool.cpus)
        return f"{self._pool.isa} in {count} thread{'s' * (count > 1)}, {described(self._facts, self._pool.cpus)}"

    def __call__(
        self,
        x: Tensor,
        w13: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        intermediate: int,
        b13: Tensor | None = None,
        b2: Tensor | None = None,
        activation: str = "silu",
        out: Tensor | None = None,
        tile: object = None,
        counts: Tensor | None = None,
        live: Tensor | None = None,
        quantised: Quantised | None = None,
    ) -> Tensor:
        """Arguments as of ``kernels.grouped_gemm``; ``tile`` is a GPU's."""
        hidden, size = x.shape[1], x.element_size()
        kind, s13, s2 = (None, None, None) if quantised is None else quantised
        ids = routed(topk_ids, topk_weights, len(w13), live)
        if counts is not None:
            counts.copy_(torch.bincount(ids + 1, minlength=len(w13) + 1)[1:])
        sizes = (2 * intermediate, hidden), (hidden, intermediate)
        if kind is None:
            codes, scales = [rows * columns * size for rows, columns in sizes], [0, 0]
        else:
            codes = [math.prod(kind.code_shape(*each)) for each in sizes]
            scales = [4 * math.prod(kind.scale_shape(*each)) for each in sizes]
        addresses, nbytes = (w13, w2, s13, s2, b13, b2), (*codes, *scales, 2 * intermediate * size, hidden * size)
        tables = Tables(*map(_at, addresses, nbytes))
        spec = spec_of(x.dtype, activation, hidden, intermediate, len(w13), kind)
        total = self._pool.run(spec, tables, x, topk_weights.float().contiguous(), ids.int().view(topk_ids.shape))
        return total.to(x.dtype) if out is None else out.copy_(total)


def _at(addresses: Tensor | None, nbytes: int) -> Table:
    if addresses is None:
        return Table(None, 0)
    assert addresses.dtype == torch.int64 and addresses.is_contiguous()
    return Table(ctypes.cast(addresses.data_ptr(), POINTER(c_uint64)), nbytes)
