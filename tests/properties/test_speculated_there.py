"""Experts run by prediction where the device decides, compared with the host's: the same ones, weights and counts."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from effort import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from replay import Graph
from routing_rules import rules
from test_execution import EXPERTS, LAYERS, TOP_K, D
from test_pointer_lookahead import ON_DEVICE, file

from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.errors import UnsupportedError
from vllm_spac.methods.moe_spec.control import BudgetControl
from vllm_spac.methods.moe_spec.replay import BudgetCounters
from vllm_spac.methods.moe_spec.settings import BudgetedLayer, BudgetSettings, RoutingRule
from vllm_spac.methods.speculating_experts.speculated import SpeculatedExecution, SpeculatedLaunches

ROWS, PADDING, CAPTURED = 12, 3, 10
BIAS = torch.linspace(-0.3, 0.3, EXPERTS)
RULES = [rule for rule in rules(BIAS) if rule.groups is None]
SOFTMAX = [rule for rule in RULES if rule.scoring == "softmax"]
CASES = [*product(["predicted"], SOFTMAX), *product(["restricted"], RULES)]
LENGTHS = {RowKind.VERIFY: 4, RowKind.DECODE: 1, RowKind.PREFILL: 3}


def control(name: str, rule: RoutingRule, there: bool, held: torch.Tensor, seed: int, **chosen) -> BudgetControl:
    layers = [BudgetedLayer(f"layer.{i}", EXPERTS, TOP_K, rule, lambda: held) for i in range(LAYERS)]
    named, counters, launches = file(seed).build(name, reach=1), BudgetCounters(), None
    if there:
        launches = SpeculatedLaunches(layers, named, ROWS + PADDING, CAPTURED)
    made = BudgetControl(layers, speculation=SpeculatedExecution(layers, named, counters, launches), counters=counters)
    made.update(BudgetSettings(**chosen))
    return made


@st.composite
def steps(draw) -> Step:
    requests, start = [], 0
    for kind in draw(st.lists(st.sampled_from(list(LENGTHS)), max_size=6)):
        if start + LENGTHS[kind] <= ROWS:
            requests.append(RequestRows(start, start + LENGTHS[kind], kind))
            start += LENGTHS[kind]
    return Step(tuple(requests))


def routing(rule: RoutingRule, seed: int, rows: int) -> dict[str, torch.Tensor]:
    """What a router of this rule computes of rows, and reads."""
    rng = torch.Generator().manual_seed(seed)
    logits, hidden = torch.randn(rows, EXPERTS, generator=rng), torch.randn(rows, D, generator=rng)
    probs = rule.probs(logits)
    ids = (probs if rule.bias is None else probs + rule.bias).topk(TOP_K).indices
    weights = probs.gather(1, ids)
    weights = weights / weights.sum(1, keepdim=True) if rule.renormalize else weights
    return {"logits": logits, "weights": rule.scale * weights, "ids": ids.int(), "hidden": hidden}


def same(found: tuple, expected: tuple, rows: int) -> None:
    """Products of one row more or fewer may be summed in another order, and weights follow from them."""
    assert torch.equal(found[1][:rows], expected[1][:rows]) and found[1].dtype == expected[1].dtype
    torch.testing.assert_close(found[0][:rows], expected[0][:rows], rtol=1e-4, atol=1e-6)


def run(made: BudgetControl, layer: int, step: Step, of: dict[str, torch.Tensor]) -> tuple:
    return made.apply(layer, of["logits"], of["weights"], of["ids"], step, hidden=of["hidden"])


@settings(max_examples=examples(300), phases=[Phase.generate], report_multiple_bugs=False)
@given(
    case=st.sampled_from(CASES),
    name=st.sampled_from(ON_DEVICE),
    when=st.sampled_from(["decode", "all"]),
    step=steps(),
    padding=st.integers(0, PADDING),
    seed=st.integers(0, 2**20),
)
def test_the_same_as_on_the_host(case, name, when, step, padding, seed) -> None:
    """Padding may hold anything, and keeps it; so do rows that are not speculated."""
    (mode, rule), chosen = case, {"when": when}
    held = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(seed)) < 0.4
    host, there = (control(name, rule, each, held, seed % 7, speculate=mode, **chosen) for each in (False, True))
    host.begin_step(step)
    there.begin_step(step)
    for layer in range(LAYERS):
        of = routing(rule, seed + layer, step.rows + padding)
        of["logits"][step.rows :], of["weights"][step.rows :], of["ids"][step.rows :] = math.nan, math.nan, 9999
        found = run(there, layer, step, of)
        same(found, run(host, layer, step, of), step.rows)
        assert (found[1][step.rows :] == 9999).all()
        speculates = any(request.kind in there.settings.kinds for request in step.requests)
        assert (there.guess is not None) == (speculates and layer + 1 < LAYERS)
    host.end_step()
    there.end_step()
    found, expected = there.counters.snapshot(), host.counters.snapshot()
    assert found == pytest.approx(expected, rel=1e-4) and list(map(type, found.values())) == list(
        map(type, expected.values())
    )


class InAGraph:
    """All layers as one graph, on buffers that stay where they are."""

    def __init__(self, made: BudgetControl, rule: RoutingRule) -> None:
        made.prepare_graphs(ROWS)
        self.made, self.rule, self.graph = made, rule, Graph()
        for rows in (ROWS, CAPTURED):  # as vLLM's profile run, of which no graph is made
            self.given = [routing(rule, layer, rows) for layer in range(LAYERS)]
            for layer, of in enumerate(self.given):
                made.compile(layer, **of)
        with self.graph:
            self.found = [made.capture(layer, **of) for layer, of in enumerate(self.given)]

    def check(self, host: BudgetControl, step: Step, seed: int) -> None:
        for layer, of in enumerate(self.given):
            for kind, new in routing(self.rule, seed + layer, CAPTURED).items():
                of[kind].copy_(new)
        self.made.begin_step(step)
        self.graph.replay()
        self.made.end_step()
        host.begin_step(step)
        for layer, of in enumerate(self.given):
            natural = of["weights"], of["ids"]
            same(self.found[layer], run(host, layer, step, of) if host.active else natural, CAPTURED)


def decoding(rows: int) -> Step:
    return Step((RequestRows(0, 2, RowKind.DECODE), RequestRows(2, rows, RowKind.VERIFY, rows - 3)))


@pytest.mark.parametrize("name", ON_DEVICE)
@pytest.mark.parametrize("mode", ["predicted", "restricted"])
def test_a_replayed_step_is_speculated_too(name: str, mode: str) -> None:
    """By the choices of its own step, whatever was captured; nothing is, while it is switched off."""
    held = torch.zeros(EXPERTS, dtype=torch.bool)
    held[:3] = True
    host, there = (control(name, SOFTMAX[0], each, held, 1, speculate=mode) for each in (False, True))
    there.begin_step(step := decoding(5))  # one before the capture leaves nothing in it
    for layer in range(LAYERS):
        run(there, layer, step, routing(SOFTMAX[0], layer, 5))
    there.end_step()
    there.counters.reset()
    graph = InAGraph(there, SOFTMAX[0])
    assert there.counters.snapshot()["rows"] == 0, "nobody votes yet"
    for seed, rows in enumerate((4, 7, 3)):
        graph.check(host, decoding(rows), 100 * seed)
    assert there.counters.snapshot() == pytest.approx(host.counters.snapshot(), rel=1e-4)
    assert there.counters.snapshot()["dropped_weight"] > 0
    for made in (host, there):
        made.update(BudgetSettings())
    graph.check(host, decoding(4), 7)


def test_a_graph_keeps_its_kind() -> None:
    there = control("gate", SOFTMAX[0], True, torch.ones(EXPERTS, dtype=torch.bool), 1, speculate="predicted")
    InAGraph(there, SOFTMAX[0])
    for other in ({"speculate": "restricted"}, {"budget": TOP_K}):
        with pytest.raises(UnsupportedError, match=r"a budget of the kind \(speculate=predicted\)"):
            there.update(BudgetSettings(**other))
    assert there.settings.speculate == "predicted"
