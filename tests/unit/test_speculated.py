"""Speculated execution: which experts run, with which weights, by which prediction, and what is counted."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.decisions.predictors.base import Guess, Predictor, PredictorInputs, Signal
from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.methods.moe_spec.control import BudgetControl
from vllm_spac.methods.moe_spec.replay import BudgetCounters
from vllm_spac.methods.moe_spec.settings import BudgetedLayer, BudgetSettings, RoutingRule
from vllm_spac.methods.speculating_experts.speculated import SpeculatedExecution

LAYERS, EXPERTS, TOP_K, WIDTH, ROWS = 3, 12, 2, 5, 7  # the last row is padding
STEP = Step(
    (RequestRows(0, 2, RowKind.DECODE), RequestRows(2, 4, RowKind.PREFILL), RequestRows(4, 6, RowKind.VERIFY, 1))
)
DECODING = [0, 1, 4, 5]
RULES = [RoutingRule(), RoutingRule(renormalize=False, scale=2.5), RoutingRule(groups=3, top_groups=2)]
SIGMOID = RoutingRule("sigmoid", bias=torch.linspace(-0.3, 0.3, EXPERTS))


class Told(Predictor):
    """Says in each layer what ``scores`` [layers, rows, N] has for the next one; keeps what it has seen."""

    needs = frozenset({Signal.ROUTER_INPUT})
    reach = 1

    def __init__(self, scores: torch.Tensor, knows: tuple[int, ...] = (1, 2)) -> None:
        self.told, self.knows, self.seen = scores, knows, []

    def guesses(self, seen: PredictorInputs) -> Iterable[Guess]:
        self.seen.append(seen)
        if seen.layer + 1 in self.knows:
            yield Guess((seen.layer + 1) * EXPERTS, self.told[seen.layer + 1, : len(seen.hidden)])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def routed(rule: RoutingRule, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a router of the checkpoint chooses, written down a second time."""
    probs = logits.sigmoid() if rule.scoring == "sigmoid" else logits.softmax(-1)
    chosen_by = probs if rule.bias is None else probs + rule.bias
    if rule.groups is not None:
        parts = chosen_by.view(len(logits), rule.groups, -1)
        best = parts.amax(2).topk(rule.top_groups).indices
        allowed = torch.zeros(len(logits), rule.groups).scatter(1, best, 1).bool()
        chosen_by = parts.masked_fill(~allowed[:, :, None], -9).flatten(1)
    ids = chosen_by.topk(TOP_K).indices
    weights = probs.gather(1, ids)
    if rule.renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    return weights * rule.scale, ids.int()


def control(predictor: Predictor | None, rule: RoutingRule = RULES[0], resident=None, **more) -> BudgetControl:
    layers = [BudgetedLayer(f"layer.{number}", EXPERTS, TOP_K, rule, resident) for number in range(LAYERS)]
    counters = BudgetCounters()
    ahead = None if predictor is None else SpeculatedExecution(layers, predictor, counters)
    made = BudgetControl(layers, speculation=ahead, counters=counters)
    made.update(BudgetSettings(**more))
    return made


def run(made: BudgetControl, rule: RoutingRule, logits: torch.Tensor, step: Step = STEP) -> list[tuple]:
    """Weights and ids of all layers of a step, natural and as they are run."""
    found = []
    for layer in range(LAYERS):
        natural = routed(rule, logits[layer])
        hidden = random(ROWS, WIDTH, seed=layer)
        kept = [each.clone() for each in natural]
        found.append((natural, made.apply(layer, logits[layer], *natural, step, hidden=hidden)))
        assert all(map(torch.equal, natural, kept)), "the router's own are not written to"
    return found


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("mode", ["predicted", "restricted"])
@given(seed=st.integers(0, 1000))
@settings(max_examples=examples(20), deadline=None)
def test_who_predicts_what_routers_choose_changes_nothing(rule: RoutingRule, mode: str, seed: int) -> None:
    """The oracle's recall is 1: the output is the exact one, to the bit where the router's weights are used."""
    logits = 2 * random(LAYERS, ROWS, EXPERTS, seed=seed)
    made = control(Told(logits), rule, speculate=mode)
    for (weights, ids), (run_weights, run_ids) in run(made, rule, logits):
        assert torch.equal(ids.sort(1).values, run_ids.sort(1).values)
        if mode == "restricted":
            assert torch.equal(ids, run_ids) and torch.equal(weights, run_weights)
        else:
            torch.testing.assert_close(run_weights, weights)
    counted = made.counters.snapshot()
    assert counted["dropped_weight"] == 0 and counted["rows"] == 2 * len(DECODING)


@pytest.mark.parametrize("rule", RULES, ids=str)
@given(seed=st.integers(0, 1000))
@settings(max_examples=examples(20), deadline=None)
def test_predicted_rows_run_what_the_predicted_logits_choose(rule: RoutingRule, seed: int) -> None:
    """With their weights, whatever the router says; other rows and the first layer keep the router's."""
    logits, scores = 2 * random(LAYERS, ROWS, EXPERTS, seed=seed), 2 * random(LAYERS, ROWS, EXPERTS, seed=seed + 5000)
    others = [row for row in range(ROWS) if row not in DECODING]
    for layer, (natural, (weights, ids)) in enumerate(
        run(control(Told(scores), rule, speculate="predicted"), rule, logits)
    ):
        expected = natural if layer == 0 else routed(rule, scores[layer])
        assert torch.equal(ids[DECODING], expected[1][DECODING])
        torch.testing.assert_close(weights[DECODING], expected[0][DECODING])
        assert torch.equal(ids[others], natural[1][others]) and torch.equal(weights[others], natural[0][others])
        assert ids.dtype == torch.int32


@pytest.mark.parametrize("rule", [*RULES, SIGMOID], ids=str)
@given(seed=st.integers(0, 1000), held=st.sets(st.integers(0, EXPERTS - 1)))
@settings(max_examples=examples(20), deadline=None)
def test_restricted_rows_choose_among_what_is_predicted_or_held(rule: RoutingRule, seed: int, held: set[int]) -> None:
    """A twin, row by row: the router's scores, all experts but the admitted ones left out."""
    logits, scores = 2 * random(LAYERS, ROWS, EXPERTS, seed=seed), random(LAYERS, ROWS, EXPERTS, seed=seed + 5000)
    resident = torch.tensor([expert in held for expert in range(EXPERTS)])
    made = control(Told(scores), rule, lambda: resident, speculate="restricted")
    for layer, (natural, (weights, ids)) in enumerate(run(made, rule, logits)):
        for row in DECODING if layer else ():
            admitted = {*scores[layer, row].topk(2 * TOP_K).indices.tolist(), *held}
            assert set(ids[row].tolist()) <= admitted
            if set(natural[1][row].tolist()) <= admitted:
                assert torch.equal(ids[row], natural[1][row]) and torch.equal(weights[row], natural[0][row])
            if rule.groups is None:
                probs = rule.probs(logits[layer, row])
                worth = probs if rule.bias is None else probs + rule.bias
                best = sorted(admitted, key=lambda expert: float(worth[expert]), reverse=True)[:TOP_K]
                assert set(ids[row].tolist()) == set(best)
                kept = probs[ids[row].long()]
                torch.testing.assert_close(weights[row], rule.scale * (kept / kept.sum() if rule.renormalize else kept))


def test_what_is_dropped_is_counted() -> None:
    logits, scores = 2 * random(LAYERS, ROWS, EXPERTS), random(LAYERS, ROWS, EXPERTS, seed=1)
    made = control(Told(scores), speculate="predicted")
    lost = 0.0
    for (weights, ids), (_, run_ids) in run(made, RULES[0], logits)[1:]:
        for row in DECODING:
            gone = [w for w, expert in zip(weights[row], ids[row], strict=True) if expert not in run_ids[row]]
            lost += float(sum(gone) / weights[row].sum())
    counted = made.counters.snapshot()
    assert counted["dropped_weight"] == pytest.approx(lost) and lost > 0
    assert (counted["rows"], counted["shortlists"]) == (2 * len(DECODING), 2)


def test_a_layer_that_nothing_is_known_about_runs_its_router_s_choice() -> None:
    logits = random(LAYERS, ROWS, EXPERTS)
    made = control(Told(-logits, knows=(2,)), speculate="predicted")
    found = run(made, RULES[0], logits)
    assert [torch.equal(natural[1], chosen[1]) for natural, chosen in found] == [True, True, False]


def test_prompts_are_not_speculated_unless_asked_for() -> None:
    logits = random(LAYERS, ROWS, EXPERTS)
    prompt = Step((RequestRows(0, 6, RowKind.PREFILL),), torch.arange(6))
    predictor = Told(-logits)
    made = control(predictor, speculate="predicted")
    assert all(torch.equal(natural[1], chosen[1]) for natural, chosen in run(made, RULES[0], logits, prompt))
    assert not predictor.seen, "nor predicted"
    made.update(BudgetSettings(speculate="restricted", when="all", window=4))
    found = run(made, RULES[0], logits, prompt)
    assert not torch.equal(found[1][0][1][:6], found[1][1][1][:6])
    assert made.counters.snapshot()["shortlists"] == 4, "two windows in each of two layers"


def test_what_is_in_fast_memory_does_not_count_while_texts_are_evaluated() -> None:
    logits = random(LAYERS, ROWS, EXPERTS)
    made = control(Told(-logits), resident=lambda: torch.ones(EXPERTS, dtype=torch.bool), speculate="restricted")
    assert all(torch.equal(natural[1], chosen[1]) for natural, chosen in run(made, RULES[0], logits))
    made.update(BudgetSettings(speculate="restricted", when="all"))
    assert not all(torch.equal(natural[1], chosen[1]) for natural, chosen in run(made, RULES[0], logits))


# -- settings ----------------------------------------------------------------------------------------------------------


def test_it_is_lossy_and_says_so() -> None:
    made = control(Told(random(LAYERS, ROWS, EXPERTS)), speculate="restricted")
    assert made.active and made.settings.describe() == "lossy (speculated execution, restricted, decoding rows)"
    assert BudgetSettings(speculate="predicted", when="all").describe().endswith("predicted, all rows)")
    made.update(BudgetSettings())
    assert not made.active and made.settings.describe() == "exact"


def test_what_cannot_be_speculated_is_refused_and_nothing_changes() -> None:
    predictor = Told(random(LAYERS, ROWS, EXPERTS))
    for made, mode, error, says in (
        (control(None), "restricted", ConfigError, "a predictor that looks one layer ahead; add --spac-prefetch gate"),
        (
            control(predictor, SIGMOID),
            "predicted",
            UnsupportedError,
            "sigmoid routing.*use --spac-speculate restricted",
        ),
        (control(predictor, RoutingRule(custom=True)), "restricted", UnsupportedError, "function of its own"),
    ):
        with pytest.raises(error, match=rf"speculate={mode} \(--spac-speculate\).*{says}"):
            made.update(BudgetSettings(speculate=mode))
        assert not made.active
    with pytest.raises(ConfigError, match="speculate and a budget both choose"):
        BudgetSettings.parse({"speculate": "predicted", "budget": 8})
