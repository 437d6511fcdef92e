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
    change places: so requests go by their ids, and rows are compared token by token. All of it stays on the device on
    which it was computed, and nothing waits for that.

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
        self._tokens.append(tokens.to(states.device, torch.int64, copy=True))
        self._states.append(states.clone())

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
            tokens: int64 [rows], the token of each row, where the states are.
        """
        rows, dtype = len(tokens), self._states[0].dtype if self._states else None
        found = torch.full((rows + 1, *self._shape), self._unread, dtype=dtype, device=tokens.device)
        read = [(self._requests[name], part, drafts) for name, part, drafts in requests if name in self._requests]
        if self._states and read:
            # int64 [requests, forwards]: the row that a forward read, the last one of ``found`` for none.
            wanted = torch.full((len(read), len(self._tokens)), rows)
            for number, (_, part, drafts) in enumerate(read):
                width = min(drafts + 1, len(self._tokens))
                first = part.stop - drafts - 1
                wanted[number, :width] = torch.arange(first, first + width)
            places = torch.tensor([place for place, _, _ in read])
            there, places = (_sent(each, tokens.device) for each in (wanted, places))
            known = torch.stack(self._tokens, 1)[places]
            same = (known == tokens[there.clamp(max=rows - 1)]).cumprod(1).bool()
            found[there.where(same, rows).flatten()] = torch.stack(self._states, 1)[places].flatten(0, 1)
        self.begin(())
        return found[:-1]


def _sent(indices: Tensor, device: torch.device) -> Tensor:
    """Returns ``indices``, which are on the host, on ``device``; does not wait for it."""
    return indices if device.type == "cpu" else indices.pin_memory().to(device, non_blocking=True)
