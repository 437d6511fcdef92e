"""Generates synthetic routing traces: Zipf popularity, and tokens correlated with their predecessors."""

from __future__ import annotations

import numpy as np

from vllm_spac.recording.trace_file import ACCEPTED, DRAFT, REJECTED, ROW_KINDS, STEP_KINDS, Trace, TraceFacts

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
    requests: int = 1,
    expert_bytes: int = 1 << 20,
    seed: int = 0,
) -> Trace:
    """Generates the trace of requests that decode together; deterministic.

    An expert's logit is -skew * log(rank) plus Gumbel-like noise that follows from token to token with correlation
    ``reuse``; ranks are drawn anew for each layer and are those of all requests. Drafts are routed like other tokens: a
    rejected draft is routed as the token that replaces it.

    Args:
        steps: forwards; each verifies 1 + ``drafts`` tokens of each request.
        acceptance: probability that a draft token is accepted when those before it were.
        skew: exponent of Zipf's law; 0 is uniform.
        reuse: from 0 (tokens are independent) to 1 (all are alike).
    """
    rng = np.random.default_rng(seed)
    accepted = draw_accepted(rng, requests, steps, drafts, acceptance)
    count = int((accepted[:, :-1] + 1).sum(axis=1).max()) + drafts + 1
    facts = TraceFacts(layers, experts, top_k, expert_bytes, f"synthetic(skew={skew}, reuse={reuse})")
    tokens, weights = _tokens(rng, requests, count, facts, skew, reuse)
    return decoded(facts, tokens, weights, accepted, drafts)


def draw_accepted(rng: np.random.Generator, requests: int, steps: int, drafts: int, acceptance: float) -> np.ndarray:
    """Returns int64 [requests, steps]: drafts that each step accepts, each with probability ``acceptance``."""
    return np.minimum(rng.geometric(1 - min(acceptance, 1 - 1e-9), (requests, steps)) - 1, drafts)


def decoded(
    facts: TraceFacts, tokens: np.ndarray, weights: np.ndarray | None, accepted: np.ndarray, drafts: int
) -> Trace:
    """Returns the trace of requests that decode together, whose tokens are routed in this way.

    Args:
        tokens: experts of each request's tokens, [requests, tokens, layers, top_k], in the dtype of ``facts``; of each
            as many as its steps emit, and ``drafts`` more.
        weights: float16 of the same shape, or None.
        accepted: int [requests, steps].
    """
    requests, steps = accepted.shape
    start = np.concatenate((np.zeros((requests, 1), dtype=np.int64), np.cumsum(accepted + 1, axis=1)[:, :-1]), axis=1)
    rows = start[:, :, None] + np.arange(drafts + 1)  # [requests, steps, rows]

    def by_layer(values: np.ndarray) -> np.ndarray:
        chosen = values[np.arange(requests)[:, None, None], rows]
        return chosen.transpose(1, 3, 0, 2, 4).reshape(-1, facts.top_k)

    kind = "verify" if drafts else "decode"
    row_kind = ([ROW_KINDS.index(kind)] + [DRAFT] * drafts) * requests
    taken = np.arange(drafts + 1) <= accepted.T[:, :, None]  # [steps, requests, rows]
    return Trace.of(
        facts,
        step_kind=np.full(steps, STEP_KINDS.index(kind), dtype=np.uint8),
        step_rows=np.full(steps, requests * (drafts + 1), dtype=np.uint32),
        step_tokens=(accepted + 1).sum(axis=0).astype(np.uint32),
        row_kind=np.tile(np.array(row_kind, dtype=np.uint8), steps),
        row_back=np.tile(np.array(row_kind, dtype=np.uint8) == DRAFT, steps).astype(np.uint8),
        row_accepted=np.where(taken, ACCEPTED, REJECTED).astype(np.uint8).ravel(),
        record_step=np.repeat(np.arange(steps, dtype=np.uint32), facts.layers),
        record_layer=np.tile(np.arange(facts.layers, dtype=np.uint16), steps),
        ids=by_layer(tokens),
        weights=None if weights is None else by_layer(weights),
    )


def _tokens(
    rng: np.random.Generator, requests: int, count: int, facts: TraceFacts, skew: float, reuse: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids, weights) of shape [requests, count, layers, top_k], highest weight first."""
    layers, experts, top_k = facts.layers, facts.experts, facts.top_k
    ranks = np.argsort(rng.random((layers, experts)), axis=1) + 1
    popularity = (-skew * np.log(ranks)).astype(np.float32)
    fresh = np.float32(np.sqrt(1 - reuse**2))
    ids = np.empty((requests, count, layers, top_k), dtype=facts.id_dtype)
    weights = np.empty((requests, count, layers, top_k), dtype=np.float16)
    for request in range(requests):
        state = rng.standard_normal((layers, experts), dtype=np.float32)
        for first in range(0, count, _CHUNK):
            noise = rng.standard_normal((min(_CHUNK, count - first), layers, experts), dtype=np.float32)
            for token in noise:
                state = token[:] = np.float32(reuse) * state + fresh * token
            logits = popularity + np.float32(np.pi / np.sqrt(6)) * noise  # as wide as Gumbel's distribution
            top = np.argpartition(-logits, top_k - 1, axis=2)[:, :, :top_k]
            values = np.take_along_axis(logits, top, axis=2)
            order = np.argsort(-values, axis=2)
            values = np.exp(np.take_along_axis(values, order, axis=2) - values.max(axis=2, keepdims=True))
            ids[request, first : first + len(noise)] = np.take_along_axis(top, order, axis=2)
            weights[request, first : first + len(noise)] = values / values.sum(axis=2, keepdims=True)
    return ids, weights
