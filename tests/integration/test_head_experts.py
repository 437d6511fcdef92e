"""When the experts of an MTP head have slots of their own, and what a forward of the head is to its execution."""

from __future__ import annotations

import logging
from types import ModuleType, SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode

from vllm_spac.config.config import SpacConfig
from vllm_spac.core import RowKind
from vllm_spac.execution.base import Rows
from vllm_spac.integration.hooks import model_host
from vllm_spac.integration.loading.head_experts import _HeadRuntime, target_of
from vllm_spac.integration.stepping.v1 import draft_loading_v1
from vllm_spac.integration.stepping.v2 import runner_v2

DRAFT = SimpleNamespace(model="/model", runner_type="draft")


def target(knobs: dict | None = None, **changes) -> SimpleNamespace:
    config = SpacConfig.parse({"slots": "25%"} | (knobs or {}))
    vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(method=changes.pop("method", "mtp")),
        model_config=SimpleNamespace(model="/model"),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[changes.pop("graphs", "NONE")]),
    )
    runtime = SimpleNamespace(executions=[SimpleNamespace(holds_all=changes.pop("holds_all", False))])
    fields = {"on_cpu": True, "ranks": SimpleNamespace(size=1), "runtime": runtime} | changes
    return SimpleNamespace(config=config, vllm_config=vllm_config, **fields)


def chosen(of: SimpleNamespace | None, draft: SimpleNamespace = DRAFT) -> bool:
    with model_host.drafting_for(of):
        return target_of(draft) is of and of is not None


def test_a_head_s_experts_have_slots_as_the_model_s() -> None:
    assert chosen(target()) and chosen(target({"slots": 4})) and chosen(target({"slots": "2k"}))
    assert chosen(target(on_cpu=False)), "a GPU, step by step"
    assert not chosen(None), "a draft without a managed model"
    assert target_of(DRAFT) is None, "nothing is loaded"
    assert not chosen(target(method="eagle3")) and not chosen(target(holds_all=True))


@pytest.mark.parametrize(
    ("of", "draft", "why"),
    [
        (target({"slots": "auto"}), DRAFT, "slots=auto"),
        (target(on_cpu=False, graphs="PIECEWISE"), DRAFT, "CUDA graphs (PIECEWISE)"),
        (target(ranks=SimpleNamespace(size=2)), DRAFT, "several ranks"),
        (target({"executor": "processes@workers=2"}), DRAFT, "executor=processes@workers=2"),
        (target({"plane": "pointers", "store": "host"}), DRAFT, "plane=pointers"),
        (target(), SimpleNamespace(model="/other", runner_type="draft"), "another checkpoint"),
    ],
)
def test_otherwise_the_log_says_why_they_have_none(of, draft, why: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.spac"):
        assert not chosen(of, draft)
    [record] = caplog.records
    assert "stay in memory as a whole" in record.getMessage() and why in record.getMessage()


class Recorded:
    """An execution that says what it was asked."""

    shape = SimpleNamespace(layers=("head",), total=4)

    def __init__(self) -> None:
        self.asked: list = []

    def begin_step(self, step) -> None:
        self.asked.append([(r.start, r.stop, r.kind) for r in step.requests])

    def end_forward(self) -> None:
        self.asked.append("end")

    def forward(self, layer, x, weights, ids, kernel, rows):
        self.asked.append(rows)
        if kernel == "fails":
            raise RuntimeError("a disk")
        return x

    def close(self) -> None:
        """Nothing to close."""


def test_each_forward_of_the_head_is_a_step_of_its_execution() -> None:
    execution, model = Recorded(), SimpleNamespace(in_step=True, budget=None)
    runtime = _HeadRuntime([execution], model)
    given = torch.ones(3, 2), torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32)
    assert runtime.forward(execution, 0, *given, None) is given[0]
    assert execution.asked == [[(0, 3, RowKind.DECODE)], Rows(3, as_routed=True), "end"]
    with pytest.raises(RuntimeError):
        runtime.forward(execution, 0, *given, "fails")
    assert execution.asked[-1] == "end", "the next step begins as any other"
    execution.asked.clear()
    model.in_step = False  # profiling and warm-up
    runtime.forward(execution, 0, *given, None)
    assert execution.asked == [Rows(3)]


@pytest.mark.parametrize("hooks", [draft_loading_v1, runner_v2])
def test_both_runners_say_whose_head_they_load(hooks: ModuleType) -> None:
    experts = SimpleNamespace(signals=frozenset())
    layer = torch.nn.Module()
    layer.spac_kernel, layer.spac = None, experts
    drafter = SimpleNamespace(model=torch.nn.Module(), vllm_config=SimpleNamespace(speculative_config=None))
    seen: list = []
    load = hooks._loading(lambda self, target: seen.append(model_host.drafted_for()))
    load(drafter, torch.nn.Sequential(layer))
    assert seen == [experts] and model_host.drafted_for() is None
