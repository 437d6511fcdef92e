"""How often predictors call torch in a layer, and that the few calls compute what their definitions say."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1] / "contracts"))
import imagined as made

from vllm_spac.decisions.predictor_file import Identity, PredictorFile, Training, kinds
from vllm_spac.decisions.predictors._trained import Trained
from vllm_spac.decisions.predictors.base import START, PredictorInputs
from vllm_spac.methods.speculating_experts import neural_predictor
from vllm_spac.methods.speculating_experts.neural_predictor import Neural
from vllm_spac.methods.speculating_experts.quasi_hidden_predictor import LayerFeatures, mixing

MOST = {"gate": 2, "quasi_hidden": 4, "neural": 9, "hybrid": 9}


class Calls(TorchDispatchMode):
    """Counts what torch dispatches: kernels and views alike."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@cache
def file(reach: int) -> PredictorFile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neural_predictor, "_STEPS", 3)
        training = Training(made.material(reach), Identity("f" * 32, "imagined", made.NAMES), "texts")
        list(training.run())
        return training.result()


def called(predictor: Trained, rows: int) -> list[list[str]]:
    """Calls of torch in each layer of a step, whose rows are in bf16 as in an engine; the second of two equal steps."""
    samples = made.samples(texts=1)
    for _ in range(2):
        found = []
        for layer in (START, *range(made.LAYERS)):
            hidden = samples.hidden[layer, :rows].bfloat16()
            seen = PredictorInputs(layer, hidden, samples.ids[layer, :rows], samples.weights[layer, :rows])
            with Calls() as calls:
                list(predictor.guesses(seen))
            found.append(calls.names)
    return found[1:]


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("reach", [1, 3])
@pytest.mark.parametrize("name", MOST)
def test_few_calls_of_torch_in_a_layer(name: str, reach: int, rows: int) -> None:
    """As few for several rows and several layers ahead; none in a layer that nothing is guessed in."""
    found = called(file(reach).build(name), rows)
    assert all(0 < len(calls) <= MOST[name] for calls in found[:-1]), found
    assert not found[-1], "nothing is after the last layer"


def test_every_predictor_that_looks_at_layers_is_counted() -> None:
    assert set(kinds()) == set(MOST)


def test_features_are_the_router_input_and_its_weights_whatever_was_there_before() -> None:
    samples, features = made.samples(texts=1), LayerFeatures(made.WIDTH, made.EXPERTS)
    for layer, rows in ((0, slice(0, 5)), (2, slice(7, 12)), (1, slice(3, 4)), (0, slice(0, 9))):
        hidden, ids, weights = (value[layer, rows] for value in (samples.hidden, samples.ids, samples.weights))
        with torch.inference_mode(layer == 2):
            found = features.of(PredictorInputs(layer, hidden.bfloat16(), ids, weights.bfloat16()))
            expected = torch.cat([hidden.bfloat16().float(), mixing(ids, weights.bfloat16(), made.EXPERTS)], 1)
        assert torch.equal(found, expected)


def test_the_network_in_few_calls_is_that_of_the_training() -> None:
    """Up to rounding: the two products of the input are one, and one bias is added earlier."""
    found, samples = file(1), made.samples(texts=1, seed=8)
    predictor = Neural(found.sizes, found.tensors["neural"], {})
    random = torch.Generator().manual_seed(0)
    net = {
        part: found.tensors["neural"][f"{part}.2"].float()
        + 0.1 * torch.randn(found.tensors["neural"][f"{part}.2"].shape, generator=random)
        for part in neural_predictor._PARTS
    }
    inputs = torch.cat([samples.hidden[1], mixing(samples.ids[1], samples.weights[1], made.EXPERTS)], 1)
    expected = neural_predictor._run(net, inputs)
    torch.testing.assert_close(predictor._run(neural_predictor._merged(net), inputs), expected, rtol=1e-4, atol=1e-4)
    for rows in (1, 6):
        found_now = predictor._run(neural_predictor._merged(net), inputs[:rows])
        torch.testing.assert_close(found_now, expected[:rows], rtol=1e-4, atol=1e-4)
