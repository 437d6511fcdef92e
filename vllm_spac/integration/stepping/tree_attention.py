"""What verifies draft trees writes keys to scratch, too: the hook of the target's KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from vllm_spac.methods.trees.tensors import Scattered


def updating(update: Callable, scattered: Callable[[], Scattered | None]) -> Callable:
    """In place of a layer's ``do_kv_cache_update``: also writes what rows of trees see where they see it.

    ``scattered`` is asked in each forward of the target; None: it verifies no tree.
    """

    def updated(layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        update(layer, key, value, kv_cache, slot_mapping)
        if (also := scattered()) is not None:
            update(layer, key[also.rows], value[also.rows], kv_cache, also.slots)

    return updated
