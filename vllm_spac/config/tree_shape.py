"""Shapes of draft trees: which candidates of a level are expanded, and which are verified in the end."""

from __future__ import annotations

import heapq
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vllm_spac import components
from vllm_spac.components import Argument, filled
from vllm_spac.errors import ConfigError, Remedy, brief, drop, use

Path = tuple[int, ...]  # of a node: the rank of each step among its siblings, e.g. (0, 2): third child of the first

MOST_NODES = 255
_NAMES = ("dynamic", "static")
_SIZE = {"depth": Argument(6, (1, 16)), "width": Argument(8, (1, 64))}
_LARGER = Remedy("raise depth or width of --spac-tree-shape", {"tree_shape": None})
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
    """One shape for every step, as EAGLE-1's: constant index tensors, whatever the drafter says.

    Attributes:
        paths: of the nodes, in the order in which they are verified; each path's parent comes before it.
    """

    fixed = True
    paths: tuple[Path, ...]

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
            ConfigError: the text is no such list.
        """
        named = "tree_shape (--spac-tree-shape)"
        try:
            paths = [tuple(path) for path in json.loads(text)]
        except (ValueError, TypeError, RecursionError):
            paths = []
        if not paths or not all(p and all(type(r) is int and 0 <= r < MOST_NODES for r in p) for p in paths):
            raise ConfigError(f"spac: {named}={brief(text)}: use static, dynamic, or a list such as [[0],[1],[0,0]]")
        if len(set(paths)) < len(paths):
            raise ConfigError(f"spac: {named} gives a path twice")
        known = {(), *paths}
        for path in paths:
            if path[:-1] not in known:
                raise ConfigError(f"spac: {named}: {list(path)} has no parent {list(path[:-1])}; add it")
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


def _split(spec: str) -> tuple[str, int, int]:
    """Returns (``static``, ``dynamic`` or a list of paths; depth; width) of a value of the knob ``tree_shape``."""
    try:
        shape, given = components.parse(spec)
        named = shape in _NAMES
        found = filled(shape if named else "a list of paths", given, _SIZE if named else {})
    except ValueError as error:
        raise ConfigError(f"spac: tree_shape={brief(spec)} (--spac-tree-shape): {error}") from None
    return shape, found.get("depth", 0), found.get("width", 0)


def most_nodes(spec: str) -> int:
    """Returns the most nodes of a tree of this shape, of a list of paths those that it has; raises as ``parse``."""
    shape, depth, width = _split(spec)
    return min(MOST_NODES, _most(depth, width)) if shape in _NAMES else StaticShape.of_paths(shape).nodes


def _most(depth: int, width: int) -> int:
    return width + (depth - 1) * width**2


def parse(nodes: int, spec: str) -> TreeShape:
    """The shape that the knobs ``tree`` and ``tree_shape`` describe.

    Args:
        spec: ``dynamic``, ``static``, either with ``@depth=6@width=8`` (most levels, and most children per node), or a
            list of paths.

    Raises:
        ConfigError: it is none of these, or has another number of nodes.
    """
    shape, depth, width = _split(spec)
    problem = f"spac: tree={nodes} (--spac-tree): "
    if shape == "dynamic":
        if (most := _most(depth, width)) < nodes:
            raise ConfigError.refused(
                f"{problem}{depth} levels of at most {width} expanded nodes with {width} children have {most}",
                _LARGER,
                use(tree=most) if most > 1 else drop("tree"),
            )
        return DynamicShape(nodes, depth, width, width)
    found = StaticShape.of_size(nodes, depth, width) if shape == "static" else StaticShape.of_paths(shape)
    if found.nodes != nodes:
        raise ConfigError.refused(
            f"{problem}the shape has {found.nodes} nodes", _LARGER if shape == "static" else use(tree=found.nodes)
        )
    return found
