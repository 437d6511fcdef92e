"""Perplexity, agreement and divergence against a naive twin."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from vllm_spac.tools.evaluation.scoring import Scores


def naive(logits, reference, following) -> dict:
    """Row by row, in float64."""
    losses, others, kl, agreed, right = [], [], [], [], []
    for ours, theirs, token in zip(logits.double(), reference.double(), following.tolist(), strict=True):
        p, q = theirs.softmax(0), ours.softmax(0)
        losses.append(-math.log(q[token]))
        others.append(-math.log(p[token]))
        kl.append(sum(float(a) * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True)))
        agreed.append(int(ours.argmax() == theirs.argmax()))
        right.append(int(ours.argmax()) == token)
    count = len(losses)
    return {
        "perplexity": math.exp(sum(losses) / count),
        "perplexity_change": math.exp(sum(losses) / count) / math.exp(sum(others) / count) - 1,
        "accuracy": sum(right) / count,
        "agreement": sum(agreed) / count,
        "kl": sum(kl) / count,
        "kl_error": statistics.pstdev(kl) / math.sqrt(count),
    }


def test_equals_the_naive_twin() -> None:
    torch.manual_seed(0)
    logits, reference, following = torch.randn(40, 7), torch.randn(40, 7), torch.randint(7, (40,))
    scores = Scores()
    for rows in (slice(0, 1), slice(1, 30), slice(30, 40)):
        scores.add(logits[rows], reference[rows], following[rows])
    found = scores.snapshot()
    assert found["tokens"] == 40
    for name, value in naive(logits, reference, following).items():
        assert found[name] == pytest.approx(value, rel=1e-5), name
    assert found["perplexity_change_error"] > 0 and found["agreement_error"] > 0 and found["accuracy_error"] > 0


def test_divergence_is_of_the_reference_from_the_other() -> None:
    """KL is not symmetric: the reference's probabilities weigh."""
    reference, other = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    scores = Scores()
    scores.add(other, reference, torch.tensor([0]))
    assert scores.snapshot()["kl"] == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-5)
