"""Rows of cut drafts, whose ids are -1: no expert is loaded, computed, named or counted for them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_divided import TOP_K, make
from test_cpu_divided import routed as routed_rows
from test_execution import EXPERTS as ADDRESSED
from test_execution import TOP_K as CHOSEN
from test_execution import D, made
from test_lookahead import BUSY, EXPERTS, LAYERS, TOP
from test_lookahead_away import Away, There, away
from test_pointer_lookahead import ahead_by, predictor
from torch import Tensor

from vllm_spac.core import NO_EXPERT, RequestRows, RowKind, Step
from vllm_spac.execution.base import Rows
from vllm_spac.execution.row_shares import predictor_rows

__all__ = ["made", "make"]  # fixtures


class Weighed(There):
    """The sum of the experts' numbers by the rows' weights; remembers which experts it ran."""

    def __init__(self, tensors) -> None:
        super().__init__(tensors)
        self.ran: set[int] = set()

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, slot_of=None, rows: int = 0) -> Tensor:
        self.ran |= set(ids[weights.any(1)].flatten().tolist())
        return (self._slots[slot_of[ids.long()].long(), 0] * weights).sum(1, keepdim=True)


def layer(pool: Away, number: int, ids: Tensor, cut: Tensor, padding: int = 0) -> Tensor:
    """Runs a layer over rows that chose ``ids`` [rows, k], of which those of ``cut`` [rows, 1] run none."""
    given, real = ids.masked_fill(cut, NO_EXPERT), len(ids)
    given = torch.cat([given, torch.full((padding, ids.shape[1]), 99, dtype=ids.dtype)])
    x, weights = torch.zeros(len(given), 1), torch.ones(given.shape)
    return pool.forward(number, x, weights, given, pool._kernel, Rows(real, cut=True))[:real]


routed = st.lists(
    st.lists(st.integers(0, EXPERTS - 1), unique=True, min_size=TOP, max_size=TOP), min_size=2, max_size=5
)


@settings(**BUSY)
@given(ids=routed, data=st.data(), slots=st.sampled_from([8, 16]), padding=st.integers(0, 2))
def test_experts_of_cut_rows_are_not_loaded_and_not_counted(ids, data, slots: int, padding: int) -> None:
    """Beside a pool whose step lacks these rows, every load and count is the same."""
    cut = [False, *data.draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))]
    left = [chosen for chosen, gone in zip(ids, cut, strict=True) if not gone]
    with away(slots) as whole, away(slots) as short:
        for pool in whole, short:
            pool._kernel = Weighed(pool.tensors)
            pool.begin(len(ids if pool is whole else left))
        for number in range(LAYERS):
            found = layer(whole, number, torch.tensor(ids), torch.tensor(cut)[:, None], padding)
            expected = layer(short, number, torch.tensor(left), torch.zeros(len(left), 1, dtype=torch.bool))
            assert torch.equal(found[~torch.tensor(cut)], expected), "a row that is kept"
            assert not found[torch.tensor(cut)].any()
        counted = [pool._routed.counts([slice(0, len(ids if pool is whole else left))]) for pool in (whole, short)]
        assert (counted[0] == counted[1]).all(), "what policies learn of"
        for pool in whole, short:
            pool.end_forward()
            pool.residency.check_integrity()
        assert whole.store.order == short.store.order
        assert whole._kernel.ran == short._kernel.ran
        assert whole.counters.misses == short.counters.misses and whole.counters.hits == short.counters.hits


def test_the_cpu_computes_no_cut_row(make) -> None:
    """Neither with experts of its own nor with those that stand for them."""
    layers = make(TOP_K, count=EXPERTS)
    x, weights, ids = routed_rows(4, seed=3)
    ids[1:] = ids[0]
    cut = torch.tensor([[False], [True], [False], [True]])
    seen_rows = []
    run = layers.executor.run
    layers.executor.run = lambda x, *others: (seen_rows.append(len(x)), run(x, *others))[1]
    given = ids.masked_fill(cut, NO_EXPERT)
    found = layers.pool.forward(0, x, weights, given, layers, Rows(4, cut=True))
    expected = layers.all_hot(0, x, weights, ids)
    kept = ~cut[:, 0]
    assert torch.allclose(found[kept], expected[kept], atol=1e-6) and not found[~kept].any()
    assert seen_rows == [2]


def test_a_predictor_reads_no_cut_row() -> None:
    x, weights = torch.tensor([[1.0], [2.0], [3.0]]), torch.ones(3, 2)
    ids = torch.tensor([[4, 5], [-1, -1], [6, -1]])
    read, experts, shares = predictor_rows(x, ids, weights)
    assert read.flatten().tolist() == [1.0, 1.0, 3.0]
    assert experts.tolist() == [[4, 5], [4, 5], [6, 5]] and shares.tolist() == [[1, 1], [0, 0], [1, 0]]


def test_the_device_reads_nothing_ahead_for_a_cut_row(made) -> None:
    """Its guess is no expert, as it has none itself: what is named are its neighbours' names."""
    pool = made(CHOSEN, ahead=ahead_by(predictor("gate")))
    rng = torch.Generator().manual_seed(0)
    pool.begin_step(Step((RequestRows(0, 3, RowKind.VERIFY, 2),)))
    x, weights = torch.randn(3, D, generator=rng), torch.rand(3, CHOSEN, generator=rng)
    ids = torch.rand(3, ADDRESSED, generator=rng).topk(CHOSEN).indices.int()
    ids[2] = NO_EXPERT
    named = pool.ahead.layers.named(0, x, ids, weights, torch.ones(3, 1))
    alone = pool.ahead.layers.named(0, x[:2], ids[:2], weights[:2], torch.ones(2, 1))
    assert torch.equal(named, alone) and (named >= 0).any()
    x[2] += 9  # another row
    named = pool.ahead.layers.named(0, x, ids.clamp(min=0), weights, torch.ones(3, 1))
    assert not torch.equal(named, alone), "the row has other names"
    found = pool.run(0, x, weights, ids, "silu", torch.full_like(x, float("nan")))
    assert not found[2].any() and found[:2].any(), "a cut row is finite, and adds nothing"
    assert pool.launches.counts[0].sum() == 2 * CHOSEN
    pool.end_forward()
