"""The scaled machine: deadlines on a clock that the test moves, proportions of real machines, rungs and rows."""

from __future__ import annotations

import json
import math
import threading
import types
from pathlib import Path

import pytest
import torch

from benchmarks.scaled import executors, ladder, machine, pacing, probe, proportions, scale, tiers
from benchmarks.scaled import run as scaled_run
from benchmarks.serving.cases import Drafts, Settings
from vllm_spac.config.config import SpacConfig
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.decisions.core_rates import CORE_RATES, READ
from vllm_spac.decisions.costs import Costs
from vllm_spac.errors import ConfigError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SHAPE = MoEShape(("a", "b"), 2, 1, {"w13_weight": TensorSpec((8, 4), torch.float32)})
MACHINE = machine.ScaledMachine(
    machine="m", expert_bytes=SHAPE.expert_bytes, layer_seconds=1e-3, load_seconds=2e-3, cpu_seconds=3e-3, core=0
)


class Time:
    """A clock that sleeping moves on, by ``overshoot`` more than asked for."""

    def __init__(self, overshoot: float = 0.0) -> None:
        self.now, self.overshoot, self.slept = 100.0, overshoot, []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + self.overshoot


# --- pacing ----------------------------------------------------------------------------------------------------------


def test_transfers_pass_one_after_another_in_their_order() -> None:
    clock = Time()
    link = pacing.Link(10.0, clock)
    assert [link.book(nbytes) for nbytes in (20, 5, 10)] == [102.0, 102.5, 103.5]
    clock.now = 103.0
    assert link.book(10) == 104.5, "it is still busy"
    clock.now = 110.0
    assert link.book(10) == 111.0, "it was idle, and does not catch up"


def test_what_sleeps_overshoot_does_not_add_up() -> None:
    """Two readers, as an engine has them: while one oversleeps, the other's transfer is on the link already."""
    clock = Time(overshoot=0.3)
    link, pace = pacing.Link(1.0, clock), pacing.Pace(pacing.Kept(), clock, clock.sleep)
    ends = [link.book(1), link.book(1)]
    for _ in range(20):
        pace.until(ends.pop(0))
        ends.append(link.book(1))
    assert ends == [100 + 21, 100 + 22]


def test_a_deadline_that_has_passed_is_missed_and_not_slept_for() -> None:
    clock, kept = Time(overshoot=0.25), pacing.Kept()
    pace = pacing.Pace(kept, clock, clock.sleep)
    pace.until(101.0)
    assert clock.slept == [1.0] and kept == pacing.Kept(waits=1, overshoot_seconds=0.25)
    pace.until(101.0)
    assert clock.slept == [1.0]
    assert kept == pacing.Kept(waits=1, overshoot_seconds=0.25, missed=1, missed_seconds=0.25)


def test_counters_have_the_names_that_the_report_reads() -> None:
    names = {f"{kind}_{name}" for kind in ("load", "cpu") for name in vars(pacing.Kept())}
    assert set(pacing.counted()) == names


# --- the file of the machine -----------------------------------------------------------------------------------------


@pytest.fixture
def scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "machine.json"
    path.write_text(MACHINE.model_dump_json())
    monkeypatch.setenv(machine.VARIABLE, str(path))
    return path


def test_the_machine_is_read_from_the_environment(scaled: Path) -> None:
    assert machine.ScaledMachine.of_environment(SHAPE.expert_bytes) == MACHINE
    assert MACHINE.link_bytes_per_second == pytest.approx(SHAPE.expert_bytes / 2e-3)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"load_seconds": 0}, "load_seconds: .*greater than 0"),
        ({"cpu_seconds": "fast"}, "cpu_seconds: .*number"),
        ({"rate": 3}, "rate: Extra"),
        ({"format": "2"}, "format: "),
        ({"expert_bytes": 7}, "for experts of 7 bytes, and these have 128"),
    ],
)
def test_a_file_that_is_no_machine(scaled: Path, change: dict, problem: str) -> None:
    scaled.write_text(json.dumps(MACHINE.model_dump() | change))
    with pytest.raises(ConfigError, match=f"SCALED_MACHINE=.*{problem}.*benchmarks/scaled/run.py"):
        machine.ScaledMachine.of_environment(SHAPE.expert_bytes)


def test_without_a_file_the_components_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(machine.VARIABLE, raising=False)
    for build in (lambda: tiers.PacedStore(SHAPE, ""), lambda: executors.PacedExperts(SHAPE, 1, "silu", print)):
        with pytest.raises(ConfigError, match="SCALED_MACHINE is not set.*benchmarks/scaled/run.py"):
            build()
    monkeypatch.setenv(machine.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be read"):
        tiers.PacedStore(SHAPE, "")


# --- store and executor ----------------------------------------------------------------------------------------------


def test_the_store_returns_what_was_packed_when_the_link_has_passed_it(scaled: Path) -> None:
    clock = Time()
    store = tiers.PacedStore(SHAPE, "")
    link, memory = (pacing.Link(rate, clock) for rate in (MACHINE.link_bytes_per_second, math.inf))
    store._channels = link, memory
    store._pace = pacing.Pace(pacing.Kept(), clock, clock.sleep)
    packed = {"w13_weight": torch.arange(32.0).view(8, 4)}
    store.put(3, packed)
    slot = {"w13_weight": torch.zeros(8, 4)}
    for _ in range(3):
        assert store.read(3, slot) == SHAPE.expert_bytes
    assert torch.equal(slot["w13_weight"], packed["w13_weight"])
    assert clock.now == pytest.approx(100 + 3 * MACHINE.load_seconds)
    store._channels = link, pacing.Link(SHAPE.expert_bytes / 5e-3, clock)
    store._channels[1].book(2 * SHAPE.expert_bytes)  # by the CPU
    before = clock.now
    store.read(3, slot)
    assert clock.now == pytest.approx(before + 3 * 5e-3), "memory serves loads and computations"
    assert store.addressable and store.describe().startswith("paced host")


def test_the_executor_releases_the_kernels_and_then_sleeps(scaled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, bool]] = []
    bound: list[set[int]] = []
    monkeypatch.setattr(executors.os, "sched_setaffinity", lambda pid, cpus: bound.append(cpus))
    found = executors.PacedExperts(SHAPE, 1, "silu", lambda x, weights, ids, experts: x + 1)
    begin = 100.0
    monkeypatch.setattr(executors.time, "perf_counter", lambda: begin)
    found._pace = type(
        "Watched", (), {"until": lambda self, end: seen.append((end - begin, found.released.is_set()))}
    )()
    found._memory = pacing.Link(math.inf, lambda: begin)
    weights, ids = torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([[0, 1], [1, 2]])
    for _ in range(2):
        found.released = threading.Event()
        assert found.run(torch.zeros(2, 4), weights, ids, {}).sum() == 8
    two = pytest.approx(2 * MACHINE.cpu_seconds)
    assert seen == [(two, True)] * 2, "expert 2 has no weight: two experts are computed"
    found._memory = pacing.Link(SHAPE.expert_bytes / 5e-3, lambda: begin)
    found._memory.book(3 * SHAPE.expert_bytes)  # by loads
    found.released = threading.Event()
    found.run(torch.zeros(2, 4), weights, ids, {})
    assert seen[-1] == (pytest.approx(5 * 5e-3), True), "memory serves loads and computations"
    assert bound == [{MACHINE.core}], "once, in its own thread"
    assert found.exclusive and found.layout == "kernel"


# --- proportions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "load", "memory", "share"),
    [
        ("rtx4090", 2.40, 0.84, READ),
        ("rtx4090-int4", 1.09, 0.38, READ),
        ("h200", 5.7, 1.2, READ),
        ("h200-int4", 2.6, 0.54, 16 * CORE_RATES["int4"].one / (0.8 * 307.2e9)),  # its cores are the limit
    ],
)
def test_proportions_of_the_packaged_profiles(name: str, load: float, memory: float, share: float) -> None:
    """Against figures worked out by hand from the data sheets, to their two digits; link and memory attain .8.

    ``share``: what experts on the CPU read of what memory attains.
    """
    real = proportions.Proportions.of(name)
    assert (real.load, real.memory) == (pytest.approx(load / 0.8, rel=0.02), pytest.approx(memory / 0.8, rel=0.04))
    assert real.cpu == pytest.approx(real.memory / share, rel=1e-6)
    assert real.expert_bytes == (2_359_296 if name.endswith("int4") else 9_437_184)
    profile = Costs.read(name.removesuffix("-int4"))
    rates = profile.rates(real.expert_bytes)
    assert real.layer_seconds == pytest.approx(8 * rates.fast + profile.other / 48)
    assert real.draft == pytest.approx(profile.draft / real.layer_seconds) and "Qwen3-4B" in real.drafter


def test_a_machine_keeps_the_proportions() -> None:
    real = proportions.Proportions.of("rtx4090")
    found = real.scaled(2e-3, 1 << 20, core=1)
    assert found.load_seconds / found.layer_seconds == pytest.approx(real.load)
    assert found.cpu_seconds / found.layer_seconds == pytest.approx(real.cpu)
    assert found.memory_seconds / found.layer_seconds == pytest.approx(real.memory)
    with pytest.raises(ConfigError, match="no machine is called 'cray'; use one of a100, a100-int4, b200"):
        proportions.Proportions.of("cray")


def test_what_a_machine_serves_of_what_its_link_and_memory_move() -> None:
    """Of 12 experts a token, in 30 ms, where the link moves one in 2 ms and memory one in 1."""
    there = MACHINE.model_copy(update={"memory_seconds": 1e-3})
    resident = scale.Resident(SHAPE.expert_bytes, 4, 3, [1.0])
    real = proportions.Proportions.of("rtx4090")
    found = scale.Scale(there, real, resident, probe.Speeds(1, 1, 1, 1))
    assert found.served(30e-3) == pytest.approx((12 / 30e-3) / (1 / 2e-3 + 1 / 1e-3))


@pytest.mark.parametrize(
    ("speeds", "problem"),
    [
        ((1e-4, 1e-4, 1e-4, 1e-5), ""),
        ((1.5e-3, 1e-4, 1e-4, 1e-5), "a load is to take 2.00 ms and already takes 1.50 ms.*smaller experts"),
        ((1e-4, 2.5e-3, 1e-4, 1e-5), "a CPU expert is to take 3.00 ms and already takes 2.50 ms"),
        ((1e-4, 1e-4, 1e-4, 2.5e-4), "a load .* sleeps here are 0.25 ms too long.*larger experts"),
    ],
)
def test_a_machine_that_is_too_slow_for_its_pace(speeds: tuple, problem: str) -> None:
    found = probe.Speeds(*speeds)
    if not problem:
        found.check(MACHINE)
        return
    with pytest.raises(ConfigError, match=problem):
        found.check(MACHINE)


def test_cores_and_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale.os, "sched_getaffinity", lambda pid: {7, 3, 5})
    cores = scale.Cores.here()
    assert (cores.forward, cores.other) == (3, 5)
    found = cores.environment()
    assert (found["VLLM_CPU_OMP_THREADS_BIND"], found["SPAC_CPUS"], found["OMP_NUM_THREADS"]) == ("3", "5", "1")
    monkeypatch.setattr(scale.os, "sched_getaffinity", lambda pid: {3})
    with pytest.raises(ConfigError, match="two CPUs"):
        scale.Cores.here()


# --- the ladder ------------------------------------------------------------------------------------------------------


def test_each_rung_adds_to_those_before_it_and_is_understood() -> None:
    names = ["cpu", "tree", "layer_lru", "reuse", "prefetch", "drafts"]
    steps = ladder.rungs(names, "utility")
    *sides, tree = ladder.cases(steps, "25%")
    assert [side.name for side in sides] == ["layer_lru", "reuse", "prefetch", "cpu", "drafts"]
    assert [rung.name for rung in steps if rung.lossy] == ["tree"]
    config = SpacConfig.parse(tree.knobs)
    assert (config.tree_nodes, config.budget, config.prefetch, config.guard) == (16, "16", "off", "off")
    assert (tree.draft_tokens, tree.speculation, config.cpu_experts) == (16, "eagle3", "waterfill")
    for side in sides:
        config = SpacConfig.parse(side.knobs)
        assert config.slots == "25%" and config.store_class_on("cpu") is tiers.PacedStore
    assert [side.knobs["policy"] for side in sides] == ["layer_lru", *["reuse"] * 4]
    assert ["prefetch" in side.knobs for side in sides] == [False, False, True, False, False], "beside the ladder"
    assert [side.knobs.get("cpu_kernel") for side in sides] == [None] * 3 + [ladder.WATERFILL["cpu_kernel"]] * 2
    assert [side.speculation for side in sides] == ["none"] * 4 + ["eagle3"]
    for names, predictor, problem in ((["up"], "utility", "no rung is called up"), ([], "utility", "needs a rung")):
        with pytest.raises(ConfigError, match=problem):
            ladder.rungs(names, predictor)
    with pytest.raises(ConfigError, match="prefetch=.*oracle"):
        ladder.rungs(["prefetch"], "oracle")


def test_the_papers_arrangements_stay_beside_the_ladder(tmp_path: Path) -> None:
    of = ladder.cases(ladder.rungs(["layer_lru", "cpu", "moe_spac", "drafts"], "off"), "17%")
    lru, cpu, spac, drafts = (SpacConfig.parse(side.knobs) for side in of)
    preset = SpacConfig.parse({"preset": "moe-spac"})
    same = ("slots", "policy", "prefetch", "cpu_experts", "guard", "tree", "budget")
    assert [getattr(spac, name) for name in same] == [getattr(preset, name) for name in same]
    assert (drafts.policy, drafts.prefetch, drafts.cpu_experts) == (lru.policy, "off", cpu.cpu_experts)
    assert [(side.speculation, side.draft_tokens) for side in of[1:]] == [
        ("none", None),
        ("draft", 8),
        ("eagle3", None),
    ]
    steps = ladder.rungs(["drop", "executed"], "quasi_hidden", tmp_path / "file")
    drop, executed = (SpacConfig.parse(side.knobs) for side in ladder.cases(steps, "2k"))
    assert (drop.slots, drop.policy, drop.lossy) == (executed.slots, executed.policy, False) == ("2k", "drop", False)
    assert executed.prefetch == f"quasi_hidden@file={tmp_path / 'file'}"
    assert executed.speculate == "predicted" and steps[1].lossy


def test_composed_recipes_are_rungs_beside_one_another() -> None:
    of = ladder.cases(ladder.rungs(["cpu", "head", "drafts", "budget", "budget_all"], "off"), "25%")
    cpu, head, drafts, budget, every = (SpacConfig.parse(side.knobs) for side in of)
    composed, lossy = (SpacConfig.parse({"preset": name}) for name in ("composed", "composed-lossy"))
    assert [side.speculation for side in of] == ["none"] + ["eagle3"] * 4
    for rung, preset in ((head, composed), (budget, lossy)):
        assert (rung.budget, rung.policy, rung.tree) == (preset.budget, preset.policy, preset.tree)
    assert [side.uses_lookups for side in (head, composed, lossy, drafts, budget)] == [False] * 3 + [True] * 2
    assert (every.guard, every.budget) == ("off", budget.budget)
    assert {each.cpu_experts for each in (cpu, head, drafts, budget, every)} == {"waterfill"}


def test_engines_take_turns_in_groups_with_the_first_two() -> None:
    assert ladder.groups(6, 9) == [[0, 1, 2, 3, 4, 5]]
    assert ladder.groups(6, 4) == [[0, 1, 2, 3], [0, 1, 4, 5]]
    assert ladder.groups(4, 1) == [[0, 1, 2], [0, 1, 3]]
    assert ladder.groups(2, 9) == [[0, 1]]


def answer(tpot: float, tokens: list[int]) -> dict:
    known = {"hits": 1, "misses": 1, "loads": 1, "cpu_experts": 0, "prefetches": 0, "steps": {"decode": 4}}
    known |= {"stall_seconds": 0.1, "cpu_wait_seconds": 0.0}
    own = pacing.counted() | {"load_waits": 3, "load_missed": 1, "load_overshoot_seconds": 3e-4}
    counted = {**known, "own": own}
    return {"tpot": [tpot], "ttft": [1.0], "tokens": [tokens], "counters": counted, "choices": {}}


def served() -> list[dict]:
    turns = [[answer(1.0, [1]), answer(4.0 + n, [1]), answer(2.0, [1 + (n == 2)])] for n in range(3)]
    found = [
        ladder.row(side, turns, n, 0) for n, side in enumerate(ladder.cases(ladder.rungs(["reuse"], "off"), "25%") * 3)
    ]
    return [row | {"slots": "25%", "rounds": False} for row in found]


def test_a_row_compares_turn_by_turn() -> None:
    resident, first, row = served()
    assert (row["speedup"], row["share_of_resident"], row["tpot_median"]) == (2.5, 0.5, 2.0)
    assert first["speedup"] == 1 and resident["share_of_resident"] == 1
    low, high = row["speedup_interval"]
    assert 2 <= low <= row["speedup"] <= high <= 3
    assert (row["equal_to_resident"], row["equal_to_first"], row["turns"]) == (2, 2, 3)
    assert row["counters"]["steps"] == {"decode": 12} and row["counters"]["own"]["load_waits"] == 9


def test_stock_judges_lossy_rungs_and_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each turn's own prompt: warm ones are not among the answers."""
    asked = []

    class Judge:
        """In place of an engine of stock vLLM."""

        def __init__(self, job: dict, is_stock: bool, timeout: float) -> None:
            assert is_stock and job["spac"] is None

        def score(self, ids: list[int], first: int) -> dict[str, list]:
            asked.append((ids, first))
            return {"logprobs": [-1.0 if ids[-1] > 2 else 0.0] * 2, "best": [True, False]}

        def close(self) -> None: ...

    monkeypatch.setattr(scaled_run, "LiveEngine", Judge)
    run = types.SimpleNamespace(
        rungs=ladder.rungs(["reuse", "drafts", "tree"], "off"),
        ids=[[7], [8], [9]],
        settings=Settings(Path("m"), Drafts(4, Path("e"), Path("d")), 1, 1),
    )
    said = dict.fromkeys(("resident", "reuse", "drafts"), [[[1]], [[2]]]) | {"tree": [[[3]], [[4]]]}
    rows = [{"rung": name, "answers": each} for name, each in said.items()]
    scaled_run._judge(rows, run, run.ids[1:])
    assert sorted(asked) == [([8, 1], 1), ([8, 3], 1), ([9, 2], 1), ([9, 4], 1)]
    assert [row.get("quality") for row in rows] == [
        None,
        {"perplexity": 1.0, "top1_agreement": 0.5},
        None,
        {"perplexity": pytest.approx(2.71828, abs=1e-4), "top1_agreement": 0.5},
    ]
    assert (
        "tree: the answers have a perplexity of 2.718"
        in list(scaled_run._on_quality({"rows": [row | {"slots": "25%"} for row in rows]}))[1]
    )
    run.rungs = run.rungs[:2]
    rows = [{"rung": name, "answers": []} for name in ("resident", "reuse")]
    scaled_run._judge(rows, run, run.ids[1:])
    assert rows == [{"rung": "resident"}, {"rung": "reuse"}]
    said = {"resident": [[[1, 2]], [[1, 2]]], "reuse": [[[1, 2]], [[1, 9]]]}
    rows = [{"rung": name, "answers": each} for name, each in said.items()]
    asked.clear()
    scaled_run._judge(rows, run, run.ids[1:])
    assert asked == [([9, 1, 2], 2), ([9, 1, 9], 2)], "of an exact rung, the first token that differs"
    assert rows == [{"rung": "resident"}, {"rung": "reuse", "differences": [{"prompt": 1, "token": 1, "gap": 1.0}]}]
    assert "token 1 of answer 1 differs" in next(scaled_run._on_tokens({"rows": [rows[1] | {"slots": "25%"}]}))


def test_drafts_and_disturbed_runs_are_told() -> None:
    rows = [{"counters": {"own": {"draft_seconds": seconds, "draft_tokens": 4}}} for seconds in (1.0, 3.0)]
    assert ladder.drafted(rows) == (8, 0.5)
    assert ladder.drafted([{"counters": {"own": {"draft_seconds": 0.0, "draft_tokens": 0}}}]) == (0, 0.0)
    late = {"load_waits": 9, "load_missed": 1, "load_overshoot_seconds": 9e-4, "load_missed_seconds": 1e-3}
    assert "loads took 0.19 ms too long in the mean, of 2.00" in ladder.disturbed(late, MACHINE)
    assert ladder.disturbed({**late, "load_missed_seconds": 0.0}, MACHINE) == ""
