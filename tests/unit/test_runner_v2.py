"""V2's batches and outputs, as plain stand-ins with the fields that vLLM gives them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.decisions.guard.draft_states import DraftStates
from vllm_spac.integration.hooks.runner_hooks import tokens_of
from vllm_spac.integration.stepping.v1.runner_v1 import sampled_plainly, unless_plain
from vllm_spac.integration.stepping.v2 import runner_v2
from vllm_spac.integration.stepping.v2.runner_v2 import step_of


def batch(lengths: list[int], prefilling: list[bool], drafts: list[int] | None, padding: int = 0):
    """An ``InputBatch``; vLLM pads the starts up to its greatest batch, and the rows up to a graph's size."""
    starts = np.concatenate([[0], np.cumsum(lengths), [sum(lengths)] * 3]).astype(np.int32)
    return SimpleNamespace(
        num_reqs=len(lengths),
        num_tokens=sum(lengths),
        num_tokens_after_padding=sum(lengths) + padding,
        query_start_loc_np=starts,
        is_prefilling_np=np.array(prefilling),
        num_draft_tokens_per_req=None if drafts is None else np.array(drafts, dtype=np.int32),
    )


def test_a_batch_of_every_kind() -> None:
    step = step_of(batch([5, 1, 4, 7], [True, False, False, True], [0, 0, 3, 0], padding=7))
    assert step == Step(
        (
            RequestRows(0, 5, RowKind.PREFILL, 0),
            RequestRows(5, 6, RowKind.DECODE, 0),
            RequestRows(6, 10, RowKind.VERIFY, 3),
            RequestRows(10, 17, RowKind.PREFILL, 0),
        )
    )
    assert step.rows == 17, "padding is nobody's"
    assert step.kind == "mixed"


def test_without_drafts_vllm_gives_none() -> None:
    assert step_of(batch([1, 1], [False, False], None, padding=2)).kind == "decode"
    assert step_of(batch([9, 3], [True, True], None)).kind == "prefill"


def test_a_step_is_made_of_plain_numbers() -> None:
    """It outlives the batch, whose arrays vLLM writes again."""
    given = batch([4], [False], [3])
    step = step_of(given)
    given.query_start_loc_np[:] = 0
    assert step.requests == (RequestRows(0, 4, RowKind.VERIFY, 3),)
    assert {type(step.requests[0].start), type(step.requests[0].drafts)} == {int}


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("drafts", [[0, 0], [0, 2]], ids=["no drafts", "drafts"])
@pytest.mark.parametrize("chooser", [None, object()], ids=["unguarded", "guarded"])
def test_only_a_guarded_step_without_drafts_is_sampled_plainly(chooser, drafts, hybrid) -> None:
    """Then of each request the last row, also behind a chunk of a prompt."""
    runner = SimpleNamespace(
        _spac_experts=SimpleNamespace(runtime=SimpleNamespace(drafts=SimpleNamespace(chooser=chooser))),
        model_config=SimpleNamespace(is_hybrid=hybrid),
        query_start_loc=SimpleNamespace(gpu=torch.tensor([0, 4, 5, 99, 99], dtype=torch.int32)),
    )
    calculate = unless_plain(lambda runner, *counts: ("metadata", *counts))
    metadata = calculate(runner, np.array(drafts), np.array([4, 5]))
    answer = sampled_plainly(runner, None, ("indices", metadata, 3))
    plain = chooser is not None and not any(drafts) and not hybrid
    assert (answer[1] is None) == plain and answer[::2] == ("indices", 3)
    if plain:
        assert metadata.logits_indices.tolist() == [3, 4]


class Copying:
    """An ``AsyncOutput`` of V2: the counts are there when the event has happened."""

    def __init__(self, counts: list[int]) -> None:
        self.num_sampled_tokens_np = np.full(len(counts), 99)
        self.copy_event = SimpleNamespace(synchronize=lambda: np.copyto(self.num_sampled_tokens_np, counts))


@pytest.mark.parametrize(
    ("output", "tokens"),
    [
        (Copying([0, 1, 4]), [0, 1, 4]),
        (SimpleNamespace(sampled_token_ids=[[], [7], [1, 2, 3, 4]]), [0, 1, 4]),
        (SimpleNamespace(sampled_token_ids=object()), None),
        (SimpleNamespace(), None),
        (None, None),
    ],
    ids=["V2", "V1", "V1, asynchronous", "neither", "nothing ran"],
)
def test_tokens(output, tokens) -> None:
    assert tokens_of(output) == tokens


# -- what its drafter computes -----------------------------------------------------------------------------------------

WIDTH = 2


class Speculator:
    """Drafts two tokens of each request: 10 more than the one that it has read, then 10 more."""

    last_token_indices = torch.tensor([1, 0, 7])

    def propose(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        read, drafts = args[6][input_batch.idx_mapping].flatten(), []
        for number in range(2):
            states = (read[:, None] + torch.zeros(WIDTH)) / 100
            drafts.append(self.sample_draft(states, read + 10, draft_step=number))
            read = drafts[-1]
        return torch.stack(drafts, 1)

    def sample_draft(self, hidden_states: torch.Tensor, drafts: torch.Tensor, draft_step: int) -> torch.Tensor:
        return drafts


class Routing:
    """What a draft model's routers chose: the rows that they are asked for, and the number of the forward."""

    def __init__(self) -> None:
        self.forwards, self.open = 0, False

    def observing(self):
        return self

    def __enter__(self) -> None:
        self.open = True

    def __exit__(self, *error: object) -> None:
        self.open = False

    def take(self, requests: int, rows: torch.Tensor | None) -> torch.Tensor:
        assert self.open
        self.forwards += 1
        found = torch.arange(requests) if rows is None else rows
        return torch.stack([found, torch.full_like(found, self.forwards)], 1)[:, None]


def reading() -> tuple[SimpleNamespace, SimpleNamespace, list]:
    """A runner whose predictor looks at the draft model, its experts, and what the predictor was told."""
    told: list[list] = []
    runtime = SimpleNamespace(observes_drafts=True, in_step=True, observe_draft=lambda read: told.append(read.tolist()))
    serving = SimpleNamespace(draft_states=DraftStates(1, 2))
    experts = SimpleNamespace(runtime=runtime, serving=serving, draft_routing=Routing(), cutter=None)
    return SimpleNamespace(_spac_experts=experts, speculator=Speculator()), experts, told


def drafted_batch() -> SimpleNamespace:
    """Requests a and b, in places 2 and 0 of the runner's state; of each the last token and two drafts."""
    found = batch([3, 3], [False, False], [2, 2])
    found.req_ids, found.idx_mapping = ["a", "b"], torch.tensor([2, 0])
    found.input_ids = torch.tensor([3, 13, 23, 1, 11, 99], dtype=torch.int32)
    return found


def proposed(runner: SimpleNamespace, **more: Any) -> list:
    last_sampled = torch.tensor([[1], [2], [3]])
    return runner.speculator.propose(drafted_batch(), *6 * [None], last_sampled, **more).tolist()


def test_a_predictor_reads_each_forward_of_the_drafter() -> None:
    """Drafts are as before; the step gets what was chosen of the rows that were read, up to the first other draft.

    The first forward reads whole requests, of which the last rows count.
    """
    runner, experts, told = reading()
    assert (runner_v2._step(runner, None, drafted_batch()).draft == -1).all()
    assert proposed(runner) == [[13, 23], [11, 21]]
    assert told == [[[[1, 1]], [[0, 1]]], [[[1, 1]], [[0, 1]], [[0, 2]], [[1, 2]]]]
    assert not experts.draft_routing.open
    step = runner_v2._step(runner, None, drafted_batch())
    assert step.draft.tolist() == [[[1, 1]], [[0, 2]], [[-1, -1]], [[0, 1]], [[1, 2]], [[-1, -1]]]


def test_dummy_drafts_are_not_read() -> None:
    runner, experts, told = reading()
    runner_v2._step(runner, None, drafted_batch())
    assert proposed(runner, dummy_run=True) == [[13, 23], [11, 21]]
    experts.runtime.in_step = False  # vLLM warms up with batches that look real
    assert proposed(runner) == [[13, 23], [11, 21]]
    assert told == [] and experts.serving.draft_states.forwards == 0


def test_a_runner_whose_predictor_reads_no_drafter_is_left_alone() -> None:
    runner, experts, _ = reading()
    experts.runtime.observes_drafts = False
    assert runner_v2._step(runner, None, drafted_batch()).draft is None
    assert not vars(runner.speculator)
