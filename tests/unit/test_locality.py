"""Locality figures of traces: which rows are text, figures by hand, and against a naive twin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.replay import routing_locality as locality
from benchmarks.replay.routing_locality import PUBLISHED, Locality
from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.recording.trace_file import ROW_KINDS, Trace, TraceFacts
from vllm_spac.recording.trace_writer import TraceWriter
from vllm_spac.tools.traces.synthetic import synthetic_trace
from vllm_spac.tools.traces.trace_text import Text

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"
KINDS = {letter: ROW_KINDS.index(kind) for letter, kind in zip("pdvx-", ROW_KINDS, strict=True)}


def trace_of(
    steps: list[tuple[str, int]],
    ids: np.ndarray,
    experts: int,
    weights: np.ndarray | None = None,
    drop: int | None = None,
) -> Trace:
    """A trace of steps such as ``("vxx", 2)``: a verify row with two drafts emitted 2 tokens; ``p`` is a prompt row.

    Args:
        ids: int [rows, layers, top_k].
        drop: a step whose last layer is missing.
    """
    layers, start = ids.shape[1], np.cumsum([0] + [len(rows) for rows, _ in steps])
    records = [(s, layer) for s in range(len(steps)) for layer in range(layers - (s == drop))]
    order = [(row, layer) for s, layer in records for row in range(start[s], start[s + 1])]
    facts = TraceFacts(layers, experts, ids.shape[2])
    row, layer = np.array(order, dtype=np.int64).reshape(-1, 2).T
    return Trace.of(
        facts,
        step_kind=np.zeros(len(steps), dtype=np.uint8),
        step_rows=np.diff(start).astype(np.uint32),
        step_tokens=np.array([emitted for _, emitted in steps], dtype=np.uint32),
        row_kind=np.array([KINDS[kind] for rows, _ in steps for kind in rows], dtype=np.uint8),
        record_step=np.array([s for s, _ in records], dtype=np.uint32),
        record_layer=np.array([layer for _, layer in records], dtype=np.uint16),
        ids=ids[row, layer].astype(facts.id_dtype),
        weights=None if weights is None else weights[row, layer].astype(np.float16),
    )


def decoding(tokens: list[list[int]], experts: int, weights: list[list[float]] | None = None) -> Trace:
    """One layer, one request that decodes."""
    given = None if weights is None else np.array(weights)[:, None]
    return trace_of([("d", 1)] * len(tokens), np.array(tokens)[:, None], experts, given)


def sequences(steps: list[tuple[str, int]], drop: int | None = None) -> list[list[int]]:
    """Rows of each sequence of a trace with these steps; each row selects the expert of its own number."""
    rows = sum(len(rows) for rows, _ in steps)
    ids = np.repeat(np.arange(rows)[:, None, None], 2, axis=1)
    text = Text.of(trace_of(steps, ids, max(1, rows), drop=drop))
    assert (text.ids[:, 0] == text.ids[:, 1]).all() and text.rows == rows
    return [text.ids[a:b, 0, 0].tolist() for a, b in zip(text.start[:-1], text.start[1:], strict=True)]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], []),
        ([("d", 1), ("d", 1)], [[0, 1]]),
        ([("vxx", 2), ("vxx", 1), ("vxx", 3)], [[0, 1, 3, 6, 7, 8]]),
        ([("vxx", 0), ("d", 1)], [[0], [3]]),  # which drafts are text is unknown
        ([("d", 0), ("d", 0)], [[0, 1]]),  # without drafts nothing is unknown
        ([("vx", 9)], [[0, 1]]),
        ([("ppp", 1), ("d", 1), ("vx", 2)], [[0, 1, 2, 3, 4, 5]]),
        ([("pp", 0), ("p", 1), ("d", 1)], [[0, 1, 2, 3]]),  # a prompt in chunks
        ([("pp", 1), ("p", 1), ("d", 1)], [[2, 3]]),  # two prompts, the first without generated text
        ([("pppp", 2), ("dd", 2), ("dd", 2)], [[4, 6], [5, 7]]),
        ([("pppp", 2), ("d", 1)], [[4]]),  # of one of the two
        ([("pp", 0), ("d", 1)], [[2]]),  # the prompt has not ended, so another request generates
        ([("pp", 1)], []),
        ([("dd", 2), ("d", 1), ("d", 1)], [[0], [1], [2, 3]]),  # which of the two goes on is unknown
        ([("d", 1), ("dpp", 2), ("dd", 2)], [[0], [4], [5]]),
        ([("vxvx", 3), ("dd", 2)], [[4], [5]]),
        ([("d", 1), ("-", 0), ("d", 1)], [[0], [2]]),
        ([("p", 1), ("dd", 2)], [[1], [2]]),
    ],
)
def test_which_rows_are_text(steps: list[tuple[str, int]], expected: list[list[int]]) -> None:
    assert sequences(steps) == expected


TREE = Step((RequestRows(0, 4, RowKind.VERIFY, 3, parents=(0, 0, 1)), RequestRows(4, 6, RowKind.VERIFY, 1)))
MIXED = Step((RequestRows(0, 4, RowKind.VERIFY, 3, parents=(0, 0, 1)), RequestRows(4, 5, RowKind.DECODE)))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(TREE, [3, 1], [[0, 2], []])], [[0, 1, 3], [4]]),
        ([(TREE, [2, 2], [[1], [0]]), (TREE, [1, 1], [[], []])], [[0, 2, 6], [4, 5, 10]]),
        ([(TREE, None, None), (TREE, [1, 2], [[], [0]])], [[6], [10, 11]]),
        ([(MIXED, [3, 1], [[0, 2], []])], []),  # the runner may reorder the two
    ],
)
def test_accepted_drafts_of_several_requests_are_text(tmp_path: Path, steps, expected) -> None:
    rows = np.cumsum([0] + [step.rows for step, *_ in steps])
    writer = TraceWriter(tmp_path / "t", TraceFacts(1, 16, 1))
    for first, (step, tokens, paths) in zip(rows, steps, strict=False):
        writer.begin_step(step)
        ids = np.arange(first, first + step.rows)[None, :, None]
        writer.observe([0], ids, np.ones(ids.shape))
        writer.end_step(tokens, paths)
    text = Text.of(Trace.load(writer.finish()))
    assert [text.ids[a:b, 0, 0].tolist() for a, b in zip(text.start[:-1], text.start[1:], strict=True)] == expected


def test_a_step_that_lacks_a_layer_ends_the_text() -> None:
    assert sequences([("d", 1)] * 4, drop=1) == [[0], [2, 3]]


def test_overlap_does_not_cross_requests() -> None:
    steps = [("pp", 1), ("d", 1), ("pp", 1), ("d", 1)]
    ids = np.array([[[e]] for e in (0, 1, 2, 2, 3, 4)])
    assert locality.overlap(Text.of(trace_of(steps, ids, 8))).tolist() == [0]


def test_use_by_hand() -> None:
    text = Text.of(decoding([[0, 1], [0, 2], [0, 1], [0, 1]], 4))
    assert locality.use(text).tolist() == [[1, 0.75, 0.25, 0]]


def test_sets_by_hand() -> None:
    """The order in which a router names its experts is no other set."""
    even = decoding([[0, 1], [1, 0], [2, 3], [3, 2]], 4)
    assert locality.sets_perplexity(Text.of(even)).tolist() == pytest.approx([2])
    uneven = decoding([[0, 1]] * 3 + [[2, 3]], 4)
    assert locality.sets_perplexity(Text.of(uneven)).tolist() == pytest.approx([4 / 3**0.75])


def test_sets_are_counted_in_stretches_of_equal_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stretches of one set each, and of two; the token behind them counts in none."""
    monkeypatch.setattr(locality, "SETS_TOKENS", 2)
    text = decoding([[0, 1], [0, 1], [0, 2], [0, 3], [1, 2]], 4)
    assert locality.sets_perplexity(Text.of(text)).tolist() == pytest.approx([(1 + 2) / 2])


def test_gini_by_hand() -> None:
    found = locality.gini(np.array([[0.5, 0.5, 0.5, 0.5], [0, 0, 0, 1], [0.1, 0.3, 0.2, 0.4]]))
    assert found.tolist() == pytest.approx([0, 0.75, 0.25])


def test_heaviest_by_hand() -> None:
    text = Text.of(decoding([[0, 1], [2, 3]], 4, [[0.75, 0.25], [0.25, 0.25]]))
    assert locality.heaviest(text).tolist() == [(0.75 + 0.5) / 2]
    assert np.isnan(locality.heaviest(Text.of(decoding([[0, 1], [2, 3]], 4)))).all()


def test_a_trace_without_text() -> None:
    found = Locality.of(trace_of([("pp", 1)], np.zeros((2, 3, 1), dtype=np.int64), 8))
    assert found.tokens == 0 and found.rows == 2
    assert all(np.isnan(values).all() and values.shape == (3,) for values in found.layers().values())


def naive(sequences: list[np.ndarray], experts: int, slots: int, rows: int) -> tuple[float, float, float]:
    """Overlap, LRU hits and distinct experts of one layer, for sequences of int [tokens, top_k]."""
    shared = [len(set(a) & set(b)) / len(a) for text in sequences for a, b in zip(text[1:], text[:-1], strict=True)]
    cache: list[int] = []
    hits = []
    for token in (token for text in sequences for token in text):
        if len(cache) == slots:
            hits.append(len(set(token) & set(cache)) / len(token))
        for expert in sorted(token):
            cache = [held for held in cache if held != expert] + [expert]
        cache = cache[-slots:]
    windows = [text[a : a + rows] for text in sequences for a in range(0, len(text) - rows + 1, rows)]
    return tuple(np.mean(x) if x else np.nan for x in (shared, hits, [len(set(w.ravel().tolist())) for w in windows]))


@given(st.lists(st.integers(1, 25), min_size=1, max_size=5), st.integers(1, 3), st.integers(0, 1 << 30))
@settings(max_examples=examples(60), deadline=None)
def test_against_a_naive_twin(lengths: list[int], top_k: int, seed: int) -> None:
    """Requests one after the other, each with a prompt of two tokens; two layers."""
    rng, experts, slots = np.random.default_rng(seed), 7, 4
    noise = rng.random((sum(lengths) + 2 * len(lengths), 2, experts)) ** [1, 1, 1, 3, 5, 7, 9]
    ids = np.argsort(noise, axis=2)[..., :top_k]
    text = Text.of(trace_of([step for n in lengths for step in [("pp", 1), *[("d", 1)] * n]], ids, experts))
    bounds = np.cumsum([0] + [n + 2 for n in lengths])
    for layer in range(2):
        parts = [ids[a:b, layer] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
        found = (locality.overlap(text), locality.lru_hits(text, [slots])[0], locality.distinct(text, 5))
        assert [values[layer] for values in found] == pytest.approx(naive(parts, experts, slots, 5), nan_ok=True)


@pytest.mark.parametrize("name", ["none1", "none8", "eagle4_1", "eagle8_1", "draft8_1"])
def test_routing_of_the_flat_toy_is_flat(name: str) -> None:
    """As its trainer measured it on text: .223, .31 and .53; drafts that were rejected would blur the agreement."""
    found = Locality.of(Trace.load(TRACES / f"{name}.trace")).means()
    assert found["overlap"] == pytest.approx(0.225, abs=0.01) and found["rare"] == 0
    if name != "none8":
        assert found["lru_small"] == pytest.approx(0.328, abs=0.002)
        assert found["distinct"] == pytest.approx(36.7, abs=0.15)


def test_speculation_leaves_the_text_as_it_is() -> None:
    """Greedy text is the same with drafts: so are the tokens' experts, except after the last accepted one."""
    plain, drafted = (Text.of(Trace.load(TRACES / f"{name}.trace")) for name in ("none1", "eagle4_1"))
    assert len(plain.start) == len(drafted.start) == 33
    for a, b in zip(plain.start[:-1], drafted.start[:-1], strict=True):
        least = min(plain.start[plain.start > a][0] - a, drafted.start[drafted.start > b][0] - b)
        same = np.sort(plain.ids[a : a + least]) == np.sort(drafted.ids[b : b + least])
        assert least >= 96 and same.mean() > 0.98


def test_a_trace_with_weights_has_all_figures() -> None:
    found = Locality.of(synthetic_trace(layers=2, experts=32, top_k=4, steps=400, skew=0.7, reuse=0.6))
    assert all(np.isfinite(values).all() for values in found.layers().values())
    assert found.means()["top_half_long"] < found.means()["top_half_short"] <= 1


def test_published_figures_are_of_ours_and_have_sources() -> None:
    names = Locality.of(synthetic_trace(layers=1, experts=8, top_k=2, steps=9)).layers()
    assert all(one.figure in names and one.source and one.conditions for one in PUBLISHED)
