"""OD-MoE's shadow beside a model of random weights, against a plain reading of the same texts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.papers import shadow

CONFIG = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
CONFIG |= {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
CONFIG |= {"n_routed_experts": 8, "num_experts_per_tok": 2}
PROMPT, NEW = 4, 12
NEVER = shadow.NEVER


def weights(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens": (50, 32), "lm_head": (50, 32), "model.norm": (32,)}
    for number in range(3):
        layer = f"model.layers.{number}."
        shapes |= {f"{layer}{name}": (32,) for name in ("input_layernorm", "post_attention_layernorm")}
        attention = {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32)}
        shapes |= {f"{layer}self_attn.{part}_proj": shape for part, shape in attention.items()}
        shapes[f"{layer}mlp.gate"] = (8, 32)
        for expert in [*(f"experts.{each}" for each in range(8)), "shared_experts"]:
            mlp = f"{layer}mlp.{expert}."
            shapes |= {f"{mlp}gate_proj": (16, 32), f"{mlp}up_proj": (16, 32), f"{mlp}down_proj": (32, 16)}
    return {f"{name}.weight": torch.randn(*shape, generator=draw) / 4 for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def beside():
    """A model, a copy whose weights are off by a fifth, and two texts that the model wrote."""
    given, draw = weights(0), torch.Generator().manual_seed(9)
    model = shadow.MoE(given, CONFIG, temperature=0.5)
    copy = shadow.MoE(
        given, CONFIG, temperature=0.5, rounded=lambda w: w + w.std() / 5 * torch.randn(w.shape, generator=draw)
    )
    return model, copy, shadow.written(model, torch.tensor([[1, 2, 3, 4], [9, 8, 7, 6]]), NEW, [])


def share(experts: Tensor, theirs) -> Tensor:
    """Of experts [L, q, n, k], those that the model chose."""
    return (experts[..., :, None] == theirs.chosen[..., None, :]).any(-1).float().mean((0, 3))


def whole(moe, ids: Tensor) -> Tensor:
    """Experts behind the prompt, all tokens read at once."""
    return moe.read(ids, moe.empty(*ids.shape), 0)[1][:, :, PROMPT:]


def test_token_by_token_is_as_at_once(beside) -> None:
    model, _, theirs = beside
    assert torch.equal(whole(model, theirs.ids), theirs.chosen)
    for place in range(PROMPT, PROMPT + NEW):
        said, _ = model.read(theirs.ids[:, :place], model.empty(2, place), 0)
        assert torch.equal(said, theirs.ids[:, place])


def test_noise_is_sampling_by_place() -> None:
    """Over places, tokens are as frequent as the softmax of the logits says; the same place gives the same again."""
    logits = torch.tensor([[2.0, 0.0, -1.0]])
    drawn = torch.cat([shadow.sampled(logits, 2.0, place) for place in range(4000)])
    assert torch.equal(drawn[:100], torch.cat([shadow.sampled(logits, 2.0, place) for place in range(100)]))
    assert drawn.bincount(minlength=3) / 4000 == pytest.approx((logits[0] / 2).softmax(0), abs=0.03)


def test_the_model_is_its_own_perfect_shadow(beside) -> None:
    model, _, theirs = beside
    pairs = [shadow.Pair(tokens, kv) for tokens in (1, 3, NEVER) for kv in (1, 4, NEVER)]
    assert shadow.followed(model, theirs, PROMPT, pairs).min() == 1


def test_never_aligned_is_the_copy_s_own_text(beside) -> None:
    _, copy, theirs = beside
    own = shadow.written(copy, theirs.ids[:, :PROMPT], NEW, [])
    assert not torch.equal(own.ids, theirs.ids)
    [found] = shadow.followed(copy, theirs, PROMPT, [shadow.Pair(NEVER, NEVER)])
    assert torch.equal(found, share(own.chosen, theirs))


def test_tokens_alone_are_the_model_s_text_read_by_the_copy(beside) -> None:
    _, copy, theirs = beside
    [found] = shadow.followed(copy, theirs, PROMPT, [shadow.Pair(1, NEVER)])
    assert torch.equal(found, share(whole(copy, theirs.ids), theirs))


@pytest.mark.parametrize(("tokens", "kv"), [(1, 1), (1, 3), (2, 3), (NEVER, 2), (5, 1)])
def test_periods_apart(beside, tokens: int, kv: int) -> None:
    """One text, one place after another; keys and values as lists, replaced whole where they are aligned."""
    _, copy, theirs = beside
    found = shadow.followed(copy, theirs, PROMPT, [shadow.Pair(NEVER, NEVER), shadow.Pair(tokens, kv)])[1]
    kept = copy.empty(2, PROMPT + NEW)
    own, _ = copy.read(theirs.ids[:, :PROMPT], kept, 0)
    for since in range(NEW):
        place = PROMPT + since
        if since % kv == 0:
            kept[:, :, :, :, :place] = theirs.kept[:, :, :, :, :place]
        token = theirs.ids[:, place] if since % tokens == 0 and tokens != NEVER else own
        own, chosen = copy.read(token[:, None], kept, place)
        right = (chosen[:, :, 0, :, None] == theirs.chosen[:, :, since, None]).any(-1).float().mean((0, 2))
        assert torch.equal(found[:, since], right), since


def test_recall_counts_to_the_end_of_each_text() -> None:
    named, counts = torch.zeros(2, 40), torch.ones(2, 40, dtype=torch.bool)
    named[0], counts[1, 36:] = 1, False
    named[1, 36:] = 1  # behind the end
    found = shadow.recalls(named, counts)
    assert found["recall"] == pytest.approx(40 / 76) and found["by_token"] == pytest.approx([0.5, 8 / 12])


def test_nf4_by_hand() -> None:
    """The greatest of 64 values is kept, the others go to the nearest of 16 steps."""
    block = torch.zeros(1, 64)
    block[0, :4] = torch.tensor([2.0, -0.4, 0.15, 0.2])
    assert shadow.nf4(block)[0, :5].tolist() == pytest.approx([2, 2 * -0.18477343, 2 * 0.0795803, 2 * 0.0795803, 0])


def test_int8_is_half_a_step_off_at_most() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    step = weight.abs().amax(-1, keepdim=True) / 127
    off = (shadow.int8(weight) - weight).abs() / step
    assert 0.4 < off.max() <= 0.501
