"""Several GPUs of ``vllm-spac plan``: layers and slots of each stage, what is refused, and what the command says."""

from __future__ import annotations

import itertools
import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_planning import CONFIG, GIB, MIB, W_E
from typer.testing import CliRunner

from vllm_spac.cli.main import app
from vllm_spac.errors import ConfigError
from vllm_spac.storage.checkpoint.published import find_model
from vllm_spac.tools.planning import planned_routing
from vllm_spac.tools.planning.planned_machine import UTILIZATION, PlannedMachine
from vllm_spac.tools.planning.planned_memory import Load, kv_bytes, slot_bytes, split, staged
from vllm_spac.tools.planning.planned_model import ServedModel
from vllm_spac.tools.planning.planned_routing import LOW
from vllm_spac.tools.planning.planned_serving import make_plan
from vllm_spac.tools.planning.planned_stages import StagedModel, even, stages
from vllm_spac.tools.planning.predict import predict

LAYER = 32 * W_E  # 96 MiB
LOAD, BUFFERS = Load(1024, 1), 590 * MIB


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def model(config: Path) -> ServedModel:
    return ServedModel.of(find_model(str(config)), "pointers")


def several(*rooms: int) -> PlannedMachine:
    """GPUs with so many bytes for vLLM each, beside run-time buffers."""
    cards = [int((room + BUFFERS) / UTILIZATION) + 1 for room in rooms]
    return PlannedMachine.of("rtx4090", None, 64 * GIB).with_cards(cards)


def test_what_stages_hold_adds_up_to_what_one_gpu_would(model: ServedModel) -> None:
    """But for run-time buffers, which each of them needs."""
    machine = several(400 * MIB, 150 * MIB)
    first, last = staged(model, machine, LOAD)
    one = split(model, replace(machine, cards=()), LOAD)
    assert (first.start, first.stop, last.stop) == (0, last.start, 8)
    assert first.weights + last.weights == pytest.approx(one.weights, abs=8)
    assert first.kv + last.kv == pytest.approx(kv_bytes(model, machine, LOAD), abs=2)
    both = split(model, machine, LOAD)
    assert first.working == last.working == both.working / 2
    assert both.room == first.room + last.room
    for stage in (first, last):
        assert stage.room == stage.fast - stage.weights - stage.kv - stage.working
        assert stage.slots == stage.room // W_E and stage.experts == 32 * (stage.stop - stage.start)
        assert stage.experts_bytes == LAYER * (stage.stop - stage.start)


def test_a_gpu_with_more_memory_has_more_layers_and_slots(model: ServedModel) -> None:
    equal = staged(model, several(200 * MIB, 200 * MIB), LOAD)
    assert [stage.stop - stage.start for stage in equal] == [4, 4] and equal[0].slots == equal[1].slots
    first, last = staged(model, several(400 * MIB, 120 * MIB), LOAD)
    assert first.stop - first.start > last.stop - last.start and first.slots > last.slots
    turned = staged(model, several(120 * MIB, 400 * MIB), LOAD)
    assert [stage.slots for stage in turned] == [last.slots, first.slots]


def test_room_that_a_stage_has_no_experts_for_counts_for_nothing(model: ServedModel) -> None:
    machine = several(40 * GIB, 60 * MIB)
    first, last = staged(model, machine, LOAD)
    assert first.room == first.experts_bytes and first.slots == first.experts
    assert split(model, machine, LOAD).room == first.experts_bytes + last.room


@given(
    st.lists(st.sampled_from([0, 50, 100, 130]), min_size=3, max_size=9).filter(
        lambda found: sum(map(bool, found)) > 2
    ),
    st.lists(st.integers(40, 900), min_size=2, max_size=3),
    st.integers(0, 20),
    st.integers(0, 40),
)
def test_no_other_division_of_layers_gives_the_least_stage_more(layers, cards, each, end) -> None:
    """Than by the one percent that vLLM's own division may lack."""
    model, given = StagedModel(tuple(layers), 10, each, end), [(2 * card, card) for card in cards]
    found = stages(model, given, 30, 5)
    least = min(stage.share for stage in found)
    assert [stage.start for stage in found] == [0, *(stage.stop for stage in found[:-1])]
    assert found[-1].stop == len(layers)
    for cuts in itertools.combinations(range(1, len(layers)), len(cards) - 1):
        ends = (0, *cuts, len(layers))
        other = stages(model, given, 30, 5, [b - a for a, b in itertools.pairwise(ends)])
        assert min(stage.share for stage in other) <= least + 0.01


def test_layers_are_counted_as_vllm_divides_them() -> None:
    from vllm.distributed.utils import get_pp_indices

    for layers, count in itertools.product(range(1, 20), range(1, 7)):
        if count <= layers:
            ends = [get_pp_indices(layers, number, count) for number in range(count)]
            assert even(layers, count) == tuple(end - start for start, end in ends)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_routing, "STEPS", 40, raising=False)


def test_requests_are_batches_in_other_stages(model: ServedModel) -> None:
    """Eight requests on two GPUs are two batches of four, each as fast as on one GPU with the memory of both."""
    machine, load = several(400 * MIB, 150 * MIB), Load(1024, 8)
    plan = make_plan(model, machine, load, [LOW])
    assert all(not row.choice.drafts and row.choice.store in ("host", "none") for row in plan.rows)
    one = predict(plan.best.choice, model, machine, Load(1024, 4), LOW)
    assert plan.best.low.tokens_per_second == pytest.approx(2 * one.tokens_per_second)
    assert slot_bytes(model, plan.best.choice.percent) <= sum(stage.room for stage in plan.stages)
    lines = [line for line in plan.memory() if line[0].startswith("stage ")]
    assert [line[0].split(" experts")[0] for line in lines] == [
        f"stage {number}: slots of {stage.slots:,} of {stage.experts:,}" for number, stage in enumerate(plan.stages)
    ]


def plan(config: Path, *options: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, ["plan", str(config), "--machine", "rtx4090", "--context", "1024", *options])
    assert found.exit_code == code, found.output
    return found.output


def test_the_command_has_the_stages(config: Path) -> None:
    unequal = json.loads(plan(config, "--gpus", "1200MiB,950MiB", "--plane", "pointers", "--json"))
    line = shlex.split(unequal["command"])
    counts = [stage["stop"] - stage["start"] for stage in unequal["stages"]]
    assert line[0] == f"VLLM_PP_LAYER_PARTITION={counts[0]},{counts[1]}" and counts[0] > counts[1]
    given = dict(zip(line, line[1:], strict=False))
    assert given["--pipeline-parallel-size"] == "2" and given["--spac-slots"] == "auto"
    assert int(given["--kv-cache-memory-bytes"]) == max(stage["kv"] for stage in unequal["stages"])
    most = unequal["choices"][0]["choice"]["percent"]
    smaller = {
        row["choice"]["percent"]: row["command"]
        for row in unequal["choices"]
        if "--spac-slots auto" not in row["command"]
    }
    assert most not in smaller and all(f"--spac-slots {percent}% " in line for percent, line in smaller.items())
    assert smaller
    equal = json.loads(plan(config, "--fast-memory", "900MiB", "--gpus", "2", "--json"))
    assert equal["command"].startswith("vllm serve") and len(equal["stages"]) == 2
    whole = json.loads(plan(config, "--gpus", "2", "--json"))
    assert "--plugin" not in whole["command"] and "--pipeline-parallel-size 2" in whole["command"]
    assert "stage 1: slots of" in " ".join(plan(config, "--gpus", "1200MiB,950MiB").split())


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ("1", "--gpus names one GPU; leave it out"),
        ("24GiB", "--gpus names one GPU; leave it out"),
        ("24GiB,x", "use a number of GPUs, or the memory of each, as 24GiB,12GiB"),
        ("9", "--gpus has 9 GPUs, and 8 layers have experts; name fewer"),
        (",".join(["1GiB"] * 65), "use at most 64"),
    ],
)
def test_gpus_that_cannot_be_planned_for(config: Path, gpus: str, said: str) -> None:
    assert said in " ".join(plan(config, "--gpus", gpus, code=1).split())


def test_a_machine_without_a_gpu_has_no_several() -> None:
    machine = replace(PlannedMachine.of("rtx4090", None, 64 * GIB), gpu=0)
    with pytest.raises(ConfigError, match="has no GPU; leave it out"):
        machine.with_cards([None, None])
