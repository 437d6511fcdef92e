"""Reads ahead by a predictor on the device: the same bits whatever it names, and fewer misses where it is right."""

from __future__ import annotations

import random

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from replay import Graph
from test_execution import DECODE, EXPERTS, LAYERS, PROMPT, TOP_K, D, Pool, Replayed, made, moved, shape
from vllm_spac.kernels.types import ADMITTED

from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.cache.residency import NOWHERE
from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.decisions.predictor_file import Identity, PredictorFile, kinds, needed
from vllm_spac.decisions.predictors._trained import Sizes, Trained
from vllm_spac.decisions.predictors.base import PredictorInputs
from vllm_spac.execution.device import layer_lookahead
from vllm_spac.execution.device.layer_lookahead import MOST_ROWS

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


def ahead_by(named: Trained, extra: float) -> PrefetchSettings:
    return PrefetchSettings(prefetch="gate", built=named, extra=extra)


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
def test_right_guesses_leave_misses_to_the_first_layer(made, slots: int) -> None:
    pool, plain = made(slots, ahead=ahead_by(predictor(), 1.0)), made(slots)
    foreseen, same = Foreseen(pool, predictor(), 1.0), Foreseen(plain, predictor(), 1.0)
    for _ in range(30):
        assert foreseen.step(2) == same.step(2)
    found, without = pool.snapshot(), plain.snapshot()
    assert moved(found, shape()) and without["prefetches"] == 0
    assert found["prefetch_hits"] == found["prefetches"] > 0 == found["prefetch_wasted"]
    assert found["misses"] < (0.8 if slots > 6 else 1.0) * without["misses"]
    assert found["hits"] + found["misses"] == without["hits"] + without["misses"]


@settings(max_examples=examples(25))
@given(
    slots=st.integers(TOP_K, LAYERS * EXPERTS),
    right=st.sampled_from([0.0, 0.5, 1.0]),
    rows=st.lists(st.integers(1, 5), min_size=10, max_size=25),
    seed=st.integers(0, 99),
)
def test_the_same_bits_whatever_is_named(slots: int, right: float, rows: list[int], seed: int) -> None:
    pool = Pool(slots, ahead=ahead_by(predictor(seed=seed), 1.0))
    try:
        foreseen = Foreseen(pool, predictor(seed=seed), right, seed)
        used = sum(foreseen.step(count, RowKind.PREFILL if count == 5 else RowKind.DECODE) for count in rows)
        pool.admission.check_integrity()
        stats = pool.snapshot()
        assert stats["hits"] + stats["misses"] == used
        moved(stats, shape())
        read = pool.admission.account._unused
        assert stats["prefetch_hits"] + stats["prefetch_wasted"] + len(read) == stats["prefetches"]
        assert (pool.residency.slot_of[list(read)] != NOWHERE).all()
        if slots == LAYERS * EXPERTS:
            assert stats["prefetches"] == 0 and pool.signals == frozenset()
    finally:
        pool.close()


def verified(pool: Pool, named: Trained, bounds: tuple | None, steps: int) -> None:
    """Steps of four rows, whose layers use the two names that rank first, and two more that are always the same."""
    rng = torch.Generator().manual_seed(0)
    votes = torch.tensor([1.0, 0.8, 0.6, 0.4])
    for _ in range(steps):
        pool.begin_step(Step((RequestRows(0, 4, RowKind.VERIFY, weights=tuple(votes.tolist())),), bounds=bounds))
        first = torch.randperm(EXPERTS, generator=rng)[:2]
        for layer in range(LAYERS):
            x, weights = torch.randn(4, D, generator=rng), torch.rand(4, TOP_K, generator=rng) + 0.1
            a, b, c, d = *first.tolist(), *[e for e in range(4) if e not in first][:2]
            ids = torch.tensor([[a, b], [b, c], [a, d], [b, a]], dtype=torch.int32)
            pool.run(layer, x, weights, ids, "silu", torch.empty_like(x))
            for guess in named.guesses(PredictorInputs(layer, hidden=x)):
                best = guess.scores.topk(TOP_K).indices
                own = torch.zeros_like(guess.scores).scatter(1, best, guess.scores.softmax(-1).gather(1, best))
                first = (own * votes[:, None]).sum(0).topk(2).indices
        pool.end_forward()
        pool.admission.check_integrity()


def test_under_a_budget_nine_of_ten_reads_are_used(made) -> None:
    """And at most a tenth as many evict what is needed before they are used: reads of names that rank low do both."""
    found, bounds = {}, (4,) * LAYERS
    for limit in (None, bounds):
        pool = made(14, policy="reuse", ahead=ahead_by(predictor(), 0.1))
        verified(pool, predictor(), limit, 200)
        stats = pool.snapshot()
        found[limit] = [stats[name] for name in ("prefetches", "prefetch_hits", "prefetch_harmful")]
    read, hits, harmful = found[None]
    assert hits < 0.85 * read and harmful > 0.2 * hits
    read, hits, harmful = found[bounds]
    assert hits >= 0.9 * read and harmful <= 0.1 * hits and hits > 30


def test_a_budget_and_votes_rank_what_rows_name(made) -> None:
    """Places are reported of all that is named; of a layer at most the first are read."""
    pool = made(10, ahead=ahead_by(predictor(), 1.0))
    ahead, rng = pool.ahead.layers, torch.Generator().manual_seed(5)
    x, votes = torch.randn(3, D, generator=rng), torch.tensor([[1.0], [0.0], [0.25]])
    x[1] = float("nan")
    ids, out = torch.zeros(3, TOP_K, dtype=torch.int32), torch.zeros(1, EXPERTS)
    ahead._limits.fill_(2)
    ahead.write_guess(0, x, ids, torch.rand(3, TOP_K), votes, out)
    own: dict[int, float] = {}
    for row in (0, 2):
        [guess] = predictor().guesses(PredictorInputs(0, hidden=x[row : row + 1]))
        weights = guess.scores[0].softmax(-1)
        for expert in guess.scores[0].topk(TOP_K).indices.tolist():
            own[expert] = own.get(expert, 0) + float(weights[expert] * votes[row])
    order = sorted(own, key=lambda expert: -own[expert])
    places = pool.admission.places[1].tolist()
    assert [places[expert] for expert in order] == list(range(len(order)))
    assert all(place == -1 for expert, place in enumerate(places) if expert not in own)
    assert set(out[0].nonzero().flatten().tolist()) == set(order[:2])


def test_nothing_is_named_in_steps_with_prompts_or_without_requests(made) -> None:
    pool = made(10, ahead=ahead_by(predictor(), 1.0))
    rng = torch.Generator().manual_seed(0)
    for _ in range(5):
        pool.check(DECODE, rng)
    assert pool.snapshot()["prefetches"] > 0
    before = pool.snapshot()["prefetches"]
    for _ in range(10):
        pool.check(PROMPT, rng)
        assert pool.ahead.layers._step[0] == [], "nothing is scored either"
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
    pool = made(10, ahead=ahead_by(file(reach=2).build(name, reach=1), 1.0))
    named, ahead = file(reach=2).build(name, reach=1), pool.ahead.layers
    rng = torch.Generator().manual_seed(3)
    ahead._limits.fill_(EXPERTS)  # as steps without a budget do
    for layer in range(LAYERS - 1):
        x, weights = torch.randn(4, D, generator=rng), torch.rand(4, TOP_K, generator=rng)
        ids = torch.rand(4, EXPERTS, generator=rng).topk(TOP_K).indices.int()
        out = torch.zeros(1, EXPERTS)
        ahead.write_guess(layer, x, ids, weights, torch.ones(4, 1), out)
        [guess] = named.guesses(PredictorInputs(layer, hidden=x, ids=ids, weights=weights))
        assert guess.first == (layer + 1) * EXPERTS and guess.scores.shape == (4, EXPERTS)
        assert set(out[0].nonzero().flatten().tolist()) == set(guess.scores.topk(TOP_K).indices.flatten().tolist())
        known = guess.scores.flip(1).contiguous()  # what was computed already is not computed again
        ahead.write_guess(layer, x, ids, weights, torch.ones(4, 1), out, known)
        assert set(out[0].nonzero().flatten().tolist()) == set(known.topk(TOP_K).indices.flatten().tolist())


def test_what_warms_up_moves_nothing(made) -> None:
    """Before any step, and in the middle of one that may read ahead: slots, offers and guesses stay what they were."""
    pool = made(10, ahead=ahead_by(predictor(), 1.0))
    admission, ahead, rng = pool.admission, pool.ahead.layers, torch.Generator().manual_seed(0)
    state = [*admission.experts, *admission.offers, admission.reports.guesses, ahead._step_words]

    def warm_up() -> None:
        before = [tensor.clone() for tensor in state]
        admission.compile()
        for layer in range(LAYERS):
            x, weights = torch.randn(3, D, generator=rng), torch.rand(3, TOP_K, generator=rng)
            ahead.compile(layer, x, torch.full((3, TOP_K), -1, dtype=torch.int32), weights)
            ahead.wait()
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
    pool, named = made(LAYERS * EXPERTS - 4, ahead=ahead_by(predictor("quasi_hidden"), 1.0)), predictor("quasi_hidden")
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
        pool.ahead.layers.wait()
        read = set((pool.admission.reports.guesses == ADMITTED).nonzero().flatten().tolist())
        pool.end_forward()
        pool.admission.check_integrity()
        assert read <= of_the_row and pool.snapshot()["prefetches"] - before == len(read)
        total += len(read)
    assert total > 10


def test_a_step_that_ends_early_leaves_nothing_behind(made) -> None:
    """As after an error: the copy stream has arrived, and the next step computes the same bits."""
    pool, rng = made(10, ahead=ahead_by(predictor(), 1.0)), torch.Generator().manual_seed(0)
    for _ in range(3):
        pool.check(DECODE, rng)
        pool.begin_step(DECODE)
        x = torch.randn(3, D, generator=rng)
        ids = torch.rand(3, EXPERTS, generator=rng).topk(TOP_K).indices.int()
        pool.run(0, x, torch.rand(3, TOP_K), ids, "silu", torch.empty_like(x))
        assert pool.ahead.layers._arrives is not None or pool.ahead.layers._step[0] == []
        pool.end_forward()
        assert pool.ahead.layers._arrives is None and pool.ahead.layers._kept == ()
    pool.check(DECODE, rng)


def test_a_graph_of_more_rows_than_there_is_memory_for_reads_nothing_ahead(made, monkeypatch) -> None:
    monkeypatch.setattr(layer_lookahead, "MOST_ROWS", 2)
    pool, rng = made(10, ahead=ahead_by(predictor(), 1.0)), torch.Generator().manual_seed(0)
    step = Replayed(pool, 5, monkeypatch)
    for rows in (5, 1, 2, 5) * 3:
        step.check(rows, rng)
    assert pool.snapshot()["prefetches"] == 0


@pytest.mark.parametrize(
    ("slots", "name"), [(TOP_K, "gate"), (10, "gate"), (LAYERS * EXPERTS - 1, "gate"), (10, "hybrid"), (10, "neural")]
)
def test_a_replayed_step_reads_ahead_too(made, monkeypatch, slots: int, name: str) -> None:
    pool, choice, rng = (
        made(slots, ahead=ahead_by(predictor(name), 1.0)),
        random.Random(0),
        torch.Generator().manual_seed(0),
    )
    graph = Graph()
    monkeypatch.setattr("test_execution.Graph", lambda: graph)
    monkeypatch.setattr(pool.ahead.layers, "write_guess", graph.kernel(pool.ahead.layers.write_guess))
    step, used = Replayed(pool, 5, monkeypatch), 0
    for _ in range(40):
        used += step.check(choice.randint(1, 5), rng)
    stats = pool.snapshot()
    assert stats["hits"] + stats["misses"] == used and moved(stats, shape())
    assert stats["prefetches"] > 0 or slots == TOP_K
    pool.admission.check_integrity()
