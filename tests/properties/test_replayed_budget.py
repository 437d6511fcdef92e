"""A budget as launches of a CUDA graph compared with one applied by the host: the same experts, weights and counts."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from replay import Graph
from routing_rules import rules

from vllm_spac import components
from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.errors import UnsupportedError
from vllm_spac.execution import rerouting
from vllm_spac.integration.serving.worker_extension import SpacWorker
from vllm_spac.methods.moe_spec.control import BudgetControl, BudgetedLayer
from vllm_spac.methods.moe_spec.settings import BudgetSettings, RoutingRule
from vllm_spac.runtime import Runtime

# A row is a multiple of the vectors that a CPU computes sigmoids in: what is left over, torch rounds otherwise.
EXPERTS, TOP_K, ROWS, LAYERS = 32, 3, 12, 2
RNG = torch.Generator().manual_seed(0)
BIAS = torch.randn(EXPERTS, generator=RNG) / 3
RULES = rules(BIAS)
BOUNDS = [
    *({"budget": count} for count in (TOP_K, 5, 12, EXPERTS)),
    *({"mass": mass, "mass_of": of} for mass, of in product((0.3, 0.9, 1.0), ("selected", "scores"))),
]
COVERAGES = [{"coverage": each} for each in ("substitution", "truncation")]
VOTES = [{}, *({"votes": "path", "votes_alpha": alpha} for alpha in (0.0, 0.5, 1.0))]
KINDS = {RowKind.VERIFY: 4, RowKind.DECODE: 1, RowKind.PREFILL: 3}
RANKINGS = components.names("rankings")


def control(rule: RoutingRule, **chosen) -> BudgetControl:
    layers = [BudgetedLayer(f"layer.{i}", EXPERTS, TOP_K, rule) for i in range(LAYERS)]
    made = BudgetControl(layers)
    made.update(BudgetSettings(**chosen))
    return made


@st.composite
def steps(draw) -> Step:
    """Requests one behind the other; what is left of ``ROWS`` is padding."""
    requests, start = [], 0
    for kind in draw(st.lists(st.sampled_from(list(KINDS)), max_size=6)):
        if start + KINDS[kind] <= ROWS:
            reached = draw(st.none() | st.lists(st.floats(0, 1), min_size=KINDS[kind], max_size=KINDS[kind]).map(tuple))
            requests.append(RequestRows(start, start + KINDS[kind], kind, weights=reached))
            start += KINDS[kind]
    return Step(tuple(requests))


def routing(rule: RoutingRule, seed: int, spread: float, coarse: bool) -> tuple[torch.Tensor, ...]:
    """(logits, weights, ids) as a router of this rule has them; ``coarse`` logits are often equal."""
    logits = spread * torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    logits = logits.round() if coarse else logits
    probs = rule.probs(logits)
    ids = (probs if rule.bias is None else probs + rule.bias).topk(TOP_K).indices
    weights = probs.gather(1, ids)
    return logits, rule.scale * (weights / weights.sum(1, keepdim=True)), ids.to(torch.int32)


def same(found: tuple, expected: tuple, rows: int = ROWS) -> None:
    """The ids are equal; the host's sum that renormalises a row adds the same ``TOP_K`` weights in another order."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours[:rows], theirs[:rows], rtol=TOP_K * 2**-23, atol=0)


def same_counts(found: BudgetControl, expected: BudgetControl) -> None:
    found, expected = found.counters.snapshot(), expected.counters.snapshot()
    assert found == pytest.approx(expected) and list(map(type, found.values())) == list(map(type, expected.values()))


@settings(max_examples=examples(400))
@given(
    rule=st.sampled_from(RULES),
    bound=st.sampled_from(BOUNDS),
    ranking=st.sampled_from(RANKINGS),
    coverage=st.sampled_from(COVERAGES),
    votes=st.sampled_from(VOTES),
    when=st.sampled_from(["verify", "decode", "all"]),
    step=steps(),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    coarse=st.booleans(),
)
def test_the_same_as_on_the_host(rule, bound, ranking, coverage, votes, when, step, seed, spread, coarse) -> None:
    """Rows that do not vote may hold anything, and keep it."""
    chosen = bound | coverage | votes | {"ranking": ranking, "when": when}
    host, device = control(rule, **chosen), control(rule, **chosen)
    device.prepare_graphs(ROWS)
    for index in range(LAYERS):
        logits, weights, ids = routing(rule, seed + index, spread, coarse)
        logits[step.rows :], weights[step.rows :], ids[step.rows :] = math.nan, math.nan, -1
        expected = host.apply(index, logits, weights, ids, step)
        if index == 0:
            for layer in range(LAYERS):
                device.compile(layer, logits, weights, ids)
            same(device.capture(index, *routing(rule, seed, spread, coarse)), routing(rule, seed, spread, coarse)[1:])
            assert set(device.counters.snapshot().values()) == {0}, "nobody votes yet"
            device.begin_step(step)
        found = device.capture(index, logits, weights, ids)
        same(found, expected, step.rows)
        assert (found[1][step.rows :] == -1).all() and found[0][step.rows :].isnan().all()
    host.begin_step(step)
    device.end_step()
    same_counts(device, host)


@st.composite
def cut_steps(draw) -> tuple[Step, torch.Tensor]:
    """A step, and which of its rows are cut, bool [ROWS, 1]: only drafts, which are behind a request's first row."""
    step, cut = draw(steps()), torch.zeros(ROWS, 1, dtype=torch.bool)
    for request in step.requests:
        if request.kind is RowKind.VERIFY:
            for row in range(request.start + 1, request.stop):
                cut[row] = draw(st.booleans())
    return step, cut


@settings(max_examples=examples(200))
@given(
    rule=st.sampled_from(RULES),
    bound=st.sampled_from(BOUNDS),
    ranking=st.sampled_from(RANKINGS),
    coverage=st.sampled_from(COVERAGES),
    when=st.sampled_from(["verify", "decode", "all"]),
    given=cut_steps(),
    seed=st.integers(0, 2**32),
    held=st.booleans(),
)
def test_a_row_that_the_device_cuts_has_no_vote(rule, bound, ranking, coverage, when, given, seed, held) -> None:
    """The others run what they run in a step that lacks it; so they do in a step without such rows afterwards."""
    (step, cut), chosen = given, bound | coverage | {"ranking": ranking, "when": when}
    short, device = control(rule, **chosen), control(rule, **chosen)
    kept = [row for row in range(step.rows) if not cut[row]]
    start, requests = 0, []
    for request in step.requests:
        rows = sum(row in kept for row in range(request.start, request.stop))
        requests.append(RequestRows(start, start + rows, request.kind))
        start += rows
    if held:
        device.prepare_graphs(ROWS)
    for index in range(LAYERS):
        logits, weights, ids = routing(rule, seed + index, 1.0, False)
        if held:
            for layer in range(LAYERS):
                device.compile(layer, logits, weights, ids)
            device.capture(index, logits, weights, ids)
        device.begin_step(step, cut)
        launch = device.capture if held else lambda *layer: device.apply(*layer, step)
        found = launch(index, logits, weights, ids)
        left = [each[kept] for each in (logits, weights, ids)]
        same([each[kept] for each in found], short.apply(index, *left, Step(tuple(requests))), len(kept))
        device.end_step()
        if not held:
            device.begin_step(step)
            whole = control(rule, **chosen).apply(index, logits, weights, ids, step)
            same(device.apply(index, logits, weights, ids, step), whole)
            device.end_step()
    if not held:
        assert device.counters.snapshot()["rows"] >= short.counters.snapshot()["rows"]


def test_a_budget_changes_between_steps_after_one_in_which_rows_were_cut() -> None:
    """vLLM runs steps in inference mode, and answers a change of the budget outside of it."""
    step, cut = Step((RequestRows(0, 4, RowKind.VERIFY),)), torch.zeros(ROWS, 1, dtype=torch.bool)
    cut[3] = True
    layer = routing(RULES[0], 0, 1.0, False)
    device = control(RULES[0], budget=3, when="all")

    def stepped() -> tuple:
        with torch.inference_mode():
            device.begin_step(step, cut)
            found = device.apply(0, *layer, step)
            device.end_step()
        return found

    stepped()
    device.counters.reset()
    assert set(device.counters.snapshot().values()) == {0}
    device.update(BudgetSettings(budget=TOP_K, when="all"))
    wanted = control(RULES[0], budget=TOP_K, when="all")
    wanted.begin_step(step, cut)
    same(stepped(), wanted.apply(0, *layer, step))


@settings(max_examples=examples(200))
@given(
    rule=st.sampled_from(RULES),
    bound=st.sampled_from(BOUNDS),
    ranking=st.sampled_from(RANKINGS),
    coverage=st.sampled_from(COVERAGES),
    alpha=st.sampled_from([0.0, 0.5, 1.0]),
    when=st.sampled_from(["verify", "decode", "all"]),
    step=steps(),
    seed=st.integers(0, 2**32),
    held=st.booleans(),
)
def test_votes_that_the_device_knows_weigh_the_same(rule, bound, ranking, coverage, alpha, when, step, seed, held):
    """The host has no weights of the step, and counts nobody as unweighted."""
    chosen = bound | coverage | {"votes": "path", "votes_alpha": alpha, "ranking": ranking, "when": when}
    host, device = control(rule, **chosen), control(rule, **chosen)
    reached, requests = torch.ones(ROWS, dtype=torch.float64), []
    for request in step.requests:
        rows = request.stop - request.start
        reached[request.start : request.stop] = torch.tensor(request.weights or [1.0] * rows, dtype=torch.float64)
        requests.append(RequestRows(request.start, request.stop, request.kind))
    blind = Step(tuple(requests))
    if held:
        device.prepare_graphs(ROWS)
    for index in range(LAYERS):
        logits, weights, ids = routing(rule, seed + index, 1.0, False)
        if held:
            for layer in range(LAYERS):
                device.compile(layer, logits, weights, ids)
            device.capture(index, logits, weights, ids)
        device.begin_step(blind, reached=reached)
        launch = device.capture if held else lambda *layer: device.apply(*layer, blind)
        same(launch(index, logits, weights, ids), host.apply(index, logits, weights, ids, step), step.rows)
        device.end_step()
    assert device.counters.snapshot()["unweighted"] == 0


def test_votes_that_the_device_knows_are_not_of_parts_that_the_host_ranks() -> None:
    layers = [BudgetedLayer("layer.0", EXPERTS, TOP_K, RULES[0])]
    made = BudgetControl(layers, weighed_on_device=True)
    made.update(BudgetSettings(budget=5, window=2))
    with pytest.raises(UnsupportedError, match="window=2 ranks rows apart, and only the device knows how likely rows"):
        made.update(BudgetSettings(budget=5, window=2, votes="path"))


def test_which_budgets_leave_drafts_whole() -> None:
    """They rank parts of a request alone."""
    assert not control(RULES[0], budget=5).uncut and not control(RULES[0]).uncut
    assert "window=2" in control(RULES[0], budget=5, window=2).uncut


class Replayed:
    """The routing of both layers as one graph, on buffers that stay where they are."""

    def __init__(self, held: BudgetControl) -> None:
        held.prepare_graphs(ROWS)
        self.held, self.graph = held, Graph()
        self.given = [list(routing(RULES[0], layer, 1.0, False)) for layer in range(LAYERS)]
        for layer, buffers in enumerate(self.given):
            held.compile(layer, *buffers)
        with self.graph:
            self.found = [held.capture(layer, *buffers) for layer, buffers in enumerate(self.given)]

    def check(self, host: BudgetControl, step: Step, seed: int) -> None:
        """One step, replayed, beside ``host``."""
        for layer, buffers in enumerate(self.given):
            for ours, new in zip(buffers, routing(RULES[0], seed + layer, 1.0, False), strict=True):
                ours.copy_(new)
        self.held.begin_step(step)
        self.graph.replay()
        self.held.end_step()
        if host is not self.held:
            host.begin_step(step)
        for layer, buffers in enumerate(self.given):
            expected = host.apply(layer, *buffers, step) if host.active else tuple(buffers[1:])
            same(self.found[layer], expected)


PROMPT, VERIFY = RequestRows(0, 3, RowKind.PREFILL), RequestRows(3, 7, RowKind.VERIFY, 3, (1.0, 0.5, 0.1, 0.0))
STEPS = [Step((PROMPT, VERIFY)), Step((RequestRows(0, 4, RowKind.VERIFY),)), Step((PROMPT,)), Step()]


@pytest.mark.parametrize("coverage", COVERAGES, ids=["substitution", "truncation"])
@pytest.mark.parametrize(
    "bounds",
    [
        [{"budget": 4}, {"budget": 3}, {}, {"budget": EXPERTS}],
        [{"mass": 0.5}, {"mass": 0.9}, {}, {"mass": 1.0}, {"mass": 0.2}],
        [{"mass": 0.5, "mass_of": "scores"}, {}, {"mass": 0.9, "mass_of": "scores"}],
    ],
    ids=["number", "selected mass", "mass of scores"],
)
@pytest.mark.parametrize("ranking", RANKINGS)
def test_a_replay_follows_the_step_and_the_settings(ranking, bounds, coverage) -> None:
    """Budgets, who votes and how much, on and off: all change between replays of one graph."""
    kind = {"ranking": ranking} | coverage
    host, held = control(RULES[0], **bounds[0], **kind), control(RULES[0], **bounds[0], **kind)
    step = Replayed(held)
    assert set(held.counters.snapshot().values()) == {0}, "a capture is nobody's"
    for number, (bound, when) in enumerate(product(bounds, ("verify", "all"))):
        for each in (host, held):
            votes = VOTES[number % len(VOTES)]
            each.update(BudgetSettings(**bound, **kind, **votes, when=when) if bound else BudgetSettings())
        for each in STEPS:
            step.check(host, each, number)
        same_counts(held, host)
    for each in (host, held):
        each.counters.reset()
    step.check(host, STEPS[0], 5)
    same_counts(held, host)


def test_a_budget_that_is_off_may_be_switched_on() -> None:
    held = control(RULES[0], coverage="truncation")
    step = Replayed(held)
    assert held.captured and not held.active
    step.check(held, STEPS[0], 0)
    assert set(held.counters.snapshot().values()) == {0}
    host = control(RULES[0], budget=3, coverage="truncation")
    held.update(BudgetSettings(budget=3, coverage="truncation"))
    step.check(host, STEPS[0], 0)
    same_counts(held, host)
    assert held.counters.snapshot()["dropped_weight"] > 0


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"budget": 4, "ranking": "router"}, "ranking=router"),
        ({"budget": 4, "coverage": "truncation"}, "coverage=truncation"),
        ({"mass": 0.9}, "mass_of=selected"),
        ({"budget": 4, "window": 2}, "window.*--enforce-eager"),
    ],
    ids=str,
)
def test_what_takes_other_launches_is_refused(asked: dict, named: str) -> None:
    held = control(RULES[0], budget=4)
    step = Replayed(held)
    with pytest.raises(UnsupportedError, match=named):
        held.update(BudgetSettings(**asked))
    step.check(control(RULES[0], budget=4), STEPS[0], 0)
    held.update(BudgetSettings(coverage="truncation"))  # off


def test_without_room_for_it_a_graph_holds_no_budget() -> None:
    plain, (logits, weights, ids) = control(RULES[0], budget=4), routing(RULES[0], 0, 1.0, False)
    found = plain.capture(0, logits, weights, ids)
    assert found[0] is weights and found[1] is ids and not plain.captured


@pytest.mark.parametrize("start", [{"budget": 5}, {}], ids=["in force", "off"])
def test_a_runtime_in_a_graph_follows_what_is_asked_while_it_serves(monkeypatch, start: dict) -> None:
    held, graph = control(RULES[0], **start), Graph()
    held.prepare_graphs(ROWS)
    run = Runtime([], held)
    monkeypatch.setattr(rerouting, "capturing", lambda tensor: graph.capturing)
    logits, weights, ids = routing(RULES[0], 0, 1.0, False)
    assert run.rerouter.route(0, logits, logits, weights, ids)[1] is ids, "a dummy run that is not captured"
    with graph:
        found = run.rerouter.route(0, logits, logits, weights, ids)
        run.rerouter.observe_capture(traced=False)
    worker = SpacWorker()
    worker._spac_experts = lambda: SimpleNamespace(runtime=run)
    step = Step((RequestRows(0, ROWS, RowKind.DECODE),))
    for asked in ({"budget": 5, "when": "all"}, {"budget": TOP_K, "when": "decode"}, {"budget": 4}, {}):
        worker.spac_budget(asked)
        run.begin_step(step)
        graph.replay()
        run.end_forward()
        cut = asked.get("when") is not None
        assert len(found[1].unique()) == (asked["budget"] if cut else len(ids.unique()))
        assert cut or torch.equal(found[0], weights)
    graph.replay()  # a dummy run
    assert held.counters.snapshot()["rows"] == 2 * ROWS
    assert "mass_of=selected" in worker.spac_try_budget({"mass": 0.9})["refused"]


def test_a_runtime_replays_no_budget_that_its_graph_does_not_hold(monkeypatch) -> None:
    run = Runtime([], control(RULES[0]))
    monkeypatch.setattr(rerouting, "capturing", lambda tensor: True)
    logits, weights, ids = routing(RULES[0], 0, 1.0, False)
    assert run.rerouter.route(0, logits, logits, weights, ids)[1] is ids
    run.rerouter.observe_capture(traced=False)
    with pytest.raises(UnsupportedError, match="a budget .*--enforce-eager"):
        run.rerouter.update_budget(BudgetSettings(budget=4))
    run.rerouter.update_budget(BudgetSettings())
