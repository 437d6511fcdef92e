"""Makes vLLM's Triton kernels treat slots like a whole layer: the same tiles, and rows sorted by expert.

vLLM chooses tiles, from its tuned tables or by rule, by the number of experts and rows of a call. Over slots it would
use the number of slots, and in a wave fewer rows; the resulting tiles may sum in another order than stock vLLM's.

vLLM's ``moe_align_block_size`` sorts rows by expert, with one count per expert of the layer (fewer than 1,024). When it
is set to ignore invalid experts, as ``TritonExperts`` does if there is a map, its CUDA kernel maps before it counts;
slots are numbered over all layers, so it would write far beyond its counts. Otherwise it counts experts, and vLLM maps
the result.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from vllm_spac.integration.hooks import patches

_whole: tuple[int, int] | None = None  # experts and rows that the current call is treated as having


@contextlib.contextmanager
def of_layer(experts: int, rows: int) -> Iterator[None]:
    """Context in which kernels run as in a forward of ``rows`` rows over a layer of ``experts`` experts."""
    global _whole
    install()
    before, _whole = _whole, (experts, rows)
    try:
        yield
    finally:
        _whole = before


@functools.cache
def install() -> None:
    """Wraps the functions that vLLM's Triton kernels call; a second call does nothing.

    Raises:
        UnsupportedError: this vLLM lacks one of them, or it takes other arguments than the tested ones.
    """
    patches.check_names("gpu")
    patches.install(patches.TILES, _chosen)
    for target in patches.ALIGN:  # the quantised and the unquantised kernel look it up in different modules
        patches.install(target, _aligned)


def _chosen(choose: Callable[..., dict]):
    def chosen(w1_shape, w2_shape, top_k, dtype, M, block_shape=None):  # noqa: N803
        if _whole is not None:
            experts, M = _whole  # noqa: N806
            w1_shape, w2_shape = (experts, *w1_shape[1:]), (experts, *w2_shape[1:])
        return choose(w1_shape, w2_shape, top_k, dtype, M, block_shape)

    return chosen


def _aligned(align: Callable[..., tuple]):
    def aligned(
        topk_ids,
        block_size,
        num_experts,
        expert_map=None,
        pad_sorted_ids=False,
        ignore_invalid_experts=False,
        **others: Any,
    ):
        if _whole is not None:
            ignore_invalid_experts = False
        return align(topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts, **others)

    return aligned
