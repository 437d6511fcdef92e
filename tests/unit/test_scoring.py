"""What the worker keeps while texts are read: hidden states to score. Without vLLM."""

from __future__ import annotations

import pytest
import torch

from vllm_spac.errors import SpacError
from vllm_spac.tools.evaluation.scoring import Scoring

VOCABULARY, EXPERTS, TOP_K = 11, 8, 2


class Parrot(torch.nn.Module):
    """Says the next token is the one it was given plus one; with an error once it is asked to err."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong = 0.0

    def forward(self, ids):
        states = torch.nn.functional.one_hot((ids + 1) % VOCABULARY, VOCABULARY).float()
        return states + self.wrong * torch.nn.functional.one_hot(ids % 3, VOCABULARY), ["layers for a draft"]

    def compute_logits(self, states):
        return 10 * states


def read(model: Parrot, scoring: Scoring, texts, chunk: int = 99) -> dict:
    scoring.begin(reference=not model.wrong)
    for ids in texts:
        for start in range(0, len(ids), chunk):
            model(torch.tensor(ids[start : start + chunk]))
        scoring.end_text(ids)
    return scoring.end()


def test_the_next_token_is_the_next_token() -> None:
    model = Parrot()
    scoring, texts = Scoring(model), [list(range(5)), [3, 4]]
    found = read(model, scoring, texts)
    assert found["tokens"] == 5 and found["perplexity"] == pytest.approx(1.0, abs=0.01) and found["kl"] == 0
    assert read(model, scoring, [[4, 3, 2]])["perplexity"] > 1000


@pytest.mark.parametrize("chunk", [1, 70, 99])
def test_each_text_is_compared_with_itself(chunk: int) -> None:
    """Texts of more rows than a block, read in any chunks, right ones and a wrong model."""
    model = Parrot()
    scoring, texts = Scoring(model), [[i % 11 for i in range(140)], [5, 6, 7]]
    read(model, scoring, texts, chunk)
    model.wrong = 1.5
    found = read(model, scoring, texts, chunk)
    # The wrong one prefers ids % 3, which is the reference's choice only where (id + 1) % 11 == id % 3.
    rows = [i for text in texts for i in text[:-1]]
    assert found["agreement"] == pytest.approx(sum((i + 1) % 11 == i % 3 for i in rows) / len(rows))
    follows = [(i, j) for text in texts for i, j in zip(text, text[1:], strict=False)]
    assert found["accuracy"] == pytest.approx(sum(i % 3 == j for i, j in follows) / len(follows))
    assert found["kl"] > 1 and found["perplexity_change"] > 1
    assert not model._forward_hooks, "nothing is kept when nobody asks"


def test_rows_that_are_missing_are_noticed() -> None:
    model = Parrot()
    scoring = Scoring(model)
    scoring.begin(reference=True)
    model(torch.arange(3))
    with pytest.raises(SpacError, match="3 rows for a text of 4"):
        scoring.end_text([0, 1, 2, 3])
