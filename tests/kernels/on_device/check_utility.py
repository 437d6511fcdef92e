"""``utility`` against its twin, bit for bit over many steps: a boundary near an integer would tell a fused product."""

import pytest
import torch
from vllm_spac.kernels import reference
from vllm_spac.kernels.utility import update_utility


def start(shape, gamma: int = 8, device: str = "cpu") -> list[torch.Tensor]:
    """last, score, up, down as Algorithm 1 starts."""
    zeros = torch.zeros(shape, dtype=torch.int32, device=device)
    boundary = torch.full(shape, float(gamma // 2), dtype=torch.float64, device=device)
    return [zeros, zeros.clone(), boundary, boundary.clone()]


@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize(("shape", "lam"), [((3, 100), 0.1), ((7,), 0.5), ((1, 1), 1.0)])
def test_follows_the_twin(device, shape, lam, literal):
    """300 experts: more than one block. Counts jump by anything up to gamma + 1."""
    rng = torch.Generator().manual_seed(0)
    ours, twins = start(shape, device=device), start(shape)
    for _ in range(60):
        counts = torch.randint(0, 10, shape, generator=rng, dtype=torch.int32)
        update_utility(counts.to(device), *ours, lam=lam, literal=literal)
        reference.update_utility(counts, *twins, lam=lam, literal=literal)
        assert all(torch.equal(left.cpu(), right) for left, right in zip(ours, twins, strict=True))
    assert twins[1].unique().numel() > 1 or shape == (1, 1), "scores must move"


def test_by_hand(device):
    """gamma = 8, K = 2: up at +4; the boundary follows; +3 still climbs, because it is floored; down; not below 0."""
    state = start((1,), device=device)
    said = []
    for count in (4, 4, 0, 3, 9, 9, 3, 0):
        update_utility(torch.tensor([count], dtype=torch.int32, device=device), *state, highest=2)
        said.append((int(state[1]), round(float(state[2]), 6), round(float(state[3]), 6)))
    # deltas: 4, 0, -4, 3, 6, 0, -6, -3; 0.9 * 4 + 0.1 * 3 = 3.9, floored 3; 0.9 * 3.9 + 0.1 * 6 = 4.11
    assert said == [
        (1, 4.0, 4.0), (1, 4.0, 4.0), (0, 4.0, 4.0), (0, 3.9, 4.0), (1, 4.11, 4.0), (1, 4.11, 4.0), (0, 4.11, 4.2),
        (0, 4.11, 4.08),
    ]  # fmt: skip


def test_score_stays_within_its_limits(device):
    state = start((1,), gamma=2, device=device)
    for step in range(12):
        update_utility(torch.tensor([9 * (step % 2)], dtype=torch.int32, device=device), *state, highest=4, lam=0.0)
        assert int(state[1]) == (1 if step % 2 else 0)
    for count in range(1, 12):
        update_utility(torch.tensor([count], dtype=torch.int32, device=device), *state, highest=4, lam=0.0)
    assert int(state[1]) == 4


@pytest.mark.parametrize(("literal", "score"), [(True, 4), (False, 0)])
def test_an_idle_expert_climbs_only_as_printed(device, literal, score):
    """Why the literal variant is not the default: gamma = 1 starts at 0, and then standing still is a rise."""
    state = start((1,), gamma=1, device=device)
    for _ in range(5):
        update_utility(torch.tensor([0], dtype=torch.int32, device=device), *state, literal=literal)
    assert int(state[1]) == score


@pytest.mark.parametrize(("literal", "boundary"), [(True, 4.0), (False, 5.0)])
def test_only_a_real_boundary_can_rise(device, literal, boundary):
    """lam = 0.1: from 4, jumps of 9 make 4.5, which the floor takes back each time."""
    state = start((1,), device=device)
    for count in (9, 0) * 2:
        update_utility(torch.tensor([count], dtype=torch.int32, device=device), *state, literal=literal)
    assert float(state[2].round()) == boundary


def test_what_does_not_fit_is_refused(device):
    last, score, up, down = start((4,), device=device)
    counts = torch.zeros(4, dtype=torch.int32, device=device)
    for bad in (
        (counts.long(), last, score, up, down),
        (counts, last, score, up.float(), down),
        (counts[:3], last, score, up, down),
    ):
        with pytest.raises(AssertionError):
            update_utility(*bad)
    with pytest.raises(AssertionError, match="K = 0"):
        update_utility(counts, last, score, up, down, highest=0)
