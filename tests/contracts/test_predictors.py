"""Contract of predictors; runs over the folder, so that a new one is tested at once."""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from pathlib import Path

import imagined as made
import numpy as np
import pytest
import torch

from vllm_spac import components
from vllm_spac.config.config import SpacConfig
from vllm_spac.core import NOT_RUN
from vllm_spac.decisions.predictor_file import (
    NOT_WANTED,
    Identity,
    PredictorFile,
    Training,
    check_tensors,
    closure,
    kinds,
    needed,
)
from vllm_spac.decisions.predictors._samples import Samples
from vllm_spac.decisions.predictors._trained import Trained
from vllm_spac.decisions.predictors.base import START, Guess, Predictor, Signal
from vllm_spac.errors import ConfigError

KEYS = made.LAYERS * made.EXPERTS
NAMES = [*components.names("predictors"), "outside:Same"]
TRAINED = list(kinds())
COUNTING = [
    name for name in NAMES if Signal.COUNTS in components.find("predictors", name).needs and name not in TRAINED
]


@cache
def trained() -> PredictorFile:
    training = Training(made.material(), Identity("f" * 32, "imagined", made.NAMES), "texts")
    assert training.left_out == {}
    for _ in training.run():
        pass
    return training.result()


def fresh(name: str) -> Predictor:
    return trained().build(name) if name in TRAINED else components.build("predictors", name, num_experts=KEYS)


def asked(predictor: Predictor, samples: Samples) -> list[tuple[int, slice, Guess]]:
    return list(samples.guesses_of(predictor))


@pytest.mark.parametrize("name", NAMES)
def test_guesses_are_of_layers_within_reach(name: str) -> None:
    """At the start of a step about any layer, else about layers at most ``reach`` ahead; whole layers."""
    samples, predictor = made.Drafted.of(made.samples(texts=1)), fresh(name)
    found = asked(predictor, samples)
    assert found, "it guesses something"
    for layer, rows, guess in found:
        first, width = guess.first // made.EXPERTS, guess.scores.shape[1] // made.EXPERTS
        assert guess.first % made.EXPERTS == guess.scores.shape[1] % made.EXPERTS == 0 and width >= 1
        assert first >= 0 and first + width <= made.LAYERS
        assert len(guess.scores) in (1, rows.stop - rows.start) and (guess.scores < torch.inf).all(), "a number or -inf"
        assert layer == START or layer < first and first + width - 1 <= layer + predictor.reach
    assert {layer for layer, _, _ in found} <= ({START} if predictor.reach == 0 else set(range(START, made.LAYERS)))


@pytest.mark.parametrize("name", NAMES)
def test_what_it_does_not_need_does_not_change_its_guesses(name: str) -> None:
    """``Samples.inputs`` leaves out what a predictor does not need: with it, the guesses are the same."""
    samples, predictor = made.Drafted.of(made.samples(texts=1)), fresh(name)
    for layer in (START, *(range(made.LAYERS) if predictor.reach else ())):
        some = predictor.guesses(samples.inputs(layer, slice(0, 5), predictor.needs))
        every = predictor.guesses(samples.inputs(layer, slice(0, 5), frozenset(Signal)))
        for one, other in zip(some, every, strict=True):
            assert one.first == other.first and torch.equal(one.scores, other.scores)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_scored_by_themselves_and_inputs_not_modified(name: str) -> None:
    samples, predictor = made.Drafted.of(made.samples(texts=1)), fresh(name)
    before = copy.deepcopy(vars(samples))
    layers = (START, *(range(made.LAYERS) if predictor.reach else ()))
    for layer in layers:
        whole = list(predictor.guesses(samples.inputs(layer, slice(0, 6), predictor.needs)))
        alone = list(predictor.guesses(samples.inputs(layer, slice(4, 5), predictor.needs)))
        for one, other in zip(whole, alone, strict=True):
            torch.testing.assert_close(one.scores.expand(6, -1)[4:5], other.scores)
    for field, value in before.items():
        assert field == "starts" or torch.equal(value.nan_to_num(), getattr(samples, field).nan_to_num())


@pytest.mark.parametrize("name", [name for name in NAMES if components.find("predictors", name).offline])
def test_what_no_engine_can_serve_with_says_why(name: str) -> None:
    assert name not in components.serving("predictors") and len(components.find("predictors", name).offline) > 10


# -- those that look at counts -----------------------------------------------------------------------------------------


def steps(seed: int, count: int = 40) -> list[np.ndarray]:
    """Counts of steps; in some of them the layers of the last keys did not run."""
    rng = np.random.default_rng(seed)
    found = list(rng.integers(0, 10, (count, KEYS)))
    for counts in found[::5]:
        counts[24:] = NOT_RUN
    return found


@pytest.mark.parametrize("name", COUNTING)
def test_scores_are_whole_numbers_one_for_each_key(name: str) -> None:
    predictor = fresh(name)
    assert not predictor.scores.any(), "nothing is known before the first step"
    for counts in steps(0):
        predictor.observe_step(counts)
        assert predictor.scores.shape == (KEYS,) and predictor.scores.dtype == np.int64
        assert predictor.scores.min() >= 0
        [guess] = predictor.guesses(made.samples(1, 1).inputs(START, slice(0, 1), predictor.needs))
        assert guess.scores.flatten().tolist() == predictor.scores.tolist()
    assert predictor.scores.any(), "the test says something"


@pytest.mark.parametrize("name", COUNTING)
def test_neither_counts_nor_earlier_scores_are_written_to(name: str) -> None:
    predictor = fresh(name)
    for counts in steps(2):
        before, kept, given = predictor.scores, predictor.scores.copy(), counts.copy()
        predictor.observe_step(counts)
        assert np.array_equal(before, kept) and np.array_equal(counts, given)


@pytest.mark.parametrize("name", COUNTING)
def test_a_layer_that_did_not_run_keeps_its_scores(name: str) -> None:
    predictor = fresh(name)
    for counts in steps(3):
        predictor.observe_step(counts)
    without = copy.deepcopy(predictor)
    predictor.observe_step(np.full(KEYS, NOT_RUN))
    assert np.array_equal(predictor.scores, without.scores)


# -- those that are trained --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAINED)
def test_stages_make_the_tensors_of_the_specs_and_each_by_itself(name: str) -> None:
    """In any order and again: the same tensors, each made by one stage."""
    kind, material = kinds()[name], made.material()
    beside = {other: trained().build(other, reach=1) for other in needed(name, TRAINED)}
    stages = range(kind.stages(material.sizes))
    backwards = [kind.train(stage, material, beside) for stage in reversed(stages)]
    assert sum(map(len, backwards)) == len(kind.specs(material.sizes)), "no tensor is made twice"
    tensors = {tensor: value for part in backwards for tensor, value in part.items()}
    check_tensors(name, kind.specs(material.sizes), tensors)
    assert all(torch.equal(value, trained().tensors[name][tensor]) for tensor, value in tensors.items())
    assert len({len(part) for part in backwards}) == 1, "progress is counted in stages of equal size"


@pytest.mark.parametrize("name", TRAINED)
def test_a_trained_predictor_beats_chance_and_knows_its_size(name: str) -> None:
    """On other texts; chance finds k of N."""
    samples, predictor = made.samples(texts=2, seed=5), trained().build(name)
    hits, pairs = 0.0, 0
    for _, rows, guess in samples.guesses_of(predictor):
        for layer, scores in enumerate(guess.scores.split(made.EXPERTS, 1), guess.first // made.EXPERTS):
            true = samples.ids[layer, rows].long()
            best = scores.expand(len(true), -1).topk(made.TOP_K).indices
            hits += float((best[:, :, None] == true[:, None]).sum())
            pairs += true.numel()
    assert hits / pairs > 0.5
    assert predictor.nbytes > 0


@pytest.mark.parametrize("name", TRAINED)
def test_a_trained_predictor_needs_no_more_than_it_says(name: str) -> None:
    kind = kinds()[name]
    assert issubclass(kind, Trained) and kind.needs_file and not kind.offline
    assert Signal.FUTURE not in trained().build(name).needs


def test_what_is_computed_from_a_checkpoint_is_what_training_makes() -> None:
    """An engine needs no file of these."""
    computed = [name for name in TRAINED if kinds()[name].from_checkpoint]
    assert computed == ["gate"]
    for name in computed:
        ours, theirs = kinds()[name].computed(made.material().sizes, made.gates()), trained().tensors[name]
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[each], theirs[each]) for each in ours)
        assert SpacConfig.parse({"prefetch": name}).predictor_file is None
        assert str(SpacConfig.parse({"prefetch": f"{name}@file=/x"}).predictor_file) == "/x", "a file may be given"


def test_a_model_whose_routers_are_not_known_leaves_out_what_needs_them() -> None:
    material = dataclasses.replace(made.material(), gates="the checkpoint has no router")
    training = Training(material, Identity("f" * 32, "imagined", made.NAMES), "texts")
    assert training.left_out == dict.fromkeys(("gate", "quasi_hidden"), "the checkpoint has no router")


def test_only_what_is_asked_for_and_what_it_asks_is_trained() -> None:
    identity = Identity("f" * 32, "imagined", made.NAMES)
    training = Training(made.material(), identity, "texts", ["gate"])
    for _ in training.run():
        pass
    assert training.result().names == ["gate"]
    assert training.left_out == dict.fromkeys(set(TRAINED) - {"gate"}, NOT_WANTED)
    assert closure(["hybrid"]) == closure(None) == set(kinds()) == {"gate", "quasi_hidden", "neural", "hybrid"}
    with pytest.raises(ConfigError, match="no trained predictor is called linear; use gate, neural, quasi_hidden, hyb"):
        Training(made.material(), identity, "texts", ["linear"])


def test_progress_with_other_predictors_is_not_resumed(tmp_path: Path) -> None:
    identity, path = Identity("f" * 32, "imagined", made.NAMES), tmp_path / "progress"
    training = Training(made.material(), identity, "texts", ["quasi_hidden", "gate"])
    next(training.run())
    training.save_progress(path)
    Training(made.material(), identity, "texts", ["gate", "quasi_hidden"]).load_progress(path)
    with pytest.raises(ConfigError, match="other predictors"):
        Training(made.material(), identity, "texts").load_progress(path)
