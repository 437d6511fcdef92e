"""Samples of an imagined model whose layers follow from one another, and what predictors are made from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vllm_spac.decisions.predictors._samples import SampleRecorder, Samples
from vllm_spac.decisions.predictors._trained import Gates, Material, Sizes
from vllm_spac.decisions.predictors.base import DRAFTING, PredictorInputs, Signal

LAYERS, EXPERTS, TOP_K, WIDTH, WORDS = 4, 12, 3, 8, 20
NAMES = tuple(f"model.layers.{layer}.mlp.experts" for layer in range(LAYERS))


def gates(seed: int = 0, bias: float = 0.0) -> Gates:
    """Random routers; the weights of the norms differ from 1 and from one another."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(LAYERS, EXPERTS, WIDTH, generator=generator)
    norm = 0.5 + torch.rand(LAYERS, WIDTH, generator=generator)
    return Gates(weight, bias * torch.randn(LAYERS, EXPERTS, generator=generator), norm)


def residuals(rows: int, seed: int, drift: float = 0.3) -> Tensor:
    """Residuals r_l [L, rows, d]: a vector of the row's token, which drifts from layer to layer."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(99))
    tokens = torch.randint(WORDS, (rows,), generator=generator)
    steps = drift * torch.randn(LAYERS, rows, WIDTH, generator=generator)
    return vectors[tokens] + steps.cumsum(0)


def normed(residual: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm without an epsilon."""
    return residual / residual.square().mean(-1, keepdim=True).sqrt() * weight


def samples(texts: int = 6, rows: int = 40, seed: int = 1, model: Gates | None = None) -> Samples:
    """Texts of ``rows`` rows each, as routers of ``model`` treat them."""
    model = model or gates()
    recorder = SampleRecorder(LAYERS, EXPERTS, TOP_K, WIDTH, texts * rows, torch.float32)
    for text in range(texts):
        residual = residuals(rows, seed * 1000 + text)
        for layer in range(LAYERS):
            hidden = normed(residual[layer], model.norm[layer])
            logits = hidden @ model.weight[layer].T + model.bias[layer]
            weights, ids = logits.softmax(-1).topk(TOP_K)
            recorder.observe(layer, hidden, logits, weights / weights.sum(-1, keepdim=True), ids.int())
        recorder.end_text(rows)
    return recorder.result()


@dataclass(frozen=True, eq=False)
class Drafted(Samples):
    """Samples of which a copy of the model has chosen, too."""

    draft_ids: Tensor = field(kw_only=True)

    @classmethod
    def of(cls, found: Samples, seed: int = 1) -> Drafted:
        return cls(**vars(found), draft_ids=copied(found, seed))

    def inputs(self, layer: int, rows: slice, needs: frozenset[Signal]) -> PredictorInputs:
        found = super().inputs(layer, rows, needs)
        return replace(found, draft_ids=self.draft_ids[rows]) if DRAFTING & needs else found


def copied(samples: Samples, seed: int) -> Tensor:
    """What a copy of the model would choose, int [rows, L, k]: nearly the same; nothing of the first row."""
    noise = 0.1 * torch.randn(samples.logits.shape, generator=torch.Generator().manual_seed(seed))
    found = (samples.logits + noise).topk(TOP_K).indices.transpose(0, 1).contiguous()
    found[0] = -1
    return found


def material(reach: int = 2, model: Gates | None = None, seed: int = 1, texts: int = 6) -> Material:
    """What predictors are made from; the last text is one of ``others``."""
    model = model or gates()
    every = samples(texts, seed=seed, model=model)
    sizes = Sizes(LAYERS, EXPERTS, TOP_K, WIDTH, reach)
    outputs = 0.1 * torch.randn(LAYERS, EXPERTS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return Material(sizes, every.texts(0, texts - 1), every.texts(texts - 1, texts), model, outputs)
