"""Rebuilding a layer's output from some experts, by hand and against loops."""

from __future__ import annotations

import pytest
import torch

from vllm_spac.methods.moe_spec.calibration import CalibrationRecorder
from vllm_spac.methods.moe_spec.control import BudgetedLayer
from vllm_spac.methods.moe_spec.settings import RoutingRule
from vllm_spac.tools.evaluation.reconstruction import Reconstruction, combined, recent, whole_step

ROWS, EXPERTS, TOP_K, WIDTH = 6, 8, 3, 5


def routed(seed: int = 0):
    """Outputs, logits, and what a router makes of them."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(ROWS, EXPERTS, WIDTH, generator=generator)
    logits = 2 * torch.randn(ROWS, EXPERTS, generator=generator)
    weights, ids = logits.softmax(1).topk(TOP_K)
    return outputs, logits, weights / weights.sum(1, keepdim=True), ids


def reconstruction(calibrated: bool = True) -> Reconstruction:
    layer = BudgetedLayer("layer", EXPERTS, TOP_K, RoutingRule())
    recorder = CalibrationRecorder("", "", ["layer"], EXPERTS, TOP_K, 2)
    _, logits, _, ids = routed(seed=1)
    recorder.observe(0, logits.softmax(1), logits.softmax(1).gather(1, ids), ids)
    recorder.end_text()
    return Reconstruction([layer], recorder.result() if calibrated else None)


def errors(points, seed: int = 0, resident=None, **others) -> list[float]:
    outputs, logits, weights, ids = routed(seed)
    resident = torch.zeros(EXPERTS, dtype=torch.bool) if resident is None else resident
    return reconstruction(**others).errors(0, points, outputs, logits, weights, ids, resident)


def test_combined_against_loops() -> None:
    outputs, _, weights, ids = routed()
    for row, sums in enumerate(combined(outputs, weights, ids)):
        by_hand = sum(weights[row, j].double() * outputs[row, ids[row, j]].double() for j in range(TOP_K))
        torch.testing.assert_close(sums, by_hand)


def test_truncation_by_hand() -> None:
    """What is lost are the experts outside, with their natural weights."""
    outputs, logits, weights, ids = routed()
    inside = logits.softmax(1).sum(0).sort(descending=True, stable=True).indices[:4]
    lost = kept = 0.0
    for row in range(ROWS):
        parts = [(int(e), weights[row, j].double() * outputs[row, e].double()) for j, e in enumerate(ids[row])]
        lost += float(sum((v for e, v in parts if e not in inside), torch.zeros(WIDTH)).square().sum())
        kept += float(sum(v for _, v in parts).square().sum())
    assert errors([("router", "truncation", 4)]) == [pytest.approx(lost / kept, rel=1e-6)]


@pytest.mark.parametrize("ranking", ["selected", "router", "static", "coactivation", "resident", "oracle"])
@pytest.mark.parametrize("coverage", ["truncation", "substitution"])
def test_all_experts_lose_nothing(ranking: str, coverage: str) -> None:
    assert errors([(ranking, coverage, EXPERTS)]) == [0.0]


def test_the_oracle_is_never_beaten_under_truncation_in_the_mean() -> None:
    points = [(ranking, "truncation", budget) for budget in (3, 5) for ranking in ("oracle", "router", "static")]
    means = torch.tensor([errors(points, seed) for seed in range(30)]).mean(0).tolist()
    for oracle, router, static in (means[:3], means[3:]):
        assert oracle < router < static


def test_resident_experts_are_preferred() -> None:
    held = torch.zeros(EXPERTS, dtype=torch.bool)
    plain, none = errors([("router", "truncation", 4), ("resident", "truncation", 4)])
    assert plain == none, "with nothing resident it is the router's ranking"
    wanted = torch.bincount(routed()[3].flatten(), minlength=EXPERTS) > 0
    held[routed()[1].softmax(1).sum(0).masked_fill(~wanted, torch.inf).argmin()] = True
    assert errors([("resident", "truncation", 4)], resident=held)[0] > plain


def test_recent() -> None:
    ids = torch.tensor([[0, 1], [2, 3], [0, 4]])
    assert recent(ids, 3, 6).nonzero()[:, 0].tolist() == [0, 2, 4]
    assert recent(ids, 6, 6).nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4], "never used is never resident"
    assert not recent(ids[:0], 3, 6).any()


def test_a_whole_step_is_one_request() -> None:
    assert [(r.start, r.stop) for r in whole_step(7).requests] == [(0, 7)]
