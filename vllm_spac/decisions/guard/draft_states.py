"""What was chosen for a drafter's tokens, and how probable it found them, until the next step verifies them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor


class DraftStates:
    """Keeps the experts that were chosen when a draft model read a token, by request.

    Its first forward reads the token that the target sampled last, each further one the draft of the one before: the
    last draft is never read. Between drafting and verifying, drafts may be cut or left for a later step, and requests
    change places: so requests go by their ids, and rows are compared token by token. All of it stays on the device on
    which it was computed, and nothing waits for that.

    Args:
        layers, k: experts of a token: k of each layer.
    """

    def __init__(self, layers: int, k: int) -> None:
        self._shape = layers, k
        self._requests: dict[str, int] = {}  # place in a forward
        self._tokens: list[Tensor] = []  # int64 [requests] of each forward
        self._states: list[Tensor] = []  # int64 [requests, layers, k]

    def begin(self, requests: Sequence[str]) -> None:
        """Forgets everything; ``requests`` are drafted for now."""
        self._requests = {request: place for place, request in enumerate(requests)}
        self._tokens.clear()
        self._states.clear()

    def add(self, tokens: Tensor, states: Tensor) -> None:
        """Keeps copies of the ``tokens`` that one forward read, int [rows], and of its ``states``."""
        self._tokens.append(tokens.to(states.device, torch.int64, copy=True))
        self._states.append(states.clone())

    @property
    def forwards(self) -> int:
        """Forwards since ``begin``."""
        return len(self._tokens)

    def known(self) -> Tensor:
        """Returns the experts of all forwards so far, int64 [rows, layers, k]; there is one."""
        return torch.cat(self._states)

    def take(self, requests: Sequence[tuple[str, slice, int]], tokens: Tensor) -> Tensor:
        """Returns the experts of the rows of a step, int64 [rows, layers, k], and forgets them; -1 of other rows.

        Args:
            requests: id, rows and number of drafts of each request; the drafts are its last rows.
            tokens: int64 [rows], the token of each row, where the states are.
        """
        rows = len(tokens)
        found = torch.full((rows + 1, *self._shape), -1, dtype=torch.int64, device=tokens.device)
        read = [(self._requests[name], part, drafts) for name, part, drafts in requests if name in self._requests]
        if self._states and read:
            places = torch.arange(len(self._tokens) * len(self._requests)).view(len(self._tokens), -1).T
            # int64 [requests, forwards]: the row of the step of each row that may have been read; behind them ``rows``.
            wanted = torch.full((len(read), places.shape[1]), rows)
            for number, (_, part, drafts) in enumerate(read):
                width, first = min(drafts + 1, places.shape[1]), part.stop - drafts - 1
                wanted[number, :width] = torch.arange(first, first + width)
            there = _sent(wanted, tokens.device)
            asked = _sent(torch.tensor([place for place, _, _ in read]), tokens.device)
            places = _sent(places, tokens.device)[asked]
            same = torch.cat(self._tokens)[places] == tokens[there.clamp(max=rows - 1)]
            same = same.cumprod(1).bool()  # from the first other token on, what the drafter read were other rows
            found[there.where(same, rows).flatten()] = self.known()[places].flatten(0, 1)
        self.begin(())
        return found[:-1]


def _sent(indices: Tensor, device: torch.device) -> Tensor:
    """Returns ``indices``, which are on the host, on ``device``; does not wait for it."""
    return indices if indices.device == device else indices.pin_memory().to(device, non_blocking=True)


PADDING = -1  # token id of a row that fills up a request's drafts; it is never accepted


class DraftProbabilities:
    """Keeps drafts with the probabilities that they are reached.

    Between drafting and verifying, drafts may be cut, padded or left for a later step, and requests change places: so
    requests go by their ids, and drafts are compared token by token.
    """

    def __init__(self) -> None:
        self._drafted: dict[str, tuple[list[int], list[float]]] = {}

    def save(
        self, requests: Sequence[str], tokens: Sequence[list[int]], probabilities: Sequence[Sequence[float]]
    ) -> None:
        """Keeps the drafts of ``requests``, until they are drafted for again.

        Args:
            tokens: token ids of each request's drafts, one after another.
            probabilities: the draft's probability of each token, given those before it.
        """
        for request, drafted, each in zip(requests, tokens, probabilities, strict=True):
            self._drafted[request] = drafted, list(accumulate(each, mul))

    def remove(self, requests: Iterable[str]) -> None:
        """Drops the drafts of requests that have finished."""
        for request in requests:
            self._drafted.pop(request, None)

    def weights(self, request: str, tokens: Sequence[int], rows: int) -> tuple[float, ...] | None:
        """Returns ``RequestRows.weights`` of a request: the probability that each row is reached.

        Args:
            tokens: the drafts that are verified, from some draft on ``PADDING``.
            rows: of the request; the drafts are the last.

        Returns:
            None without drafts, and if the probabilities of these drafts are not known.
        """
        if not tokens:
            return None
        drafts = list(tokens)
        real = drafts.index(PADDING) if PADDING in drafts else len(drafts)
        drafted, reached = self._drafted.get(request, ([], []))
        if drafts[:real] != drafted[:real] or not all(map(math.isfinite, reached[:real])):
            return None
        return (1.0,) * (rows - len(drafts)) + tuple(reached[:real]) + (0.0,) * (len(drafts) - real)
