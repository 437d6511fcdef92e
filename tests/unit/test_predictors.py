"""Trained predictors against their definitions: folded gates, quasi-hidden states, ridge regression."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "contracts"))
import imagined as made

from vllm_spac.decisions.predictors._trained import Gates, Sizes
from vllm_spac.decisions.predictors.base import START, PredictorInputs
from vllm_spac.decisions.predictors.gate import Gate, folded
from vllm_spac.decisions.predictors.oracle import Oracle
from vllm_spac.methods.speculating_experts.hybrid_predictor import Hybrid
from vllm_spac.methods.speculating_experts.neural_predictor import Neural, penalty, ridge, train_map
from vllm_spac.methods.speculating_experts.quasi_hidden_predictor import QuasiHidden, through_norm

DOUBLE = {"rtol": 1e-10, "atol": 1e-10}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_a_folded_gate_is_norm_and_gate() -> None:
    """For any residual; the weights of both norms of either sign."""
    residual, gate, norm, own = random(50, 16), random(12, 16, seed=1), random(16, seed=2), random(16, seed=3)
    hidden = made.normed(residual, own)
    expected = made.normed(residual, norm) @ gate.T
    torch.testing.assert_close(hidden @ folded(gate, norm, own), expected, **DOUBLE)


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_gate_ranks_as_the_later_router_on_the_earlier_residual(bias: float) -> None:
    model = made.gates(bias=bias)
    material = made.material(reach=2, model=model)
    tensors = {name: t for stage in range(5) for name, t in Gate.train(stage, material, {}).items()}
    predictor = Gate(material.sizes, tensors, {})
    residual = made.residuals(30, seed=7)
    hidden = made.normed(residual[1], model.norm[1])
    [guess] = predictor.guesses(PredictorInputs(1, hidden=hidden))
    assert guess.first == 2 * made.EXPERTS
    for scores, target in zip(guess.scores.split(made.EXPERTS, 1), (2, 3), strict=True):
        expected = made.normed(residual[1], model.norm[target]) @ model.weight[target].T + model.bias[target]
        torch.testing.assert_close(scores, expected, rtol=0.05, atol=0.1)  # maps are in bf16


@settings(max_examples=examples(400))
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 6), experts=st.integers(2, 12), width=st.integers(2, 16))
def test_the_quasi_hidden_state_splits_into_residual_and_default_vectors(
    seed: int, rows: int, experts: int, width: int
) -> None:
    """gate(norm(r + D)) = (rms(r) * h @ F + m @ P) / rms(r + D), so both rank alike; D expert by expert (Eq. 2)."""
    residual, outputs = random(rows, width, seed=seed), random(experts, width, seed=seed + 1)
    gate, norm, own = random(experts, width, seed=seed + 2), *random(2, width, seed=seed + 3)
    mixed = random(rows, experts, seed=seed + 4).softmax(1)
    moved = residual.clone()
    for row, weights in enumerate(mixed.tolist()):
        for expert, weight in enumerate(weights):
            moved[row] += weight * outputs[expert]
    size = residual.square().mean(-1, keepdim=True).sqrt()
    parts = size * (made.normed(residual, own) @ folded(gate, norm, own)) + mixed @ through_norm(outputs, gate, norm)
    expected = made.normed(moved, norm) @ gate.T
    torch.testing.assert_close(parts / moved.square().mean(-1, keepdim=True).sqrt(), expected, **DOUBLE)


@pytest.mark.parametrize("strength", [1e-4, 1e-2, 1.0])
def test_ridge_is_least_squares_with_the_penalty_as_rows(strength: float) -> None:
    inputs, targets = random(200, 10), random(200, 6, seed=1)
    extra = penalty(inputs, strength) ** 0.5 * torch.eye(10, dtype=torch.float64)
    centred = targets - targets.mean(1, keepdim=True)
    rows, wanted = torch.cat([inputs, extra]), torch.cat([centred, torch.zeros(10, 6, dtype=torch.float64)])
    torch.testing.assert_close(ridge(inputs, targets, strength), torch.linalg.lstsq(rows, wanted).solution, **DOUBLE)


def test_distilling_lowers_the_divergence_and_repeats_itself() -> None:
    inputs, logits = random(400, 8).float(), (3 * random(400, 6, seed=1)).float()

    def loss(matrix: torch.Tensor) -> float:
        return float(-(logits.softmax(-1) * (inputs @ matrix).log_softmax(-1)).sum(-1).mean())

    found = []
    for _ in range(2):
        matrix = torch.zeros(8, 6)
        before = loss(matrix)
        train_map([matrix], lambda rows, m=matrix: rows @ m, inputs, logits, steps=60, rate=1e-2, seed=3)
        assert loss(matrix) < before and not matrix.requires_grad
        found.append(matrix)
    assert torch.equal(*found)


def quasi_hidden(material) -> dict[str, torch.Tensor]:
    stages = range(QuasiHidden.stages(material.sizes))
    return {name: t for stage in stages for name, t in QuasiHidden.train(stage, material, {}).items()}


def test_nothing_is_kept_of_earlier_rows() -> None:
    """Whatever it was asked before, with other layers, more rows, and inside of inference mode."""
    material, samples = made.material(), made.material().others
    tensors = quasi_hidden(material)
    kept = QuasiHidden(material.sizes, tensors, {})
    earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
    asked = [(0, (0, 9)), (0, (20, 29)), (START, (9, 12)), (1, (9, 12)), (0, (1, 40)), (2, (3, 5)), (1, (30, 32))]
    for number, (layer, rows) in enumerate(asked):
        seen = samples.inputs(layer, slice(*rows), kept.needs)
        with torch.inference_mode(number % 2 == 1):
            found = [guess.scores for guess in kept.guesses(seen)]
        fresh = QuasiHidden(material.sizes, tensors, {})
        for ours, theirs in zip(found, fresh.guesses(seen), strict=True):
            torch.testing.assert_close(ours, theirs.scores)
            earlier.append((ours, ours.clone()))
    assert len(earlier) == len(asked) - 1 and all(torch.equal(ours, then) for ours, then in earlier)
    one, other = (kept.guesses(samples.inputs(0, slice(*rows), kept.needs)) for rows in ((0, 9), (20, 29)))
    for guess, (expected, _) in zip((*one, *other), earlier, strict=False):
        torch.testing.assert_close(guess.scores, expected)


def test_neural_undoes_the_normalisation_of_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shifting and scaling all inputs before the training changes no score (but for bf16)."""
    monkeypatch.setattr("vllm_spac.methods.speculating_experts.neural_predictor._STEPS", 40)
    material = made.material(reach=1)
    moved = replace(material.samples, hidden=3 * material.samples.hidden + 1)
    scores = []
    for samples, seen in (
        (material.samples, material.others),
        (moved, replace(material.others, hidden=3 * material.others.hidden + 1)),
    ):
        tensors = {
            name: t for s in range(3) for name, t in Neural.train(s, replace(material, samples=samples), {}).items()
        }
        [guess] = Neural(material.sizes, tensors, {}).guesses(seen.inputs(0, slice(0, 20), Neural.needs))
        scores.append(guess.scores.softmax(-1))
    torch.testing.assert_close(*scores, rtol=0, atol=0.05)


# -- hybrid and oracle -------------------------------------------------------------------------------------------------


def test_hybrid_asks_the_predictor_that_was_right_most_often_on_other_texts() -> None:
    """Two of the file's predictors; of each, the map to one layer is made useless."""
    material = made.material(reach=1)
    gate = {name: t for s in range(3) for name, t in Gate.train(s, material, {}).items()}
    gate["map.1.3"] = -gate["map.1.3"]
    quasi = quasi_hidden(material)
    quasi["map.1.1"], quasi["map.1.2"] = -quasi["map.1.1"], -quasi["map.1.2"]
    beside = {"gate": Gate(material.sizes, gate, {}), "quasi_hidden": QuasiHidden(material.sizes, quasi, {})}
    tensors = Hybrid.train(0, material, beside)
    hybrid = Hybrid(material.sizes, tensors, beside)
    assert hybrid.chosen[1:] == ["gate", "gate", "quasi_hidden"], "no router is before layer 0"
    found = [(layer, guess.first // made.EXPERTS) for layer, _, guess in material.others.guesses_of(hybrid)]
    assert hybrid.reach == 1 and found == [(0, 1), (1, 2), (2, 3)]
    for layer, name in enumerate(hybrid.chosen[1:]):
        seen = material.others.inputs(layer, slice(0, 9), hybrid.needs)
        [ours], [theirs] = hybrid.guesses(seen), beside[name].guesses(seen)
        assert torch.equal(ours.scores, theirs.scores)
    assert hybrid.needs == beside["gate"].needs | beside["quasi_hidden"].needs


def test_hybrid_refuses_a_choice_of_nobody() -> None:
    material = made.material()
    gate = Gate(material.sizes, Gate.computed(material.sizes, made.gates()), {})
    for choice in ([0, 0, 1, 0], [0, -1, 0, 0]):
        with pytest.raises(ValueError, match="no predictor"):
            Hybrid(material.sizes, {"choice": torch.tensor(choice)}, {"gate": gate})


def test_the_oracle_names_what_is_chosen() -> None:
    samples = made.samples(texts=1)
    oracle = Oracle(made.LAYERS * made.EXPERTS)
    [guess] = oracle.guesses(samples.inputs(START, slice(0, 9), oracle.needs))
    for layer, scores in enumerate(guess.scores.split(made.EXPERTS, 1)):
        assert torch.equal(scores.topk(made.TOP_K).indices.sort(1).values, samples.ids[layer, :9].long().sort(1).values)


# -- whether the checkpoint's routers are those that ran ---------------------------------------------------------------


def test_the_routers_that_ran_are_recognised() -> None:
    model = made.gates(bias=0.5)
    samples = made.samples(model=model)
    assert model.problem(samples) == ""
    other = made.gates(seed=3)
    for changed, says in (
        (Gates(other.weight, model.bias, model.norm), "router 0 are not its gate times its input"),
        (Gates(model.weight, 0 * model.bias, model.norm), "router 0 are not its gate times its input"),
        (Gates(model.weight, model.bias, other.norm), "not the output of an RMSNorm"),
        (Gates(model.weight, model.bias, 0 * model.norm), "has a weight of 0"),
    ):
        assert says in changed.problem(samples)


@pytest.mark.parametrize("wrong", [{"reach": 4}, {"reach": 0}, {"top_k": 13}, {"layers": 0}, {"width": 0}], ids=str)
def test_impossible_sizes(wrong: dict) -> None:
    with pytest.raises(ValueError, match="impossible"):
        Sizes(**{"layers": 4, "experts": 12, "top_k": 3, "width": 8, "reach": 3} | wrong)
