"""A budget in a CUDA graph, on a GPU; for ``make test-gpu``."""

import importlib.util

import pytest
import torch

from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.methods.moe_spec.control import BudgetControl, BudgetedLayer
from vllm_spac.methods.moe_spec.settings import BudgetSettings, RoutingRule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]
EXPERTS, TOP_K, ROWS = 128, 8, 16
VERIFY = RequestRows(0, 5, RowKind.VERIFY, 4, (1.0, 0.7, 0.3, 0.01, 0.0))
STEPS = [Step((VERIFY, RequestRows(5, rows, RowKind.DECODE))) for rows in (16, 9, 6)]
COVERAGES = [{"coverage": each} for each in ("substitution", "truncation")]
VOTES = [{}, {"votes": "path"}]


def routing(seed: int) -> tuple[torch.Tensor, ...]:
    logits = 2 * torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(seed)).cuda()
    weights, ids = logits.softmax(-1).topk(TOP_K)
    return logits, weights / weights.sum(1, keepdim=True), ids.int()


@pytest.mark.parametrize("coverage", COVERAGES, ids=["substitution", "truncation"])
@pytest.mark.parametrize("rule", [RoutingRule(), RoutingRule(groups=8, top_groups=4)], ids=["plain", "groups"])
@pytest.mark.parametrize("name", ["budget", "mass"])
def test_a_replay_is_what_the_host_applies(name, rule, coverage):
    """Weights up to the order of the sum that they are divided by."""
    layers = [BudgetedLayer("layer", EXPERTS, TOP_K, rule)]
    held, host = BudgetControl(layers, device="cuda"), BudgetControl(layers, device="cuda")
    bounds = [48, 32, 64] if name == "budget" else [0.8, 0.5, 1.0]
    held.update(BudgetSettings(**{name: bounds[0]}, **coverage))
    held.prepare_graphs(ROWS)
    given = routing(0)
    held.compile(0, *given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = held.capture(0, *given)
    for number, step in enumerate(STEPS * 4):
        for budget in (held, host):
            votes = VOTES[number % 2]
            budget.update(BudgetSettings(**{name: bounds[number % 3]}, **coverage, **votes, when="all"))
        for tensor, new in zip(given, routing(number), strict=True):
            tensor.copy_(new)
        expected = host.apply(0, *given, step)
        torch.cuda.set_sync_debug_mode("error")
        try:
            held.begin_step(step)
            graph.replay()
            held.end_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(found[1], expected[1]), number
        torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    counted, counts = held.counters.snapshot(), host.counters.snapshot()
    assert counted == pytest.approx(counts, rel=1e-5) and counted["dropped_weight"] > 0
