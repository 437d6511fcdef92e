"""A step from its rows to its tokens: which parts are called with what, and in which order."""

from __future__ import annotations

import gc
import itertools
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_spac.components import build
from vllm_spac.core import Rates, RequestRows, RowKind, Step
from vllm_spac.decisions.balancers.base import LayerState
from vllm_spac.errors import UnsupportedError
from vllm_spac.integration.serving.worker_extension import SpacWorker
from vllm_spac.methods.moe_spec.control import BudgetControl, BudgetedLayer
from vllm_spac.methods.moe_spec.settings import BudgetSettings, RoutingRule
from vllm_spac.runtime import Runtime

VERIFY = Step((RequestRows(0, 3, RowKind.VERIFY, 2), RequestRows(3, 6, RowKind.VERIFY, 2)))
MIXED = Step((RequestRows(0, 3, RowKind.VERIFY, 2), RequestRows(3, 9, RowKind.PREFILL)))


class Told:
    """Allows two drafts, then none; keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple] = []
        self.asked: list[int | None] = []
        self.answers = itertools.cycle([2, 0])

    def allows(self, requests=None) -> int:
        self.asked.append(requests)
        return next(self.answers)

    def observe_drafter(self, drafts, seconds) -> None:
        self.told.append((drafts, seconds))

    def end_step(self, *step) -> None:
        self.told.append(step)


def runtime(**options) -> Runtime:
    ticks = itertools.count()
    budget = BudgetControl([BudgetedLayer("layer", 4, 2, RoutingRule())])
    return Runtime([], budget, clock=lambda: float(next(ticks)), **options)


def test_the_chooser_hears_of_drafts_tokens_and_seconds() -> None:
    chooser = Told()
    run = runtime(chooser=chooser)
    for tokens in ([1, 1], [3, 1]):
        run.begin_step(VERIFY)
        run.end_forward()
        run.drafts.length()
        run.end_drafts(2, 0.25)
        run.end_step(tokens)
    assert chooser.told == [(2, 0.25), ([2, 2], [1, 1], 2, 1.0, 0.25, 0), (2, 0.25), ([2, 2], [3, 1], 2, 1.0, 0.25, 0)]
    assert chooser.asked == [2, 2]


def test_the_chooser_hears_of_forwards_whose_drafts_are_not_verified() -> None:
    """A tree's cost is its levels; it is told where no node was worth a row, too."""
    chooser = Told()
    run = runtime(chooser=chooser)
    for drafts, forwards in ((12, 3), (0, 2), (0, 0)):
        run.begin_step(VERIFY)
        run.end_forward()
        run.end_drafts(drafts, 0.25, forwards)
        run.end_step(None)
    assert chooser.told == [(3, 0.25), (2, 0.25)]


def test_balancers_learn_what_a_draft_token_takes() -> None:
    """MoE-SpAc's Eq. 10: reads ahead may go on while drafts are made; those of steps with prompts read them, too."""
    balancer = build("balancers", "threshold", rates=Rates(1e-4, 2e-4, 1e-4), layers=4, top_k=2, gamma=4)
    nothing = {"begin_step": lambda step: None, "end_forward": lambda: None, "close": lambda: None}
    run = Runtime(
        [SimpleNamespace(balancer=balancer, **nothing), SimpleNamespace(balancer=None, **nothing)], BudgetControl([])
    )
    assert balancer.rates.draft == 0
    for step, drafts, seconds in ((VERIFY, 4, 8e-3), (MIXED, 4, 9.0), (VERIFY, 2, 2e-3), (VERIFY, 0, 1.0)):
        run.begin_step(step)
        run.end_forward()
        run.end_drafts(drafts, seconds)
        run.end_step([1, 1])
    assert balancer.rates.draft == pytest.approx(1.5e-3), "the mean of 2 and 1 ms"
    assert balancer.rates.stream == 2e-4


def test_the_time_of_drafts_widens_the_window_of_loads() -> None:
    """With slow drafts, and more of them, more is read ahead: a lower threshold."""
    rows = np.zeros(8, dtype=np.int64)
    rows[[0, 1, 2, 3]] = 3
    state = LayerState(0, rows, np.zeros(8, dtype=bool), np.array([4, 3, 2, 1, 0, 0, 0, 0]), 8)
    found = []
    for seconds, drafts in ((None, 4), (1.0, 4), (1.0, 0)):
        balancer = build("balancers", "threshold", rates=Rates(1e-4, 1e-2, 5e-3), layers=4, top_k=2)
        balancer.observe_verify(drafts)
        if seconds is not None:
            balancer.observe_draft(seconds)
        balancer.plan(state)
        found.append(balancer.threshold(0))
    assert found == [3, 1, 4], "no window without drafts, and the CPU has the work of one token alone"


def test_prompts_emit_nothing_that_the_chooser_counts() -> None:
    chooser = Told()
    run = runtime(chooser=chooser)
    run.begin_step(MIXED)
    assert run.drafts.in_prompt
    run.end_forward()
    run.drafts.length()
    run.end_drafts(2, 0.25)
    run.end_step([2, 1])
    assert chooser.told == [([2], [2], 2, 1.0, 0.25, 0)] and chooser.asked == [1]
    assert not run.drafts.in_prompt


def test_without_a_chooser_or_tokens_nothing_is_decided() -> None:
    run = runtime()
    run.begin_step(VERIFY)
    assert run.drafts.length() is None
    run.end_step([1, 1])
    chooser = Told()
    run = runtime(chooser=chooser)
    run.begin_step(VERIFY)
    run.end_forward()
    run.end_step(None)
    assert chooser.told == []


def test_dummy_runs_are_routed_unchanged_and_unheard() -> None:
    run, heard = runtime(), []
    run.rerouter.listeners.append(SimpleNamespace(route=lambda layer, *rest: heard.append(layer)))
    run.budget.update(BudgetSettings(budget=2, when="all"))
    logits = torch.tensor([[4.0, 3, 2, 1], [1.0, 2, 3, 4], [1.0, 2, 3, 4]])
    weights, ids = logits.softmax(-1).topk(2)
    got = run.rerouter.route(0, logits, logits, weights, ids)
    assert got[0] is weights and got[1] is ids and heard == []
    run.begin_step(Step((RequestRows(0, 3, RowKind.VERIFY, 2),)))
    _, cut = run.rerouter.route(0, logits, logits, weights, ids)
    assert heard == [0] and len(cut.unique()) == 2
    run.end_forward()
    assert run.rerouter.route(0, logits, logits, weights, ids)[1] is ids, "the forward is over"


@pytest.mark.parametrize("looks", ["trace", "listener", "budget"])
def test_no_graph_holds_what_looks_at_layers(looks: str) -> None:
    run = runtime()
    if looks == "trace":
        pool = SimpleNamespace(close=lambda: None)
        run = Runtime([pool], BudgetControl([]), SimpleNamespace(finish=lambda: None))
    elif looks == "listener":
        run.rerouter.listeners.append(SimpleNamespace())
    else:
        run.budget.update(BudgetSettings(budget=2))
    with pytest.raises(UnsupportedError, match="--enforce-eager"):
        run.rerouter.observe_capture(run.recordings.trace is not None)


def test_nothing_looks_into_a_graph_that_is_there() -> None:
    run = runtime()
    run.rerouter.check_host("a budget")
    run.rerouter.observe_capture(run.recordings.trace is not None)
    with pytest.raises(UnsupportedError, match="a budget .*--enforce-eager"):
        run.rerouter.check_host("a budget")
    worker = SpacWorker()
    worker._spac_experts = lambda: SimpleNamespace(runtime=run)
    with pytest.raises(UnsupportedError, match="--enforce-eager"):
        worker.spac_budget({"budget": 2})
    assert not run.budget.active
    worker.spac_budget({})  # exact is what a graph is


def test_executions_hear_the_votes_and_the_budget_the_probabilities() -> None:
    heard: list[Step] = []
    pool = SimpleNamespace(begin_step=heard.append, end_forward=lambda: None, close=lambda: None, counts_votes=True)
    run = Runtime([pool], BudgetControl([BudgetedLayer("layer", 4, 2, RoutingRule())]))
    step = Step((RequestRows(0, 2, RowKind.VERIFY, 1, (1.0, 0.25)),))
    for settings in ({}, {"votes": "path"}, {"votes": "path", "votes_alpha": 1.0}):
        run.rerouter.update_budget(BudgetSettings(**settings))
        run.begin_step(step)
    assert [each.requests[0].weights for each in heard] == [None, (1.0, 0.5), (1.0, 0.25)]
    assert run.budget.counters.snapshot()["unweighted"] == 0


@pytest.mark.parametrize(("predictor", "refused"), [("utility", True), (None, False)])
def test_votes_that_a_policy_would_not_count_are_refused(predictor: str | None, refused: bool) -> None:
    policy = SimpleNamespace(predictor=predictor)
    pool = SimpleNamespace(counts_votes=False, policy=policy, close=lambda: None)
    run = Runtime([pool], BudgetControl([]))
    run.rerouter.update_budget(BudgetSettings())
    if refused:
        with pytest.raises(UnsupportedError, match="--spac-budget.*--spac-plane slots"):
            run.rerouter.update_budget(BudgetSettings(votes="path"))
    else:
        run.rerouter.update_budget(BudgetSettings(votes="path"))
    assert run.budget.weighs is not refused


def test_batches_that_warm_up_are_nobodys() -> None:
    calls: list[str] = []
    trace = SimpleNamespace(
        begin_step=lambda step: calls.append("begin"),
        end_step=lambda tokens, paths: calls.append("end"),
        save=lambda: None,
        finish=lambda: None,
    )
    pool = SimpleNamespace(begin_step=lambda step: calls.append("pool"), end_forward=lambda: None, close=lambda: None)
    run = Runtime([pool], BudgetControl([]), trace)
    with pytest.raises(KeyError), run.warming_up():
        run.begin_step(VERIFY)
        assert not run.counts_tokens
        run.end_forward()
        raise KeyError
    assert calls == []
    run.begin_step(VERIFY)
    assert run.counts_tokens
    assert calls == ["pool", "begin"]


def test_what_routers_chose_is_recorded_behind_the_step() -> None:
    """As it was when they chose, whatever becomes of their tensors; of a step that failed nothing is."""
    heard = []
    trace = SimpleNamespace(
        begin_step=lambda step: None,
        observe=lambda layers, ids, weights: heard.append((layers, ids, weights)),
        end_step=lambda tokens, paths: None,
        save=lambda: None,
        finish=lambda: None,
    )
    pool = SimpleNamespace(
        begin_step=lambda step: None,
        forward=lambda layer, x, weights, ids, kernel, rows: rows.record and rows.record(layer, ids, weights),
        end_forward=lambda: None,
        close=lambda: None,
    )
    run = Runtime([pool], BudgetControl([]), trace)
    for fails in (True, False):
        run.begin_step(VERIFY)
        ids, weights = torch.zeros(6, 2, dtype=torch.int32), torch.ones(6, 2, dtype=torch.bfloat16)
        for layer in (1, 4):
            run.forward(pool, layer, torch.zeros(6, 4), weights, ids.fill_(layer), None)
        ids.fill_(9)
        run.end_forward()
        assert not heard
        if not fails:
            run.end_step([1, 1])
    ((layers, ids, weights),) = heard
    assert layers == (1, 4) and ids.shape == weights.shape == (2, 6, 2)
    assert (ids[0] == 1).all() and (ids[1] == 4).all() and weights.dtype == np.float32
    run.forward(pool, 0, *(torch.zeros(6, 2) for _ in range(3)), None)
    run.end_step(None)
    assert len(heard) == 1, "what runs between steps is nobody's"


def test_listeners_hear_no_padding() -> None:
    run, heard = runtime(), []
    run.rerouter.listeners.append(
        SimpleNamespace(route=lambda layer, *tensors: heard.append([len(t) for t in tensors]))
    )
    run.begin_step(VERIFY)
    run.rerouter.route(0, *(torch.zeros(8, 2) for _ in range(4)))
    assert heard == [[6, 6, 6, 6]]


def test_trace_is_saved_now_and_then() -> None:
    calls: list[str] = []
    trace = SimpleNamespace(
        begin_step=lambda step: None,
        end_step=lambda tokens, paths: None,
        save=lambda: calls.append("save"),
        finish=lambda: calls.append("finish"),
    )
    now = [0.0]
    pool = SimpleNamespace(begin_step=lambda step: None, end_forward=lambda: None, close=lambda: None)
    run = Runtime([pool], BudgetControl([]), trace, clock=lambda: now[0])
    for now[0] in (1.0, 4.0, 6.0, 7.0, 12.0):
        run.begin_step(VERIFY)
        run.end_forward()
        run.end_step([1, 1])
    assert calls == ["save", "save", "save"], "after 1, 6 and 12 seconds"


@pytest.mark.parametrize("failed", [False, True])
def test_everything_is_closed_once_when_it_is_called_or_forgotten(failed: bool) -> None:
    calls: list[str] = []
    closed = threading.Event()
    trace = SimpleNamespace(
        begin_step=lambda step: calls.append("begin"),
        end_step=lambda tokens, paths: calls.append(f"end {tokens} {paths}"),
        save=lambda: calls.append("save"),
        finish=lambda: calls.append("finish"),
    )
    ticks = itertools.count()
    pool = SimpleNamespace(begin_step=lambda step: None, end_forward=lambda: None)
    pool.close = lambda: calls.append("close") or closed.set()
    run = Runtime([pool], BudgetControl([]), trace, clock=lambda: float(next(ticks)))
    run.begin_step(VERIFY)
    run.end_forward()
    if not failed:
        run.end_step([2, 1])
    if failed:
        del run
        gc.collect()
        assert closed.wait(30), "another thread closes it"
    else:
        run.close()
        run.close()
    assert calls == ["begin", *(["end [2, 1] None", "save"] if not failed else []), "finish", "close"]
