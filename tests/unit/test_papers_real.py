"""Recorded routing changed as the papers' recipes would have it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "papers")]
five_papers = importlib.import_module("five_papers")

from vllm_spac.tools.traces.synthetic import synthetic_trace  # noqa: E402


def test_a_budgeted_trace_has_at_most_so_many_experts_in_a_layer() -> None:
    """Rows keep what is in the shortlist; prompts and steps of fewer experts are as they were."""
    trace = synthetic_trace(layers=2, experts=16, top_k=4, steps=20, drafts=3)
    cut, few = five_papers.budgeted(trace, 5), five_papers.budgeted(trace, 16)
    assert (few.ids == trace.ids).all()
    for first, last in zip(trace.record_start[:-1], trace.record_start[1:], strict=True):
        ours, theirs = cut.ids[first:last], trace.ids[first:last]
        used = np.unique(ours)
        assert len(used) <= 5 and all(len(set(row)) == 4 for row in ours.tolist())
        assert all(set(a) >= set(b) & set(used.tolist()) for a, b in zip(ours.tolist(), theirs.tolist(), strict=True))


def test_what_a_draft_model_names() -> None:
    """All of what is routed at recall 1, a part below it, and nothing of the last draft."""
    trace = synthetic_trace(layers=2, experts=64, top_k=4, steps=20, drafts=3)
    for recall in (1.0, 0.5):
        found = [each for each in five_papers.named(trace, recall) if each is not None]
        step = next(number for number, each in enumerate(five_papers.named(trace, recall)) if each is not None)
        first = trace.record_start[np.searchsorted(trace.record_step, step)]
        ids = trace.ids[first : first + 8].reshape(2, 4, 4).transpose(1, 0, 2)
        assert found[0].shape == (4, 2, 4) and (found[0][-1] == -1).all()
        same = np.mean([(each[:-1, :, :, None] == ids[:-1, :, None]).any(3).mean() for each in found[:1]])
        assert same == 1.0 if recall == 1.0 else 0.25 < same < 0.8
