"""``rank``: all outputs equal to the twin's, bit for bit: the sums are exact in float64."""

import pytest
import torch
from vllm_spac.kernels import reference
from vllm_spac.kernels.rank import rank


def probabilities(rows: int, experts: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(rows, experts, generator=rng) * 2, -1)


def check(device, p, votes, *options, **named):
    got = rank(p.to(device), votes.to(device), *options, **named)
    expected = reference.rank(p, votes, *options, **named)
    for name, left, right in zip(got._fields, got, expected, strict=True):
        assert torch.equal(left.cpu(), right), name
    assert int(got.members.sum()) == int(got.size)
    return got


def all_vote(p):
    return torch.ones(len(p), dtype=torch.bool)


@pytest.mark.parametrize("cut", [{"budget": 8}, {"epsilon": 0.1}, {"budget": 9, "epsilon": 0.3}])
@pytest.mark.parametrize(("rows", "experts"), [(1, 9), (5, 60), (70, 130)])
def test_cuts(device, rows, experts, cut):
    """60 of 64 lanes, 130 of 256; 70 rows: more than one tile."""
    p = probabilities(rows, experts)
    votes = torch.arange(rows) % 3 != 1
    check(device, p, votes, 2, **cut)


def test_rows_without_a_vote_do_not_count(device):
    p = torch.tensor([[0.1, 0.2, 0.7], [0.9, 0.05, 0.05]])
    got = check(device, p, torch.tensor([True, False]), 1, 1)
    assert got.members.tolist() == [False, False, True]
    poisoned = torch.where(torch.tensor([[True], [False]]), p, float("nan"))
    assert rank(poisoned.to(device), torch.tensor([True, False], device=device), 1, 1).ranks.tolist() == [2, 1, 0]


def test_ties_go_to_the_lowest_id(device):
    p = torch.tensor([[0.25, 0.125, 0.25, 0.125, 0.25], [0.0, 0.125, 0.0, 0.125, 0.0]])
    got = check(device, p, all_vote(p), 1, 3)
    assert got.ranks.tolist() == [0, 1, 2, 3, 4] and got.members.tolist() == [True, True, True, False, False]


def test_order_of_rows_does_not_matter(device):
    p = probabilities(64, 32)
    votes = all_vote(p)
    whole = rank(p.to(device), votes.to(device), 2, epsilon=0.2)
    again = rank(p.flip(0).contiguous().to(device), votes.to(device), 2, epsilon=0.2)
    assert all(torch.equal(left, right) for left, right in zip(whole, again, strict=True))


@pytest.mark.parametrize(("epsilon", "size"), [(0.0, 4), (0.1, 3), (0.125, 2), (0.4, 2), (0.5, 1), (0.99, 1)])
def test_mass_target_takes_the_least_that_reaches_it(device, epsilon, size):
    """By hand: 4/8, 3/8, 1/16, 1/16. At 1/8 two reach the target exactly; expert 4 has no mass: never needed."""
    p = torch.tensor([[0.0625, 0.5, 0.375, 0.0625, 0.0]])
    assert int(check(device, p, all_vote(p), 1, epsilon=epsilon).size) == size


def test_mass_target_keeps_at_least_k(device):
    p = torch.tensor([[0.9, 0.05, 0.03, 0.02]])
    assert check(device, p, all_vote(p), 3, epsilon=0.5).members.tolist() == [True, True, True, False]


def test_without_a_vote(device):
    p = probabilities(3, 6)
    got = check(device, p, ~all_vote(p), 2, epsilon=0.1)
    assert got.members.tolist() == [True, True] + [False] * 4
    assert int(check(device, p, ~all_vote(p), 2, 4).size) == 4


@pytest.mark.parametrize("options", [(2,), (3, 2), (1, 7), (0, 2), (1, None, 1.0)])
def test_what_does_not_fit_is_refused(device, options):
    p = probabilities(3, 6).to(device)
    with pytest.raises(AssertionError):
        rank(p, all_vote(p).to(device), *options)
