"""Grows draft trees with a drafter that has keys and values of its own: one forward per level, for either runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from vllm_spac.config.tree_shape import TreeShape
from vllm_spac.methods.trees.growth import Chosen, Growth
from vllm_spac.methods.trees.tensors import BlockCopies, LevelBatch, Scratch, level_batch


class Start(NamedTuple):
    """What the drafter's first pass leaves of the requests that it grows trees for."""

    logits: Tensor  # float [R, V], behind the last token of each
    hidden: Tensor  # [R, d], states that the next forward takes
    bases: Tensor  # int64 [R], tokens of each in the drafter's cache
    table: Tensor  # [R, blocks], of its cache


class Level(NamedTuple):
    """What a forward over one level computes."""

    hidden: Tensor  # [R * F, d], states that the next forward takes
    logits: Tensor  # float [R * F, V]


def grow(
    shape: TreeShape,
    scratch: Scratch,
    start: Start,
    block_size: int,
    caches: Sequence[Tensor],
    forward: Callable[[Growth, LevelBatch, Tensor], Level],
    goes_on: Callable[[Growth], bool] = lambda growth: True,
) -> Chosen:
    """Drafts one tree for each request.

    Args:
        caches: KV cache of each of the drafter's attention layers, [blocks, ...].
        forward: runs the drafter over a level, with the states behind its nodes' parents, [R * F, d].
        goes_on: whether a further level is worth a forward.
    """
    growth = Growth(shape, start.logits.float().log_softmax(-1))
    requests, hidden = len(start.bases), start.hidden
    places, previous = scratch.levels(requests), None
    while not growth.over and goes_on(growth):
        front = growth.expanded.shape[1]
        here, parents = places[growth.level % 2, :, :front], growth.parent[..., None]
        if previous is None:
            before = hidden[:, None].expand(-1, front, -1)
            own = start.table.gather(1, (start.bases // block_size)[:, None].long()).long()
            copies = BlockCopies(own.expand(-1, front).flatten(), here[..., 0].flatten())
        else:
            before = hidden.gather(1, parents.expand(-1, -1, hidden.shape[-1]))
            copies = BlockCopies(previous.gather(1, parents.expand(-1, -1, scratch.each)).flatten(), here.flatten())
        for cache in caches:
            copies.apply(cache)
        batch = level_batch(start.table, start.bases, growth.level, here, block_size)
        level = forward(growth, batch, before.flatten(0, 1).contiguous())
        hidden, previous = level.hidden.view(requests, front, -1), here
        growth.add(level.logits.float().log_softmax(-1).view(requests, front, -1))
    return growth.chosen()
