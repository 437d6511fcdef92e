"""Samples of an imagined model whose layers follow from one another, and what predictors are made from."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vllm_spac.decisions.predictors._samples import SampleRecorder, Samples
from vllm_spac.decisions.predictors._trained import Gates, Material, Sizes

LAYERS, EXPERTS, TOP_K, WIDTH, WORDS, DRAFT = 4, 12, 3, 8, 20, 6
NAMES = tuple(f"model.layers.{layer}.mlp.experts" for layer in range(LAYERS))


def gates(seed: int = 0, bias: float = 0.0) -> Gates:
    """Random routers; the weights of the norms differ from 1 and from one another."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(LAYERS, EXPERTS, WIDTH, generator=generator)
    norm = 0.5 + torch.rand(LAYERS, WIDTH, generator=generator)
    return Gates(weight, bias * torch.randn(LAYERS, EXPERTS, generator=generator), norm)


def residuals(rows: int, seed: int, drift: float = 0.3) -> tuple[Tensor, Tensor]:
    """Tokens [rows], and residuals r_l [L, rows, d]: a vector of the token, which drifts from layer to layer."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(99))
    tokens = torch.randint(WORDS, (rows,), generator=generator)
    steps = drift * torch.randn(LAYERS, rows, WIDTH, generator=generator)
    return tokens, vectors[tokens] + steps.cumsum(0)


def normed(residual: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm without an epsilon."""
    return residual / residual.square().mean(-1, keepdim=True).sqrt() * weight


def states(residual: Tensor) -> Tensor:
    """What a drafter knows of rows with the residuals r_0 [rows, d]: a part, [rows, D]; nothing of the first row."""
    found = residual @ torch.randn(WIDTH, DRAFT, generator=torch.Generator().manual_seed(98))
    found[0] = float("nan")
    return found


def samples(texts: int = 6, rows: int = 40, seed: int = 1, model: Gates | None = None, drafter: bool = True) -> Samples:
    """Texts of ``rows`` rows each, as routers of ``model`` treat them."""
    model, width = model or gates(), DRAFT if drafter else 0
    recorder = SampleRecorder(LAYERS, EXPERTS, TOP_K, WIDTH, texts * rows, torch.float32, width)
    for text in range(texts):
        tokens, residual = residuals(rows, seed * 1000 + text)
        for layer in range(LAYERS):
            hidden = normed(residual[layer], model.norm[layer])
            logits = hidden @ model.weight[layer].T + model.bias[layer]
            weights, ids = logits.softmax(-1).topk(TOP_K)
            recorder.observe(layer, hidden, logits, weights / weights.sum(-1, keepdim=True), ids.int())
        recorder.end_text(tokens.tolist(), states(residual[0]) if drafter else None)
    found = recorder.result()
    return replace(found, draft_ids=copied(found, seed)) if drafter else found


def copied(samples: Samples, seed: int) -> Tensor:
    """What a copy of the model would choose, int [rows, L, k]: nearly the same; nothing of the first row."""
    noise = 0.1 * torch.randn(samples.logits.shape, generator=torch.Generator().manual_seed(seed))
    found = (samples.logits + noise).topk(TOP_K).indices.transpose(0, 1).contiguous()
    found[0] = -1
    return found


def material(
    reach: int = 2, model: Gates | None = None, seed: int = 1, texts: int = 6, drafter: bool = True
) -> Material:
    """What predictors are made from; the last text is one of ``others``."""
    model = model or gates()
    every = samples(texts, seed=seed, model=model, drafter=drafter)
    fitted = every.texts(0, texts - 1)
    sizes = Sizes(LAYERS, EXPERTS, TOP_K, WIDTH, reach, len(fitted.tokens.unique()), DRAFT if drafter else 0)
    outputs = 0.1 * torch.randn(LAYERS, EXPERTS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return Material(sizes, fitted, every.texts(texts - 1, texts), model, outputs)
