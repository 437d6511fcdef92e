"""Plans for an H100 beside what engines took on one: rows of ``gpu_h100.json`` that decode without drafts.

Of these rows the profile has two figures: vLLM's step is *stock* at batch size 1 of run 4, and the host's work in
layers over slots is about that of runs 8 and 11. Nothing else is fitted. A band is from the most locality that is
assumed to none.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

import pytest

from vllm_spac.decisions.core_rates import CORE_RATES, PLAIN, READ
from vllm_spac.decisions.costs import Costs, Rate, names
from vllm_spac.storage.checkpoint.published import find_model
from vllm_spac.tools.planning import planned_routing
from vllm_spac.tools.planning.planned_machine import PlannedMachine
from vllm_spac.tools.planning.planned_memory import Choice, Load
from vllm_spac.tools.planning.planned_model import ServedModel
from vllm_spac.tools.planning.predict import Prediction, predict

ROOT = Path(__file__).parents[2]
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "gpu_h100.json").read_text(encoding="utf-8"))
TOY = json.loads((ROOT / "benchmarks" / "toy" / "models" / "target" / "config.json").read_text(encoding="utf-8"))
LARGE = {"hidden_size": 2048, "moe_intermediate_size": 768}  # experts of Qwen3-30B-A3B's size
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INT4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"g": {"weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}}},
}
FORMATS = {"FP8": FP8, "INT4": INT4}
BATCHES = (1, 4, 16)


def ms_per_token(run: int, name: str) -> dict[int, float]:
    """Measured, by batch size."""
    (row,) = (
        row for row in MEASURED["serving"] if (row["run"], row["name"], row["speculation"]) == (run, name, "none")
    )
    return {each["batch"]: each["ms_per_token"] for each in row["decode"]}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory):
    """Returns a function: the plan's milliseconds per token of each request, by routing."""
    machine = PlannedMachine.of("h100")

    @cache
    def model(execution: str, quantised: str) -> ServedModel:
        path = tmp_path_factory.mktemp("model") / "config.json"
        path.write_text(json.dumps(TOY | LARGE | ({"quantization_config": FORMATS[quantised]} if quantised else {})))
        return ServedModel.of(find_model(str(path)), execution, capability=machine.capability)

    @cache
    def of(execution: str, batch: int, percent: int, quantised: str = "", rate: Rate | None = None, cpu: bool = False):
        chosen = machine
        if rate is not None:
            chosen = replace(machine, costs=machine.costs.model_copy(update={"cpu": rate}))
        choice = Choice(percent, "none" if percent == 100 else "host", cpu=cpu)
        found: dict[str, tuple[float, Prediction]] = {}
        for routing in planned_routing.assumed():
            one = predict(choice, model(execution, quantised), chosen, Load(1024, batch), routing)
            found[routing.name] = 1e3 * batch / one.tokens_per_second, one
        return found

    return of


@pytest.mark.parametrize(
    ("execution", "percent", "run", "name"),
    [
        ("pointers", 25, 4, "ptr"),
        ("pointers", 25, 5, "ptr"),
        ("pointers", 25, 8, "ptr"),
        ("pointers", 25, 11, "ptr"),
        ("pointers", 25, 12, "ptr"),
        ("pointers", 50, 2, "ptr 50%"),
        ("slots", 25, 8, "slots"),
        ("slots", 25, 11, "slots"),
    ],
)
def test_a_plan_s_band_has_what_an_engine_took(planned, execution: str, percent: int, run: int, name: str) -> None:
    for batch, measured in ms_per_token(run, name).items():
        band = planned(execution, batch, percent)
        assert band["high"][0] <= measured <= band["even"][0], (batch, measured, band)


@pytest.mark.parametrize("batch", BATCHES)
def test_fp8_reads_half_as_much(planned, batch: int) -> None:
    band, measured = planned("pointers", batch, 25, "FP8"), ms_per_token(11, "ptr fp8")[batch]
    assert band["high"][0] <= measured <= band["even"][0], (measured, band)


def test_int4_is_outside_where_the_host_is_the_limit(planned) -> None:
    """At batch size 1 a step over resident INT4 experts took 0.45 ms more than over bf16 ones: no profile says so."""
    measured, resident = ms_per_token(5, "ptr int4"), ms_per_token(5, "ptr resident int4")[1]
    for batch in (4, 16):
        band = planned("pointers", batch, 25, "INT4")
        assert band["high"][0] <= measured[batch] <= band["even"][0], (measured, band)
    band = planned("pointers", 1, 25, "INT4")
    assert band["low"][1].limit == "host" and band["even"][0] < resident < measured[1] < 1.4 * band["even"][0]


def test_without_misses_the_host_is_the_limit(planned) -> None:
    """Of a model of six layers: what an H100 computes of them takes less than vLLM's own step."""
    stock, ours = ms_per_token(4, "stock"), ms_per_token(4, "ptr resident")
    for batch in BATCHES:
        seconds, found = planned("slots", batch, 100)["even"]
        assert found.limit == "host" and seconds == pytest.approx(stock[batch], rel=0.2)
    for batch in (1, 16):  # at 4 one engine took half as long again as at 1 and at 16
        assert planned("pointers", batch, 100)["even"][0] == pytest.approx(ours[batch], rel=0.2)


def test_a_cpu_without_a_share_costs_what_hides_the_host(planned) -> None:
    """By ``auto``, the CPU of that machine got 17 of some 4,000 experts at batch size 1: it took about 1.4 ms of each.

    Host and GPU took turns then. What the rows show is the cost of that; no row shows a gain.
    """
    slow = Rate(bytes_per_second=6.7e9)
    for batch, measured in ms_per_token(11, "ptr cpu").items():
        band = planned("pointers", batch, 25, rate=slow, cpu=True)
        assert band["high"][0] <= measured <= band["even"][0], (batch, measured, band)
    alone, beside = planned("pointers", 1, 25)["low"][0], planned("pointers", 1, 25, rate=slow, cpu=True)["low"][0]
    rows = ms_per_token(11, "ptr cpu")[1], ms_per_token(11, "ptr")[1]
    assert beside - alone == pytest.approx(rows[0] - rows[1], rel=0.2)


def test_the_machine_of_run_4_launched_faster_than_its_profile_says(planned) -> None:
    """The host's work in layers is that of runs 8 and 11. In run 4 it took less, and prompts repeated more."""
    for batch, measured in ms_per_token(4, "slots").items():
        fastest = planned("slots", batch, 25)["high"][0]
        assert 0.75 * fastest <= measured < fastest


@pytest.mark.parametrize("name", names())
def test_each_profile_has_the_figures_that_it_names(name: str) -> None:
    """Of the host of an H100, whatever the card; the sentences beside them say so."""
    compiled = json.loads((ROOT / "benchmarks" / "results" / "kernels_compiled.json").read_text(encoding="utf-8"))
    stock, resident = ms_per_token(4, "stock"), ms_per_token(4, "ptr resident")
    profile = Costs.read(name)
    assumed, said = profile.attained, " ".join(profile.provenance.assumes)
    assert assumed is not None
    assert assumed.vllm.step == pytest.approx(1e-3 * stock[1], rel=0.01)
    assert assumed.vllm.layer == pytest.approx(compiled["h100"]["seconds_without_bytes"], rel=0.01)
    more = median(resident[batch] - stock[batch] for batch in BATCHES)
    assert assumed.host_work.step == pytest.approx(1e-3 * more, rel=0.01)
    for part in ("gpu_h100.json", "run 4, stock", "run 4, ptr resident over stock", "attained.memory: 80 %"):
        assert part in said
    assert ("launches are the host's and not the card's" in said) == (name != "h100")
    costs = profile.as_attained()
    assert costs.memory == assumed.memory * profile.memory < profile.memory == profile.cpu.bytes_per_second
    assert f"attained.cores: {assumed.cores}," in said
    assert costs.cpu.bytes_per_second == min(READ * costs.memory, assumed.cores * CORE_RATES[PLAIN].one)
    assert (costs.vllm, costs.host_work) == (assumed.vllm, assumed.host_work)
