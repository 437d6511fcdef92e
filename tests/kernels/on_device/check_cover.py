"""Checks ``cover`` against its twin: equal experts; bit-equal weights, except where they are divided by a sum."""

import math

import pytest
import torch
from vllm_spac.kernels.cover import cover
from vllm_spac.kernels.reference import cover as reference

SHAPES = [(1, 8, 40), (9, 2, 6), (4, 3, 31)]


def drawn(rows: int, k: int, experts: int, coarse: bool = False):
    """(probs, weights, ids, votes): rows with the vote 0 hold anything; ``coarse`` scores are often equal."""
    rng = torch.Generator().manual_seed(rows)
    logits = 2 * torch.randn(rows, experts, generator=rng)
    probs = (logits.round() if coarse else logits).softmax(1)
    weights, ids = probs.topk(k)
    votes = torch.rand(rows, generator=rng) < 0.8
    votes[0] = True
    weights[~votes], ids[~votes], probs[~votes] = math.nan, -1, 0
    return probs, weights, ids.int(), votes.double().mul_(torch.tensor([1.0, 2**-12]).repeat(rows)[:rows])


def some(experts: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(members, best)"""
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(count))
    return torch.zeros(experts, dtype=torch.bool).scatter(0, order[:count], True), order[0]


def check(device, *given, equal=True, **options):
    expected = reference.cover(*given, **options)
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    got = cover(*(each.to(device) if isinstance(each, torch.Tensor) else each for each in given), **options)
    assert [each.dtype for each in got] == [each.dtype for each in given[1:3]]
    assert torch.equal(got[1].cpu(), expected[1])
    exact = {"rtol": 0, "atol": 0} if equal else {"rtol": 1e-6, "atol": 0}
    torch.testing.assert_close(got[0].cpu(), expected[0], equal_nan=True, **exact)
    return got


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("rows", "k", "experts"), SHAPES)
def test_truncation(device, rows, k, experts, coarse):
    for count in (1, experts // 2, experts):
        check(device, *drawn(rows, k, experts, coarse), *some(experts, count), False)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(("rows", "k", "experts"), SHAPES)
def test_substitution(device, rows, k, experts, coarse, biased, renormalize):
    bias = torch.randn(experts, generator=torch.Generator().manual_seed(0)) if biased else None
    for count in (k, (k + experts) // 2, experts):
        options = {"renormalize": renormalize, "bias": bias, "scale": 2.5, "equal": not renormalize}
        check(device, *drawn(rows, k, experts, coarse), *some(experts, count), True, **options)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(
    ("rows", "k", "experts", "groups", "top_groups"), [(9, 2, 6, 3, 1), (3, 4, 40, 5, 2), (2, 2, 16, 8, 8)]
)
def test_substitution_in_groups(device, rows, k, experts, groups, top_groups, coarse, biased):
    bias = torch.randn(experts, generator=torch.Generator().manual_seed(0)) if biased else None
    for count in (k, (k + experts) // 2, experts):
        options = {"groups": groups, "top_groups": top_groups, "bias": bias}
        check(device, *drawn(rows, k, experts, coarse), *some(experts, count), True, **options)


@pytest.mark.parametrize("substitute", [False, True])
def test_who_keeps_all_and_who_does_not_vote_is_unchanged(device, substitute):
    probs, weights, ids, votes = drawn(9, 2, 6)
    everyone, best = some(6, 6)
    for members, voting in ((everyone, votes), (some(6, 2)[0], torch.zeros_like(votes))):
        got = check(device, probs, weights, ids, voting, members, best, substitute, True, scale=3.0)
        assert torch.equal(got[0].cpu().view(torch.int32), weights.view(torch.int32)) and torch.equal(got[1].cpu(), ids)


def test_scores_that_underflowed_stay_0(device):
    probs = torch.tensor([[1.0, 0, 0, 0]])
    given = probs, probs[:, :2].contiguous(), torch.tensor([[0, 1]]), torch.ones(1).double()
    members = torch.tensor([False, True, False, True])
    got = check(device, *given, members, torch.tensor(3), True, True)
    assert got[0].tolist() == [[0, 0]] and got[1].tolist() == [[1, 3]]


def test_no_row(device):
    check(device, *(each[:0] for each in drawn(4, 2, 6)), *some(6, 3), True)
