"""Draft trees of V2's runner where they touch no vLLM: the layout of a batch, what is sampled, counts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_spac.integration.stepping import tree_attention
from vllm_spac.integration.stepping.v2 import tree_decoding_v2
from vllm_spac.integration.stepping.v2.tree_decoding_v2 import Sampled
from vllm_spac.methods.trees.captured_trees import CapturedTrees, every_row
from vllm_spac.methods.trees.tensors import Layout, Scratch, StepTrees, TensorRows, TreeTensors
from vllm_spac.methods.trees.tree_counters import TreeCounters

STARTS, DRAFTS = np.array([0, 4, 5, 8, 17], dtype=np.int32), np.array([3, 0, 2, 4])  # the last is a padded prompt
TREES = np.array([0, 2])


def test_layout_of_a_batch_of_trees_a_plain_request_and_a_prompt() -> None:
    layout = Layout.of(STARTS, DRAFTS, TREES)
    assert layout.owner.tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 3]
    assert layout.starts.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 17] and layout.starts.dtype == np.int32
    tree, row, token, sequence = layout.rows.tolist()
    assert tree == [0] * 4 + [1] * 3 and row == [0, 1, 2, 3, 0, 1, 2]
    assert token == [0, 1, 2, 3, 5, 6, 7] and sequence == [0, 1, 2, 3, 5, 6, 7]
    assert layout.roots.tolist() == [0, 5]


@dataclass
class Batch:
    """The fields of V2's ``InputBatch`` that are replaced."""

    num_reqs: int
    num_reqs_after_padding: int
    idx_mapping: torch.Tensor
    idx_mapping_np: np.ndarray
    num_scheduled_tokens: np.ndarray
    query_start_loc: torch.Tensor
    query_start_loc_np: np.ndarray
    seq_lens: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor
    is_prefilling_np: np.ndarray


def test_the_expanded_batch_fits_together() -> None:
    lengths, states = torch.tensor([14, 21, 33, 9], dtype=torch.int32), np.array([5, 2, 7, 0])
    batch = Batch(
        4,
        4,
        torch.from_numpy(states),
        states,
        np.diff(STARTS),
        torch.from_numpy(STARTS),
        STARTS,
        lengths,
        lengths + 3,
        np.array([False, False, False, True]),
    )
    layout = Layout.of(STARTS, DRAFTS, TREES)
    step = StepTrees(
        TreeTensors.of(torch.tensor([[-1, 0, 0, 1, 1], [-1, 0, 1, 0, 0]]), 3),
        TensorRows(*torch.from_numpy(layout.rows)),
        torch.tensor([10, 30]),
        torch.arange(1, 33).view(4, 8)[[0, 2]],
        torch.arange(100, 120).view(2, 5, 2),
    )
    found, table = tree_decoding_v2.expanded(batch, step, layout, torch.arange(1, 33).view(4, 8), 8)  # type: ignore[arg-type]
    assert found.seq_lens.tolist() == [11, 12, 12, 13, 21, 31, 32, 33, 9]
    assert found.num_scheduled_tokens.tolist() == [1] * 8 + [9] and int(found.query_start_loc[-1]) == 17
    assert found.is_prefilling_np.tolist() == [False] * 8 + [True]
    assert found.idx_mapping_np.tolist() == [5] * 4 + [2] + [7] * 3 + [0]
    assert table[1].tolist() == [1, 102, 103, 4, 5, 6, 7, 8] and table[0].tolist() == list(range(1, 9))
    assert table[6].tolist() == [17, 18, 19, 112, 113, 22, 23, 24]
    assert {len(getattr(found, field.name)) for field in fields(Batch)[2:] if "query" not in field.name} == {9}
    assert batch.seq_lens is lengths and lengths.tolist() == [14, 21, 33, 9], "vLLM's own batch is left as it is"


def parameters(**given: Any) -> SimpleNamespace:
    plain = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    return SimpleNamespace(**plain | {"bad_words": [], "structured_outputs": None} | given)


@pytest.mark.parametrize(
    "given, chain",
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"bad_words": ["no"]}, True),
        ({"structured_outputs": object()}, True),
        ({"thinking_token_budget": 5}, True),
        ({"temperature": 1.0, "top_p": 0.5, "min_tokens": 3, "logit_bias": {1: 2.0}}, False),
    ],
)
def test_requests_whose_logits_depend_on_earlier_drafts_get_chains(given: dict, chain: bool) -> None:
    assert tree_decoding_v2.needs_chain(parameters(**given)) == chain  # type: ignore[arg-type]


def test_accepted_rows_come_first_among_those_that_are_sampled() -> None:
    batch: Any = SimpleNamespace(cu_num_logits=torch.tensor([0, 4, 5, 8], dtype=torch.int32))
    at = Sampled.of(batch, 5)
    assert at.rows.tolist() == [4, 1, 3]
    assert at.logits.tolist() == [[0, 1, 2, 3, 3], [4] * 5, [5, 6, 7, 7, 7]]
    path = torch.tensor([[0, 2, 3, -1], [0, -1, -1, -1], [0, 2, -1, -1]])
    assert at.along(path, 8).tolist() == [0, 2, 3, 3, 4, 5, 7, 7]
    state = torch.arange(10.0)[:, None].expand(-1, 2)
    assert tree_decoding_v2.reordered(state, at.along(path, 8))[:, 0].tolist() == [0, 2, 3, 3, 4, 5, 7, 7, 8, 9]


def test_counts_of_trees_chains_and_drafts_that_are_unknown() -> None:
    """A tree of three nodes, a chain that was cut, one that was filled up, and a request without drafts."""
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2], [-1, 0, -2, -2], [-1, 0, 1, 2]])
    counters = TreeCounters(3)
    counters.add_step(parents, torch.tensor([4, 3, 4, 1]), torch.tensor([2, 1, 0, 0]))
    found = counters.snapshot()
    assert found["trees"] == {"trees": 1, "chains": 2, "unknown": 0, "nodes": 6}
    assert found["tree_accepted"] == {"0": 1, "1": 1, "2": 1}
    counters.add_unknown(2)
    assert counters.snapshot()["trees"] == {"trees": 1, "chains": 4, "unknown": 2, "nodes": 6}


def test_hooks_write_what_rows_see_of_their_ancestors() -> None:
    from vllm_spac.methods.trees.tensors import Scattered

    calls: list[tuple[list[int], list[int]]] = []
    trees: Any = SimpleNamespace(scattered=None)
    hooked = tree_attention.updating(
        lambda layer, k, v, cache, slots: calls.append((k.tolist(), slots.tolist())), lambda: trees.scattered
    )
    key = torch.tensor([7, 8, 9])
    hooked(None, key, key, None, torch.tensor([0, 1, 2]))
    trees.scattered = Scattered(torch.tensor([0, 2]), torch.tensor([50, -1]))
    hooked(None, key, key, None, torch.tensor([0, 1, 2]))
    assert calls == [([7, 8, 9], [0, 1, 2]), ([7, 8, 9], [0, 1, 2]), ([7, 9], [50, -1])]


def whole(requests: list[int]) -> tuple[Layout, StepTrees]:
    """Three requests of five rows each, of which ``requests`` have trees, and the others what vLLM padded them with."""
    layout = Layout.of(np.array([0, 5, 10, 15], dtype=np.int32), np.array([4, 4, 4]), np.array(requests))
    rows, _ = every_row(layout, 3)
    step = StepTrees(
        TreeTensors.of(torch.tensor([[-1, 0, 0, 1, 1], [-1, 0, 1, 0, 3]])[: len(requests)], 3),
        TensorRows(*torch.from_numpy(rows)),
        torch.tensor([10, 30])[: len(requests)],
        torch.arange(1, 25).view(3, 8)[requests],
        torch.arange(100, 120).view(2, 5, 2)[: len(requests)],
    )
    return layout, step


def test_a_graph_sees_each_row_as_it_is_seen_without_one() -> None:
    layout, step = whole([0, 2])
    positions, table = torch.tensor([*[0] * 5, *range(20, 25), *[0] * 5]), torch.arange(1, 25).view(3, 8)
    positions[step.rows.token] = step.positions
    lengths = torch.tensor([15, 25, 35], dtype=torch.int32)
    states = np.array([5, 2, 7])
    batch = Batch(
        3, 3, torch.from_numpy(states), states, np.full(3, 5), torch.from_numpy(layout.starts[:4]), layout.starts[:4],
        lengths, lengths, np.array([False, True, False]),
    )  # fmt: skip
    plain = StepTrees(step.trees, TensorRows(*torch.from_numpy(layout.rows)), *step[2:])
    found, tables = tree_decoding_v2.expanded(batch, plain, layout, table, 8)  # type: ignore[arg-type]
    memory = CapturedTrees(20, 8, 3, "cpu")
    seen = memory.batch(20)
    memory.write(positions, torch.from_numpy(every_row(layout, 3)[1]), table, step, 8)
    trees = torch.tensor([0, 1, 2, 3, 4, 10, 11, 12, 13, 14])
    assert seen.lengths[trees].tolist() == [*found.seq_lens[:5].tolist(), *found.seq_lens[6:].tolist()]
    assert seen.table[trees].tolist() == [*tables[:5].tolist(), *tables[6:].tolist()]
    assert seen.lengths[5:10].tolist() == [21, 22, 23, 24, 25], "a chain: each row sees those before it"
    assert (seen.table[5:10] == table[1]).all()
    also = plain.scattered(8)
    count = len(also.rows)
    assert seen.scattered.rows[:count].tolist() == also.rows.tolist()
    assert seen.scattered.slots[:count].tolist() == also.slots.tolist()


def test_rows_that_pad_a_graph_count_for_nothing() -> None:
    """Also where an earlier step had more rows."""
    memory = CapturedTrees(20, 8, 3, "cpu")
    seen = memory.batch(20)
    addresses = [each.data_ptr() for each in (seen.lengths, seen.table, *seen.scattered)]
    table = torch.arange(1, 25).view(3, 8)
    layout, step = whole([0, 2])
    memory.write(torch.arange(15), torch.from_numpy(every_row(layout, 3)[1]), table, step, 8)
    memory.write(torch.tensor([7, 8, 9, 10, 11]), torch.zeros(5, dtype=torch.long), table, None, 8)
    assert seen.lengths.tolist() == [8, 9, 10, 11, 12] + [1] * 15
    assert (seen.table[:5] == table[0]).all() and not seen.table[5:].any()
    assert (seen.scattered.slots == -1).all() and not seen.scattered.rows.any()
    again = memory.batch(20)
    assert addresses == [each.data_ptr() for each in (again.lengths, again.table, *again.scattered)]


def test_requests_that_pad_a_graph_share_vllm_s_own_block() -> None:
    from vllm_spac.config.tree_shape import TreeShape

    scratch = Scratch(TreeShape(16, 4, 3), 3, 8)
    three, four = scratch.levels(3), scratch.levels(4)
    assert torch.equal(four[:, :3], three)
    assert not set(four[:, 3:].flatten().tolist()) & set(three.flatten().tolist()), "no request loses its own"
    assert len(set(three.flatten().tolist())) == three.numel() <= scratch.count
