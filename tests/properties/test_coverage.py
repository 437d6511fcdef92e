"""Coverage against a naive twin in Python floats, for any router, shortlist and rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from vllm_spac.kernels.reference.cover import substituted, truncated, where, within_groups

from vllm_spac.errors import ConfigError
from vllm_spac.methods.moe_spec.replay import members
from vllm_spac.methods.moe_spec.settings import check_budget

BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
KINDS = ("softmax", "softmax+bias", "sigmoid+bias", "grouped", "grouped+bias")


def truncate(probs: Tensor, ids: Tensor, weights: Tensor, shortlist: Tensor) -> tuple[Tensor, Tensor]:
    """The natural choice within ``shortlist`` (int64 [B], the best first)."""
    inside = members(shortlist, probs.shape[1])[ids.long()]
    return truncated(probs, weights, ids, inside, shortlist[0])


def substitute(
    probs: Tensor,
    top_k: int,
    shortlist: Tensor,
    renormalize: bool,
    *,
    selection: Tensor | None = None,
    scale: float = 1.0,
    groups: int | None = None,
    top_groups: int | None = None,
    natural: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The best of ``shortlist`` by ``selection``; rows whose ``natural`` choice is inside keep it."""
    inside = members(shortlist, probs.shape[1])
    chosen_by, open_to = probs if selection is None else selection, inside
    if groups is not None and top_groups is not None:
        open_to = within_groups(inside, chosen_by, top_k, groups, top_groups, 1 if selection is None else 2)
    covered = substituted(probs, chosen_by, open_to, top_k, renormalize, scale)
    return covered if natural is None else where(inside[natural[1].long()].all(1), natural, covered)


@dataclass(frozen=True)
class Case:
    """A router, its scores of some rows, and a shortlist."""

    probs: Tensor
    top_k: int
    shortlist: Tensor
    renormalize: bool
    selection: Tensor | None
    scale: float
    groups: int | None
    top_groups: int | None

    @property
    def experts(self) -> int:
        return self.probs.shape[1]

    def substitute(self, shortlist: Tensor | None = None, **others) -> tuple[Tensor, Tensor]:
        knobs = {"selection": self.selection, "scale": self.scale, "groups": self.groups, "top_groups": self.top_groups}
        chosen = self.shortlist if shortlist is None else shortlist
        return substitute(self.probs, self.top_k, chosen, self.renormalize, **knobs | others)

    def natural(self) -> tuple[Tensor, Tensor]:
        return self.substitute(torch.arange(self.experts))

    def truncate(self) -> tuple[Tensor, Tensor]:
        weights, ids = self.natural()
        return truncate(self.probs, ids, weights, self.shortlist)


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, ties: bool | None = None, least: int | None = None) -> Case:
    kind = draw(st.sampled_from(kinds))
    groups = draw(st.sampled_from([2, 4])) if "grouped" in kind else None
    size = draw(st.integers(2, 4))
    experts = groups * size if groups else draw(st.integers(2, 12))
    top_groups = draw(st.integers(1, groups)) if groups else None
    top_k = draw(st.integers(1, min(4, top_groups * size if groups else experts)))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    rows = draw(st.integers(1, 6))
    logits = 2 * torch.randn(rows, experts, generator=rng)
    if draw(st.booleans()) if ties is None else ties:
        logits = logits.round()
    probs = logits.sigmoid() if "sigmoid" in kind else logits.softmax(1)
    bias = torch.randn(experts, generator=rng)
    shortlist = torch.randperm(experts, generator=rng)[: draw(st.integers(least or top_k, experts))]
    selection = probs + bias if "bias" in kind else None
    scale = draw(st.sampled_from([1.0, 2.5]))
    return Case(probs, top_k, shortlist, draw(st.booleans()), selection, scale, groups, top_groups)


def best(scores: dict[int, float], count: int) -> list[int]:
    return sorted(scores, key=lambda i: (-scores[i], i))[:count]


def twin(case: Case, row: int, shortlist: set[int]) -> dict[int, float]:
    """expert -> weight of one row, by the definition."""
    probs = case.probs[row].tolist()
    scores = probs if case.selection is None else case.selection[row].tolist()
    allowed = set(shortlist)
    if case.groups:
        size = len(probs) // case.groups
        members = [range(g * size, (g + 1) * size) for g in range(case.groups)]
        summed = 1 if case.selection is None else 2
        worth = {g: sum(sorted((scores[i] for i in ids), reverse=True)[:summed]) for g, ids in enumerate(members)}
        open_to = {i for g in best(worth, case.top_groups) for i in members[g]} & shortlist
        allowed = open_to if len(open_to) >= case.top_k else allowed
    chosen = best({i: scores[i] for i in allowed}, case.top_k)
    total = sum(probs[i] for i in chosen) if case.renormalize else 1.0
    return {i: probs[i] / total * case.scale for i in chosen}


def dense(weights: Tensor, ids: Tensor, experts: int) -> Tensor:
    return torch.zeros(len(ids), experts, dtype=torch.float64).scatter_add(1, ids.long(), weights.double())


def expected(rows: list[dict[int, float]], experts: int) -> Tensor:
    return torch.tensor([[row.get(i, 0.0) for i in range(experts)] for row in rows], dtype=torch.float64)


@settings(max_examples=examples(400), **BUSY)
@given(cases())
def test_substitution_is_its_twin(case: Case) -> None:
    weights, ids = case.substitute()
    rows = [twin(case, row, set(case.shortlist.tolist())) for row in range(len(ids))]
    assert [list(row) for row in rows] == ids.tolist(), "the best first, equals by the lowest id"
    torch.testing.assert_close(dense(weights, ids, case.experts), expected(rows, case.experts), rtol=1e-5, atol=1e-7)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64


@settings(max_examples=examples(400), **BUSY)
@given(cases(least=1), st.sampled_from([torch.int32, torch.int64]))
def test_truncation_is_its_twin(case: Case, dtype: torch.dtype) -> None:
    natural, chosen = case.natural()
    weights, ids = truncate(case.probs, chosen.to(dtype), natural, case.shortlist)
    inside = set(case.shortlist.tolist())
    rows = [
        {i: w for i, w in twin(case, row, set(range(case.experts))).items() if i in inside} for row in range(len(ids))
    ]
    torch.testing.assert_close(dense(weights, ids, case.experts), expected(rows, case.experts), rtol=1e-5, atol=1e-7)
    kept = torch.isin(chosen, case.shortlist)
    assert torch.equal(weights, torch.where(kept, natural, 0)) and torch.equal(ids[kept].long(), chosen[kept])
    assert weights.dtype == torch.float32 and ids.dtype == dtype
    for row, here in enumerate(rows):
        stand_in = best({i: float(case.probs[row, i]) for i in here}, 1) or [int(case.shortlist[0])]
        assert set(ids[row][~kept[row]].tolist()) <= set(stand_in)


@settings(max_examples=examples(200), **BUSY)
@given(cases(), st.randoms(use_true_random=False))
def test_rows_that_lose_nothing_keep_the_router_s_own_result(case: Case, random) -> None:
    """Its order of ids, its rounding; and the dtype of its ids."""
    order = torch.tensor(random.sample(range(case.top_k), case.top_k))
    weights, ids = (value[:, order] for value in case.natural())
    weights = weights * (1 + 1e-3)
    found = case.substitute(natural=(weights, ids.int()))
    other = case.substitute()
    assert found[1].dtype == torch.int32
    for row in range(len(ids)):
        source = (weights, ids) if set(ids[row].tolist()) <= set(case.shortlist.tolist()) else other
        assert torch.equal(found[0][row], source[0][row]) and torch.equal(found[1][row].long(), source[1][row])


def vllm_grouped(logits: Tensor, bias: Tensor | None, case: Case) -> tuple[Tensor, Tensor]:
    """``grouped_topk`` of vLLM's CPU router, whose text this repeats."""
    scores = logits.softmax(1) if bias is None else logits.sigmoid()
    original, rows = scores, len(scores)
    if bias is not None:
        scores = scores + bias
        worth = scores.view(rows, case.groups, -1).topk(2, dim=-1)[0].sum(-1)
    else:
        worth = scores.view(rows, case.groups, -1).max(-1).values
    mask = torch.zeros_like(worth).scatter_(1, worth.topk(case.top_groups, dim=-1)[1], 1)
    mask = mask.unsqueeze(-1).expand(rows, case.groups, case.experts // case.groups).reshape(rows, -1)
    ids = scores.masked_fill(~mask.bool(), float("-inf")).topk(case.top_k, dim=-1)[1]
    weights = original.gather(1, ids)
    if case.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * case.scale, ids


@settings(max_examples=examples(200), **BUSY)
@given(cases(kinds=("grouped",), ties=False), st.booleans(), st.integers(0, 2**32))
def test_groups_are_vllm_s(case: Case, biased: bool, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, case.experts, generator=rng)
    bias = torch.randn(case.experts, generator=rng) if biased else None
    probs = logits.softmax(1) if bias is None else logits.sigmoid()
    selection = None if bias is None else probs + bias
    case = replace(case, probs=probs, selection=selection)
    weights, ids = vllm_grouped(logits, bias, case)
    found = case.natural()
    assert torch.equal(found[1], ids)
    torch.testing.assert_close(found[0], weights, rtol=1e-6, atol=0)


def test_nothing_kept_is_an_exact_zero() -> None:
    probs = torch.tensor([[0.6, 0.3, 0.1]])
    weights, ids = truncate(probs, torch.tensor([[0, 1]], dtype=torch.int32), probs[:, :2], torch.tensor([2]))
    assert weights.tolist() == [[0.0, 0.0]] and ids.tolist() == [[2, 2]]


def test_the_limit_to_groups_is_lifted_where_they_hold_too_few() -> None:
    probs = torch.tensor([[0.4, 0.3, 0.1, 0.2], [0.1, 0.2, 0.3, 0.4]])
    _, ids = substitute(probs, 2, torch.tensor([0, 2, 3]), False, groups=2, top_groups=1)
    assert ids.tolist() == [[0, 3], [3, 2]]


def test_scores_that_underflowed_give_nothing_rather_than_nan() -> None:
    probs = torch.tensor([[1.0, 0.0, 0.0]])
    assert substitute(probs, 2, torch.tensor([1, 2]), True)[0].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("top_k", [3, 4])
def test_too_short_a_list_is_refused(top_k: int) -> None:
    with pytest.raises(ConfigError, match=rf"use {top_k} to 4, or use --spac-budget 2@coverage=truncation"):
        check_budget(2, 4, top_k, "substitution")
