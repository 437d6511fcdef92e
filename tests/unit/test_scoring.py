"""What the worker keeps while texts are read: hidden states to score, routing to study. Without vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_spac.errors import SpacError
from vllm_spac.methods.moe_spec.calibration import CalibrationRecorder
from vllm_spac.methods.moe_spec.control import BudgetControl, BudgetedLayer
from vllm_spac.methods.moe_spec.settings import RoutingRule
from vllm_spac.tools.evaluation.actions import Calibrating, Evaluation, WindowWeights
from vllm_spac.tools.evaluation.reconstruction import combined
from vllm_spac.tools.evaluation.routing_study import Study, fits
from vllm_spac.tools.evaluation.scoring import Scoring

VOCABULARY, EXPERTS, TOP_K, WIDTH, LAYERS = 11, 8, 2, 4, 2


class Parrot(torch.nn.Module):
    """Says the next token is the one it was given plus one; with an error once it is asked to err."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong = 0.0

    def forward(self, ids):
        states = torch.nn.functional.one_hot((ids + 1) % VOCABULARY, VOCABULARY).float()
        return states + self.wrong * torch.nn.functional.one_hot(ids % 3, VOCABULARY), ["layers for a draft"]

    def compute_logits(self, states):
        return 10 * states


def read(model: Parrot, scoring: Scoring, texts, chunk: int = 99) -> dict:
    scoring.begin(reference=not model.wrong)
    for ids in texts:
        for start in range(0, len(ids), chunk):
            model(torch.tensor(ids[start : start + chunk]))
        scoring.end_text(ids)
    return scoring.end()


def test_the_next_token_is_the_next_token() -> None:
    model = Parrot()
    scoring, texts = Scoring(model), [list(range(5)), [3, 4]]
    found = read(model, scoring, texts)
    assert found["tokens"] == 5 and found["perplexity"] == pytest.approx(1.0, abs=0.01) and found["kl"] == 0
    assert read(model, scoring, [[4, 3, 2]])["perplexity"] > 1000


@pytest.mark.parametrize("chunk", [1, 70, 99])
def test_each_text_is_compared_with_itself(chunk: int) -> None:
    """Texts of more rows than a block, read in any chunks, right ones and a wrong model."""
    model = Parrot()
    scoring, texts = Scoring(model), [[i % 11 for i in range(140)], [5, 6, 7]]
    read(model, scoring, texts, chunk)
    model.wrong = 1.5
    found = read(model, scoring, texts, chunk)
    # The wrong one prefers ids % 3, which is the reference's choice only where (id + 1) % 11 == id % 3.
    rows = [i for text in texts for i in text[:-1]]
    assert found["agreement"] == pytest.approx(sum((i + 1) % 11 == i % 3 for i in rows) / len(rows))
    follows = [(i, j) for text in texts for i, j in zip(text, text[1:], strict=False)]
    assert found["accuracy"] == pytest.approx(sum(i % 3 == j for i, j in follows) / len(follows))
    assert found["kl"] > 1 and found["perplexity_change"] > 1
    assert not model._forward_hooks, "nothing is kept when nobody asks"


def test_chances_are_the_reference_s_of_the_tokens_that_follow() -> None:
    model = Parrot()
    scoring, texts = Scoring(model), [[i % 11 for i in range(140)], [5, 6, 9]]
    read(model, scoring, texts)
    right, wrong = torch.tensor([10.0] + [0.0] * 10).softmax(0)[:2].tolist()
    model.wrong = 1.5
    scoring.begin(reference=False)
    for ids, expected in zip(texts, ([right] * 139, [right, wrong]), strict=True):
        assert scoring.chances(ids) == pytest.approx(expected)
        model(torch.tensor(ids))
        scoring.end_text(ids)
    scoring.end()


def test_rows_of_a_window_are_reached_by_all_before_them() -> None:
    weights = WindowWeights([0.5, 0.25, 0.1, 0.2, 0.4, 0.3], 3)
    assert weights.weights("text", (), 7) == pytest.approx((1, 0.5, 0.125, 1, 0.2, 0.08, 1))
    with pytest.raises(AssertionError, match="one forward"):
        weights.weights("text", (), 5)


def test_rows_that_are_missing_are_noticed() -> None:
    model = Parrot()
    scoring = Scoring(model)
    scoring.begin(reference=True)
    model(torch.arange(3))
    with pytest.raises(SpacError, match="3 rows for a text of 4"):
        scoring.end_text([0, 1, 2, 3])


# --- routing ---------------------------------------------------------------------------------------------------------


def routed(rows: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    hidden, logits = torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, EXPERTS, generator=generator)
    weights, ids = logits.softmax(1).topk(TOP_K)
    return hidden, logits, weights / weights.sum(1, keepdim=True), ids


class Layer:
    """Experts that are matrices."""

    def __init__(self, seed: int) -> None:
        self.matrices = torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))

    def every(self, hidden):
        return torch.einsum("rw,ewv->rev", hidden, self.matrices)

    def spac_forward(self, hidden, weights, ids):
        return combined(self.every(hidden), weights, ids).float()


@pytest.fixture
def study(monkeypatch) -> Study:
    layers = [BudgetedLayer(f"layers.{n}", EXPERTS, TOP_K, RoutingRule()) for n in range(LAYERS)]
    experts = SimpleNamespace(serving=SimpleNamespace(budget=BudgetControl(layers)), vllm_config=None)
    modules = [Layer(seed) for seed in range(LAYERS)]
    found = Study(experts, modules, None, window=3, every=2)
    monkeypatch.setattr(found, "_run", lambda layer, *given: modules[layer].spac_forward(*given))
    for seed, rows in enumerate((10, 7)):
        for layer in range(LAYERS):
            found.route(layer, *routed(rows, 10 * seed + layer))
        found.end_text()
    return found


def test_every_second_window_keeps_its_hidden_states(study: Study) -> None:
    """Windows 0 1 2 of the first text and 3 4 of the second; rows behind a text's last window are in none."""
    assert [sorted(text.hidden) for text in study._texts[1]] == [[0, 6], [3]]
    torch.testing.assert_close(study._texts[1][1].hidden[3], routed(7, 11)[0][3:6])


def test_errors_are_of_the_experts_that_are_left_out(study: Study) -> None:
    found = study.reconstruction(1, [2, EXPERTS], ["router", "oracle"], ["truncation"])
    assert found["points"] == [(r, "truncation", b) for r in ("router", "oracle") for b in (2, EXPERTS)]
    assert len(found["errors"]) == 3 and found["gap"] < 1e-6
    hidden, logits, weights, ids = (each[6:9] for each in routed(10, 1))
    best = logits.softmax(1).sum(0).topk(2).indices
    outputs = Layer(1).every(hidden)
    whole, kept = combined(outputs, weights, ids), combined(outputs, weights * torch.isin(ids, best), ids)
    error = (whole - kept).square().sum() / whole.square().sum()
    assert found["errors"][1][0] == pytest.approx(float(error), rel=1e-5)
    for row in found["errors"]:
        assert row[1] == row[3] == 0.0 and 0 < row[2] <= row[0] + 1e-9


def test_an_output_that_is_not_the_sum_of_its_experts_shows(study: Study) -> None:
    study._run = lambda layer, hidden, weights, ids: study._modules[layer].spac_forward(hidden, weights**2, ids)
    assert study.reconstruction(0, [EXPERTS], ["router"], ["truncation"])["gap"] > 0.1


def test_distinct_experts_against_loops(study: Study) -> None:
    found = {item["size"]: item for item in study.routing([1, 3, 10, 11], [4], "truncation")}
    assert set(found) == {1, 3, 10}, "no text has 11 rows"
    counts = []
    for seed, rows in enumerate((10, 7)):
        for layer in range(LAYERS):
            ids = routed(rows, 10 * seed + layer)[3]
            counts += [len(ids[start : start + 3].unique()) for start in range(0, rows - 2, 3)]
    assert found[3]["natural"] == pytest.approx(sum(counts) / len(counts))
    assert found[1]["natural"] == TOP_K and found[10]["distinct"][0] <= 4
    for item in found.values():
        assert (
            len(item["curve"]) == EXPERTS and item["curve"][-1] == pytest.approx(1) and item["curve"][0] > 1 / EXPERTS
        )


def test_what_fits() -> None:
    layer = BudgetedLayer("l", EXPERTS, TOP_K, RoutingRule())
    own = BudgetedLayer("l", EXPERTS, TOP_K, RoutingRule(custom=True))
    assert fits(layer, "truncation", 1) and fits(layer, "substitution", TOP_K) and not fits(layer, "substitution", 1)
    assert fits(own, "truncation", 4) and not fits(own, "substitution", 4)


# --- calibration -----------------------------------------------------------------------------------------------------


def test_calibrating_records_scores_and_not_logits() -> None:
    rule = RoutingRule(scoring="sigmoid")
    recorder = CalibrationRecorder("", "", ["l"], EXPERTS, TOP_K, 2)
    _, logits, weights, ids = routed(4, 0)
    Calibrating([BudgetedLayer("l", EXPERTS, TOP_K, rule)], recorder).route(0, None, logits, weights, ids)
    recorder.end_text()
    probs = logits.double().sigmoid()
    parts = (
        probs,
        probs * torch.zeros_like(probs).scatter(1, ids, 1.0),
        torch.zeros(4, EXPERTS).scatter(1, ids, weights),
    )
    scores, own, selected = (part.view(2, 2, EXPERTS).sum(1) for part in parts)
    order = torch.tensor([sorted(range(EXPERTS), key=lambda i: (-own[w, i], -scores[w, i])) for w in range(2)])
    for name, whole in (("scores", scores), ("selected", selected)):
        curve = (whole.gather(1, order).cumsum(1) / whole.sum(1, keepdim=True)).mean(0)
        torch.testing.assert_close(recorder.result().curve(name)[0], curve.float())


@pytest.mark.parametrize("action", ["call", "_keep", "__init__", "nothing", "_model"])
def test_only_actions_can_be_called(action: str) -> None:
    experts = SimpleNamespace(serving=SimpleNamespace(runtime=None, budget=None), drafted=None)
    with pytest.raises(SpacError, match="no evaluation"):
        Evaluation(experts, Parrot()).call(action)
