"""What V1's drafters compute of each draft and do not return: states and, where they draft greedily, probabilities."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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

    def add(self, states: Tensor, logits: Tensor) -> None:
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
def observed(drafter: SpecDecodeBaseProposer, observers: Sequence[Callable[[Tensor, Tensor], None]]) -> Iterator[None]:
    """Context in which ``observers`` are called for each forward of ``drafter`` that it drafts a token from.

    They are passed its last hidden states, float [requests, D], and its logits, float [requests, V].
    """
    model: Any = drafter.model
    compute = model.compute_logits

    def computed(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        logits = compute(hidden_states, *args, **kwargs)
        for observe in observers:
            observe(hidden_states, logits)  # before a drafter divides the logits by the temperature, in place
        return logits

    model.compute_logits = computed
    try:
        yield
    finally:
        del model.compute_logits  # from this object; its class has it
