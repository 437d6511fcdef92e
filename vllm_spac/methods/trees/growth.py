"""Candidates of draft trees, drawn level by level, and the trees that are chosen from them (EAGLE-2).

On a CPU a level expands only what may still have a child in the tree, and none follows where nothing may: the trees
are the same, and take the drafter fewer forwards, over fewer nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_spac.config.tree_shape import TreeShape


class Chosen(NamedTuple):
    """The nodes of trees, one tree per row."""

    tokens: Tensor  # int64 [requests, n]
    parents: Tensor  # int64 [requests, n + 1], row that each row follows; -1 for the root, row 0
    logp: Tensor  # joint log-probability of each node, [requests, n]


class Growth:
    """Growing trees of several requests, all at the same level.

    Args:
        logp: log-probabilities of the drafter behind each request's last token, [requests, V]; -inf of tokens that it
            does not draft.
    """

    expanded: Tensor  # candidates that the next level continues, [requests, F], as positions among all candidates
    parent: Tensor  # member of the previous ``expanded`` that each one continues, [requests, F]; at level 1 the root, 0

    def __init__(self, shape: TreeShape, logp: Tensor) -> None:
        self._shape, self.level = shape, 1  # of the newest candidates
        values, tokens = _best(logp, shape.width)
        self._tokens, self._logp = [tokens], [values]
        self._parents = [torch.full_like(tokens, -1)]
        self._expand(values, tokens.new_zeros(tokens.shape))

    def _expand(self, logp: Tensor, source: Tensor) -> None:
        """Chooses what the next level continues among the newest candidates; ``source``: member each came from."""
        chosen = self._shape.expand(self.level, logp, self._least)
        before = sum(part.shape[1] for part in self._tokens[:-1])
        self.expanded, self.parent = chosen + before, source.gather(1, chosen)

    @property
    def _least(self) -> Tensor | None:
        """As ``TreeShape.expand`` takes it; not where the host would have to wait for a device to know how many."""
        if self._logp[0].device.type != "cpu":
            return None
        logp = torch.cat(self._logp, 1)
        return logp.topk(self._shape.nodes, 1).values[:, -1] if logp.shape[1] >= self._shape.nodes else None

    @property
    def over(self) -> bool:
        """Whether no level follows."""
        return self.expanded.shape[1] == 0

    @property
    def tokens(self) -> Tensor:
        """Token of each expanded candidate, int64 [requests, F]: the input of the drafter's next forward."""
        return torch.cat(self._tokens, 1).gather(1, self.expanded)

    @property
    def chances(self) -> Tensor:
        """The drafter's probability of each token on the path to each expanded candidate, given those before it.

        [requests, F, level]; 0 of tokens that it does not draft.
        """
        parents, logp = torch.cat(self._parents, 1), torch.cat(self._logp, 1)
        at, joint = self.expanded, []
        for _ in range(self.level):
            joint.append(logp.gather(1, at))
            at = parents.gather(1, at)
        joint.append(torch.zeros_like(joint[0]))
        along = torch.stack(joint[::-1], 2)
        return along.diff(dim=2).exp().nan_to_num(0.0)

    def add(self, logp: Tensor) -> None:
        """Adds a level; ``logp``: log-probabilities behind each expanded candidate, [requests, F, V]."""
        requests, front, vocabulary = logp.shape
        width = min(self._shape.width, vocabulary)
        values, tokens = _best(logp, width)
        joint = values + torch.cat(self._logp, 1).gather(1, self.expanded)[..., None]
        self._tokens.append(tokens.flatten(1))
        self._logp.append(joint.flatten(1))
        self._parents.append(self.expanded.repeat_interleave(width, 1))
        self.level += 1
        member = torch.arange(front, device=logp.device).repeat_interleave(width).expand(requests, -1)
        self._expand(joint.flatten(1), member)

    def chosen(self) -> Chosen:
        """The nodes of each request's tree, on the device of the logits."""
        tokens, parents, logp = (torch.cat(part, 1) for part in (self._tokens, self._parents, self._logp))
        order = self._shape.order(logp)
        row = tokens.new_zeros(len(tokens), tokens.shape[1] + 1)  # of each candidate; the last one is the root's
        row.scatter_(1, order, 1 + torch.arange(order.shape[1], device=order.device).expand_as(order))
        before = row.gather(1, parents.gather(1, order) % row.shape[1])
        root = before.new_full((len(before), 1), -1)
        return Chosen(tokens.gather(1, order), torch.cat([root, before], 1), logp.gather(1, order))


def _best(logp: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens, [..., width], and their log-probabilities.

    Where the drafter's are NaN, as behind a target whose hidden states have overflowed, they are -inf: NaN is larger
    than any number to a sort, and children would come before their parents.
    """
    values, tokens = logp.topk(min(width, logp.shape[-1]), dim=-1)
    return values.nan_to_num(nan=-torch.inf, neginf=-torch.inf), tokens
