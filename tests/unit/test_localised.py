"""What a process runs of a layer: padding and cut rows choose nothing, and a rank runs its own experts alone."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_spac.execution.base import Rows
from vllm_spac.execution.host.localised import Localised, localise

X = torch.arange(4.0)[:, None].repeat(1, 3)
WEIGHTS = torch.arange(1.0, 9.0).view(4, 2)
LOCAL_OF = torch.tensor([-1, 0, -1, 1, -1, 2])  # this process holds 1, 3 and 5 of six


def of(ids: list[list[int]], rows: Rows, **more) -> Localised:
    chosen = torch.tensor(ids, dtype=torch.int32)
    return localise(X, WEIGHTS, chosen, chosen.clone(), rows, **more)


def contribution(here: Localised, experts: int = 6) -> Tensor:
    """[rows, experts]: the weight by which each row of the forward runs each expert of this process."""
    routed = here.routed
    total = torch.zeros(len(routed.x), experts).scatter_add_(1, routed.ids.long(), routed.weights)
    return here.spread(total, torch.empty(len(X), experts))


def test_what_is_as_routed_is_passed_on_as_it_is():
    chosen = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]], dtype=torch.int32)
    here = localise(X, WEIGHTS, chosen, chosen, Rows(4, as_routed=True))
    assert here.routed == (X, WEIGHTS, chosen, chosen, None)
    assert here.own is here.chosen is here.asked is chosen and here.at is here.live is None and not here.empty


def test_padding_needs_no_expert_of_its_own_and_is_not_reported():
    here = of([[0, 1], [1, 2], [-1, 99], [7, -1]], Rows(2))
    assert here.routed.ids.tolist() == [[0, 1], [1, 2], [0, 1], [0, 1]]
    assert here.own.tolist() == here.chosen.tolist() == here.asked.tolist() == [[0, 1], [1, 2]]
    assert here.real == 2 and here.weights.shape == (2, 2) and here.live is None


def test_a_skipped_pair_of_a_row_that_counts_weighs_nothing():
    here = of([[0, -1], [1, 2], [2, 3], [3, 0]], Rows(4))
    assert here.routed.weights[0].tolist() == [1, 0] and (here.routed.ids >= 0).all()


def test_a_rank_runs_the_rows_that_chose_its_experts():
    here = of([[0, 1], [2, 4], [3, 5], [1, 3]], Rows(3), local_of=LOCAL_OF)
    assert here.at is not None and here.at.tolist() == [0, 2] and here.real == len(here.routed.x) == 2
    expected = torch.zeros(4, 6)
    expected[0, 0], expected[2, 1], expected[2, 2] = 2, 5, 6
    assert torch.equal(contribution(here), expected)
    assert here.own.tolist() == [[-1, 0], [-1, -1], [1, 2]] and here.chosen.tolist() == [[0, 1], [2, 4], [3, 5]]


def test_predictors_of_a_rank_are_asked_of_experts_of_the_model():
    here = of([[0, 1], [-1, -1], [3, -1], [1, 3]], Rows(3, cut=True), local_of=LOCAL_OF)
    assert here.asked.tolist() == [[0, 1], [0, 1], [3, 1]] and here.own[1].tolist() == [-1, -1]
    assert here.weights.tolist() == [[1, 2], [0, 0], [5, 0]]


def test_nothing_runs_where_no_row_chose_an_expert_of_this_process():
    for whole in (False, True):
        here = of([[0, 2], [2, 4], [4, 0], [0, 4]], Rows(4, as_routed=True), local_of=LOCAL_OF, whole=whole)
        assert here.empty and here.asked.tolist() == [[0, 2], [2, 4], [4, 0], [0, 4]]
