"""Shapes of draft trees: which candidates of a level are expanded, and which are verified in the end."""

from __future__ import annotations

import heapq
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vllm_spac import components
from vllm_spac.components import Argument, filled
from vllm_spac.errors import ConfigError, Remedy, drop, use

Path = tuple[int, ...]  # of a node: the rank of each step among its siblings, e.g. (0, 2): third child of the first

MOST_NODES = 255
CHAINS = "0"
_ARGUMENTS = {
    "shape": Argument("dynamic", ("dynamic", "static")),
    "depth": Argument(6, (1, 16)),
    "width": Argument(8, (1, 64)),
}
_HELP = f"use a number of draft tokens up to {MOST_NODES} (16), a list of paths such as [[0],[1],[0,0]], or {CHAINS}"
_LARGER = Remedy("raise depth or width of --spac-tree", {"tree": None})
_FALL = 0.45  # assumed chance of a child relative to the sibling ranked before it


def _order(path: Path) -> tuple[float, Path]:
    """Sorts nodes by their assumed probability, (1 - f) f^rank per step; a parent comes before its children."""
    return -math.prod((1 - _FALL) * _FALL**rank for rank in path), path


class TreeShape(ABC):
    """How candidates become a tree. Candidates are drawn level by level: ``width`` for each expanded node.

    Attributes:
        nodes: draft tokens of a whole tree (n).
        depth: levels, i.e. forwards of the drafter.
        width: candidates drawn per expanded node.
        fixed: whether the nodes are the same whatever is drawn, so that no level may be left out.
    """

    fixed = False
    nodes: int
    depth: int
    width: int

    @property
    @abstractmethod
    def front(self) -> int:
        """Most nodes that are expanded in a level."""

    @abstractmethod
    def expand(self, level: int, logp: Tensor, least: Tensor | None = None) -> Tensor:
        """Chooses the candidates of a level that are expanded.

        Args:
            level: 1 for the children of the root.
            logp: joint log-probability of each candidate of this level, [requests, candidates].
            least: that of the n-th best candidate of all levels so far, [requests]: no child of a candidate that is
                not above it can be one of the n best. None: it is not known.

        Returns:
            int64 [requests, expanded], ascending; empty: no further level.
        """

    @abstractmethod
    def order(self, logp: Tensor) -> Tensor:
        """Chooses the candidates that are verified.

        Args:
            logp: joint log-probability of each candidate of all levels, [requests, candidates].

        Returns:
            int64 [requests, nodes], parents before children, the most probable first.
        """


@dataclass(frozen=True)
class DynamicShape(TreeShape):
    """EAGLE-2's trees: the most probable nodes, by the drafter's own joint probabilities."""

    nodes: int
    depth: int = 6
    width: int = 8
    expanded: int = 8

    @property
    def front(self) -> int:
        return self.expanded

    def expand(self, level: int, logp: Tensor, least: Tensor | None = None) -> Tensor:
        if level >= self.depth:
            return torch.empty(len(logp), 0, dtype=torch.long, device=logp.device)
        best = logp.sort(dim=1, descending=True, stable=True)
        count = self.expanded if least is None else int((best.values > least[:, None]).sum(1).max())
        return best.indices[:, : min(count, self.expanded)].sort(dim=1).values

    def order(self, logp: Tensor) -> Tensor:
        # A child is never more probable than its parent, which was drawn before it: a stable sort keeps this order.
        return logp.sort(dim=1, descending=True, stable=True).indices[:, : self.nodes]


@dataclass(frozen=True)
class StaticShape(TreeShape):
    """One shape for every step, as EAGLE-1's: constant index tensors, whatever the drafter says."""

    fixed = True
    paths: tuple[Path, ...]  # of the nodes, in the order in which they are verified; each path's parent comes before it

    def __post_init__(self) -> None:
        seen: set[Path] = {()}
        for path in self.paths:
            assert path[:-1] in seen and path not in seen, path
            seen.add(path)

    @classmethod
    def of_size(cls, nodes: int, depth: int, width: int) -> StaticShape:
        """The most probable nodes if children are accepted with the chances of ``_order``."""
        heap: list[tuple[float, Path]] = [_order((0,))]
        paths: list[Path] = []
        while heap and len(paths) < nodes:
            _, path = heapq.heappop(heap)
            paths.append(path)
            if path[-1] + 1 < width:
                heapq.heappush(heap, _order((*path[:-1], path[-1] + 1)))
            if len(path) < depth:
                heapq.heappush(heap, _order((*path, 0)))
        return cls(tuple(paths))

    @classmethod
    def of_paths(cls, text: str) -> StaticShape:
        """A shape written as EAGLE writes them, e.g. ``[[0],[1],[0,0]]``; missing parents are an error.

        Raises:
            ValueError: the text is no such list.
        """
        try:
            paths = [tuple(path) for path in json.loads(text)]
        except (ValueError, TypeError, RecursionError):
            paths = []
        if not paths or not all(p and all(type(r) is int and 0 <= r < MOST_NODES for r in p) for p in paths):
            raise ValueError(_HELP)
        if len(set(paths)) < len(paths):
            raise ValueError("it gives a path twice")
        known = {(), *paths}
        for path in paths:
            if path[:-1] not in known:
                raise ValueError(f"{list(path)} has no parent {list(path[:-1])}; add it")
        if len(paths) > MOST_NODES:
            raise ValueError(f"it has {len(paths)} nodes, more than {MOST_NODES}")
        return cls(tuple(sorted(paths, key=_order)))

    @property
    def nodes(self) -> int:  # type: ignore[override]
        return len(self.paths)

    @cached_property
    def depth(self) -> int:  # type: ignore[override]
        return max(map(len, self.paths))

    @cached_property
    def width(self) -> int:  # type: ignore[override]
        return 1 + max(path[-1] for path in self.paths)

    @cached_property
    def front(self) -> int:
        return max(len(self._inner(level)) for level in range(self.depth))

    def _inner(self, level: int) -> list[Path]:
        """The nodes of a level that have children, ascending."""
        return sorted({path[:-1] for path in self.paths if len(path) == level + 1})

    def _number(self, path: Path) -> int:
        """Position of a node among the candidates of its level."""
        return self._inner(len(path) - 1).index(path[:-1]) * self.width + path[-1]

    def expand(self, level: int, logp: Tensor, least: Tensor | None = None) -> Tensor:
        chosen = [self._number(path) for path in self._inner(level)] if level < self.depth else []
        return torch.tensor(chosen, dtype=torch.long, device=logp.device).expand(len(logp), -1)

    @cached_property
    def _chosen(self) -> Sequence[int]:
        before = [0]
        for level in range(self.depth):
            before.append(before[-1] + len(self._inner(level)) * self.width)
        return [before[len(path) - 1] + self._number(path) for path in self.paths]

    def order(self, logp: Tensor) -> Tensor:
        return torch.tensor(self._chosen, dtype=torch.long, device=logp.device).expand(len(logp), -1)


def parse(spec: str) -> TreeShape | None:
    """The shape that the knob ``tree`` describes; None: chains.

    Args:
        spec: ``0``, a number of nodes, perhaps with ``@shape=static@depth=6@width=8`` (most levels, and most children
            per node), or a list of paths.

    Raises:
        ValueError: it is none of these, or no tree of this size has so many nodes.
    """
    if spec.startswith("["):
        shape: TreeShape = StaticShape.of_paths(spec)
        nodes = shape.nodes
    else:
        count, given = components.parse(spec)
        if not re.fullmatch(r"[0-9]{1,3}", count) or (nodes := int(count)) > MOST_NODES:
            raise ValueError(_HELP)
        found = filled(count, given, _ARGUMENTS if nodes else {})
        if not nodes:
            return None
        shape = _of_size(nodes, given, **found)
    if nodes == 1:
        raise ConfigError.refused("a tree of one token is a chain", use(tree=2).but(" or more"), drop("tree"))
    return shape


def _of_size(nodes: int, arguments: Mapping[str, Any], shape: str, depth: int, width: int) -> TreeShape:
    if shape == "dynamic":
        tree: TreeShape = DynamicShape(nodes, depth, width, width)
        most = width + (depth - 1) * width**2
        problem = f"{depth} levels of at most {width} expanded nodes with {width} children have {most}"
    else:
        tree = StaticShape.of_size(nodes, depth, width)
        most, problem = tree.nodes, f"{depth} levels of at most {width} children per node have {tree.nodes}"
    if most < nodes:
        smaller = use(tree=components.written(str(most), arguments)) if most > 1 else drop("tree")
        raise ConfigError.refused(problem, _LARGER, smaller)
    return tree


class TreeText:
    """The type of the knob, as metadata of ``str``; pydantic validates it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self._checked, handler(source))

    def _checked(self, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(_HELP)
        parse(text := str(value).strip())
        return text

    def values(self) -> list[str]:
        """The forms of the knob's values."""
        return [CHAINS, "@".join(["N", *(f"{name}=..." for name in _ARGUMENTS)]), "[[0],[1],[0,0]]"]
