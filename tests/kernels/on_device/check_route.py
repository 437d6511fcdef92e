"""``route`` against its twin: all integers must be equal."""

import pytest
import torch
from vllm_spac.kernels import route
from vllm_spac.kernels.reference import route as reference


def routing(rows: int, k: int, experts: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=rng)[:k] for _ in range(rows)])
    return ids.int(), torch.rand(rows, k, generator=rng) + 0.01


def check_align(device, ids, weights, experts, block_m):
    got = route.align(ids.to(device), weights.to(device), experts, block_m)
    expected = reference.align(ids, weights, experts, block_m)
    for name, left, right in zip(got._fields, got, expected, strict=True):
        assert torch.equal(left.cpu(), right), name
    return got


@pytest.mark.parametrize("block_m", [1, 4, 16])
@pytest.mark.parametrize(("rows", "k", "experts"), [(1, 8, 40), (9, 2, 6), (7, 3, 31), (350, 3, 8)])
def test_align(device, rows, k, experts, block_m):
    """31: with the bin for dead pairs exactly 32; 350 x 3: more pairs than one chunk holds."""
    check_align(device, *routing(rows, k, experts), experts, block_m)


def test_align_all_on_one_expert(device):
    ids, weights = routing(40, 1, 8)
    got = check_align(device, torch.full_like(ids, 7), weights, 8, 16)
    assert got.experts.tolist()[:3] == [7, 7, 7] and got.counts.tolist() == [0] * 7 + [40]


def test_align_leaves_out_padding_and_weightless_pairs(device):
    ids, weights = routing(12, 2, 6)
    ids[3], ids[5, 1], ids[6, 0], weights[7, 1] = -1, 6, 2**31 - 1, 0.0
    got = check_align(device, ids, weights, 6, 4)
    assert int(got.counts.sum()) == 24 - 5
    check_align(device, ids.long(), weights, 6, 4)


@pytest.mark.parametrize("live", [0, 5, 24, 1000])
def test_align_leaves_out_pairs_behind_the_live_ones(device, live):
    ids, weights = routing(12, 2, 6)
    bound = torch.tensor([live], dtype=torch.int32)
    got = route.align(ids.to(device), weights.to(device), 6, 4, live=bound.to(device))
    marked = torch.where(torch.arange(24).view(12, 2) < live, ids, -1)
    for expected in (reference.align(ids, weights, 6, 4, live=bound), reference.align(marked, weights, 6, 4)):
        assert all(torch.equal(left.cpu(), right) for left, right in zip(got, expected, strict=True))


def test_align_nothing(device):
    ids, weights = routing(3, 2, 6)
    got = check_align(device, torch.full_like(ids, -1), weights, 6, 4)
    assert (got.experts == -1).all() and (got.pairs == 6).all()


def test_block_bound_is_enough_and_reached():
    """Every routing of up to 7 pairs, by its counts; the bound is what the worst of them needs."""
    for experts in (1, 2, 3):
        for pairs in range(1, 8):
            for block_m in (1, 2, 3):
                counts = [[]]
                for _ in range(experts):
                    counts = [c + [n] for c in counts for n in range(pairs - sum(c) + 1)]
                worst = max(sum(-(-n // block_m) for n in c) for c in counts if sum(c) == pairs)
                assert route.block_bound(pairs, experts, block_m) == worst


def test_what_does_not_fit_is_refused(device):
    with pytest.raises(AssertionError, match="int32 or int64"):
        route.align(torch.zeros(1, 3, device=device), torch.zeros(1, 3, device=device), 3, 16)
