"""N-grams of the requests of a V1 batch beside its drafter: one step's, by vLLM's own search for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from vllm_spac.decisions.guard.lookups import Lookups

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

LONGEST, SHORTEST = 4, 2  # tokens of an n-gram


def compile_search() -> None:
    """Compiles vLLM's search, which takes a second: later that would count as the time of a step's drafts."""
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as search

    search(np.zeros(LONGEST, dtype=np.int32), SHORTEST, LONGEST, LONGEST + 1, 1)


def find_drafts(
    runner: GPUModelRunner, sampled: Tensor | list[list[int]], emitted: Sequence[list[int]]
) -> list[list[int]]:
    """Returns the tokens behind where each request's text had its last tokens before; empty where it had not.

    Args:
        sampled: as vLLM passes it to its drafter: a tensor before the batch has these tokens, a list after that.
        emitted: tokens of each request.
    """
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as search

    batch, most = runner.input_batch, runner.speculative_config.num_speculative_tokens
    ngrams: list[list[int]] = []
    for row, tokens in enumerate(emitted):
        text = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]]
        if isinstance(sampled, Tensor):
            text = np.concatenate((text, np.array(tokens, dtype=text.dtype)))
        known = tokens and search(text, SHORTEST, LONGEST, runner.max_model_len, most).tolist()
        ngrams.append(list(known))
    return ngrams


class StepLookups:
    """The n-grams of one step, and for which requests they are taken in place of what the drafter drafts.

    Args:
        ngrams: of each request of the batch, in its order.
    """

    def __init__(self, lookups: Lookups, requests: Sequence[str], ngrams: Sequence[Sequence[int]]) -> None:
        self._lookups, self._ngrams = lookups, dict(zip(requests, ngrams, strict=True))
        self.taken: Mapping[str, Sequence[int]] = {}

    def observe_first(self, requests: Sequence[str], computed: Tensor) -> None:
        """The drafter has run its first forward, which decides; ``computed``: its logits, float [requests, V]."""
        firsts = zip(requests, computed.argmax(-1).tolist(), strict=True)
        chooses = self._lookups.chooses
        self.taken = {id: self._ngrams[id] for id, first in firsts if chooses(id, self._ngrams[id], first)}

    def others(self, requests: Sequence[str]) -> list[int]:
        """Returns the places of the requests that the drafter goes on drafting for."""
        return [place for place, request in enumerate(requests) if request not in self.taken]
