"""vLLM's Triton kernels over slots as over a whole layer: the tiles they take, and the numbers they sort rows by.

vLLM chooses tiles, from its tuned tables or by rule, by how many experts and rows a call has. Over slots it would see
as many experts as there are slots, and in a wave fewer rows: tiles that may sum in another order than stock vLLM's.

vLLM's ``moe_align_block_size`` sorts rows by expert, with one count an expert of the layer (fewer than 1,024). Told to
ignore experts without a place, as ``TritonExperts`` does where there is a map, its CUDA kernel maps before it counts;
slots are numbered over all layers, so it would write far beyond its counts. Otherwise it counts experts and vLLM maps
what came out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from vllm_spac.integration import patches

_whole: tuple[int, int] | None = None  # experts and rows, while a call is to be as if it had these


@contextlib.contextmanager
def of_layer(experts: int, rows: int) -> Iterator[None]:
    """Inside, kernels run as in a forward of ``rows`` rows over a layer of ``experts`` experts."""
    global _whole
    install()
    before, _whole = _whole, (experts, rows)
    try:
        yield
    finally:
        _whole = before


@functools.cache
def install() -> None:
    """Wrap what vLLM's Triton kernels call; a second call does nothing.

    Raises:
        UnsupportedError: this vLLM lacks one of them, or it takes other arguments than those that were tested.
    """
    patches.check("gpu")
    patches.wrap(patches.TILES, _chosen)
    for target in patches.ALIGN:  # the quantised and the unquantised kernel look it up in modules of their own
        patches.wrap(target, _aligned)


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
