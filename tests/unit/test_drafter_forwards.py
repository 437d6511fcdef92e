"""V2's drafter runs as often as drafts are planned: its speculators as stand-ins with what vLLM's have."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_spac.decisions.guard.lengths import REST, LengthChooser
from vllm_spac.integration.hooks.drafter_forwards import DrafterForwards
from vllm_spac.integration.stepping import draft_planning

MOST = 4


class Speculator:
    """A draft model's: makes ``num_speculative_steps`` drafts, as vLLM's does, whatever is planned."""

    def __init__(self) -> None:
        self.num_speculative_steps, self.forwards = MOST, 0
        self.draft_tokens = torch.full((8, MOST), 7)

    def propose(self, batch, *args, num_speculative_tokens=None, dummy_run=False, dp_sync_state=None, **kwargs):
        self.forwards += self.num_speculative_steps
        for number in range(self.num_speculative_steps):
            self.draft_tokens[: batch.num_reqs, number] = 10 + number
        return self.draft_tokens[: batch.num_reqs, : self.num_speculative_steps]


def batch(*prompts: bool):
    return SimpleNamespace(num_reqs=len(prompts), is_prefilling_np=np.array(prompts))


def forwards(rests: bool = True, ready: bool = True, loops: bool = True) -> tuple[DrafterForwards, Speculator]:
    speculator = Speculator()
    return DrafterForwards(speculator, lambda: rests, lambda: ready, loops), speculator


def test_a_drafter_that_rests_does_not_run() -> None:
    made, speculator = forwards()
    found = speculator.propose(batch(False, False), num_speculative_tokens=0)
    assert found.shape == (2, MOST) and not speculator.forwards and made.left_out == 1, "vLLM writes -1 into it"


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"rests": False}, {"num_speculative_tokens": 0}),  # it reads on, so that its KV cache stays whole
        ({"ready": False}, {"num_speculative_tokens": 0}),  # vLLM warms up
        ({}, {"num_speculative_tokens": 0, "dummy_run": True}),
        ({}, {"num_speculative_tokens": 0, "dp_sync_state": object()}),  # other ranks wait for it
        ({}, {}),
        ({}, {"num_speculative_tokens": 2}),
    ],
)
def test_when_it_runs(how: dict, what: dict) -> None:
    made, speculator = forwards(**how, loops=False)
    assert speculator.propose(batch(False), **what)[0, 0] == 10
    assert speculator.forwards == MOST and made.left_out == 0


def test_it_reads_every_prompt() -> None:
    made, speculator = forwards()
    speculator.propose(batch(False, True), num_speculative_tokens=0)
    assert speculator.forwards == 1 and made.left_out == 0


@pytest.mark.parametrize(("planned", "runs"), [(0, 1), (1, 1), (3, 3), (MOST, MOST)])
def test_a_draft_model_makes_the_drafts_that_are_planned(planned: int, runs: int) -> None:
    """And vLLM gets all columns of its buffer: it writes -1 into those behind them."""
    _, speculator = forwards(rests=False)
    found = speculator.propose(batch(False), num_speculative_tokens=planned)
    assert speculator.forwards == runs and found.shape == (1, MOST)
    assert found[0, :runs].tolist() == [10 + number for number in range(runs)]
    assert speculator.num_speculative_steps == MOST
    _, speculator = forwards(rests=False, ready=False)
    speculator.propose(batch(False), num_speculative_tokens=planned)
    assert speculator.forwards == MOST, "all that is compiled while vLLM warms up"


# -- when it rests, and trees ----------------------------------------------------------------------------------


def steps(guard: LengthChooser, count: int, accepted: int, cost: float) -> list[bool]:
    """Whether the guard rests before each step of one request; ``cost``: of a draft, in plain steps."""
    rests = []
    for _ in range(count):
        length = guard.choose(1)
        rests.append(guard.rests)
        assert not (guard.rests and length), "a step with drafts needs its drafter"
        guard.observe(length, [1 + min(accepted, length)], 1, 1.0 + cost * length)
    return rests


def test_a_guard_rests_once_drafts_have_not_paid_for_long() -> None:
    rests = steps(guard := LengthChooser(MOST), 2 * REST, accepted=0, cost=0.2)
    assert not any(rests[: REST + 1]) and rests[REST + 1]
    assert sum(rests) < REST - 1, "trials go on"
    rests = steps(guard, 2000, accepted=MOST, cost=0.01)
    assert not any(rests[-100:]) and guard.choose(1) > 0, "and drafts come back"


def test_a_guard_never_rests_while_drafts_pay() -> None:
    assert not any(steps(LengthChooser(MOST), 4 * REST, accepted=MOST, cost=0.01))


def test_a_tree_is_drafted_as_a_whole_or_not_at_all() -> None:
    """Its nodes are more than the tokens that its path can emit."""
    nodes, depth = 8, 3
    for accepted, cost, best in ((depth, 0.01, nodes), (0, 0.1, 0)):
        guard, lengths = LengthChooser(nodes, (0, nodes)), []
        for _ in range(400):
            lengths.append(length := guard.choose(1))
            guard.observe(length, [1 + accepted * (length > 0)], 1, 1.0 + cost * length)
        assert set(lengths) == {0, nodes} and guard.choose(1) == best
        assert lengths[-100:].count(best) > 90


def test_the_lengths_of_a_tree_s_guard_are_not_those_of_vllm_s_graphs(monkeypatch) -> None:
    monkeypatch.setattr(draft_planning.patches, "install", lambda target, make: None)
    speculation = SimpleNamespace(num_speculative_tokens_per_batch_size=None)
    config = SimpleNamespace(
        instance_id="trees",
        speculative_config=speculation,
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
    )
    draft_planning.install(config, guard := LengthChooser(8, (0, 8)))
    planned = draft_planning._waiting.pop("trees")
    assert planned.guard is guard and speculation.num_speculative_tokens_per_batch_size is None
