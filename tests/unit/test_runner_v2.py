"""V2's batches and outputs, as plain stand-ins with the fields that vLLM gives them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.integration.hooks.runner_hooks import tokens_of
from vllm_spac.integration.stepping.runner_v1 import sampled_plainly, unless_plain
from vllm_spac.integration.stepping.runner_v2 import step_of


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


def test_tokens_stay_where_they_are() -> None:
    """Without padding, and a copy: vLLM writes its buffer again."""
    given = batch([2, 1], [False, False], None, padding=3)
    given.input_ids = torch.arange(6, dtype=torch.int32)
    assert step_of(given).tokens is None
    found = step_of(given, tokens=True).tokens
    assert found.tolist() == [0, 1, 2] and found.dtype == torch.int64
    given.input_ids.zero_()
    assert found.tolist() == [0, 1, 2]


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
@pytest.mark.parametrize("guard", [None, object()], ids=["unguarded", "guarded"])
def test_only_a_guarded_step_without_drafts_is_sampled_plainly(guard, drafts, hybrid) -> None:
    """Then of each request the last row, also behind a chunk of a prompt."""
    runner = SimpleNamespace(
        _spac_experts=SimpleNamespace(runtime=SimpleNamespace(guard=guard)),
        model_config=SimpleNamespace(is_hybrid=hybrid),
        query_start_loc=SimpleNamespace(gpu=torch.tensor([0, 4, 5, 99, 99], dtype=torch.int32)),
    )
    calculate = unless_plain(lambda runner, *counts: ("metadata", *counts))
    metadata = calculate(runner, np.array(drafts), np.array([4, 5]))
    answer = sampled_plainly(runner, None, ("indices", metadata, 3))
    plain = guard is not None and not any(drafts) and not hybrid
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
