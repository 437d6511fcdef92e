"""``route``: integers must be equal; weights differ by the exponential of the processor."""

import pytest
import torch
from vllm_spac.kernels import reference, route

# The exponential and the sum of N terms: a few units of 2**-24 each; measured apart are values 0.01 and more.
WEIGHTS = {"rtol": 2e-6, "atol": 1e-7}


def logits(rows: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Values a row, apart by 0.03 and more, so that no rounding can reorder them."""
    rng = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(experts, generator=rng) for _ in range(rows)])
    return (order * (8 / experts) - 4).float()


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring", route.SCORINGS)
@pytest.mark.parametrize(("rows", "experts", "k"), [(1, 8, 2), (7, 60, 6), (3, 128, 8), (2, 5, 5), (4, 1, 1)])
def test_topk(device, rows, experts, k, scoring, renormalize):
    """60 of 64 lanes; all experts; a single one."""
    given = logits(rows, experts)
    weights, ids = route.topk(given.to(device), k, scoring, renormalize, scale=2.5)
    expected_weights, expected = reference.topk(given, k, scoring, renormalize, scale=2.5)
    assert torch.equal(ids.cpu(), expected)
    torch.testing.assert_close(weights.cpu(), expected_weights, **WEIGHTS)
    if renormalize:
        torch.testing.assert_close(weights.sum(1).cpu(), torch.full((rows,), 2.5))


def test_topk_bias_chooses_and_does_not_weigh(device):
    given, bias = logits(5, 12), torch.linspace(1.0, -1.0, 12)
    for_kernel, expected = (function(given.to(at), 3, "sigmoid", bias=bias.to(at)) for function, at in
                            ((route.topk, device), (reference.topk, "cpu")))  # fmt: skip
    assert torch.equal(for_kernel[1].cpu(), expected[1])
    torch.testing.assert_close(for_kernel[0].cpu(), expected[0], **WEIGHTS)
    assert not torch.equal(expected[1], reference.topk(given, 3, "sigmoid")[1]), "the bias must change a choice"
    torch.testing.assert_close(expected[0], torch.sigmoid(given).gather(1, expected[1].long()))


def test_topk_ties_go_to_the_lowest_id(device):
    given = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0, 1.0]])
    for scoring in route.SCORINGS:
        assert route.topk(given.to(device), 5, scoring)[1].tolist() == [[1, 2, 4, 0, 3]]
        assert reference.topk(given, 5, scoring)[1].tolist() == [[1, 2, 4, 0, 3]]


def test_topk_never_leaves_the_experts(device):
    """A row that is NaN all over has nothing to choose: ids stay valid, weights are 0."""
    weights, ids = route.topk(torch.full((2, 5), float("nan"), device=device), 3)
    assert ids.tolist() == [[0, 0, 0]] * 2 and weights.tolist() == [[0.0] * 3] * 2
    given = torch.tensor([[0.0, float("nan"), 2.0]])
    assert route.topk(given.to(device), 2, "sigmoid")[1].tolist() == [[2, 0]]
    assert reference.topk(given, 2, "sigmoid")[1].tolist() == [[2, 0]]


def test_topk_half_precision(device):
    given = logits(4, 32).bfloat16()
    assert torch.equal(route.topk(given.to(device), 4)[1].cpu(), reference.topk(given, 4)[1])


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
    with pytest.raises(AssertionError, match="k = 4 of 3 experts"):
        route.topk(torch.zeros(1, 3, device=device), 4)
    with pytest.raises(AssertionError, match="noaux.*softmax"):
        route.topk(torch.zeros(1, 3, device=device), 1, "noaux")
    with pytest.raises(AssertionError, match="int32 or int64"):
        route.align(torch.zeros(1, 3, device=device), torch.zeros(1, 3, device=device), 3, 16)
