"""What is chosen of a drafter's tokens: kept by request and token, read from a V1 drafter while it drafts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_spac.decisions.guard.draft_states import DraftStates
from vllm_spac.integration.stepping.draft_routing import DraftChoices
from vllm_spac.integration.stepping.v1 import runner_v1
from vllm_spac.integration.stepping.v1.runner_v1 import observed

LAYERS, K, WIDTH = 2, 3, 3


def chosen(*experts: int) -> torch.Tensor:
    """int64 [rows, LAYERS, K], of each row one expert alone."""
    return torch.tensor(experts)[:, None, None].expand(-1, LAYERS, K)


def kept() -> DraftStates:
    """Requests a and b: three forwards read 10, 11, 12 and 20, 21, 22."""
    found = DraftStates(LAYERS, K)
    found.begin(["a", "b"])
    for number in range(3):
        found.add(torch.tensor([10 + number, 20 + number], dtype=torch.int32), chosen(1 + number, 5 + number))
    return found


def first(found: torch.Tensor) -> list[int | None]:
    assert found.shape[1:] == (LAYERS, K) and found.dtype == torch.int64
    return [None if expert == -1 else expert for expert in found[:, 1, 2].tolist()]


@pytest.mark.parametrize(
    ("requests", "tokens", "expected"),
    [
        ([("a", slice(0, 4), 3)], [10, 11, 12, 13], [1, 2, 3, None]),
        ([("b", slice(0, 2), 1), ("a", slice(2, 5), 2)], [20, 21, 10, 11, 12], [5, 6, 1, 2, 3]),
        ([("a", slice(0, 1), 0)], [10], [1]),
        ([("a", slice(0, 3), 2)], [10, 99, 12], [1, None, None]),
        ([("a", slice(0, 3), 2)], [99, 11, 12], [None, None, None]),
        ([("c", slice(0, 2), 1), ("b", slice(2, 3), 0)], [10, 11, 20], [None, None, 5]),
        ([("a", slice(0, 4), 1)], [7, 8, 10, 11], [None, None, 1, 2]),
    ],
    ids=str,
)
def test_rows_have_what_was_chosen_of_their_requests_and_tokens(requests: list, tokens: list, expected: list) -> None:
    """The last draft was not read; from the first other token on, what the drafter knew was of other rows."""
    found = kept()
    assert first(found.take(requests, torch.tensor(tokens))) == expected
    assert first(found.take(requests, torch.tensor(tokens))) == [None] * len(tokens), "once: they are of one step"


def test_what_was_chosen_is_copied_and_known_forward_by_forward() -> None:
    found, tokens, experts = DraftStates(LAYERS, K), torch.tensor([4, 5]), chosen(1, 2).contiguous()
    found.begin(["a", "b"])
    found.add(tokens, experts)
    tokens.fill_(0), experts.fill_(0)
    found.add(torch.tensor([6, 7]), chosen(3, 4))
    assert first(found.known()) == [1, 2, 3, 4] and found.forwards == 2
    assert first(found.take([("b", slice(0, 2), 1)], torch.tensor([5, 7]))) == [2, 4]


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        ([[1, 2, 3], [4], []], [3, 4, -1]),
        (torch.tensor([[1, 2, 3], [4, -1, -1], [-1, -1, -1]]), [3, 4, -1]),
        (torch.tensor([[7], [8]], dtype=torch.int32), [7, 8]),
    ],
    ids=str,
)
def test_the_last_sampled_tokens(sampled, expected: list[int]) -> None:
    assert runner_v1.last_tokens(sampled).tolist() == expected


class Drafter:
    """Drafts one token more than ``inputs`` has forwards, as vLLM's: its inputs are in a buffer that it writes anew."""

    pass_hidden_states_to_model = True

    def __init__(self) -> None:
        self.model = Model()
        self.set_inputs_first_pass = lambda: None
        self.input_ids = torch.zeros(8, dtype=torch.int32)

    def propose(self, count: int) -> torch.Tensor:
        found = []
        for number in range(count):
            self.model.compute_logits(torch.full((2, WIDTH), float(number)))
            found.append(torch.tensor([100 + number, 200 + number]))
            self.input_ids[:2] = found[-1]
        return torch.stack(found, 1)


class Model(torch.nn.Module):
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.sum(1, keepdim=True)


class Choices(DraftChoices):
    """Of request r, forward f chose 10 r + f."""

    forwards = 0

    def _taken(self, rows, requests: int) -> torch.Tensor:
        self.forwards += 1
        return chosen(*(10 * request + self.forwards - 1 for request in range(requests)))


def test_a_runner_passes_on_what_its_drafter_read_and_keeps_it_for_the_step() -> None:
    told: list[list] = []
    runtime = SimpleNamespace(
        observes_drafts=True,
        budget=SimpleNamespace(weighs=False),
        drafts=SimpleNamespace(length=lambda: None, chooser=None),
        recorder=SimpleNamespace(timeline=None),
        end_drafts=lambda drafts, seconds, forwards: None,
        observe_draft=lambda read: told.append(first(read)),
    )
    drafted = SimpleNamespace(remove=lambda ids: None)
    experts = SimpleNamespace(
        runtime=runtime,
        drafted=drafted,
        serving=SimpleNamespace(draft_states=DraftStates(LAYERS, K)),
        draft_routing=Choices(),
    )
    drafter = Drafter()
    runner = SimpleNamespace(_spac_experts=experts, drafter=drafter, input_batch=SimpleNamespace(req_ids=["a", "b"]))
    sampled = torch.tensor([[7, -1], [8, 9]])
    runner_v1._proposing(lambda runner, plan, *rest: drafter.propose(2))(runner, None, sampled)
    assert told == [[0, 10], [0, 10, 1, 11]]
    assert "compute_logits" not in vars(drafter.model), "the model is as before"

    runner.input_batch = SimpleNamespace(req_ids=["b", "a"], num_computed_tokens_cpu=[9, 9], num_prompt_tokens=[5, 5])
    runner.input_ids = SimpleNamespace(gpu=torch.tensor([9, 200, 201, 7, 0], dtype=torch.int32))
    scheduled = SimpleNamespace(
        num_scheduled_tokens={"a": 1, "b": 3}, scheduled_spec_decode_tokens={"b": [200, 201]}, finished_req_ids=set()
    )
    step = runner_v1._step(runner, scheduled)
    assert first(step.draft) == [10, 11, None, 0]
    runtime.observes_drafts = False
    assert runner_v1._step(runner, scheduled).draft is None


def test_observers_are_called_in_order_and_gone_after_an_error() -> None:
    drafter, seen = Drafter(), []
    with pytest.raises(ZeroDivisionError), observed(drafter, [lambda s, _: seen.append(s.shape), lambda *_: 1 / 0]):
        drafter.propose(1)
    assert seen == [(2, WIDTH)] and "compute_logits" not in vars(drafter.model)
