"""Recall of predictors: counted by hand, with an LRU cache that is another one's, and what is printed and drawn."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "contracts"))
import imagined as made

from vllm_spac.config.types import SlotCount
from vllm_spac.decisions.predictors._samples import SampleRecorder, Samples
from vllm_spac.decisions.predictors.base import START, Guess, Predictor, PredictorInputs
from vllm_spac.decisions.predictors.oracle import Oracle
from vllm_spac.errors import SpacError
from vllm_spac.tools.evaluation import predictor_recall


def samples(ids: list, experts: int = 6) -> Samples:
    """One text with these experts [L, rows, k]."""
    chosen = torch.tensor(ids, dtype=torch.int32)
    layers, rows, _ = chosen.shape
    of_layers = torch.zeros(layers, rows, experts)
    return Samples((0,), torch.zeros(layers, rows, 2), of_layers, chosen, torch.ones(chosen.shape))


class Always(Predictor):
    """Names the experts in the order ``order``, for layers 0 and 1 at the start and layer 1 in layer 0."""

    needs = frozenset()
    reach = 1
    scores = np.zeros(0)

    def __init__(self, at_start: list[int], ahead: list[int]) -> None:
        self._start, self._ahead = (torch.tensor([[order.index(e) for e in range(6)]]) for order in (at_start, ahead))

    def guesses(self, seen: PredictorInputs) -> Iterable[Guess]:
        if seen.layer == START:
            yield Guess(0, torch.cat([-self._start, -self._start], 1))
        elif seen.layer == 0:
            yield Guess(6, -self._ahead)


def test_by_hand() -> None:
    """Layer 1: the guess of layer 0 counts, the one at the start only by horizon."""
    found = predictor_recall.measure(
        Always([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]),
        samples([[[0, 2], [1, 4], [0, 5]], [[5, 3], [4, 5], [0, 1]]]),
        torch.tensor([[[1, 1], [0, 1], [0, 0]], [[0, 1], [1, 0], [1, 0]]]).bool(),
    )
    assert found["by_layer"][0] == {"recall_at_k": 3 / 6, "recall_at_2k": 4 / 6, "recall_on_misses": 1 / 3}
    assert found["by_layer"][1] == {"recall_at_k": 3 / 6, "recall_at_2k": 4 / 6, "recall_on_misses": 1 / 3}
    assert found["by_horizon"]["1"] == found["by_layer"][1]
    assert found["by_horizon"]["step"]["recall_at_k"] == (3 + 2) / 12 and list(found["by_horizon"]) == ["1", "step"]
    assert found["recall_at_k"] == 6 / 12 and found["recall_on_misses"] == 2 / 6
    assert found["reach"] == 1 and found["needs"] == [] and found["us_per_layer"] > 0
    json.dumps(found, allow_nan=False)


def test_without_a_miss_there_is_no_recall_on_misses() -> None:
    one = samples([[[0, 2]], [[5, 3]]])
    found = predictor_recall.measure(Always([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]), one, torch.zeros(2, 1, 2).bool())
    assert found["recall_on_misses"] is None and found["recall_at_k"] == 2 / 4


def test_the_oracle_is_always_right() -> None:
    one = made.samples(texts=2)
    oracle = Oracle(made.LAYERS * made.EXPERTS)
    oracle.scores = np.zeros(0)
    found = predictor_recall.measure(oracle, one, predictor_recall.misses(one, 4))
    assert found["recall_at_k"] == found["recall_at_2k"] == found["recall_on_misses"] == 1
    assert None not in found["by_layer"]


def test_counts_are_of_the_rows_before() -> None:
    """A predictor that names what the last row selected is right as often as rows repeat themselves."""
    ids = [[[0, 1], [1, 0], [2, 3], [3, 2]]]

    class Last(Predictor):
        scores = np.zeros(6, dtype=np.int64)

        def guesses(self, seen: PredictorInputs) -> Iterable[Guess]:
            return [Guess(0, torch.from_numpy(self.scores)[None])]

        def observe_step(self, counts: np.ndarray) -> None:
            self.scores = counts

    found = predictor_recall.measure(Last(), samples(ids), torch.ones(1, 4, 2).bool())
    assert found["recall_at_k"] == (2 + 2 + 0 + 2) / 8, "the first row finds 0 and 1, the lowest of equal ones"
    assert set(predictor_recall.history(samples(ids))) == {"utility"}


@given(st.integers(1, 8), st.lists(st.permutations(range(8)).map(lambda order: order[:3]), min_size=1, max_size=30))
def test_misses_are_those_of_an_lru_cache(slots: int, rows: list[list[int]]) -> None:
    """Experts of a row count as present or not before the row is loaded."""
    cache: OrderedDict[int, None] = OrderedDict()
    expected = []
    for row in rows:
        expected.append([expert not in cache for expert in row])
        for expert in row:
            cache[expert] = None
            cache.move_to_end(expert)
        while len(cache) > slots:
            cache.popitem(last=False)
    assert predictor_recall.misses(samples([rows, rows], experts=8), slots)[1].tolist() == expected


@pytest.mark.parametrize(
    ("slots", "size"),
    [
        (SlotCount(per_layer=5), 5),
        (SlotCount(per_layer=99), 12),
        (SlotCount(share=Fraction(1, 4)), 3),
        (SlotCount(share=Fraction(1, 5)), 3),
    ],
)
def test_the_cache_of_a_layer(slots: SlotCount, size: int) -> None:
    assert predictor_recall.cache_of(slots, 12) == size


# -- samples -----------------------------------------------------------------------------------------------------------


def recorder(rows: int = 10) -> SampleRecorder:
    return SampleRecorder(2, 4, 1, 3, rows, torch.bfloat16)


def observe(made_by: SampleRecorder, layer: int, rows: int) -> None:
    made_by.observe(
        layer, torch.full((rows, 3), rows), torch.zeros(rows, 4), torch.ones(rows, 1), torch.zeros(rows, 1).int()
    )


def test_texts_are_recorded_in_order() -> None:
    one = recorder()
    for rows in (3, 5):
        for layer, parts in ((0, (rows,)), (1, (1, rows - 1))):
            for part in parts:
                observe(one, layer, part)
        assert one.end_text(rows).rows == rows
    found = one.result()
    assert found.starts == (0, 3) and found.rows == 8
    assert found.hidden[0, :, 0].tolist() == [3] * 3 + [5] * 5 and found.hidden.dtype == torch.bfloat16
    last = found.texts(1, 2)
    assert last.starts == (0,) and last.rows == 5 and last.hidden.data_ptr() == found.hidden[0, 3].data_ptr()
    size = sum(v[:, :1].nbytes for v in (found.hidden, found.logits, found.ids, found.weights))
    assert SampleRecorder.row_bytes(2, 4, 1, 3, torch.bfloat16) == size


def test_more_rows_than_there_is_room_for() -> None:
    one = recorder(4)
    with pytest.raises(SpacError, match="room for 4 rows"):
        observe(one, 0, 5)


def test_layers_that_ran_other_rows() -> None:
    one = recorder()
    observe(one, 0, 3)
    observe(one, 1, 2)
    with pytest.raises(SpacError, match=r"ran \[2, 3\] rows for a text of 3 tokens"):
        one.end_text(3)


# -- report ------------------------------------------------------------------------------------------------------------


def results() -> dict[str, dict]:
    one, two = [0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]
    known = samples([[[0, 2], [1, 4]], [[5, 3], [4, 5]]])
    missed = torch.ones(2, 2, 2).bool()

    class Nowhere(Always):
        reach = 0

    return {
        "better": predictor_recall.measure(Always(one, two), known, missed),
        "worse": predictor_recall.measure(Nowhere(two, one), known, missed),
    }


def test_the_table() -> None:
    console = Console(width=160)
    with console.capture() as shown:
        console.print(predictor_recall.table(results(), "title", "caption"))
    first = [line.split()[0] for line in shown.get().splitlines() if len(line.split()) > 3 and "predictor" not in line]
    assert first == ["worse", "better", "1", "step"], "the lowest first; horizons where there are several"
    assert "2 of 2" in shown.get()
