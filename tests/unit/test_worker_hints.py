"""What an engine tells its expert workers: which experts, of which layer, in which step, and when it says nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from vllm_spac.core import MoEShape, RequestRows, RowKind, Step, TensorSpec
from vllm_spac.decisions.policies.lru import LRU
from vllm_spac.decisions.predictors.base import START, Guess, Predictor, PredictorInputs, Signal
from vllm_spac.execution.base import Rows
from vllm_spac.execution.exchange import Exchange
from vllm_spac.methods.moe_spac.utility_predictor import UtilityEstimator
from vllm_spac.methods.od_moe.workers_execution import WorkerExecution

LAYERS, EXPERTS, TOP_K = 3, 4, 2
SHAPE = MoEShape(tuple("abc"), EXPERTS, TOP_K, {"w": TensorSpec((1,), torch.float32)})


class Client:
    """Takes what it is told, in order; the worker computes while ``meanwhile`` runs."""

    divides = False

    def __init__(self) -> None:
        self.told: list[tuple] = []

    def send_hint(self, step: int, layer: int, experts: np.ndarray) -> None:
        self.told.append((step, layer, experts.tolist()))

    def compute(self, forward, layer: int, x: Tensor, weights: Tensor, ids: Tensor, meanwhile: Callable | None):
        self.told.append((forward.number, layer, "rows"))
        if meanwhile is not None:
            meanwhile()
        return x


class Named(Predictor):
    """All layers before a step by its drafts, later by the row's own experts."""

    needs = frozenset({Signal.ROUTING, Signal.DRAFT_ROUTING})
    reach = 1

    def guesses(self, seen: PredictorInputs) -> Iterable[Guess]:
        if seen.layer == START:
            assert seen.draft_ids is not None
            yield Guess.of_chosen(seen.draft_ids, LAYERS * EXPERTS)
        else:
            assert seen.ids is not None
            chosen = torch.zeros(len(seen.ids), EXPERTS).scatter_(1, seen.ids.long(), 1.0)
            yield Guess((seen.layer + 1) % LAYERS * EXPERTS, chosen)
            yield Guess(seen.layer * EXPERTS, chosen)  # of a layer that runs: nobody needs it


def serving(predictor: Predictor | None, names: tuple[int, int] | None = None) -> tuple[WorkerExecution, Client]:
    client = Client()
    store = SimpleNamespace(client=client)
    return WorkerExecution(SHAPE, LRU(), store, predictor, names), client


class Lane:
    """Copies at once; counts how often the host waits."""

    waits = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def record(self) -> Lane:
        return self

    def wait(self) -> None:
        self.waits += 1


def step(kind: RowKind) -> Step:
    return Step((RequestRows(0, 1, kind),), draft=drafted(1, 3))


def drafted(*experts: int) -> Tensor:
    """What a draft model chose of one row: the same experts in each layer, the likeliest first."""
    return torch.tensor([[experts] * LAYERS])


def layer(execution: WorkerExecution, number: int) -> None:
    ids = torch.tensor([[2, 0]], dtype=torch.int32)
    execution.forward(number, torch.ones(1, 3), torch.ones(1, TOP_K), ids, None, Rows(1, as_routed=True))


def test_workers_are_told_before_and_while_others_compute() -> None:
    execution, client = serving(Named())
    assert execution.signals == Named.needs
    execution.begin_step(step(RowKind.DECODE))
    every = [(1, number, [1, 3]) for number in range(LAYERS)]
    assert client.told == every
    for number in range(LAYERS):
        layer(execution, number)
    execution.end_forward()
    assert client.told[3:] == [
        *[(1, 0, "rows"), (1, 1, [0, 2])],
        *[(1, 1, "rows"), (1, 2, [0, 2])],
        *[(1, 2, "rows"), (2, 0, [0, 2])],  # which has run: of the next step
    ]
    client.told.clear()
    execution.draft(drafted(0, 3))
    assert client.told == [(2, number, [0, 3]) for number in range(LAYERS)]


def test_workers_are_told_of_so_many_experts_and_layers_as_asked_for() -> None:
    execution, client = serving(Named(), (1, 2))
    execution.draft(drafted(0, 3))
    assert client.told == [(1, number, [0]) for number in (0, 1)]


def test_a_predictor_that_fails_tells_workers_nothing_and_is_not_asked_again(caplog) -> None:
    execution, client = serving(Named())
    wrong = Step((RequestRows(0, 1, RowKind.DECODE),))
    execution.begin_step(wrong)  # without what was chosen
    layer(execution, 0)
    execution.end_forward()
    execution.begin_step(step(RowKind.DECODE))
    layer(execution, 0)
    execution.draft(drafted(0, 1))
    assert client.told == [(1, 0, "rows"), (2, 0, "rows")]
    [record] = caplog.records
    assert "failed; workers get no more hints" in record.getMessage() and record.exc_info is not None


def test_after_a_step_workers_are_told_what_its_counts_are_worth() -> None:
    """By the utility of what generates: the greatest score first, those that reach the threshold alone."""
    client = Client()
    estimator = UtilityEstimator(SHAPE.total, gamma=0)
    execution = WorkerExecution(SHAPE, LRU(), SimpleNamespace(client=client), estimator, threshold=2)
    assert execution.signals == frozenset()
    rising = [[[2, 0]], [[2, 0], [2, 1]], [[2, 0], [2, 1], [2, 3]]]  # f_t of expert 2: 1, 2, 3; of 0: 1, 1, 1
    for number, chosen in enumerate(rising):
        rows = len(chosen)
        prompt = RequestRows(rows, rows + 1, RowKind.PREFILL)
        execution.begin_step(Step((RequestRows(0, rows, RowKind.DECODE), prompt)))
        ids = torch.tensor([*chosen, [3, 1]], dtype=torch.int32)
        given = torch.ones(rows + 1, 3), torch.ones(rows + 1, TOP_K)
        execution.forward(1, *given, ids, None, Rows(rows + 1, as_routed=True))
        assert client.told == [(number + 1, 1, "rows")], "before the step ended"
        execution.end_forward()
        told = [(number + 2, 1, [2])] if number else []
        assert client.told[1:] == told, estimator.scores
        client.told.clear()
    execution.begin_step(Step((RequestRows(0, 1, RowKind.PREFILL),)))
    layer(execution, 1)
    execution.end_forward()
    assert client.told == [(4, 1, "rows")], "a prompt says little about the next token"


def test_of_a_layer_that_no_row_guesses_about_workers_are_told_nothing() -> None:
    execution, client = serving(Named())
    execution.draft(drafted(-1, -1))
    assert client.told == []


def test_rows_of_a_device_come_to_the_host_with_their_routing_in_one_wait() -> None:
    """Also what the drafter computed, for the predictor there. Padding may have any ids, and does not come."""
    sent: list[tuple[Tensor, ...]] = []

    class Remembers(Client):
        def compute(self, forward, layer: int, x: Tensor, weights: Tensor, ids: Tensor, meanwhile: Callable | None):
            sent.append((x, weights, ids))
            return super().compute(forward, layer, 2 * x, weights, ids, meanwhile)

    client, lane, recorded = Remembers(), Lane(), []
    exchange = Exchange(torch.device("cpu"), lane)
    execution = WorkerExecution(SHAPE, LRU(), SimpleNamespace(client=client), Named(), None, exchange)
    assert not execution.keeps_bits
    execution.begin_step(step(RowKind.DECODE))
    assert lane.waits == 1 and client.told == [(1, number, [1, 3]) for number in range(LAYERS)]
    x, ids = torch.rand(3, 3), torch.tensor([[2, -1], [99, 7], [-1, -1]], dtype=torch.int32)
    given = x, torch.ones(3, TOP_K), ids
    record = lambda *what: recorded.append(what)  # noqa: E731
    out = execution.forward(0, *given, None, Rows(1, as_routed=False, record=record))
    assert lane.waits == 2
    assert torch.equal(out, torch.cat([2 * x[:1], torch.zeros(2, 3)]))
    assert torch.equal(x, given[0]) and ids.tolist()[0] == [2, -1], "the engine's own were changed"
    ((rows, weights, experts),) = sent
    assert torch.equal(rows, x[:1]) and weights.tolist() == [[1, 0]] and experts.tolist() == [[2, 0]]
    assert recorded[0][1].tolist() == [[2, -1]]


def test_rows_of_cut_drafts_go_to_no_worker() -> None:
    sent: list[tuple[Tensor, ...]] = []

    class Remembers(Client):
        def compute(self, forward, layer: int, x: Tensor, weights: Tensor, ids: Tensor, meanwhile: Callable | None):
            sent.append((x, weights, ids))
            return 2 * x

    execution = WorkerExecution(SHAPE, LRU(), SimpleNamespace(client=Remembers()))
    x, ids = torch.rand(5, 3), torch.tensor([[2, 0], [-1, -1], [1, -1], [-1, -1], [99, 99]], dtype=torch.int32)
    out = execution.forward(0, x, torch.ones(5, TOP_K), ids, None, Rows(4, cut=True))
    ((rows, weights, experts),) = sent
    assert torch.equal(rows, x[[0, 2]]) and weights.tolist() == [[1, 1], [1, 0]]
    assert experts.tolist() == [[2, 0], [1, 0]]
    assert torch.equal(out, torch.cat([2 * x[:1], torch.zeros(1, 3), 2 * x[2:3], torch.zeros(2, 3)]))


def test_nothing_is_said_about_prompts_or_without_a_predictor() -> None:
    for predictor, kind in ((Named(), RowKind.PREFILL), (None, RowKind.DECODE)):
        execution, client = serving(predictor)
        execution.begin_step(step(kind))
        layer(execution, 0)
        execution.end_forward()
        assert client.told == [(1, 0, "rows")]
    execution, client = serving(Named())
    layer(execution, 0)  # outside of steps, as in warm-up
    assert client.told == [(0, 0, "rows")]
