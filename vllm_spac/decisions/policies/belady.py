"""Belady's MIN: the most hits that any policy can have. It needs the future uses, so only the simulator can use it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

from vllm_spac.decisions.policies._sorted import SortedPolicy

_NEVER = 1 << 62


class Belady(SortedPolicy):
    """Evicts the expert whose next use is furthest ahead, among equals the one with the highest key.

    Args:
        future: keys in the order in which they will be used; each ``insert`` and ``touch`` of a key is its next
            occurrence. Uses of different keys may be reordered within one forward of a layer, during which all its
            experts are pinned. None when nothing is known: then no key is ever used again.
    """

    offline: ClassVar[str] = "it must know the future, as the simulator alone does"

    def __init__(self, *, future: Sequence[int] | None = None) -> None:
        super().__init__()
        self._known = future is not None
        self._uses: dict[int, list[int]] = defaultdict(list)
        for moment, key in enumerate(future if future is not None else ()):
            self._uses[int(key)].append(moment)
        for moments in self._uses.values():
            moments.reverse()

    def _rank_of_use(self, key: int) -> tuple:
        moments = self._uses[key]
        if self._known:
            assert moments, f"expert {key} is used more often than ``future`` has it"
            moments.pop()
        return (-(moments[-1] if moments else _NEVER), -key, key)
