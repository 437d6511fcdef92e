"""A shadow as draft model: what it names, what is kept of its routers, and where it is refused."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from vllm_spac.config.config import SpacConfig
from vllm_spac.core import MoEShape
from vllm_spac.decisions.guard.draft_states import DraftStates
from vllm_spac.decisions.predictors.base import START, PredictorInputs, Signal
from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.integration.hooks import drafts
from vllm_spac.integration.loading import ahead
from vllm_spac.integration.stepping.draft_routing import DraftGates, DraftRouting
from vllm_spac.integration.stepping.v1 import draft_loading_v1, runner_v1
from vllm_spac.methods.od_moe.shadow_predictor import Shadow

EXPERTS, TOP_K = 5, 2
NAMES = ("model.layers.1.mlp.experts", "model.layers.2.mlp.experts")
SHAPE = MoEShape(NAMES, EXPERTS, TOP_K, {})
INF = float("inf")

# -- the predictor -----------------------------------------------------------------------------------------------------


def test_a_row_names_what_the_draft_model_chose_in_its_order_and_nothing_if_it_was_not_read() -> None:
    ids = torch.tensor([[[3, 1], [0, 4]], [[-1, -1], [-1, -1]]])
    [guess] = Shadow(num_experts=2 * EXPERTS).guesses(PredictorInputs(START, draft_ids=ids))
    assert guess.first == 0
    assert guess.scores.tolist() == [[-INF, 1, -INF, 2, -INF, 2, -INF, -INF, -INF, 1], [-INF] * 10]
    assert not list(Shadow(num_experts=2 * EXPERTS).guesses(PredictorInputs(0, draft_ids=ids))), "of a layer that runs"


# -- what is kept of a draft model's routers ---------------------------------------------------------------------------


class Router:
    """Chooses the experts that its input holds, with the weights that it holds."""

    def _compute_routing(self, hidden: Tensor, logits: Tensor, indices_type: object, **more: object):
        return logits, hidden.int()


class Layer(torch.nn.Module):
    def __init__(self, name: str, experts: int = EXPERTS, top_k: int = TOP_K, monolithic: bool = False) -> None:
        super().__init__()
        self.router, self.is_monolithic = Router(), monolithic
        self.routed_experts = torch.nn.Module()
        self.routed_experts.layer_name = f"draft_model.{name}"
        self.routed_experts.moe_config = SimpleNamespace(num_experts=experts)
        self.routed_experts.top_k = top_k


class Drafter:
    """Its first forward reads three rows and drafts from rows 2 and 0; the others read a row per request."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def set_inputs_first_pass(self) -> tuple[int, Tensor, None]:
        return 3, torch.tensor([2, 0], dtype=torch.int32), None

    def forward(self, ids: list[list[int]], weights: list[list[float]], layers: slice = slice(None)) -> None:
        """Each layer chooses ``ids``, the second one those after them."""
        for number, layer in enumerate(list(self.model)[layers]):
            chosen = torch.tensor(ids) + number
            found = layer.router._compute_routing(chosen, torch.tensor(weights), None)
            assert found[1].tolist() == chosen.tolist(), "the draft model's choice is as before"
            found[1].fill_(-7)  # vLLM may reuse it


def loaded() -> tuple[DraftRouting, Drafter]:
    model = torch.nn.Sequential(*map(Layer, NAMES))
    return DraftRouting.hooked(model, SHAPE), Drafter(model)


def test_the_rows_that_are_drafted_from_with_the_heaviest_expert_first() -> None:
    routing, drafter = loaded()
    with draft_loading_v1.reading(routing, drafter):  # type: ignore[arg-type]
        drafter.set_inputs_first_pass()
        drafter.forward([[0, 1], [1, 2], [2, 3]], [[0.9, 0.1], [0.5, 0.5], [0.1, 0.9]])
        assert routing.take(2).tolist() == [[[3, 2], [4, 3]], [[0, 1], [1, 2]]]
        drafter.forward([[1, 0], [3, 2], [0, 0]], [[0.5, 0.5], [0.1, 0.9], [1.0, 0.0]])  # the last row is padding
        assert routing.take(2).tolist() == [[[1, 0], [2, 1]], [[2, 3], [3, 4]]]
    assert "set_inputs_first_pass" not in vars(drafter), "the drafter is as before"


def test_forwards_outside_of_drafting_are_not_kept() -> None:
    """Such as those that warm up, or of a draft length of 0."""
    routing, drafter = loaded()
    with draft_loading_v1.reading(routing, drafter):  # type: ignore[arg-type]
        drafter.set_inputs_first_pass()
        drafter.forward([[0, 1], [1, 2], [2, 3]], [[0.9, 0.1]] * 3)
    with draft_loading_v1.reading(routing, drafter):  # type: ignore[arg-type]
        assert routing.take(1).tolist() == [[[-1, -1], [-1, -1]]], "what was not taken is of an earlier proposal"
    drafter.forward([[0, 1]], [[0.9, 0.1]])
    with draft_loading_v1.reading(routing, drafter):  # type: ignore[arg-type]
        assert routing.take(1).tolist() == [[[-1, -1], [-1, -1]]]


def test_a_layer_that_was_not_observed_is_logged_once_and_names_nothing(caplog: pytest.LogCaptureFixture) -> None:
    routing, drafter = loaded()
    with draft_loading_v1.reading(routing, drafter), caplog.at_level(logging.ERROR, "vllm.spac"):  # type: ignore[arg-type]
        for _ in range(2):
            drafter.forward([[0, 1]], [[0.9, 0.1]], slice(1))
            assert routing.take(1).tolist() == [[[-1, -1], [-1, -1]]]
        drafter.forward([[0, 1]], [[0.9, 0.1]])
        assert routing.take(1).tolist() == [[[0, 1], [1, 2]]]
    [record] = caplog.records
    assert "1 of the draft model's 2 MoE layers were observed" in record.getMessage()


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([Layer(NAMES[0])], "of this model are 1, 2, those of the draft model 1; use a copy"),
        ([], "those of the draft model none; use a copy"),
        ([Layer("model.layers.0.mlp.experts"), Layer(NAMES[0])], "are 1, 2, those of the draft model 0, 1; use a copy"),
        ([Layer(NAMES[0]), Layer(NAMES[1], experts=6)], "has 5 experts, top-2, and one of the draft model 6, top-2"),
        ([Layer(NAMES[0], top_k=1), Layer(NAMES[1])], "one of the draft model 5, top-1; use a copy"),
        ([Layer(NAMES[0]), Layer(NAMES[1], monolithic=True)], "kernel that also routes.*draft model in bf16, or"),
    ],
)
def test_a_draft_model_of_other_layers_or_experts_is_refused(layers: list[Layer], says: str) -> None:
    with pytest.raises(UnsupportedError, match=f"prefetch=shadow.*{says}"):
        DraftRouting.hooked(torch.nn.Sequential(*layers), SHAPE)


@pytest.mark.parametrize("looks", [True, False])
def test_a_draft_model_is_hooked_when_it_is_loaded_and_looked_at(looks: bool, monkeypatch) -> None:
    target = torch.nn.Sequential(torch.nn.Module())
    runtime = SimpleNamespace(executions=[SimpleNamespace(shape=SHAPE)])
    seen = frozenset({Signal.DRAFT_ROUTING} if looks else ())
    experts = SimpleNamespace(signals=seen, draft_routing=None, runtime=runtime)
    target[0].spac_kernel, target[0].spac = None, experts
    config = SimpleNamespace(speculative_config=None, model_config=None)
    drafter, router = SimpleNamespace(model=None, vllm_config=config), Router._compute_routing

    def load(self, target_model: torch.nn.Module) -> None:
        self.model = torch.nn.Sequential(*map(Layer, NAMES))

    draft_loading_v1._loading(load)(drafter, target_model=target)
    assert (experts.draft_routing is not None) == looks
    hooked = [layer.router._compute_routing.__func__ is not router for layer in drafter.model] if not looks else []
    assert not any(hooked)
    stock = torch.nn.Sequential(torch.nn.Module())
    draft_loading_v1._loading(load)(drafter, target_model=stock)  # of an engine without the plugin


def test_a_runner_keeps_what_its_draft_model_chose_for_the_step() -> None:
    routing, drafter = loaded()
    told: list[list] = []
    runtime = SimpleNamespace(
        observes_drafts=True,
        drafts=SimpleNamespace(chooser=None),
        budget=SimpleNamespace(weighs=False),
        observe_draft=lambda read: told.append(read[:, 1].tolist()),
    )
    states = DraftStates(2, TOP_K)
    experts = SimpleNamespace(runtime=runtime, serving=SimpleNamespace(draft_states=states), draft_routing=routing)
    drafter.input_ids = torch.zeros(4, dtype=torch.int32)
    drafter.model.compute_logits = lambda hidden: hidden
    batch = SimpleNamespace(req_ids=["a", "b"])
    runner = SimpleNamespace(_spac_experts=experts, drafter=drafter, input_batch=batch)

    def propose(runner: object, plan: object, *rest: object) -> Tensor:
        drafter.set_inputs_first_pass()
        drafter.forward([[0, 1], [1, 2], [2, 3]], [[0.9, 0.1]] * 3)
        drafter.model.compute_logits(torch.zeros(2, 1))
        drafter.input_ids[:2] = torch.tensor([7, 8])
        drafter.forward([[3, 0], [0, 1]], [[0.9, 0.1]] * 2)
        drafter.model.compute_logits(torch.zeros(2, 1))
        return torch.tensor([[7, 9], [8, 9]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_v1, "trees_of", lambda runner: None)
        runner_v1._observed(propose, runner, None, torch.tensor([[5, -1], [4, 6]]))
    assert told == [[[3, 4], [1, 2]], [[3, 4], [1, 2], [4, 1], [1, 2]]]
    rows = [("b", slice(0, 3), 2), ("a", slice(3, 5), 1)]
    found = states.take(rows, torch.tensor([6, 8, 9, 5, 0]))
    assert found[:, 0].tolist() == [[0, 1], [0, 1], [-1, -1], [2, 3], [-1, -1]] and found.dtype == torch.int64
    assert states.take(rows, torch.zeros(5)).tolist() == [[[-1, -1]] * 2] * 5, "once: they are of one step"


# -- where it is refused -----------------------------------------------------------------------------------------------


def test_as_many_experts_are_kept_as_the_predictor_needs() -> None:
    def kept(prefetch: str, shapes: list[MoEShape]) -> DraftStates | None:
        return ahead.draft_states(SpacConfig(prefetch=prefetch), shapes)

    row = [("a", slice(0, 1), 0)], torch.tensor([1])
    for name in ("off", "gate", "utility"):
        assert kept(name, [SHAPE, SHAPE]) is None
    assert kept("shadow@depth=3", [SHAPE]).take(*row).tolist() == [[[-1, -1], [-1, -1]]]
    assert kept("draft_gate@k=3", [SHAPE]).take(*row).shape == (1, 2, 3)
    assert kept("draft_gate@k=5@cutoff=2", [SHAPE]).take(*row).shape == (1, 2, 5)
    with pytest.raises(ConfigError, match=r"prefetch=shadow \(--spac-prefetch\) needs MoE layers of one shape.*has 2"):
        kept("shadow", [SHAPE, SHAPE])
    for name, problem in (
        ("shadow@k=3", r"k of prefetch=shadow@k=3.*more than the 2 experts.*use at most --spac-prefetch shadow@k=2"),
        ("draft_gate@k=6@cutoff=1", "k of .*more than the 5 experts.*draft_gate@k=5@cutoff=1"),
        ("draft_gate@cutoff=3", "cutoff of .*more than the 2 MoE layers.*draft_gate@cutoff=2"),
    ):
        with pytest.raises(ConfigError, match=problem):
            kept(name, [SHAPE])


# -- the model's routers on what a draft model's layers compute --------------------------------------------------------


class Mlp(torch.nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * hidden


def dense(layers: int) -> torch.nn.Module:
    """A draft model, of whose layers the l-th adds l + 1 in place of attention."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList()
    for _ in range(layers):
        block = torch.nn.Module()
        block.mlp = Mlp()
        model.layers.append(block)
    return model


@pytest.mark.parametrize(("drafts", "stand"), [(3, [1, 2]), (2, [0, 1]), (1, [0, 0]), (6, [2, 4])])
def test_the_gates_of_the_model_choose_by_what_the_mlp_of_the_draft_layer_reads(drafts: int, stand: list[int]) -> None:
    """MoE layers 1 and 2 of three; with another depth, the draft layer at the same part of its model stands for one."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(2, EXPERTS, 4, generator=generator), torch.randn(2, EXPERTS, generator=generator)
    model = dense(drafts)
    gates = DraftGates(model, weight, bias, ([1, 2], 3), 3, rows=8)
    drafter = Drafter(model)
    with draft_loading_v1.reading(gates, drafter):  # type: ignore[arg-type]
        drafter.set_inputs_first_pass()
        for rows in ([2, 0], [0, 1]):  # of the first forward, those that it drafts from; then the first ones
            hidden = torch.randn(drafts, 3, 4, generator=generator)
            for layer, block in enumerate(model.layers):
                assert torch.equal(block.mlp(hidden[layer]), 2 * hidden[layer])
            scores = torch.stack([hidden[n][rows] @ weight[i].T + bias[i] for i, n in enumerate(stand)], 1)
            assert gates.take(2).tolist() == scores.topk(3).indices.tolist()
    assert not any("spac" in name for name in model.state_dict()), "no weights of the draft model"


def test_a_draft_model_without_layers_of_its_own_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="prefetch=draft_gate.*no layers whose MLP is .*--spac-prefetch gate"):
        DraftGates(torch.nn.Linear(1, 1), torch.zeros(2, EXPERTS, 4), torch.zeros(2, EXPERTS), ([1, 2], 3), 3, rows=8)


def model(layers: int = 2, experts: int = 16, top_k: int = 4) -> SimpleNamespace:
    return SimpleNamespace(
        get_total_num_hidden_layers=lambda: layers,
        get_num_experts=lambda: experts,
        get_num_experts_per_tok=lambda: top_k,
    )


def engine(draft: SimpleNamespace | None = None, **speculation: object) -> SimpleNamespace:
    known = {"method": "draft_model", "parallel_drafting": False, "draft_model_config": draft or model()}
    known |= {"use_local_argmax_reduction": False, "use_heterogeneous_vocab": False}
    return SimpleNamespace(model_config=model(), speculative_config=SimpleNamespace(**known | speculation))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (engine(), None),
        (SimpleNamespace(speculative_config=None), "no draft model; add --speculative-config.*with llm-compressor"),
        (engine(method="eagle3"), "eagle3 drafts without experts like this model's; use a copy.*with llm-compressor"),
        (engine(method="ngram"), "ngram drafts without experts.*as draft model"),
        (engine(parallel_drafting=True), r"parallel drafting \(draft_model\) has no routing"),
        (engine(use_heterogeneous_vocab=True), "use_heterogeneous_vocab.*drop use_het"),
        (engine(model(layers=3)), "this model has 2 layers and 16 experts.*the draft model 3 layers.*use a copy"),
        (engine(model(experts=8)), "the draft model 2 layers and 8 experts per layer, top-4; use a copy"),
        (engine(model(top_k=2)), "the draft model 2 layers and 16 experts per layer, top-2; use a copy"),
        (engine(model(experts=0)), "the draft model 2 layers and no experts; use a copy"),
    ],
    ids=lambda value: str(value) if isinstance(value, str | None) else "given",
)
def test_which_draft_models_may_be_shadows(given: SimpleNamespace, says: str | None) -> None:
    reason = drafts.unshadowed(given)  # type: ignore[arg-type]
    assert reason is None if says is None else re.search(says, str(reason)), reason
