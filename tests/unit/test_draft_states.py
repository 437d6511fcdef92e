"""The drafter's states: kept by request and token, read from a V1 drafter while it drafts and while it reads texts."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from vllm_spac.decisions.guard.draft_states import DraftStates
from vllm_spac.errors import ConfigError, SpacError
from vllm_spac.execution.slots_execution import SlotExecution
from vllm_spac.integration.hooks import drafts
from vllm_spac.integration.loading import ahead
from vllm_spac.integration.stepping.v1 import runner_v1
from vllm_spac.integration.stepping.v1.runner_v1 import observed
from vllm_spac.tools.evaluation.collection import DraftReader

WIDTH = 3


def state(*numbers: float) -> torch.Tensor:
    """States [len(numbers), WIDTH], each of one number."""
    return torch.tensor(numbers)[:, None].expand(-1, WIDTH)


def kept() -> DraftStates:
    """Requests a and b: three forwards read 10, 11, 12 and 20, 21, 22."""
    found = DraftStates(WIDTH)
    found.begin(["a", "b"])
    for number in range(3):
        found.add(torch.tensor([10 + number, 20 + number], dtype=torch.int32), state(1.0 + number, 5.0 + number))
    return found


def first(found: torch.Tensor) -> list[float | None]:
    return [None if row.isnan() else float(row) for row in found[:, 0]]


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
def test_rows_have_the_states_of_their_requests_and_tokens(requests: list, tokens: list, expected: list) -> None:
    """The last draft was not read; from the first other token on, what the drafter knew was of other rows."""
    found = kept()
    assert first(found.take(requests, torch.tensor(tokens))) == expected
    assert first(found.take(requests, torch.tensor(tokens))) == [None] * len(tokens), "once: they are of one step"


def test_states_are_copies_and_known_forward_by_forward() -> None:
    found, tokens, states = DraftStates(WIDTH), torch.tensor([4, 5]), state(1.0, 2.0).bfloat16().contiguous()
    found.begin(["a", "b"])
    found.add(tokens, states)
    tokens.fill_(0), states.fill_(0)
    found.add(torch.tensor([6, 7]), state(3.0, 4.0).bfloat16())
    known = found.known()
    assert known[0].tolist() == [4, 5, 6, 7] and first(known[1]) == [1, 2, 3, 4] and found.forwards == 2
    taken = found.take([("b", slice(0, 2), 1)], torch.tensor([5, 7]))
    assert first(taken) == [2, 4] and taken.dtype == torch.bfloat16


def tree_states() -> DraftStates:
    """Requests a and b: the root, two nodes of a level, one of the next; the trees have three nodes.

    Of a, nodes 0 and 2 were read first and last, and node 1 was not. Of b, nodes 0 and 1 in the second forward.
    """
    found = DraftStates(WIDTH)
    found.begin(["a", "b"])
    found.add(torch.tensor([10, 20]), state(1.0, 2.0))
    found.add(torch.tensor([11, 12, 21, 22]), state(3.0, 4.0, 5.0, 6.0))
    found.add(torch.tensor([13, 23]), state(7.0, 8.0))
    found.settle(torch.tensor([[0, -1, 2], [0, 1, -1]]))
    return found


@pytest.mark.parametrize(
    ("requests", "tokens", "expected"),
    [
        ([("a", slice(0, 4), 3)], [10, 11, 98, 13], [1, 3, None, 7]),
        ([("b", slice(1, 5), 3), ("c", slice(0, 1), 0)], [10, 20, 21, 22, 97], [None, 2, 5, 6, None]),
        ([("b", slice(0, 2), 1), ("a", slice(2, 6), 3)], [20, 21, 10, 11, 98, 13], [2, 5, 1, 3, None, 7]),
        ([("a", slice(0, 4), 3)], [10, 99, 98, 13], [1, None, None, 7]),
        ([("a", slice(0, 1), 0)], [10], [1]),
    ],
    ids=str,
)
def test_nodes_of_a_tree_have_the_states_of_the_forward_that_read_them(
    requests: list, tokens: list, expected: list
) -> None:
    """A node does not follow the one before it: another token says nothing of the others."""
    assert first(tree_states().take(requests, torch.tensor(tokens))) == expected


def test_after_a_tree_a_chain_is_a_chain() -> None:
    found = tree_states()
    found.begin(["a"])
    found.add(torch.tensor([4]), state(1.0))
    found.add(torch.tensor([5]), state(2.0))
    assert first(found.take([("a", slice(0, 3), 2)], torch.tensor([4, 5, 6]))) == [1, 2, None]


def test_a_tree_of_one_level_has_only_its_root_read() -> None:
    found = DraftStates(WIDTH)
    found.begin(["a"])
    found.add(torch.tensor([4]), state(1.0))
    found.settle(torch.tensor([[-1, -1]]))
    assert first(found.take([("a", slice(0, 3), 2)], torch.tensor([4, 4, 4]))) == [1, None, None]


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
        self.input_ids = torch.zeros(8, dtype=torch.int32)

    def propose(self, count: int) -> torch.Tensor:
        found = []
        for number in range(count):
            self.model.compute_logits(state(float(number), 10.0 + number))
            found.append(torch.tensor([100 + number, 200 + number]))
            self.input_ids[:2] = found[-1]
        return torch.stack(found, 1)


class Model(torch.nn.Module):
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.sum(1, keepdim=True)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = state(*(input_ids.float() * 2).tolist()).contiguous()
        return states, states + 1


def test_a_runner_passes_on_what_its_drafter_read_and_keeps_it_for_the_step() -> None:
    told: list[tuple[list[int], list]] = []
    runtime = SimpleNamespace(
        looks_at_drafts=True,
        looks_at_tokens=True,
        budget=SimpleNamespace(weighs=False),
        draft_length=lambda: None,
        drafted=lambda drafts, seconds, forwards: None,
        chooser=None,
        timeline=None,
        drafting=lambda tokens, states: told.append((tokens.tolist(), first(states))),
    )
    drafted = SimpleNamespace(forget=lambda ids: None)
    experts = SimpleNamespace(
        runtime=runtime,
        drafted=drafted,
        serving=SimpleNamespace(draft_states=DraftStates(WIDTH)),
        draft_routing=None,
    )
    drafter = Drafter()
    runner = SimpleNamespace(_spac_experts=experts, drafter=drafter, input_batch=SimpleNamespace(req_ids=["a", "b"]))
    sampled = torch.tensor([[7, -1], [8, 9]])
    runner_v1._proposing(lambda runner, plan, *rest: drafter.propose(2))(runner, None, sampled)
    assert told == [([7, 9], [0, 10]), ([7, 9, 100, 200], [0, 10, 1, 11])]
    assert "compute_logits" not in vars(drafter.model), "the model is as before"

    runner.input_batch = SimpleNamespace(req_ids=["b", "a"], num_computed_tokens_cpu=[9, 9], num_prompt_tokens=[5, 5])
    runner.input_ids = SimpleNamespace(gpu=torch.tensor([9, 200, 201, 7, 0], dtype=torch.int32))
    scheduled = SimpleNamespace(
        num_scheduled_tokens={"a": 1, "b": 3}, scheduled_spec_decode_tokens={"b": [200, 201]}, finished_req_ids=set()
    )
    step = runner_v1._step(runner, scheduled)
    assert first(step.draft) == [10, 11, None, 0]
    runtime.looks_at_drafts = runtime.looks_at_tokens = False
    step = runner_v1._step(runner, scheduled)
    assert step.draft is None and step.tokens is None


def test_observers_are_called_in_order_and_gone_after_an_error() -> None:
    drafter, seen = Drafter(), []
    with pytest.raises(ZeroDivisionError), observed(drafter, [lambda s, _: seen.append(s.shape), lambda *_: 1 / 0]):
        drafter.propose(1)
    assert seen == [(2, WIDTH)] and "compute_logits" not in vars(drafter.model)


# -- while texts are read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shifted", [True, False])
def test_the_first_forward_of_a_text_reads_its_tokens(shifted: bool) -> None:
    """EAGLE reads each token with the target's state before it, so not the first; a draft model reads all."""
    drafter = Drafter()
    drafter.draft_model_config = SimpleNamespace(get_hidden_size=lambda: WIDTH)
    reader = DraftReader(drafter, shifted)
    for ids in ([3, 4, 5], [6], [7, 8]):
        consumed = [*(ids[1:] if shifted else ids), 99]
        drafter.model(input_ids=torch.tensor(consumed), positions=torch.arange(len(consumed)))
        drafter.model(input_ids=torch.tensor([99]), positions=torch.zeros(1))  # the next draft
        assert first(reader.take(ids)) == [None if shifted and not place else 2 * id for place, id in enumerate(ids)]
    for consumed in ([4, 6, 99], [4]):
        drafter.model(input_ids=torch.tensor(consumed), positions=torch.zeros(1))
        with pytest.raises(SpacError, match="not read the text in one forward"):
            reader.take([3, 4, 5])
    with pytest.raises(SpacError, match="not read the text"):
        reader.take([3, 4, 5])
    reader.close()
    drafter.model(input_ids=torch.tensor([4, 5, 99]), positions=torch.zeros(1))
    with pytest.raises(SpacError, match="not read the text"):
        reader.take([3, 4, 5])


# -- where they can be read --------------------------------------------------------------------------------------------


def engine(**speculation) -> SimpleNamespace:
    known = {"method": "eagle3", "parallel_drafting": False}
    known |= {"use_local_argmax_reduction": False, "use_heterogeneous_vocab": False}
    return SimpleNamespace(speculative_config=SimpleNamespace(**known | speculation))


@pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model"])
def test_chains_can_be_read(method: str) -> None:
    assert drafts.unread(engine(method=method)) is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (SimpleNamespace(speculative_config=None), "no drafter; add --speculative-config"),
        (engine(method="ngram"), "ngram has no states.*EAGLE-3"),
        (engine(parallel_drafting=True), r"parallel drafting \(eagle3\)"),
        (engine(use_local_argmax_reduction=True), "use_local_argmax_reduction.*drop use_local"),
        (engine(use_heterogeneous_vocab=True), "use_heterogeneous_vocab.*drop use_het"),
    ],
    ids=str,
)
def test_why_others_cannot_be_read(given: SimpleNamespace, says: str) -> None:
    reason = drafts.unread(given)
    assert reason is not None and re.search(says, str(reason)), reason


def test_the_drafter_is_the_one_of_the_training() -> None:
    """Only for a predictor that reads its states; ``auto`` leaves such predictors out."""
    file = SimpleNamespace(names=["linear", "draft_linear"], left_out={}, drafter="d" * 32, build=lambda name: name)

    def built(name: str, drafter: str) -> str:
        config = SimpleNamespace(prefetch=name, predictor_file="p", execution_class=SlotExecution)
        return ahead.predictor(config, file, lambda: drafter, torch.device("cpu"))

    assert built("draft_linear", "d" * 32) == "draft_linear" and built("linear", "e" * 32) == "linear"
    for other, says in (("e" * 32, "than this engine's .eeeeeeeeeeee."), ("", "than this engine's .none.")):
        with pytest.raises(ConfigError, match=f"another drafter .dddddddddddd. {says}; train again"):
            built("draft_linear", other)
    assert ahead.usable(file, "d" * 32) == ["linear", "draft_linear"]
    assert ahead.usable(file, "") == ahead.usable(file, "e" * 32) == ["linear"]
