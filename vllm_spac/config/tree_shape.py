"""The shape of draft trees: which candidates of a level are expanded, and which are verified in the end."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_spac import components
from vllm_spac.components import Argument, filled
from vllm_spac.errors import ConfigError, Remedy, drop, use

MOST_NODES = 255
CHAINS = "0"
_ARGUMENTS = {
    "depth": Argument(6, (1, 16)),
    "width": Argument(8, (1, 64)),
}
_HELP = f"use a number of draft tokens up to {MOST_NODES} (16), or {CHAINS}"
_LARGER = Remedy("raise depth or width of --spac-tree", {"tree": None})


@dataclass(frozen=True)
class TreeShape:
    """How candidates become a tree, EAGLE-2's: its nodes are the most probable, by the drafter's joint probabilities.

    Candidates are drawn level by level: ``width`` for each expanded node.
    """

    nodes: int  # draft tokens of a whole tree (n)
    depth: int = 6  # levels, i.e. forwards of the drafter
    width: int = 8  # candidates drawn per expanded node
    expanded: int = 8  # most nodes that are expanded in a level

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
        if level >= self.depth:
            return torch.empty(len(logp), 0, dtype=torch.long, device=logp.device)
        best = logp.sort(dim=1, descending=True, stable=True)
        count = self.expanded if least is None else int((best.values > least[:, None]).sum(1).max())
        return best.indices[:, : min(count, self.expanded)].sort(dim=1).values

    def order(self, logp: Tensor) -> Tensor:
        """Chooses the candidates that are verified.

        Args:
            logp: joint log-probability of each candidate of all levels, [requests, candidates].

        Returns:
            int64 [requests, nodes], parents before children, the most probable first.
        """
        # A child is never more probable than its parent, which was drawn before it: a stable sort keeps this order.
        return logp.sort(dim=1, descending=True, stable=True).indices[:, : self.nodes]


def parse(spec: str) -> TreeShape | None:
    """The shape that the knob ``tree`` describes; None: chains.

    Args:
        spec: ``0``, or a number of nodes, perhaps with ``@depth=6@width=8`` (most levels, and most children per node).

    Raises:
        ValueError: it is none of these, or no tree of this size has so many nodes.
    """
    count, given = components.parse(spec)
    if not re.fullmatch(r"[0-9]{1,3}", count) or (nodes := int(count)) > MOST_NODES:
        raise ValueError(_HELP)
    found = filled(count, given, _ARGUMENTS if nodes else {})
    if not nodes:
        return None
    if nodes == 1:
        raise ConfigError.refused("a tree of one token is a chain", use(tree=2).but(" or more"), drop("tree"))
    depth, width = found["depth"], found["width"]
    if (most := width + (depth - 1) * width**2) < nodes:
        problem = f"{depth} levels of at most {width} expanded nodes with {width} children have {most}"
        smaller = use(tree=components.written(str(most), given)) if most > 1 else drop("tree")
        raise ConfigError.refused(problem, _LARGER, smaller)
    return TreeShape(nodes, depth, width, width)


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
        return [CHAINS, "@".join(["N", *(f"{name}=..." for name in _ARGUMENTS)])]
