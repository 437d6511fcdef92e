"""Reads ahead by a predictor on the device: the same bits whatever it names, and the same hits."""

from __future__ import annotations

import random

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from replay import Graph
from test_execution import DECODE, EXPERTS, LAYERS, PROMPT, TOP_K, D, Pool, Replayed, made, shape

from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.decisions.predictor_file import Identity, PredictorFile, kinds, needed
from vllm_spac.decisions.predictors._trained import Sizes, Trained
from vllm_spac.decisions.predictors.base import PredictorInputs
from vllm_spac.execution.device import layer_lookahead
from vllm_spac.execution.device.layer_launches import LayerRows
from vllm_spac.execution.device.layer_lookahead import ENTRIES, MOST_ROWS

__all__ = ["made"]  # a fixture

ON_DEVICE = [name for name, kind in kinds().items() if kind.on_device]
CHOSEN = ("quasi_hidden", "neural")  # by hybrid, of the layers behind the first


def file(seed: int = 0, reach: int = 1) -> PredictorFile:
    """Predictors with random tensors."""
    rng = torch.Generator().manual_seed(seed)
    sizes = Sizes(LAYERS, EXPERTS, TOP_K, D, reach)
    tensors = {}
    for name in ON_DEVICE:
        tensors[name] = {}
        for part, (dtype, size) in kinds()[name].specs(sizes).items():
            if part == "choice":
                tensors[name][part] = torch.tensor([0, *(sorted(needed(name, ON_DEVICE)).index(n) for n in CHOSEN)])
            else:
                tensors[name][part] = torch.rand(size, generator=rng).sub(0.5 * part.startswith("map")).to(dtype)
    return PredictorFile(Identity("f", "m", tuple("abc")), sizes, 1, tensors, {})


def predictor(name: str = "gate", seed: int = 0) -> Trained:
    found = file(seed).build(name, reach=1)
    assert isinstance(found, Trained)
    return found


def ahead_by(named: Trained) -> PrefetchSettings:
    return PrefetchSettings(prefetch="gate", built=named)


def counted(stats: dict) -> bool:
    """Whether something was read ahead; bytes are those of what layers missed, and of what none of them used."""
    layout = shape()
    assert stats["bytes"].get("host streamed", 0) == (stats["misses"] - stats["loads"]) * layout.expert_bytes
    assert stats["bytes"].get("host", 0) == stats["loads"] * layout.expert_bytes
    assert stats["prefetch_hits"] + stats["prefetch_wasted"] == stats["prefetches"]
    assert 0 <= stats["bytes"].get("host ahead", 0) <= stats["prefetch_wasted"] * WEIGHTS
    return stats["prefetches"] > 0


WEIGHTS = sum(shape().tensors[name].nbytes for name in ("w13_weight", "w2_weight"))


class Foreseen:
    """Steps whose routing after the first layer is what ``gate`` names, with the probability ``right``."""

    def __init__(self, pool: Pool, named: Trained, right: float, seed: int = 0) -> None:
        self.pool, self.named, self.right = pool, named, right
        self.rng, self.choice = torch.Generator().manual_seed(seed), random.Random(seed)

    def step(self, rows: int = 3, kind: RowKind = RowKind.DECODE) -> int:
        """Returns the distinct experts that it used."""
        pool, used, ids = self.pool, 0, None
        pool.begin_step(Step((RequestRows(0, rows, kind),)))
        pool.admission.check_integrity()
        for layer in range(LAYERS):
            x, weights = torch.randn(rows, D, generator=self.rng), torch.rand(rows, TOP_K, generator=self.rng)
            if ids is None or self.choice.random() >= self.right:
                ids = torch.rand(rows, EXPERTS, generator=self.rng).topk(TOP_K).indices.int()
            out = pool.run(layer, x, weights, ids, "silu", torch.full_like(x, float("nan")))
            assert torch.equal(out, pool.expected(layer, x, weights, ids, "silu"))
            used += len(ids.unique())
            ids = None
            for guess in self.named.guesses(PredictorInputs(layer, hidden=x)):
                ids = guess.scores.topk(TOP_K).indices.int()
        pool.end_forward()
        return used


@pytest.mark.parametrize("slots", [6, 10, LAYERS * EXPERTS - 1])
def test_right_guesses_are_all_used_and_change_no_hit(made, slots: int) -> None:
    pool, plain = made(slots, ahead=ahead_by(predictor())), made(slots)
    foreseen, same = Foreseen(pool, predictor(), 1.0), Foreseen(plain, predictor(), 1.0)
    for _ in range(30):
        assert foreseen.step(2) == same.step(2)
    found, without = pool.snapshot(), plain.snapshot()
    assert counted(found) and without["prefetches"] == 0 == found["prefetch_wasted"]
    for name in ("hits", "misses", "loads"):
        assert found[name] == without[name]


@settings(max_examples=examples(25))
@given(
    slots=st.integers(TOP_K, LAYERS * EXPERTS),
    right=st.sampled_from([0.0, 0.5, 1.0]),
    rows=st.lists(st.integers(1, 5), min_size=10, max_size=25),
    seed=st.integers(0, 99),
)
def test_the_same_bits_whatever_is_named(slots: int, right: float, rows: list[int], seed: int) -> None:
    pool = Pool(slots, ahead=ahead_by(predictor(seed=seed)))
    try:
        foreseen = Foreseen(pool, predictor(seed=seed), right, seed)
        used = sum(foreseen.step(count, RowKind.PREFILL if count == 5 else RowKind.DECODE) for count in rows)
        pool.admission.check_integrity()
        stats = pool.snapshot()
        assert stats["hits"] + stats["misses"] == used
        counted(stats)
        if slots == LAYERS * EXPERTS:
            assert stats["prefetches"] == 0 and pool.signals == frozenset()
    finally:
        pool.close()


def test_votes_rank_what_rows_name(made) -> None:
    """What a slot has is not read, and no more than there is memory for."""
    pool = made(10, ahead=ahead_by(predictor()))
    ahead, rng = pool.ahead.layers, torch.Generator().manual_seed(5)
    x, votes = torch.randn(6, D, generator=rng), torch.tensor([[1.0], [0.0], [0.25], [0.5], [0.7], [0.3]])
    x[1] = float("nan")
    ids = torch.zeros(6, TOP_K, dtype=torch.int32)
    own: dict[int, float] = {}
    for row in (0, 2, 3, 4, 5):
        [guess] = predictor().guesses(PredictorInputs(0, hidden=x[row : row + 1]))
        weights = guess.scores[0].softmax(-1)
        for expert in guess.scores[0].topk(TOP_K).indices.tolist():
            own[expert] = own.get(expert, 0) + float(weights[expert] * votes[row])
    order = [expert for expert in sorted(own, key=lambda expert: -own[expert])]
    outside = [EXPERTS + expert for expert in order if pool.admission.experts.slot_of[EXPERTS + expert] < 0]
    assert 0 < len(outside) < len(order)
    named = ahead.named(0, x, ids, torch.rand(6, TOP_K), votes).tolist()
    assert named == (outside + [-1] * ENTRIES)[:ENTRIES]


def test_nothing_is_named_in_steps_with_prompts_or_without_requests(made) -> None:
    pool = made(10, ahead=ahead_by(predictor()))
    rng = torch.Generator().manual_seed(0)
    for _ in range(5):
        pool.check(DECODE, rng)
    assert pool.snapshot()["prefetches"] > 0
    before = pool.snapshot()["prefetches"]
    for _ in range(10):
        pool.check(PROMPT, rng)
        assert pool.ahead.layers._step == [], "nothing is scored either"
    x = torch.randn(3, D)
    pool.run(0, x, torch.rand(3, TOP_K), torch.zeros(3, TOP_K, dtype=torch.int32), "silu", torch.empty_like(x))
    many = Step((RequestRows(0, MOST_ROWS + 1, RowKind.DECODE),))
    pool.prompts = None
    pool.check(many, rng)
    assert pool.snapshot()["prefetches"] == before


def test_every_trained_predictor_is_there() -> None:
    assert list(kinds()) == ON_DEVICE and len(CHOSEN) == LAYERS - 1


@pytest.mark.parametrize("name", ON_DEVICE)
def test_it_names_what_the_predictor_guesses(made, name: str) -> None:
    """By the router's input and choice; from a file that looks two layers ahead, too."""
    pool = made(TOP_K, ahead=ahead_by(file(reach=2).build(name, reach=1)))
    named, ahead = file(reach=2).build(name, reach=1), pool.ahead.layers
    rng = torch.Generator().manual_seed(3)
    for layer in range(LAYERS - 1):
        x, weights = torch.randn(2, D, generator=rng), torch.rand(2, TOP_K, generator=rng)
        ids = torch.rand(2, EXPERTS, generator=rng).topk(TOP_K).indices.int()
        [guess] = named.guesses(PredictorInputs(layer, hidden=x, ids=ids, weights=weights))
        assert guess.first == (layer + 1) * EXPERTS and guess.scores.shape == (2, EXPERTS)
        known = guess.scores.flip(1).contiguous()  # what was computed already is not computed again
        for scores, computed in ((guess.scores, None), (known, known)):
            found = ahead.named(layer, x, ids, weights, torch.ones(2, 1), computed)
            expected = set((scores.topk(TOP_K).indices + guess.first).flatten().tolist())
            assert set(found.tolist()) - {-1} == {key for key in expected if pool.admission.experts.slot_of[key] < 0}


def test_what_warms_up_moves_nothing(made) -> None:
    """Before any step, and in the middle of one that may read ahead: slots, offers and votes stay what they were."""
    pool = made(10, ahead=ahead_by(predictor()))
    admission, ahead, rng = pool.admission, pool.ahead.layers, torch.Generator().manual_seed(0)
    state = [*admission.experts, *admission.offers, ahead._votes, *ahead.parts.memory]

    def warm_up() -> None:
        before = [tensor.clone() for tensor in state]
        admission.compile()
        for layer in range(LAYERS):
            x, weights = torch.randn(3, D, generator=rng), torch.rand(3, TOP_K, generator=rng)
            ids = torch.full((3, TOP_K), -1, dtype=torch.int32)
            ahead.compile(layer, LayerRows(x, ids, ids, weights, pool._all))
            assert (ahead.parts.keys[min(layer, LAYERS - 2) + 1] < 0).all()
        pool.ahead.layers._copy.record().wait()
        assert all(map(torch.equal, state, before))

    warm_up()
    x = torch.randn(3, D, generator=rng)
    pool.run(0, x, torch.rand(3, TOP_K), torch.zeros(3, TOP_K, dtype=torch.int32), "silu", torch.empty_like(x))
    admission.check_integrity()
    for _ in range(5):
        pool.check(DECODE, rng)
    pool.begin_step(DECODE)
    assert ahead._votes.any() and admission.offers.state[1] > 0
    warm_up()
    pool.end_forward()


def test_padding_names_nothing(made) -> None:
    """Whatever it holds: other rows, experts that there are not, and numbers that are none."""
    pool, named = made(LAYERS * EXPERTS - 4, ahead=ahead_by(predictor("quasi_hidden"))), predictor("quasi_hidden")
    rng = torch.Generator().manual_seed(0)
    for _ in range(4):
        pool.check(DECODE, rng)
    total = 0
    for _ in range(30):
        before, of_the_row = pool.snapshot()["prefetches"], set()
        pool.begin_step(Step((RequestRows(0, 1, RowKind.DECODE),)))
        for layer in range(LAYERS):
            x = torch.randn(6, D, generator=rng)
            x[5] = float("nan")
            weights, ids = torch.rand(6, TOP_K, generator=rng), torch.full((6, TOP_K), 12345, dtype=torch.int32)
            ids[0] = torch.rand(EXPERTS, generator=rng).topk(TOP_K).indices
            for guess in named.guesses(PredictorInputs(layer, hidden=x[:1], ids=ids[:1], weights=weights[:1])):
                of_the_row |= {guess.first + expert for expert in guess.scores.topk(TOP_K).indices[0].tolist()}
            pool.run(layer, x, weights, ids, "silu", torch.empty_like(x))
        read = set(pool.ahead.layers.parts.keys[1:].flatten().tolist()) - {-1}
        pool.end_forward()
        pool.admission.check_integrity()
        assert read <= of_the_row and pool.snapshot()["prefetches"] - before <= len(read)
        total += len(read)
    assert total > 10


def test_a_step_that_ends_early_leaves_nothing_behind(made) -> None:
    """As after an error: the copy stream has arrived, and the next step computes the same bits."""
    pool, rng = made(10, ahead=ahead_by(predictor())), torch.Generator().manual_seed(0)
    for _ in range(3):
        pool.check(DECODE, rng)
        pool.begin_step(DECODE)
        x = torch.randn(3, D, generator=rng)
        ids = torch.rand(3, EXPERTS, generator=rng).topk(TOP_K).indices.int()
        pool.run(0, x, torch.rand(3, TOP_K), ids, "silu", torch.empty_like(x))
        assert pool.ahead.layers._read is not None
        pool.end_forward()
        assert pool.ahead.layers._planned is pool.ahead.layers._read is None and pool.ahead.layers._kept == ()
    pool.check(DECODE, rng)


def test_a_graph_of_more_rows_than_there_is_memory_for_reads_nothing_ahead(made, monkeypatch) -> None:
    monkeypatch.setattr(layer_lookahead, "MOST_ROWS", 2)
    pool, rng = made(10, ahead=ahead_by(predictor())), torch.Generator().manual_seed(0)
    step = Replayed(pool, 5, monkeypatch)
    for rows in (5, 1, 2, 5) * 3:
        step.check(rows, rng)
    assert pool.snapshot()["prefetches"] == 0


@pytest.mark.parametrize(
    ("slots", "name"), [(TOP_K, "gate"), (10, "gate"), (LAYERS * EXPERTS - 1, "gate"), (10, "hybrid"), (10, "neural")]
)
def test_a_replayed_step_reads_ahead_too(made, monkeypatch, slots: int, name: str) -> None:
    pool, choice, rng = (
        made(slots, ahead=ahead_by(predictor(name))),
        random.Random(0),
        torch.Generator().manual_seed(0),
    )
    graph = Graph()
    monkeypatch.setattr("test_execution.Graph", lambda: graph)
    monkeypatch.setattr(pool.ahead.layers, "_name", graph.kernel(pool.ahead.layers._name))
    step, used = Replayed(pool, 5, monkeypatch), 0
    for _ in range(40):
        used += step.check(choice.randint(1, 5), rng)
    stats = pool.snapshot()
    assert stats["hits"] + stats["misses"] == used and counted(stats)
    pool.admission.check_integrity()
