"""``remap`` against its twins, and the rules that hold whatever the input: no -1, nothing outside the shortlist."""

import pytest
import torch
from vllm_spac.kernels import reference, remap

SHARE = {"rtol": 1e-5, "atol": 1e-6}  # sums of at most 8 float32 in another order, and one quotient


def case(rows: int, experts: int, k: int, kept: int, seed: int = 0):
    """p, weights, ids, members, budgeted; p apart by far more than any rounding, one row in four not budgeted."""
    rng = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(experts, generator=rng) for _ in range(rows)])
    p = torch.softmax(order * (6 / experts), -1)
    weights, ids = reference.topk(p.log(), k)
    members = torch.zeros(experts, dtype=torch.bool)
    members[torch.randperm(experts, generator=rng)[:kept]] = True
    return p, weights, ids, members, torch.arange(rows) % 4 != 3


def compare(got, expected):
    assert torch.equal(got[1].cpu(), expected[1])
    torch.testing.assert_close(got[0].cpu(), expected[0], rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(got[2].cpu(), expected[2], **SHARE)


def to(device, *tensors):
    return [tensor.to(device) for tensor in tensors]


@pytest.mark.parametrize(("rows", "experts", "k", "kept"), [(1, 8, 2, 4), (9, 60, 6, 20), (8, 128, 8, 8), (6, 5, 3, 5)])
def test_truncate(device, rows, experts, k, kept):
    """A shortlist of all drops nothing; 8 of 128 leave rows with nothing."""
    _, weights, ids, members, budgeted = case(rows, experts, k, kept)
    got = remap.truncate(*to(device, weights, ids, members, budgeted))
    compare(got, reference.truncate(weights, ids, members, budgeted))
    new_weights, new_ids, dropped = (tensor.cpu() for tensor in got)
    assert torch.equal(new_weights[~budgeted], weights[~budgeted]) and torch.equal(new_ids[~budgeted], ids[~budgeted])
    assert members[new_ids[budgeted].long()].all()
    stays = new_weights != 0
    assert torch.equal(new_weights[stays], weights[stays]), "weights are not computed anew"
    assert ((dropped > 0) == (~stays).any(1)).all()
    compare(remap.truncate(*to(device, weights, ids.long(), members, budgeted)), got)


def test_truncate_repeats_an_expert_of_the_row(device):
    """By hand. Row 0 keeps 4, so its dropped slot repeats 4; row 1 keeps nothing: S's lowest; row 2 is padding."""
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])
    ids = torch.tensor([[1, 4, 2], [1, 0, 3], [-1, -1, 9]]).int()
    members = torch.tensor([False, False, True, False, True])
    got = remap.truncate(*to(device, weights, ids, members, torch.tensor([True, True, False])))
    compare(got, reference.truncate(weights, ids, members, torch.tensor([True, True, False])))
    assert got[1].tolist() == [[4, 4, 2], [2, 2, 2], [2, 2, 2]]
    assert got[0].tolist() == [[0.0, 0.25, 0.25], [0.0] * 3, [0.0] * 3]
    assert got[2].tolist() == [0.5, 1.0, 0.0]


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("rows", "experts", "k", "kept"), [(1, 8, 2, 4), (9, 60, 6, 20), (8, 128, 8, 8), (6, 5, 3, 5)])
def test_substitute(device, rows, experts, k, kept, renormalize):
    p, _, ids, members, budgeted = case(rows, experts, k, kept)
    got = remap.substitute(*to(device, p, ids, members, budgeted), renormalize=renormalize, scale=1.5)
    compare(got, reference.substitute(p, ids, members, budgeted, renormalize=renormalize, scale=1.5))
    new_weights, new_ids, dropped = (tensor.cpu() for tensor in got)
    assert members[new_ids[budgeted].long()].all() and torch.equal(new_ids[~budgeted], ids[~budgeted])
    assert all(len(set(row)) == k for row in new_ids.tolist())
    if renormalize:
        torch.testing.assert_close(new_weights.sum(1), torch.full((rows,), 1.5))
    assert (dropped[~budgeted] == 0).all()


def test_substitute_with_everything_allowed_is_the_natural_choice(device):
    p, weights, ids, members, budgeted = case(9, 60, 6, 60)
    got = remap.substitute(*to(device, p, ids, members, budgeted))
    assert torch.equal(got[1].cpu(), ids) and (got[2] == 0).all()
    torch.testing.assert_close(got[0].cpu(), weights, rtol=2e-6, atol=1e-7)


def test_substitute_bias_cannot_lift_an_expert_into_the_shortlist(device):
    """By hand: expert 0 has the greatest bias and is outside; 3 beats 2 by its bias and weighs its own p."""
    p = torch.tensor([[0.5, 0.25, 0.15, 0.1]])
    ids, members = torch.tensor([[0, 1]]).int(), torch.tensor([False, True, True, True])
    bias, budgeted = torch.tensor([9.0, 0.0, 0.0, 0.1]), torch.tensor([True])
    got = remap.substitute(*to(device, p, ids, members, budgeted), bias=bias.to(device))
    compare(got, reference.substitute(p, ids, members, budgeted, bias=bias))
    assert got[1].tolist() == [[1, 3]]
    torch.testing.assert_close(got[0].cpu(), torch.tensor([[0.25, 0.1]]))
    torch.testing.assert_close(got[2].cpu(), torch.tensor([0.5 / 0.75]))


def test_substitute_with_a_shortlist_below_k(device):
    p, _, ids, members, _ = case(4, 8, 3, 2)
    got = remap.substitute(*to(device, p, ids, members, torch.ones(4, dtype=torch.bool)))
    compare(got, reference.substitute(p, ids, members, torch.ones(4, dtype=torch.bool)))
    assert members[got[1].cpu().long()].all() and (got[0][:, 2] == 0).all() and (got[0][:, :2] > 0).all()


def test_what_does_not_fit_is_refused(device):
    p, weights, ids, members, budgeted = to(device, *case(4, 8, 2, 4))
    with pytest.raises(AssertionError):
        remap.truncate(weights.double(), ids, members, budgeted)
    with pytest.raises(AssertionError):
        remap.truncate(weights, ids, members.int(), budgeted)
    with pytest.raises(AssertionError):
        remap.substitute(p[:, :4].contiguous(), ids, members, budgeted)
