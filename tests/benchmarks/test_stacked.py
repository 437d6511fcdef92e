"""Traces of few layers that are stacked to the layers of a larger model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.replay import policies
from vllm_spac.tools.traces.synthetic import synthetic_trace


@pytest.fixture(scope="module")
def trace():
    """Every tenth step is of a prompt, and every seventh has one row less than the others."""
    found = synthetic_trace(layers=2, experts=12, top_k=2, steps=70, drafts=3, reuse=0.8)
    found.row_kind.reshape(70, 4)[::10] = 0
    return dataclasses.replace(found, row_back=None, row_accepted=None)


def test_layers_are_the_recorded_ones_from_other_places_on(trace):
    stacked = policies.stack(trace, 6, 1000)
    steps = [step for step in range(70) if step % 10]
    assert stacked.steps == len(steps) and stacked.facts.layers == 6
    given = trace.ids.reshape(70, 2, 4, 2)[steps]
    ids = stacked.ids.reshape(len(steps), 3, 2, 4, 2)
    for turn, first in enumerate((0, 21, 42)):
        assert (ids[:, turn] == np.roll(given, -first, axis=0)).all()
    assert (stacked.step_tokens == trace.step_tokens[steps]).all()
    assert policies.stack(trace, 2, 5).steps == 5


def test_layers_that_do_not_fit_are_refused(trace):
    with pytest.raises(Exception, match="cannot be stacked to 7"):
        policies.stack(trace, 7, 5)
