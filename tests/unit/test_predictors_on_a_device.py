"""Predictors on a device: nothing that they compute is read on the host, and it is what they compute on a CPU.

A meta tensor has a shape and no values, so that whatever reads one, or mixes it with the host's, raises.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_predictor_calls import file
from test_predictor_calls import made as imagined
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vllm_spac.cache.named import PredictedExperts
from vllm_spac.decisions.guard import draft_states
from vllm_spac.decisions.guard.draft_states import DraftStates
from vllm_spac.decisions.predictor_file import kinds
from vllm_spac.decisions.predictors._trained import Trained
from vllm_spac.decisions.predictors.base import START, Guess, Predictor, PredictorInputs
from vllm_spac.methods.od_moe.shadow_predictor import Shadow

ROWS = 5


class AsOnAGpu(TorchFunctionMode):
    """Each tensor says that it is on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__self__", None) is Tensor.is_cuda:
            return True
        return func(*args, **(kwargs or {}))


def on(device: str, value: Any) -> Any:
    """A copy of a predictor, or of what it holds, with its tensors on ``device``."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: on(device, each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(on(device, each) for each in value)
    if isinstance(value, Predictor):
        found = copy.copy(value)
        vars(found).update({name: on(device, each) for name, each in vars(value).items()})
        return found
    return value


def seen(layer: int, device: str) -> PredictorInputs:
    samples = imagined.samples(texts=1)
    rows = samples.hidden[layer, :ROWS].bfloat16(), samples.ids[layer, :ROWS], samples.weights[layer, :ROWS]
    return PredictorInputs(layer, *(each.to(device) for each in rows))


def asked(predictor: Trained, device: str) -> Iterator[tuple[int, Guess]]:
    for layer in range(imagined.LAYERS):
        for guess in predictor.guesses(seen(layer, device)):
            yield layer, guess


@pytest.mark.parametrize("name", list(kinds()))
def test_nothing_is_read_on_the_host(name: str) -> None:
    predictor = on("meta", file(2).build(name))
    with AsOnAGpu():
        found = [PredictedExperts.of(guess, imagined.EXPERTS, imagined.TOP_K) for _, guess in asked(predictor, "meta")]
    assert found and all(each.ids.device.type == "meta" for each in found)


@pytest.mark.parametrize("name", list(kinds()))
def test_scores_are_those_of_a_cpu(name: str) -> None:
    """Up to the order in which a product of other shapes sums: float32, relative to sums of a few hundred terms."""
    here, there = file(2).build(name), file(2).build(name)
    expected = [(layer, guess.first, guess.scores.clone()) for layer, guess in asked(here, "cpu")]
    with AsOnAGpu():
        found = [(layer, guess.first, guess.scores.clone()) for layer, guess in asked(there, "cpu")]
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    for (_, _, ours), (_, _, theirs) in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_shadow_stays_there() -> None:
    [guess] = Shadow(num_experts=12).guesses(
        PredictorInputs(START, draft_ids=torch.zeros(2, 3, 2, dtype=torch.int64, device="meta"))
    )
    assert PredictedExperts.of(guess, 4, 2).ids.device.type == "meta"


def test_states_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_states, "_sent", lambda indices, device: indices.to(device))
    kept = DraftStates(3, 2)
    kept.begin(["a", "b"])
    for _ in range(2):
        kept.add(
            torch.zeros(2, dtype=torch.int32, device="meta"), torch.zeros(2, 3, 2, dtype=torch.int64, device="meta")
        )
    assert kept.known().shape == (4, 3, 2) and kept.known().device.type == "meta"
    taken = kept.take([("b", slice(0, 3), 2), ("c", slice(3, 4), 0)], torch.zeros(4, dtype=torch.int64, device="meta"))
    assert taken.shape == (4, 3, 2) and taken.device.type == "meta"
