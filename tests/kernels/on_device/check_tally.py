"""Checks ``tally`` against its twin: equal integers; shares equal up to summation order."""

import math

import pytest
import torch
from vllm_spac.kernels.reference import tally as reference
from vllm_spac.kernels.tally import tally


def drawn(rows: int, k: int, experts: int):
    """(votes, natural, members, chosen): rows that do not vote hold anything."""
    rng = torch.Generator().manual_seed(rows)
    pairs = [
        (torch.rand(rows, k, generator=rng), torch.rand(rows, experts, generator=rng).topk(k).indices.int())
        for _ in range(2)
    ]
    votes = torch.rand(rows, generator=rng) < 0.7
    pairs[1][0][torch.rand(rows, k, generator=rng) < 0.3] = 0
    for weights, ids in pairs:
        weights[~votes], ids[~votes] = math.nan, -1
    return votes.double() / 4096, pairs[0], torch.rand(experts, generator=rng) < 0.2, pairs[1]


def moved(each, device):
    return tuple(part.to(device) for part in each) if isinstance(each, tuple) else each.to(device)


@pytest.mark.parametrize(("rows", "k", "experts"), [(1, 8, 40), (9, 2, 6), (7, 3, 31), (90, 6, 160), (600, 1, 8)])
def test_counts_are_added(device, rows, k, experts):
    given = drawn(rows, k, experts)
    counted = torch.tensor([5.0, 0.25, 2.0, 7.0, 3.0], dtype=torch.float64)
    expected, got = counted.clone(), counted.to(device)
    for _ in range(2):
        reference.tally(expected, *given)
        tally(got, *(moved(each, device) for each in given))
    assert torch.equal(got.cpu()[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])
    torch.testing.assert_close(got.cpu()[1], expected[1], rtol=1e-6, atol=0)
    voting = given[0] > 0
    assert expected[0] == 5 + 2 * voting.sum()
    assert expected[4] == 3 + 2 * (~given[2][given[1][1][voting].long()].any(1)).sum()


def test_nobody_votes(device):
    votes, *given = drawn(9, 2, 6)
    counted = torch.arange(5, dtype=torch.float64, device=device)
    tally(counted, torch.zeros_like(votes).to(device), *(moved(each, device) for each in given))
    assert counted.tolist() == [0, 1, 2, 3, 4]
