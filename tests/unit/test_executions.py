"""``benchmarks/replay/executions.py`` on tiny traces: how they are stacked, and what admission on the device does."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_spac.decisions.costs import Costs
from vllm_spac.tools.traces.replayed import Outcome, filling, parts
from vllm_spac.tools.traces.simulation import simulate
from vllm_spac.tools.traces.synthetic import synthetic_trace

REPLAY = Path(__file__).resolve().parents[2] / "benchmarks" / "replay"


@pytest.fixture(scope="module")
def executions():
    paths = [str(REPLAY), str(REPLAY.parent)]
    sys.path[:0] = paths
    spec = importlib.util.spec_from_file_location("executions", REPLAY / "executions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for path in paths:
        sys.path.remove(path)
    for name in ("admission", "policies", "common"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def trace():
    """Every tenth step is of a prompt, and every seventh has one row less than the others."""
    found = synthetic_trace(layers=2, experts=12, top_k=2, steps=70, drafts=3, reuse=0.8)
    found.row_kind.reshape(70, 4)[::10] = 0
    return dataclasses.replace(found, row_back=None, row_accepted=None)


def test_layers_are_the_recorded_ones_from_other_places_on(executions, trace):
    stacked = executions.stack(trace, 6, 1000)
    steps = [step for step in range(70) if step % 10]
    assert stacked.steps == len(steps) and stacked.facts.layers == 6
    given = trace.ids.reshape(70, 2, 4, 2)[steps]
    ids = stacked.ids.reshape(len(steps), 3, 2, 4, 2)
    for turn, first in enumerate((0, 21, 42)):
        assert (ids[:, turn] == np.roll(given, -first, axis=0)).all()
    assert (stacked.step_tokens == trace.step_tokens[steps]).all()
    assert executions.stack(trace, 2, 5).steps == 5


def test_layers_that_do_not_fit_are_refused(executions, trace):
    with pytest.raises(Exception, match="cannot be stacked to 7"):
        executions.stack(trace, 7, 5)


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_admission_is_lru(executions, seed, slots, width):
    """Beside a dictionary; ids that were used in the same call go in the order of their slots."""
    rng, lru = np.random.default_rng(seed), sys.modules["admission"].DeviceLRU(20, slots)
    order: dict[int, tuple[int, int]] = {}  # id -> (when it was used, its slot)
    for call in range(30):
        query = rng.zipf(1.4, width) % 20
        ids = set(query.tolist())
        if len(ids) > slots:
            with pytest.raises(LookupError):
                lru.ensure(query)
            continue
        missing, to = lru.ensure(query)
        assert missing.tolist() == sorted(ids - set(order))
        free = set(range(slots)) - {slot for _, slot in order.values()}
        others = sorted((when, slot) for key, (when, slot) in order.items() if key not in ids)
        expected = [*sorted(free), *(slot for _, slot in others)][: len(missing)]
        assert to.tolist() == expected
        order = {key: (when, slot) for key, (when, slot) in order.items() if slot not in expected}
        order |= {key: (call, order[key][1]) for key in ids & set(order)}
        order |= {key: (call, slot) for key, slot in zip(missing.tolist(), expected, strict=True)}
        assert {key: slot for key, (_, slot) in order.items()} == {
            int(key): int(lru.slot_of[key]) for key in np.flatnonzero(lru.slot_of >= 0)
        }


def test_a_layer_that_needs_more_than_there_are_slots_is_impossible(executions, trace):
    costs = Costs.read("h200")
    outcome = Outcome("lru", "none", 4, 4 / 24)
    replay = executions.AdmissionReplay(trace, costs, 100, outcome)
    replay.fill(filling(trace, 4))
    replay.run(parts(trace, 24))
    wide = [len(part.keys) for (part,) in parts(trace, 24) if len(part.keys) > 4]
    assert replay.impossible == len(wide) > 0
    assert outcome.streamed_bytes == 100 * sum(wide) and outcome.bytes == 100 * (outcome.misses - sum(wide))
    assert outcome.hits + outcome.misses == simulate(trace, 24, costs).hits


def test_it_says_where_its_numbers_come_from(executions, trace, tmp_path):
    trace.save(tmp_path / "run.trace")
    options = ["--layers", "4", "--shares", "50", "--moves", "0,3", "--policy", "lru", "--slots-policy", "lru"]
    options += ["--output", str(tmp_path / "o.json"), "--profile", "h200", "--expert-bytes", "1000"]
    done = CliRunner().invoke(executions.app, [str(tmp_path / "run.trace"), *options])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "o.json").read_text())
    assert result["provenance"]["git"]["commit"] and result["calculated"]["h200"]["how"] == "calculated"
    assert [(r["execution"], r.get("admission"), r["moves"]) for r in result["rows"]] == [
        ("slots", None, None),
        ("flashlib", None, None),
        ("pointers", "layer", None),
        ("pointers", "step", 0),
        ("pointers", "step", 3),
    ]
    times = [row["tpot_ms"] for row in result["rows"]]
    expected = {"slots": times[0] / times[2], "flashlib": times[1] / times[2]}
    found = result["time_over_admission_in_the_layer"]["run"]
    assert found == {way: [round(ratio, 3)] * 2 for way, ratio in expected.items()}, "3 moves are not the default"
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG") and "impossible" in done.output
