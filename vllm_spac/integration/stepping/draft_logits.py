"""The draft's probabilities of its tokens, which V1's drafters do not return where they draft greedily."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer


class DraftLogits:
    """Probabilities of the best token in each row of a draft model's logits, one forward after another.

    Attributes:
        best: float32 [requests] of each forward.
    """

    def __init__(self, drafter: SpecDecodeBaseProposer) -> None:
        self._drafter = drafter
        self.best: list[Tensor] = []

    def add(self, logits: Tensor) -> None:
        """Adds the logits of one forward, float [requests, V]."""
        self.best.append(logits.softmax(-1, dtype=torch.float32).amax(-1))

    def of(self, drafts: Tensor) -> Tensor | None:
        """Returns the draft's probability of each token of ``drafts``, int [requests, drafts], as float32.

        None if these drafts did not come one from each forward.
        """
        sampled = self._drafter.take_last_draft_probs()  # [requests, drafts, V]; None of greedy drafts
        if sampled is not None:
            return sampled.gather(2, drafts[:, :, None].long())[:, :, 0]
        if not self.best or len(self.best) != drafts.shape[1] or any(len(best) != len(drafts) for best in self.best):
            return None
        return torch.stack(self.best, 1)


@contextlib.contextmanager
def kept_logits(drafter: SpecDecodeBaseProposer) -> Iterator[DraftLogits]:
    """Context that observes the logits which ``drafter`` drafts from."""
    model: Any = drafter.model
    found, compute = DraftLogits(drafter), model.compute_logits

    def computed(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        logits = compute(hidden_states, *args, **kwargs)
        found.add(logits)  # before a drafter divides them by the temperature, in place
        return logits

    model.compute_logits = computed
    try:
        yield found
    finally:
        del model.compute_logits  # from this object; its class has it
