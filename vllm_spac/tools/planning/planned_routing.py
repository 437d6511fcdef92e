"""Routing that a plan assumes: synthetic, as local as published figures say, or that of a recorded trace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from vllm_spac.errors import ConfigError
from vllm_spac.recording.trace_file import Trace, TraceFacts
from vllm_spac.tools.planning.planned_model import ServedModel
from vllm_spac.tools.traces.synthetic import decoded, draw_accepted, synthetic_trace
from vllm_spac.tools.traces.trace_text import Text

LAYERS = 4  # that are simulated; slots and costs in proportion
STEPS = 150  # of one request; fewer of several, at least FEWEST
FEWEST = 40


@dataclass(frozen=True)
class Routing:
    """An assumption on routing and drafts."""

    name: str  # ``even``, ``low``, ``high`` or ``trace``
    # skew, reuse: of ``synthetic_trace``
    skew: float
    reuse: float
    acceptance: float  # probability that a draft is accepted when those before it were; assumed, not published
    trace: Trace | None = None  # recorded routing, in place of ``skew`` and ``reuse``


# With 128 experts and top-8, ``LOW`` has the overlap that was published of Qwen3-30B-A3B and nothing else (45 %; LRU of
# 19 and 38 % of the experts: 60 and 70 %), ``HIGH`` its overlap and its LRU hits (45, 74 and 90 %; see
# benchmarks/replay/routing_locality.py). ``EVEN`` has no locality at all: hits are the share of slots.
EVEN = Routing("even", skew=0.0, reuse=0.0, acceptance=0.2)
LOW = Routing("low", skew=0.0, reuse=0.75, acceptance=0.2)
HIGH = Routing("high", skew=1.1, reuse=0.25, acceptance=0.7)


def assumed() -> tuple[Routing, ...]:
    """Returns the assumptions without a trace, the slowest first."""
    return EVEN, LOW, HIGH


def routings(trace: Path | None, model: ServedModel) -> tuple[Routing, ...]:
    """Returns the assumptions, or the routing of the file ``trace``; errors as ``recorded``."""
    return assumed() if trace is None else recorded(Trace.load(trace), model, str(trace))


def recorded(trace: Trace, model: ServedModel, source: str) -> tuple[Routing, ...]:
    """Returns the routing of ``trace`` with few and with many accepted drafts.

    Raises:
        ConfigError: the trace is of another model, or has too little text.
    """
    facts, checkpoint = trace.facts, model.checkpoint
    there, here = (facts.layers, facts.experts, facts.top_k), (model.layers, checkpoint.experts, checkpoint.top_k)
    if there != here:
        raise ConfigError(
            "{} is of {} layers of {} experts with top-{}, and the model has {} of {} with top-{}; use a trace of this "
            "model".format(source, *there, *here)
        )
    if (tokens := len(Text.of(trace))) < 2 * FEWEST:
        raise ConfigError(
            f"{source} has {tokens} rows that are known to be text, fewer than {2 * FEWEST}; record a longer run, with "
            "one request at a time or without drafts"
        )
    return tuple(Routing("trace", 0.0, 0.0, other.acceptance, trace) for other in (LOW, HIGH))


@lru_cache(maxsize=64)
def routed(routing: Routing, facts: TraceFacts, requests: int, drafts: int) -> Trace:
    """Returns the trace of ``requests`` that decode together with this routing, of a few layers of the model.

    Args:
        facts: of the whole model; the trace has at most ``LAYERS`` of its layers.
    """
    steps = max(FEWEST, STEPS // requests)
    if routing.trace is not None:
        return _from_text(routing, routing.trace, requests, drafts, steps)
    return synthetic_trace(
        layers=min(LAYERS, facts.layers),
        experts=facts.experts,
        top_k=facts.top_k,
        steps=steps,
        drafts=drafts,
        acceptance=routing.acceptance,
        skew=routing.skew,
        reuse=routing.reuse,
        requests=requests,
        expert_bytes=facts.expert_bytes,
    )


def _from_text(routing: Routing, trace: Trace, requests: int, drafts: int, steps: int) -> Trace:
    """Returns the text of a trace as that of ``requests`` that begin at different places of it."""
    text = Text.of(trace)
    layers = np.unique(np.linspace(0, text.layers - 1, min(LAYERS, text.layers)).round().astype(int))
    accepted = draw_accepted(np.random.default_rng(0), requests, steps, drafts, routing.acceptance)
    needed = int((accepted + 1).sum(axis=1).max()) + drafts
    first = np.linspace(0, max(0, len(text) - needed), requests).round().astype(int)
    tokens = (first[:, None] + np.arange(needed)) % len(text)  # a short text is repeated
    facts = TraceFacts(len(layers), text.experts, text.top_k, trace.facts.expert_bytes, trace.facts.model)
    return decoded(facts, text.ids[tokens][:, :, layers], None, accepted, drafts)
