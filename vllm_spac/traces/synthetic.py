"""Generates synthetic routing traces: Zipf popularity, and tokens correlated with their predecessors."""

from __future__ import annotations

import numpy as np

from vllm_spac.traces.format import ROW_KINDS, STEP_KINDS, Trace, TraceFacts

_CHUNK = 256


def synthetic_trace(
    *,
    layers: int = 6,
    experts: int = 64,
    top_k: int = 8,
    steps: int = 200,
    drafts: int = 0,
    acceptance: float = 0.7,
    skew: float = 1.0,
    reuse: float = 0.5,
    expert_bytes: int = 1 << 20,
    seed: int = 0,
) -> Trace:
    """Generates the trace of one request that decodes; deterministic.

    An expert's logit is -skew * log(rank) plus Gumbel-like noise that follows from token to token with correlation
    ``reuse``; ranks are drawn anew for each layer. Drafts are routed like other tokens: a rejected draft is
    routed as the token that replaces it.

    Args:
        steps: forwards; each verifies 1 + ``drafts`` tokens.
        acceptance: probability that a draft token is accepted when those before it were.
        skew: exponent of Zipf's law; 0 is uniform.
        reuse: from 0 (tokens are independent) to 1 (all are alike).
    """
    rng = np.random.default_rng(seed)
    accepted = np.minimum(rng.geometric(1 - min(acceptance, 1 - 1e-9), steps) - 1, drafts)
    start = np.concatenate(([0], np.cumsum(accepted + 1)[:-1]))
    tokens, weights = _tokens(rng, int(start[-1]) + drafts + 1, layers, experts, top_k, skew, reuse)
    rows = start[:, None] + np.arange(drafts + 1)
    facts = TraceFacts(layers, experts, top_k, expert_bytes, f"synthetic(skew={skew}, reuse={reuse})")
    kind = "verify" if drafts else "decode"
    row_kind = [ROW_KINDS.index(kind)] + [ROW_KINDS.index("draft")] * drafts
    return Trace.of(
        facts,
        step_kind=np.full(steps, STEP_KINDS.index(kind), dtype=np.uint8),
        step_rows=np.full(steps, drafts + 1, dtype=np.uint32),
        step_tokens=(accepted + 1).astype(np.uint32),
        row_kind=np.tile(np.array(row_kind, dtype=np.uint8), steps),
        record_step=np.repeat(np.arange(steps, dtype=np.uint32), layers),
        record_layer=np.tile(np.arange(layers, dtype=np.uint16), steps),
        ids=tokens[rows].transpose(0, 2, 1, 3).reshape(-1, top_k),
        weights=weights[rows].transpose(0, 2, 1, 3).reshape(-1, top_k),
    )


def _tokens(
    rng: np.random.Generator, count: int, layers: int, experts: int, top_k: int, skew: float, reuse: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids, weights) of shape [count, layers, top_k], highest weight first."""
    ranks = np.argsort(rng.random((layers, experts)), axis=1) + 1
    popularity = (-skew * np.log(ranks)).astype(np.float32)
    state = rng.standard_normal((layers, experts), dtype=np.float32)
    fresh = np.float32(np.sqrt(1 - reuse**2))
    ids = np.empty((count, layers, top_k), dtype=TraceFacts(layers, experts, top_k).id_dtype)
    weights = np.empty((count, layers, top_k), dtype=np.float16)
    for first in range(0, count, _CHUNK):
        noise = rng.standard_normal((min(_CHUNK, count - first), layers, experts), dtype=np.float32)
        for token in noise:
            state = token[:] = np.float32(reuse) * state + fresh * token
        logits = popularity + np.float32(np.pi / np.sqrt(6)) * noise  # as wide as Gumbel's distribution
        top = np.argpartition(-logits, top_k - 1, axis=2)[:, :, :top_k]
        values = np.take_along_axis(logits, top, axis=2)
        order = np.argsort(-values, axis=2)
        values = np.exp(np.take_along_axis(values, order, axis=2) - values.max(axis=2, keepdims=True))
        ids[first : first + len(noise)] = np.take_along_axis(top, order, axis=2)
        weights[first : first + len(noise)] = values / values.sum(axis=2, keepdims=True)
    return ids, weights
