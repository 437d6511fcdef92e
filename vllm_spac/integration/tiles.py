"""The tiles of vLLM's Triton kernels, in slots as in a whole layer.

vLLM chooses them, from its tuned tables or by rule, by how many experts and rows a call has. Over slots it would see as
many experts as there are slots, and in a wave fewer rows: tiles that may sum in another order than stock vLLM's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

_whole: tuple[int, int] | None = None  # experts and rows, while a call is to be as if it had these


@contextlib.contextmanager
def of_layer(experts: int, rows: int) -> Iterator[None]:
    """Inside, kernels use the tiles of a forward of ``rows`` rows over a layer of ``experts`` experts."""
    global _whole
    _install()
    before, _whole = _whole, (experts, rows)
    try:
        yield
    finally:
        _whole = before


@functools.cache
def _install() -> None:
    from vllm.model_executor.layers.fused_moe.experts import triton_moe

    choose = triton_moe.try_get_optimal_moe_config

    @functools.wraps(choose)
    def chosen(w1_shape, w2_shape, top_k, dtype, rows, block_shape=None):
        if _whole is not None:
            experts, rows = _whole
            w1_shape, w2_shape = (experts, *w1_shape[1:]), (experts, *w2_shape[1:])
        return choose(w1_shape, w2_shape, top_k, dtype, rows, block_shape)

    triton_moe.try_get_optimal_moe_config = chosen
