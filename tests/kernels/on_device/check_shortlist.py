"""Checks ``shortlist`` against its twin: the same members and the same best, for any ties."""

import pytest
import torch
from vllm_spac.kernels.reference import shortlist as reference
from vllm_spac.kernels.shortlist import shortlist

SIZES = [1, 7, 40]


def drawn(experts: int, seed: int, coarse: bool) -> torch.Tensor:
    """float64 [experts]; ``coarse`` ones are often equal, and some 0. Sums of either are exact."""
    rng = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 5 if coarse else 2**20, (experts,), generator=rng).double()
    return found / 16


def some(experts: int, seed: int = 0) -> torch.Tensor:
    """bool [experts]: those that rows selected."""
    return torch.rand(experts, generator=torch.Generator().manual_seed(seed)) < 0.4


def check(device, scores, selected, bound, held=None, share=None, **options) -> torch.Tensor:
    given = scores, selected, bound, held, share
    expected = reference.shortlist(*given, **options)
    got = shortlist(*(each if each is None else each.to(device) for each in given), **options)
    for left, right in zip(got, expected, strict=True):
        assert left.dtype == right.dtype and torch.equal(left.cpu(), right)
    return expected[0]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("experts", SIZES)
def test_a_number(device, experts, coarse, pairs):
    for bound in {1, (experts + 1) // 2, experts}:
        scores, selected = drawn(experts, bound, coarse), some(experts, bound)
        scores = torch.stack((scores, drawn(experts, 9, coarse))) if pairs else scores
        members = check(device, scores, selected, torch.tensor(bound))
        assert members.sum() == bound
        assert (members & selected).sum() == min(bound, selected.sum()), "selected ones first"


def test_the_second_score_decides_where_the_first_are_equal(device):
    scores = torch.tensor([[1, 2, 1, 2, 0], [5, 3, 7, 3, 9]]).double()
    for nobody in (torch.zeros(5, dtype=torch.bool), torch.ones(5, dtype=torch.bool)):
        assert check(device, scores, nobody, torch.tensor(3)).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("experts", SIZES)
def test_a_share_of_a_mass(device, experts, coarse):
    for share in (1e-9, 0.5, 0.98, 1.0):
        scores, held = drawn(experts, 1, coarse), drawn(experts, 2, coarse)
        least = min(3, experts)
        members = check(device, scores, some(experts), None, held, torch.tensor(share).double(), least=least)
        assert members.sum() >= (experts if share == 1.0 else least)


def test_no_mass(device):
    """Where nobody votes."""
    nothing = torch.zeros(8, dtype=torch.float64)
    members = check(device, nothing, nothing != 0, None, nothing, torch.tensor(0.5).double(), least=2)
    assert members.tolist() == [True] * 2 + [False] * 6


def test_layers_need_not_be_aligned(device):
    both, flags = drawn(14, 0, True).view(2, 7), some(14).view(2, 7)
    for scores, selected in zip(both, flags, strict=True):
        check(device, scores, selected, torch.tensor([3, 4])[1])
    members, _ = shortlist(both.to(device)[1], flags.to(device)[1], torch.tensor(4, device=device))
    assert torch.equal(members.cpu(), check(device, both[1], flags[1], torch.tensor(4)))


def test_what_does_not_fit_is_refused(device):
    none = torch.zeros(4, dtype=torch.bool, device=device)
    with pytest.raises(AssertionError):
        shortlist(torch.zeros(4, device=device), none, torch.tensor(2, device=device))
    with pytest.raises(AssertionError):
        shortlist(torch.zeros(4, device=device).double(), none, None)
    with pytest.raises(AssertionError):
        shortlist(torch.zeros(3, 4, device=device).double(), none, torch.tensor(2, device=device))
