"""How many requests at once may have a draft tree: by the rows of a forward, and by the blocks of the KV cache."""

from __future__ import annotations

from vllm_spac.config.tree_shape import TreeShape
from vllm_spac.methods.trees.tensors import Scratch

MOST_SHARE = 0.2  # of the KV cache that may be scratch


def rows_of(shape: TreeShape) -> int:
    """Rows that a request has in a forward of the target, or in one of the drafter."""
    return max(shape.nodes + 1, shape.expanded)


def most_requests(shape: TreeShape, rows: int, blocks: int | None, block_size: int, longest: int) -> int:
    """Returns the requests that fit both limits; 0: not one does.

    Args:
        rows: most of a forward.
        blocks: of the KV cache that requests can use; None: not known yet.
        longest: tokens of a request, for which blocks must be left beside the scratch.
    """
    fit = rows // rows_of(shape)
    if blocks is None:
        return fit
    left = blocks - -(-longest // block_size)
    return max(0, min(fit, min(int(MOST_SHARE * blocks), left) // Scratch(shape, 1, block_size).count))
