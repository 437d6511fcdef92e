"""The losses that make the ``local`` toy model's routing local, and the text that it is trained on."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "toy"))
import corpus
import domains
import locality
import streams
from nets import Shape, SparseMLP

EXPERTS = 16


def routed(*experts: int) -> torch.Tensor:
    """Probabilities of tokens that each select one expert."""
    return torch.nn.functional.one_hot(torch.tensor(experts), EXPERTS).float()


def test_entropy_of_a_mean_is_that_of_the_tokens_in_it():
    p = routed(*[0, 1] * 4, *[2] * 8)  # two windows of eight
    assert locality.mean_entropy(p, 2, 8).flatten().tolist() == pytest.approx([math.log(2), 0.0], abs=1e-5)
    assert locality.mean_entropy(p, 2, 4).shape == (2, 5), "each run of four tokens of each window"


@given(st.integers(0, 2**31), st.sampled_from([1, 2, 4]))
def test_entropy_of_means_equals_a_loop(seed: int, windows: int):
    p = torch.rand(windows * 8, EXPERTS, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    naive = [
        locality.entropy(torch.stack([row for row in window[start : start + 3]]).mean(0))
        for window in p.view(windows, 8, EXPERTS)
        for start in range(6)
    ]
    assert torch.allclose(locality.mean_entropy(p, windows, 3).flatten(), torch.stack(naive), atol=1e-4)


def test_local_routing_costs_less_than_routing_that_jumps():
    """Both use the same experts as often, with the same entropy per token."""
    p = torch.rand(64, 40).softmax(-1)
    local = torch.zeros(128, 80)
    local[:64, :40], local[64:, 40:] = p, p
    jumping = local[torch.arange(128).view(2, 64).T.flatten()]
    assert locality.shape_loss(local, 2) < locality.shape_loss(jumping, 2)


def test_the_losses_are_zero_at_their_targets():
    even = round(math.exp(locality.FAR_TARGET))  # as many experts, evenly: the entropy of any mean of them
    p = torch.full((64, 2 * even), 0.0)
    p[:, :even] = 1 / even
    off = abs(locality.FAR_TARGET - math.log(even)), abs(locality.NEAR_TARGET - math.log(even))
    expected = locality.FAR_WEIGHT * off[0] + locality.NEAR_WEIGHT * off[1]
    assert locality.shape_loss(p, 1).item() == pytest.approx(expected, abs=1e-4)


def test_tokens_that_select_one_expert_are_pushed_apart():
    """Their entropy is 0, and so is that of their means."""
    terms = ((locality.NEAR_WEIGHT, locality.NEAR_TARGET), (locality.FAR_WEIGHT, locality.FAR_TARGET))
    expected = sum(weight * target for weight, target in terms) + locality.TOKEN_WEIGHT * locality.TOKEN_BOUND
    assert locality.shape_loss(routed(*[3] * 64), 1).item() == pytest.approx(expected, abs=1e-4)


def test_balance_pushes_away_from_experts_that_are_used_much():
    balance = locality.Balance()
    logits = torch.zeros(32, EXPERTS)
    logits[:, 0] = 3.0
    logits.requires_grad_()
    p = logits.softmax(-1)
    chosen = p.topk(2).indices
    chosen[:, 1] = 1
    balance.loss([p], [chosen]).backward()
    push = logits.grad.sum(0)
    assert push[0] > 0 and (push[2:] < 0).all(), "gradient descent takes from 0 and gives to the unused"


def test_balance_is_zero_for_even_use():
    even = [torch.full((EXPERTS, EXPERTS), 1 / EXPERTS)], [torch.arange(EXPERTS)[:, None]]
    assert locality.Balance().loss(*even).item() == pytest.approx(0.0, abs=1e-5)


def test_balance_is_stronger_while_an_expert_is_unused():
    def push(chosen: torch.Tensor) -> float:
        p = torch.full((64, EXPERTS), 1 / EXPERTS, requires_grad=True)
        locality.Balance().loss([p], [chosen]).backward()
        return (p.grad[:, 0] - p.grad[:, 1]).abs().mean().item()

    chosen = torch.arange(64)[:, None] % (EXPERTS - 1)  # the last expert is unused
    chosen[:8] = 0
    all_used = chosen.clone()
    all_used[-1] = EXPERTS - 1
    assert push(chosen) > 4 * push(all_used) > 0, "between experts 0 and 1, which are used as before"


def test_an_unused_expert_takes_tokens_of_the_busiest():
    torch.manual_seed(0)
    mlp = SparseMLP(Shape(hidden=32, experts=EXPERTS, top_k=1, intermediate=8))
    with torch.no_grad():
        mlp.gate.weight.zero_()
        mlp.gate.weight[5] = torch.ones(32)
    x = 1 + torch.randn(512, 32)
    mlp(x)
    assert (mlp.chosen == 5).float().mean() > 0.9
    use = torch.full((1, EXPERTS), 1 / EXPERTS)
    use[0, 7], use[0, 5] = 0.0, 0.9
    assert locality.share_busy_experts([mlp], use) == 1
    assert use[0, 5] == use[0, 7] == pytest.approx(0.45)
    mlp(x)
    each = [(mlp.chosen == expert).float().mean().item() for expert in (5, 7)]
    assert min(each) > 0.02, "each has the tokens on its side"
    assert torch.equal(mlp.w13[5], mlp.w13[7]) and torch.equal(mlp.w2[5], mlp.w2[7])
    assert locality.share_busy_experts([mlp], use) == 0


def test_every_kind_of_text_is_installed_and_held_out_text_is_disjoint():
    for kind, paths in domains.files().items():
        held = [path for path in paths if domains.is_held_out(kind, path)]
        names = {path.name for path in held}
        assert held and len(held) < len(paths), kind
        if kind != domains.LIBRARY:  # a copy of a file has its name
            assert not names.intersection(path.name for path in paths if not domains.is_held_out(kind, path))


def test_the_library_is_held_out_as_for_the_flat_model():
    """So that both models are compared, and prompted, with text that neither saw."""
    library = domains.files()[domains.LIBRARY]
    assert {p for p in library if domains.is_held_out(domains.LIBRARY, p)} == {
        p for p in corpus.files() if corpus.is_held_out(p)
    }


def test_windows_are_of_one_kind_of_text_each_in_the_intended_shares():
    texts = {domains.LIBRARY: np.zeros(5_000, np.int64), "few": np.full(100, 1), "many": np.full(10_000, 2)}
    stream = streams.mixed(texts, 1000, 8, seed=0)
    windows = next(stream)
    assert windows.shape == (1000, 9) and windows.dtype == torch.int64
    assert (windows == windows[:, :1]).all()
    shares = torch.bincount(windows[:, 0]) / 1000
    assert shares[0] == pytest.approx(streams.LIBRARY_SHARE, abs=0.05)
    assert shares[2] == pytest.approx(10 * shares[1].item(), rel=0.4), "square root of 100 times the tokens"
    assert (next(streams.mixed({domains.LIBRARY: texts[domains.LIBRARY]}, 4, 8, seed=0)) == 0).all()
