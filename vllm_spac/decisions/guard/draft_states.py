"""What the drafter computed for each token that it read, until the step that verifies its drafts begins. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class DraftStates:
    """Keeps what a drafter computed when it read a token, by request: its hidden state, or what its routers chose.

    Its first forward reads the token that the target sampled last, each further one the draft of the one before: the
    last draft is never read. Between drafting and verifying, drafts may be cut or left for a later step, and requests
    change places: so requests go by their ids, and rows are compared token by token.

    Args:
        shape: of what it keeps for a token: [D] for a state, [layers, k] for experts.
        unread: in place of it, for a token that was not read; its type is that of the others if there are none.
    """

    def __init__(self, *shape: int, unread: float = math.nan) -> None:
        self._shape, self._unread = shape, unread
        self._requests: dict[str, int] = {}  # place in a forward
        self._tokens: list[Tensor] = []  # int64 [requests] of each forward
        self._states: list[Tensor] = []  # [requests, *shape]

    def begin(self, requests: Sequence[str]) -> None:
        """Forgets everything; ``requests`` are drafted for now."""
        self._requests = {request: place for place, request in enumerate(requests)}
        self._tokens.clear()
        self._states.clear()

    def add(self, tokens: Tensor, states: Tensor) -> None:
        """Keeps copies of the ``tokens`` that one forward read, int [requests], and of its ``states``."""
        self._tokens.append(tokens.to("cpu", torch.int64, copy=True))
        self._states.append(states.to("cpu", copy=True))

    @property
    def forwards(self) -> int:
        """Forwards since ``begin``."""
        return len(self._tokens)

    def known(self) -> tuple[Tensor, Tensor]:
        """Returns the tokens, int64 [rows], and states, [rows, *shape], of all forwards so far; there is one."""
        return torch.cat(self._tokens), torch.cat(self._states)

    def take(self, requests: Sequence[tuple[str, slice, int]], tokens: Tensor) -> Tensor:
        """Returns the states of the rows of a step, [rows, *shape], and forgets them; ``unread`` for other rows.

        Args:
            requests: id, rows and number of drafts of each request; the drafts are its last rows.
            tokens: int64 [rows], the token of each row.
        """
        dtype = self._states[0].dtype if self._states else None
        found = torch.full((len(tokens), *self._shape), self._unread, dtype=dtype)
        for request, rows, drafts in requests:
            place = self._requests.get(request)
            if place is None:
                continue
            first = rows.stop - drafts - 1
            for row, read, states in zip(range(first, rows.stop), self._tokens, self._states, strict=False):
                if read[place] != tokens[row]:
                    break
                found[row] = states[place]
        self.begin(())
        return found
