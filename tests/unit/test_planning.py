"""``vllm-spac plan``: memory adds up, predictions are the simulator's, the best is picked, vLLM takes the command."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_configs import qwen3_moe
from typer.testing import CliRunner
from vllm_spac.kernels.formats import Format
from vllm_spac.kernels.grouped_gemm import tile_for

from benchmarks.replay.routing_locality import PUBLISHED, Locality
from vllm_spac.cli.main import app
from vllm_spac.config.config import SpacConfig
from vllm_spac.decisions.core_rates import CORE_RATES
from vllm_spac.decisions.costs import Capacity, Costs, HostWork, Rate, VllmStep
from vllm_spac.decisions.prompt_chunks import ATTAINED
from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.recording.trace_file import TraceFacts
from vllm_spac.storage.checkpoint import published, quantisation
from vllm_spac.storage.checkpoint.published import find_model
from vllm_spac.system.host_memory import SYSTEM_RESERVE, gib
from vllm_spac.system.machine import Machine
from vllm_spac.tools.planning import planned_machine as machines
from vllm_spac.tools.planning import planned_memory, planned_routing
from vllm_spac.tools.planning import planned_serving as plans
from vllm_spac.tools.planning.architecture import Architecture
from vllm_spac.tools.planning.planned_machine import HIT_SHARE, USABLE, UTILIZATION, PlannedMachine
from vllm_spac.tools.planning.planned_memory import Choice, Load, command, kv_bytes, largest_slots, slot_bytes, split
from vllm_spac.tools.planning.planned_model import ServedModel, executions
from vllm_spac.tools.planning.planned_serving import make_plan
from vllm_spac.tools.planning.predict import PROMPT, first_token, predict
from vllm_spac.tools.traces.simulation import simulate
from vllm_spac.tools.traces.synthetic import synthetic_trace

GIB, MIB = 1 << 30, 1 << 20
CONFIG = qwen3_moe(
    hidden_size=1024,
    intermediate_size=2048,
    moe_intermediate_size=512,
    num_attention_heads=8,
    head_dim=128,
    num_hidden_layers=8,
    num_experts=32,
    max_position_embeddings=8192,
    vocab_size=1000,
)
W_E = 3 * 1024 * 512 * 2
ALL = 8 * 32 * W_E  # 0.75 GiB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return ServedModel.of(find_model(str(folder)))


def machine(fast: float, host: float, *, gpu: bool = True, disk_free: int | None = None, name: str = "rtx4090"):
    """A machine with ``fast`` usable bytes of GPU memory and ``host`` bytes for experts."""
    costs = Costs.read(name)
    if not gpu:
        origin = costs.provenance.model_copy(update={"store": "disk"})
        update = {"load": costs.disk, "host": costs.load, "disk": None, "provenance": origin}
        return PlannedMachine("cpu", costs.model_copy(update=update), 0, int(fast / UTILIZATION), disk_free)
    return PlannedMachine(
        name, costs, int(fast / UTILIZATION) + 1, int((host + SYSTEM_RESERVE) / USABLE) + 1, disk_free
    )


ONE = Load(2048, 1)


def test_the_sizes_of_a_model(model: ServedModel) -> None:
    assert model.experts_bytes == ALL and model.expert_bytes == W_E and model.layers == 8
    assert model.read_bytes == model.checkpoint.other_bytes - 2 * 1000 * 1024
    assert model.source == "config.json"


def test_headers_are_read_where_there_are_any(tmp_path: Path) -> None:
    toy = Path(__file__).parents[2] / "benchmarks" / "toy" / "models" / "target"
    whole = ServedModel.of(find_model(str(toy)))
    assert whole.source == "headers"
    (tmp_path / "config.json").write_text((toy / "config.json").read_text())
    alone = ServedModel.of(find_model(str(tmp_path)))
    assert (alone.source, alone.checkpoint, alone.architecture) == ("config.json", whole.checkpoint, whole.architecture)


@given(fast=st.integers(GIB, 4 * GIB), context=st.integers(2, 8192), concurrency=st.integers(1, 64))
def test_memory_adds_up_and_one_more_percent_would_not_fit(
    model: ServedModel, fast: int, context: int, concurrency: int
) -> None:
    load = Load(context, concurrency)
    found = split(model, machine(fast, 0), load)
    assert found.weights + found.kv + found.working + found.room == found.fast
    assert found.kv >= concurrency * context * 8 * 2 * 2 * 128 * 2
    try:
        percent, tokens = largest_slots(model, found)
    except ConfigError as error:
        assert "nothing fits" in str(error) and slot_bytes(model, 0, tokens=1) > found.room
        return
    if tokens:
        assert slot_bytes(model, 0, tokens) <= found.room < slot_bytes(model, 0, tokens + 1)
        assert percent == 0 and slot_bytes(model, model.checkpoint.smallest_percent()) > found.room
        return
    assert slot_bytes(model, percent) <= found.room
    assert percent == 100 or slot_bytes(model, percent + 1) > found.room


def test_more_requests_tokens_and_drafts_leave_less_room(model: ServedModel) -> None:
    big, room = machine(4 * GIB, 0), split(model, machine(4 * GIB, 0), ONE).room
    for load in (Load(4096, 1), Load(2048, 2), Load(2048, 1, drafts=4)):
        assert split(model, big, load).room < room


# -- routing --


def test_the_assumed_routing_is_as_local_as_published() -> None:
    published = {one.figure: one.value for one in PUBLISHED if one.model == "Qwen3-30B-A3B"}

    def figures(assumed: planned_routing.Routing) -> dict[str, float]:
        traces = (
            synthetic_trace(layers=4, experts=128, steps=400, skew=assumed.skew, reuse=assumed.reuse, seed=seed)
            for seed in (1, 2)
        )
        means = [Locality.of(trace).means() for trace in traces]
        return {figure: float(np.mean([mean[figure] for mean in means])) for figure in published}

    high, low, even = map(figures, (planned_routing.HIGH, planned_routing.LOW, planned_routing.EVEN))
    assert high == pytest.approx(published, abs=0.02)
    assert low["overlap"] == pytest.approx(published["overlap"], abs=0.02)
    assert low["lru_small"] < published["lru_small"] - 0.1
    assert even["overlap"] == pytest.approx(8 / 128, abs=0.02) and even["lru_small"] == pytest.approx(0.19, abs=0.02)


# -- predictions --


def all_resident(model: ServedModel, found: PlannedMachine) -> float:
    """Seconds of a token that reads everything once."""
    each = model.layers * 4 * float(found.costs.fast.seconds(W_E))
    return each + model.read_bytes / found.costs.fast.bytes_per_second


def test_without_misses_a_token_reads_each_weight_once(model: ServedModel) -> None:
    big = machine(4 * GIB, 0)
    found = predict(Choice(100, "none"), model, big, ONE, planned_routing.EVEN)
    assert found.tokens_per_second == pytest.approx(1 / all_resident(model, big), rel=1e-6)
    assert (found.hit_rate, found.limit) == (1.0, "compute")


@pytest.mark.parametrize(("store", "rate", "limit"), [("host", 31.5e9, "link"), ("disk", 7.45e9, "disk")])
def test_misses_cost_what_their_store_takes(model: ServedModel, store, rate: float, limit: str) -> None:
    found = predict(Choice(25, store), model, machine(GIB, GIB), ONE, planned_routing.EVEN)
    misses = (1 - found.hit_rate) * model.layers * 4
    expected = all_resident(model, machine(GIB, GIB)) + misses * W_E / rate
    assert found.tokens_per_second == pytest.approx(1 / expected, rel=1e-3)
    assert found.hit_rate == pytest.approx(0.25, abs=0.04) and found.limit == limit


def test_experts_that_host_memory_has_no_room_for_have_slots_for_good(model: ServedModel) -> None:
    """Twenty of 256; with 25 % they are counted among the slots, and the others hold what steps select."""
    short, ours = machine(GIB, ALL - 20 * W_E), replace(model, execution="pointers")
    assert planned_memory.settled(ours, short, 25) == 20 and planned_memory.settled(model, short, 25) == 0
    assert planned_memory.settled(ours, machine(GIB, ALL), 25) == 0
    assert planned_memory.settled(ours, short, 20) == 20, "52 slots, of which a layer's 32 are left"
    assert planned_memory.settled(ours, short, 19) == 0, "49 slots"
    plan = make_plan(ours, short, ONE, [planned_routing.LOW])
    choice = plan.best.choice
    assert (choice.store, choice.settled) == ("host", 20)
    assert ("all experts but 20, which have slots for good", gib(ALL - 20 * W_E), "host memory") in list(plan.memory())
    assert not any("store=host" in problem for problem in plan.problems)
    even, low = (
        [predict(Choice(25, "host", settled=n), ours, short, ONE, each).hit_rate for n in (0, 20)]
        for each in (planned_routing.EVEN, planned_routing.LOW)
    )
    assert even[1] == pytest.approx(even[0], abs=0.02), "without locality every slot is worth the same"
    assert low[1] < low[0] - 0.02


def test_the_host_s_own_work_slows_layers_over_slots(model: ServedModel) -> None:
    """The measured seconds are added where there are fewer slots than experts; the plan says what is left out."""
    plain = machine(GIB, GIB)
    work = HostWork(layer=1e-3)
    works = replace(plain, costs=plain.costs.model_copy(update={"host_work": work}))
    for choice, more in ((Choice(25, "host"), model.layers * work.layer), (Choice(100, "none"), 0.0)):
        before, after = (
            1 / predict(choice, model, m, ONE, planned_routing.EVEN).tokens_per_second for m in (plain, works)
        )
        assert after - before == pytest.approx(more)
    for found, said in ((plain, "the plugin's own work, "), (works, "")):
        (text,) = (t for t in make_plan(model, found, ONE, [planned_routing.LOW]).assumptions if "no time" in t)
        assert text == (
            f"taken to take no time: {said}vLLM's own work in a step, kernel launches; real speeds are lower"
        )


def test_vllm_s_own_work_slows_every_step(model: ServedModel) -> None:
    plain = machine(64 * GIB, 0, gpu=False)
    own = {"vllm": VllmStep(step=2e-3, layer=1e-4), "host_work": HostWork(layer=1e-9)}
    works = replace(plain, costs=plain.costs.model_copy(update=own))
    for choice in (Choice(100, "none"), Choice(25, "disk")):
        before, after = (
            1 / predict(choice, model, m, ONE, planned_routing.EVEN).tokens_per_second for m in (plain, works)
        )
        assert after - before == pytest.approx(2e-3 + model.layers * 1e-4, rel=1e-3)
    assert not any("no time" in text for text in make_plan(model, works, ONE, [planned_routing.LOW]).assumptions)


def test_a_step_s_work_on_the_host_hides_while_the_gpu_computes(model: ServedModel) -> None:
    """Where the device decides; what the host decides in layers it does while the GPU waits. Launches hide nowhere."""
    works = {"vllm": VllmStep(step=20e-3, layer=1e-3), "host_work": HostWork(step=10e-3)}
    plain = machine(GIB, GIB)
    plain = replace(plain, costs=plain.costs.model_copy(update={"attained": None}))
    slow = replace(plain, costs=plain.costs.model_copy(update=works))
    pointers = replace(model, execution="pointers")
    launches = 1e-3 * model.layers
    for served, percent, bandwidth, expected in (
        (pointers, 25, 31.5e9, lambda before: max(before + launches, 30e-3)),
        (pointers, 25, 31.5e7, lambda before: max(before + launches, 30e-3)),
        (model, 25, 31.5e9, lambda before: before + launches + 20e-3),
        (model, 100, 31.5e9, lambda before: max(before + launches, 20e-3)),
    ):
        seconds, limits = [], []
        for one in (plain, slow):
            load = one.costs.load.model_copy(update={"bytes_per_second": bandwidth})
            one = replace(one, costs=one.costs.model_copy(update={"load": load}))
            choice = Choice(percent, "none" if percent == 100 else "host")
            found = predict(choice, served, one, ONE, planned_routing.EVEN)
            seconds.append(1 / found.tokens_per_second)
            limits.append(found.limit)
        assert seconds[1] == pytest.approx(expected(seconds[0]))
        assert (limits[1] == "host") == (seconds[1] in (pytest.approx(20e-3), pytest.approx(30e-3)))


def test_host_memory_and_processors_help(model: ServedModel) -> None:
    def speed(choice: Choice, assumed: planned_routing.Routing = planned_routing.LOW) -> float:
        return predict(choice, model, machine(GIB, GIB), ONE, assumed).tokens_per_second

    assert speed(Choice(25, "disk")) < speed(Choice(25, "tiers", ALL // 2)) < speed(Choice(25, "host"))
    assert speed(Choice(25, "host")) < speed(Choice(25, "host", cpu=True))
    assert speed(Choice(25, "host")) < speed(Choice(50, "host")) < speed(Choice(100, "none"))
    assert (
        speed(Choice(25, "host"), planned_routing.EVEN)
        < speed(Choice(25, "host"))
        < speed(Choice(25, "host"), planned_routing.HIGH)
    )


def test_a_deeper_model_is_slower_in_proportion(model: ServedModel) -> None:
    """Layers that are not simulated count."""
    layers = {layer: 32 * W_E for layer in range(16)}
    deep = replace(model, checkpoint=replace(model.checkpoint, layer_bytes=layers, other_bytes=2 * model.read_bytes))
    shallow = replace(model, checkpoint=replace(model.checkpoint, other_bytes=model.read_bytes))
    speeds = [
        predict(Choice(25, "host"), one, machine(GIB, GIB), ONE, planned_routing.LOW).tokens_per_second
        for one in (replace(shallow, architecture=tied(model)), replace(deep, architecture=tied(model)))
    ]
    assert speeds[0] == pytest.approx(2 * speeds[1], rel=1e-6)


def tied(model: ServedModel) -> Architecture:
    return replace(model.architecture, tied=True)


def test_several_requests_share_what_is_loaded(model: ServedModel) -> None:
    one, four = (
        predict(Choice(50, "host"), model, machine(GIB, GIB), Load(2048, count), planned_routing.HIGH).tokens_per_second
        for count in (1, 4)
    )
    assert one < four < 4 * one


def test_a_plan_with_a_trace_is_what_simulate_says(model: ServedModel) -> None:
    """A model of as many layers as are simulated."""
    checkpoint = replace(model.checkpoint, layer_bytes={layer: 32 * W_E for layer in range(4)})
    small = replace(model, checkpoint=checkpoint)
    trace = synthetic_trace(
        layers=4, experts=32, top_k=4, steps=planned_routing.STEPS, skew=0.9, reuse=0.6, expert_bytes=W_E
    )
    (assumed, _) = planned_routing.recorded(trace, small, "run.trace")
    here = machine(GIB, GIB)
    for choice in (Choice(25, "host"), Choice(50, "disk"), Choice(25, "tiers", 32 * W_E), Choice(25, "host", cpu=True)):
        said = simulate(
            trace,
            slot_bytes(small, choice.percent) // W_E,
            here.costs_of(choice.store, small),
            policy="reuse",
            balancer="waterfill" if choice.cpu else "none",
            host_bytes=choice.host_bytes,
        )
        found = predict(choice, small, here, ONE, assumed)
        assert said.tpot and found.tokens_per_second == pytest.approx(1 / said.tpot)
        assert found.hit_rate == said.hit_rate


def test_a_trace_must_be_of_the_model_and_have_text(model: ServedModel) -> None:
    with pytest.raises(ConfigError, match="of 4 layers of 32 experts with top-4, and the model has 8 of 32"):
        planned_routing.recorded(synthetic_trace(layers=4, experts=32, top_k=4), model, "a.trace")
    with pytest.raises(ConfigError, match="10 rows that are known to be text"):
        planned_routing.recorded(synthetic_trace(layers=8, experts=32, top_k=4, steps=10), model, "a.trace")


def test_drafts_and_requests_from_a_trace(model: ServedModel) -> None:
    trace = synthetic_trace(layers=8, experts=32, top_k=4, steps=300)
    (few, many) = planned_routing.recorded(trace, model, "a.trace")
    facts = TraceFacts(8, 32, 4, W_E)
    made = planned_routing.routed(many, facts, requests=3, drafts=2)
    assert made.facts.layers == planned_routing.LAYERS and set(made.step_rows.tolist()) == {9}
    assert made.step_tokens.sum() > planned_routing.routed(few, facts, requests=3, drafts=2).step_tokens.sum()


def test_the_first_token_waits_for_the_experts_of_its_prompt(model: ServedModel) -> None:
    here = machine(GIB, GIB)
    least, most = first_token(Choice(25, "host"), model, here, ONE)
    assert most - least == pytest.approx(0.25 * ALL / 31.5e9, rel=0.01), "those in slots may be needed again"
    assert least > 0.75 * ALL / 31.5e9
    assert first_token(Choice(25, "disk"), model, here, ONE)[0] > 0.75 * ALL / 7.45e9
    short, long = (first_token(Choice(100, "none"), model, here, Load(n, 1)) for n in (64, 2 * PROMPT))
    assert short[0] == short[1] < long[0]


def test_a_long_prompt_copies_what_it_lacks_and_what_it_borrows_once(model: ServedModel) -> None:
    served, here = replace(model, execution="pointers"), machine(GIB, GIB)
    computed, _ = first_token(Choice(100, "none"), model, here, ONE)
    least, most = first_token(Choice(25, "host"), served, here, ONE)
    loads = (8 * 32 - 64 + 32) * W_E / 31.5e9  # of 64 slots half are borrowed: a layer misses 24 or more
    assert most == pytest.approx(computed + loads) and least == pytest.approx(max(computed, loads))


def test_a_short_prompt_reads_in_place_once_for_each_block_of_an_expert_s_rows(model: ServedModel) -> None:
    served, here, load = replace(model, execution="pointers"), machine(GIB, GIB), W_E / 31.5e9
    for prompt, again in ((60, 0), (100, 100 * 4 // 64)):
        computed, _ = first_token(Choice(100, "none"), model, here, Load(2 * prompt, 1))
        least, most = first_token(Choice(25, "host"), served, here, Load(2 * prompt, 1))
        used = 32 * (1 - (1 - 4 / 32) ** prompt)
        assert least == pytest.approx(max(computed, 0.75 * 8 * used * load))
        assert most == pytest.approx(computed + 8 * (used + again) * load)
    for kind in (None, Format("int4", 128), Format("e4m3", 128)):
        blocks = [tile_for(rows, kind).block_m for rows in range(1, 257)]
        assert all(block >= min(rows, 64) for rows, block in enumerate(blocks, 1))


def test_experts_of_four_bits_are_multiplied_in_sixteen(model: ServedModel, tmp_path: Path) -> None:
    """A prompt is bound by arithmetic, of which a data sheet's peak is attained in part."""
    long, here = Load(16384, 1), machine(GIB, GIB)
    packed = ServedModel.of(find_model(str(quantised(tmp_path, GPTQ))))
    whole, fourth = (first_token(Choice(100, "none"), each, here, long)[0] for each in (model, packed))
    assert 0.7 * whole < fourth <= whole, "what is beside the experts is packed, too"
    peak = here.costs.fast.flops_per_second
    assert peak is not None and whole > 8 * 32 * (PROMPT * 4 // 32) * W_E / (ATTAINED * peak)


# -- choices --


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fewer steps are simulated."""
    monkeypatch.setattr(planned_routing, "STEPS", 2)
    monkeypatch.setattr(planned_routing, "FEWEST", 20)
    planned_routing.routed.cache_clear()
    yield
    planned_routing.routed.cache_clear()


def stores_of(model: ServedModel, found: PlannedMachine) -> set[str]:
    return {choice.store for choice in plans.choices(model, found, ONE)}


def test_stores_that_there_is_room_for(model: ServedModel) -> None:
    fast = GIB * 1.2
    assert stores_of(model, machine(2.5 * GIB, 0)) == {"none"}
    assert stores_of(model, machine(fast, 2 * GIB)) == {"host", "disk"}
    assert stores_of(model, machine(fast, GIB // 2)) == {"disk", "tiers"}
    assert stores_of(model, machine(fast, 0)) == {"disk"}
    assert stores_of(model, machine(fast, 0, disk_free=100)) == set()
    assert stores_of(model, machine(fast, 0, gpu=False)) == {"disk"}
    assert all(choice.host_bytes <= GIB // 2 for choice in plans.choices(model, machine(fast, GIB // 2), ONE))


@pytest.mark.usefixtures("quick")
def test_the_best_is_so_with_little_locality_and_smaller_shares_are_shown(model: ServedModel) -> None:
    found = make_plan(model, machine(GIB * 1.25, 2 * GIB), ONE, planned_routing.assumed())
    most = max(row.compared.tokens_per_second for row in found.rows)
    assert found.best.compared.tokens_per_second == most and found.best.compared.routing == "low"
    assert {row.choice.percent for row in found.rows} > {found.best.choice.percent}
    for row in found.rows:
        assert row.low.tokens_per_second <= row.compared.tokens_per_second <= row.high.tokens_per_second
        assert row.low is row.even or row.choice.cpu, "which is slowest with a little locality"
    assert any("stock vLLM would need" in problem for problem in found.problems)


def test_where_all_experts_fit_nothing_is_offloaded(model: ServedModel) -> None:
    found = make_plan(model, machine(3 * GIB, 0), ONE, planned_routing.assumed())
    assert {row.choice.store for row in found.rows} == {"none"} and found.best.choice.percent == 100
    assert not any("stock" in problem for problem in found.problems)


def test_a_plan_that_cannot_be_made(model: ServedModel) -> None:
    with pytest.raises(ConfigError, match="--context 9000 is more than the 8192 tokens"):
        make_plan(model, machine(GIB, GIB), Load(9000, 1), planned_routing.assumed())
    with pytest.raises(ConfigError, match="nothing fits: .* of weights"):
        make_plan(model, machine(GIB // 2, GIB), ONE, planned_routing.assumed())
    with pytest.raises(ConfigError, match="nothing fits: the experts take"):
        make_plan(model, machine(GIB * 1.2, 0, disk_free=100), ONE, planned_routing.assumed())


# -- the machine --


def test_a_measured_machine_loads_from_what_was_measured(model: ServedModel, monkeypatch, tmp_path: Path) -> None:
    calculated = Costs.read("rtx4090")
    origin = calculated.provenance.model_copy(update={"how": "measured", "machine": Machine.here(), "store": "disk"})
    changes = {"provenance": origin, "load": calculated.disk, "host": calculated.load, "disk": None}
    path = tmp_path / "profile.json"
    path.write_text(calculated.model_copy(update=changes).model_dump_json())
    monkeypatch.setattr(machines, "PROFILE", path)
    for found in (PlannedMachine.of("here"), PlannedMachine.of(str(path), host_memory=64 * GIB)):
        assert found.disk == calculated.disk and found.link == calculated.load
        assert found.costs_of("host", model).load == calculated.load
        assert found.costs_of("tiers", model).host == calculated.load
        assert found.costs_of("disk", model).other == calculated.other, "measured here"
    assert PlannedMachine.of(str(path), fast_memory=GIB).gpu == GIB
    path.write_text(calculated.model_copy(update={"capacity": Capacity(host=GIB)}).model_dump_json())
    with pytest.raises(ConfigError, match="has none; use --host-memory"):
        PlannedMachine.of(str(path), fast_memory=GIB)
    path.write_text(calculated.model_copy(update={"capacity": None}).model_dump_json())
    with pytest.raises(ConfigError, match="run vllm-spac check --measure there"):
        PlannedMachine.of(str(path))


def test_other_weights_are_those_of_the_model(model: ServedModel) -> None:
    found = machine(GIB, GIB).costs_of("host", model)
    assert found.other == model.read_bytes / 1008e9 and found.draft == 0, "not those of the profile's model"


# -- the command line --


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.mark.usefixtures("quick")
def test_json_has_what_is_printed(model: ServedModel) -> None:
    options = (model.name, "--machine", "rtx4090", "--fast-memory", "1.4GiB", "--context", 1024, "--concurrency", 2)
    found = json.loads(run(*options, "--json"))
    assert found["calculated"] is True and found["model"]["experts"] == 32
    assert found["command"] == found["choices"][0]["command"] and found["command"] in run(*options)
    split_ = found["fast_memory"]
    assert split_["room"] == split_["fast"] - split_["weights"] - split_["kv"] - split_["working"]


@pytest.mark.usefixtures("quick")
def test_a_config_alone_and_a_trace(model: ServedModel, tmp_path: Path) -> None:
    config = Path(model.name) / "config.json"
    options = (config, "--machine", "rtx4090", "--fast-memory", "1.4GiB")
    assert f"vllm serve {model.name} " in run(*options)
    synthetic_trace(layers=8, experts=32, top_k=4, steps=100).save(tmp_path / "run.trace")
    text = run(*options, "--trace", tmp_path / "run.trace")
    assert "no locality" not in text
    assert "of 2 layers" in run(*options, "--trace", saved(tmp_path, layers=2), code=1)


def saved(folder: Path, layers: int) -> Path:
    synthetic_trace(layers=layers, experts=32, top_k=4, steps=100).save(folder / "other.trace")
    return folder / "other.trace"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--machine", "tractor"],
            "no profile tractor; name a file or one of a100, b200, h100, h200, rtx3090, rtx4090, rtx5090; for another",
        ),
        (["--machine", "rtx4090", "--fast-memory", "much"], "--fast-memory much: use a number of bytes"),
        (["--machine", "rtx4090", "--host-memory", "0"], "--host-memory 0: use a number of bytes"),
        (["--machine", "rtx4090", "--fast-memory", "100MiB"], "nothing fits"),
        (["--machine", "rtx4090", "--context", "100000"], "--context 100000 is more"),
        (["--machine", "rtx4090", "--trace", "absent.trace"], "absent.trace cannot be read"),
    ],
)
def test_bad_options(model: ServedModel, options: list[str], said: str) -> None:
    assert said in run(model.name, *options, code=1)


@pytest.mark.usefixtures("quick")
def test_a_machine_that_was_not_measured_is_measured_once(model: ServedModel, monkeypatch, tmp_path: Path) -> None:
    """By the command that measures, in a process of its own, which is told the size of an expert."""
    path, asked = tmp_path / "profile.json", []
    monkeypatch.setattr(machines, "PROFILE", path)
    measured = Costs.read("rtx4090")
    origin = measured.provenance.model_copy(update={"how": "measured", "machine": Machine.here(), "store": "disk"})
    capacity = Capacity(host=64 * GIB)
    changes = {"provenance": origin, "load": measured.disk, "host": measured.load, "disk": None, "capacity": capacity}

    def profile(command: list[str], **options: object) -> subprocess.CompletedProcess:
        asked.append(command)
        path.write_text(measured.model_copy(update=changes).model_dump_json())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", profile)
    text = run(model.name)
    assert "this machine was not measured yet: doing so once" in text and f"kept in {path}" in text
    assert "costs of here: measured" in text
    assert asked[0][-4:-1] == ["--measure", f"--expert-bytes={W_E}", f"--disk-dir={machines.DISK_DIR.expanduser()}"]
    assert asked[0][-1] == f"--output={path}"
    assert "not measured yet" not in run(model.name) and len(asked) == 1


def test_a_machine_that_cannot_be_measured_is_an_error(model: ServedModel, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machines, "PROFILE", tmp_path / "absent.json")
    failed = subprocess.CompletedProcess([], 1, "", "error: no room on the disk")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert "this machine cannot be measured: error: no room on the disk; name another" in run(model.name, code=1)


def test_bad_models(tmp_path: Path) -> None:
    at = ("--machine", "rtx4090")
    assert "is not a folder" in run(tmp_path / "absent", *at, code=1)
    assert "is a folder without config.json" in run(tmp_path, *at, code=1)
    assert "run: hf download nobody/nothing config.json" in run("nobody/nothing", *at, code=1)
    for text, said in (
        ("{", "cannot be read"),
        ("[]", "is no mapping"),
        (json.dumps(CONFIG | {"num_experts": 0}), "is a dense model"),
        (json.dumps(CONFIG | {"quantization_config": {"quant_method": "quark"}}), "quantised experts (quark)"),
        (
            json.dumps(CONFIG | {"quantization_config": {"quant_method": "fp8"}}),
            "one scale per tensor",
        ),
    ):
        (tmp_path / "config.json").write_text(text)
        assert said in run(tmp_path, *at, code=1)


def test_float32_is_served_as_16_bits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"dtype": "float32"}))
    found = ServedModel.of(find_model(str(tmp_path)))
    assert found.halved and found.expert_bytes == W_E
    with pytest.raises(UnsupportedError):
        ServedModel.of(find_model(str(tmp_path / "absent")))


COMMANDS = [
    Choice(25, "host", cpu=True),
    Choice(30, "tiers", 3 << 28, drafts=4),
]
PARSED = """
import json, sys
import vllm_spac; vllm_spac.register()
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
parser.add_argument("model_tag")
EngineArgs.add_cli_args(parser)
for line in json.load(sys.stdin):
    args = EngineArgs.from_cli_args(parser.parse_args(line))
    print(json.dumps([args.additional_config["spac"], args.max_model_len, args.kv_cache_memory_bytes,
                      args.speculative_config, args.max_num_seqs]))
"""


def test_the_command_is_one_that_vllm_takes(model: ServedModel) -> None:
    """In a process of its own, where the plugin adds its flags to vLLM's."""
    lines = [shlex.split(command(choice, model, machine(GIB, GIB), ONE))[2:] for choice in COMMANDS]
    done = subprocess.run(
        [sys.executable, "-c", PARSED], input=json.dumps(lines), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    host, tiers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{")]
    assert host[0] == {"slots": "25%", "store": "host", "plane": "slots", "cpu_experts": "auto"}
    assert SpacConfig.parse(tiers[0]).host_memory == 3 << 28
    assert tiers[0]["store"] == "disk" and tiers[3]["num_speculative_tokens"] == 4
    assert [found[4] for found in (host, tiers)] == [1, 1], "as many as were asked for"
    assert host[1:3] == [2048, kv_bytes(model, machine(GIB, GIB), ONE)]


def test_where_all_experts_fit_the_command_is_stock_s(model: ServedModel) -> None:
    """With what its defaults would not have room for: its longest context, and as many requests as it admits."""
    everything = Choice(100, "none")

    def options(fast: float, **changes: object) -> list[str]:
        found = command(everything, replace(model, **changes), machine(fast, 0), Load(2048, 2))
        line = shlex.split(found)
        assert line[:3] == ["vllm", "serve", model.name] and "spac" not in found
        return line[3:]

    assert options(16 * GIB) == []
    assert options(16 * GIB, revision="v1") == ["--revision", "v1"]
    shape, long = model.architecture, 1 << 20
    asked = replace(shape, longest=long)
    taken = kv_bytes(replace(model, architecture=asked), machine(GIB, 0), Load(long, 1))
    assert options(4 * GIB + taken, architecture=asked) == []
    assert options(4 * GIB, architecture=asked) == ["--max-model-len", "2048"]
    wide = replace(shape, vocabulary=1 << 20)
    assert options(3 * GIB, architecture=wide) == ["--max-num-seqs", "2"]
    drafts = shlex.split(command(replace(everything, drafts=4), model, machine(16 * GIB, 0), ONE))
    assert drafts[3] == "--speculative-config" and len(drafts) == 5


@pytest.mark.usefixtures("quick")
def test_what_fits_is_left_to_stock_with_the_reason(model: ServedModel) -> None:
    text = run(model.name, "--machine", "rtx4090")
    assert text.startswith(f"run: vllm serve {model.name} calculated, not measured: ")
    assert "all experts fit in GPU memory, so stock vLLM serves this model: the plugin would have nothing to" in text
    assert "all 256 experts" in text and "what to expect of stock vLLM" in text
    for plugin_s in ("does not fit", "--plane", "range:", "where the device decides", "a layer over slots"):
        assert plugin_s not in text


@pytest.mark.usefixtures("quick")
def test_the_command_comes_first_then_what_it_rests_on_then_tables(model: ServedModel) -> None:
    text = run(model.name, "--machine", "rtx4090", "--fast-memory", "1.4GiB", "--host-memory", "8GiB")
    order = ["run: vllm serve ", "calculated, not measured: ", "does not fit: ", "assumed: ", "memory, calculated"]
    places = [text.index(part) for part in [*order, "what to expect with"]]
    assert places == sorted(places) and places[0] == 0


HERE_ONLY = {"on_cpu": False, "ours": False}


@pytest.mark.parametrize(
    ("plane", "where", "found"),
    [
        ("auto", {}, ("slots", "pointers")),
        ("auto", {"ours": True}, ("pointers", "table")),
        ("slots", {"ours": True}, ("slots",)),
        ("pointers", {}, ("pointers",)),
        ("table", {}, ("table",)),
        ("auto", {"on_cpu": True}, ("slots",)),
    ],
)
def test_executions_are_those_that_an_engine_may_choose(plane, where, found) -> None:
    assert executions(plane, **HERE_ONLY | where) == found


def test_a_plan_has_no_table_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="--plane table is planned for a GPU"):
        executions("table", ours=False, on_cpu=True)


@pytest.mark.usefixtures("quick")
def test_a_refusal_that_names_a_kernel_can_be_followed(tmp_path: Path) -> None:
    """Of experts that vLLM's kernel does not read from slots; our kernel has them from a disk, too."""
    folder, small = quantised(tmp_path, MXFP4), ("--machine", "rtx4090", "--fast-memory", "0.8GiB", "--context", 1024)
    refused = run(folder, *small, "--plane", "slots", code=1)
    assert "use --spac-plane table" in refused
    text = run(folder, *small, "--host-memory", "4.1GiB", "--spac-plane", "table")
    for part in ("--spac-store disk", "--spac-plane table --moe-backend marlin", "plane=table"):
        assert part in text
    chosen = run(folder, *small, "--host-memory", "4.1GiB")
    assert "--spac-plane table" in chosen, "where pointers have no host memory to read from"


@pytest.mark.usefixtures("quick")
def test_a_model_is_looked_for_once_however_many_ways_are_compared(model: ServedModel, monkeypatch) -> None:
    """A name on the hub costs a request or two each time."""
    asked, find = [], published.find_model

    def counted(name: str, revision: str | None = None) -> published.NamedModel:
        asked.append((name, revision))
        return find(name)

    monkeypatch.setattr(published, "find_model", counted)
    text = run(model.name, "--machine", "rtx4090", "--fast-memory", "1.4GiB", "--revision", "v1")
    assert "with --plane " in text and asked == [(model.name, "v1")]


def test_states_of_unknown_size_leave_the_kv_cache_to_vllm(model: ServedModel) -> None:
    shape = replace(model.architecture, recurrent=4)
    found, here = replace(model, architecture=shape), machine(GIB, GIB)
    assert "--kv-cache-memory-bytes" not in command(Choice(25, "host"), found, here, ONE)
    plan = make_plan(found, machine(GIB * 1.25, 2 * GIB), ONE, [planned_routing.LOW])
    assert any("states of its 4 recurrent layers take no memory" in text for text in plan.assumptions)


MXFP4 = {"quant_method": "mxfp4"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}


def compressed(weights: dict) -> dict:
    """Rows are as the weights."""
    group = {"weights": weights, "input_activations": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def quantised(folder: Path, settings: dict | None) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | ({"quantization_config": settings} if settings else {})))
    return folder


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
        ({"quant_method": "fp8"}, "fp8-channel"),
        ({"quant_method": "awq", "bits": 4, "zero_point": True}, "int4-zeros"),
        (compressed({"type": "int", "num_bits": 4, "strategy": "group", "symmetric": False}), "int4-zeros"),
        (compressed({"type": "int", "num_bits": 8, "strategy": "channel"}), "int8"),
        (compressed({"type": "float", "num_bits": 8, "strategy": "block"}), "fp8-block"),
        (compressed({"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}), "nvfp4"),
    ],
)
def test_what_experts_are_to_kernels_of_a_cpu(settings, kind) -> None:
    assert quantisation.kind(settings) == kind and kind in CORE_RATES


@pytest.mark.parametrize(
    ("settings", "execution", "nbytes", "kind", "flags"),
    [
        (MXFP4, None, W_E // 4 + W_E // 64, "mxfp4", "--spac-plane pointers --moe-backend marlin"),
        (GPTQ, None, W_E // 4 + W_E // 32, "int4", "--quantization moe_wna16 --moe-backend triton"),
        (GPTQ, "pointers", W_E // 4 + W_E // 32, "int4", "--spac-plane pointers"),
        (GPTQ | {"bits": 8}, "pointers", W_E // 2 + W_E // 16, "int8", "--spac-plane pointers"),
        (None, "pointers", W_E, "bf16", "--spac-plane pointers --moe-backend triton"),
        (None, None, W_E, "bf16", "--moe-backend triton"),
    ],
    ids=["MXFP4", "GPTQ", "GPTQ packed", "GPTQ INT8 packed", "unquantised, pointers", "unquantised"],
)
def test_experts_are_planned_as_they_are_stored(tmp_path, settings, execution, nbytes, kind, flags) -> None:
    served = ServedModel.of(find_model(str(quantised(tmp_path, settings))), execution)
    assert (served.expert_bytes, served.kind) == (nbytes, kind)
    assert command(Choice(25, "host"), served, machine(GIB, GIB), ONE).endswith(f" {flags}")


def test_pointers_read_host_memory_only(tmp_path: Path) -> None:
    """No disk. The CPU reads packed experts, too."""
    served = ServedModel.of(find_model(str(quantised(tmp_path, MXFP4))))
    room = split(served, machine(GIB * 0.9, 0), ONE).room
    fast = GIB * 0.9 - room + served.experts_bytes // 2
    small = machine(fast, GIB)
    assert {(choice.store, choice.cpu) for choice in plans.choices(served, small, ONE)} == {
        ("host", False),
        ("host", True),
    }
    in_slots = ServedModel.of(find_model(str(quantised(tmp_path, GPTQ))), "slots")
    assert not any(choice.cpu for choice in plans.choices(in_slots, small, ONE)), "vLLM's kernel has their layout"
    with pytest.raises(ConfigError, match="plane=pointers reads them from host memory, of which 0.0 KiB"):
        make_plan(served, machine(fast, 0), ONE, planned_routing.assumed())
    with pytest.raises(ConfigError, match="plane=pointers serves on a GPU, and cpu has none; name a machine with one$"):
        make_plan(served, machine(fast, 0, gpu=False), ONE, planned_routing.assumed())
    plain = ServedModel.of(find_model(str(quantised(tmp_path, None))), "pointers")
    with pytest.raises(ConfigError, match="or use --plane slots"):
        make_plan(plain, machine(fast, 0, gpu=False), ONE, planned_routing.assumed())


def test_the_cpu_helps_layers_whose_loads_the_device_decides(model: ServedModel) -> None:
    """So it is not a reason to let the host decide, whose work in layers comes on top."""
    served, costs = replace(model, execution="pointers"), Costs.read("rtx4090").as_attained()
    found = replace(machine(GIB, GIB), costs=costs)
    assert {choice.cpu for choice in plans.choices(served, found, ONE)} == {False, True}
    low = [planned_routing.EVEN, planned_routing.LOW]
    best = plans.best_plan([model, served], found, Load(2048, 8), low)
    assert best.model.execution == "pointers" and best.best.choice.cpu
    assert best.beside is not None and best.beside.best.choice.cpu
    slow = costs.model_copy(update={"cpu": Rate(bytes_per_second=1e9)})
    rows = plans.best_plan([served], replace(found, costs=slow), Load(2048, 8), low).rows
    assert not rows[0].choice.cpu and any(row.choice.cpu for row in rows)


@pytest.mark.usefixtures("quick")
def test_int4_in_slots_is_read_as_an_h100_read_it(tmp_path: Path) -> None:
    """Of GPU memory's rate, 13 to 21 % from 1 to 64 rows: with one row, the 8 experts of a token."""
    found = json.loads((Path(__file__).parents[2] / "benchmarks/results/gpu_h100.json").read_text())
    (one,) = (each for each in found["chosen_int4"] if each["format"] == "int4" and each["rows"] == 1)
    bf16 = found["kernels"]["rows"][0]["bytes"]["needed"]
    packed = bf16 // 4 + bf16 // 2 // 32 * 2  # codes, and scales by 32
    peak = Costs.read("h100").fast.bytes_per_second
    assert 0.13 < packed / one["hbm_us"] / 1e-6 / peak < HIT_SHARE["int4"] < 0.21
    served = ServedModel.of(find_model(str(quantised(tmp_path, GPTQ))), "pointers")
    there = machine(4 * GIB, 64 * GIB)
    slots = ServedModel.of(find_model(str(quantised(tmp_path, GPTQ))), "slots")
    ours, vllms, stock = (
        there.costs_of(store, model).fast.bytes_per_second
        for store, model in (("host", served), ("host", slots), ("none", served))
    )
    assert ours == HIT_SHARE["int4"] * vllms and vllms == stock == there.costs.fast.bytes_per_second


def test_64_gib_of_a_data_sheet_hold_fewer_experts_than_that() -> None:
    nominal = PlannedMachine("rtx4090", Costs.read("rtx4090"), 24 * GIB, 64 * GIB)
    assert nominal.spare == int(62.5 * GIB) - SYSTEM_RESERVE and replace(nominal, name="here").spare == 58 * GIB


def test_a_plan_with_pointers(tmp_path: Path) -> None:
    folder = quantised(tmp_path, MXFP4)
    text = run(folder, "--machine", "rtx4090", "--fast-memory", "0.8GiB", "--context", 1024)
    said = f"one expert in a slot (mxfp4, plane=pointers) {W_E // 4 + W_E // 64:,} B"
    for part in (said, "plane=pointers, calculated", "timed on one H100", "--spac-plane pointers"):
        assert part in text
    assert "'tables' is not one of 'slots', 'table', 'pointers'" in run(folder, "--plane", "tables", code=2)
