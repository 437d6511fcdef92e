"""The lower bound of a step and of a run, and the rows of the serving benchmark compared with it."""

from __future__ import annotations

import importlib
import io
import math
import random
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from rich.console import Console
from vllm.engine.arg_utils import EngineArgs

from vllm_spac.config.config import SpacConfig
from vllm_spac.storage.checkpoint.headers import Checkpoint

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "serving")]
bound = importlib.import_module("bound")
plan = importlib.import_module("plan")
report = importlib.import_module("report")
summary = importlib.import_module("summary")

W, FAST, SLOW, CPU = 100, 1000.0, 10.0, 50.0


def step(distinct, resident, on_cpu=None, other=0.0, **rates):
    rates = {"fast_rate": FAST, "slow_rate": SLOW, "cpu_rate": CPU, **rates}
    on_cpu = on_cpu or [0] * len(distinct)
    return bound.step_bound(distinct, resident, on_cpu, W, other_seconds=other, **rates)


@pytest.mark.parametrize(
    ("distinct", "resident", "on_cpu", "seconds"),
    [
        pytest.param([], [], [], 0.0, id="no-layer"),
        pytest.param([0], [0], [0], 0.0, id="nothing-routed"),
        pytest.param([8], [8], [0], 0.8, id="all-resident"),
        pytest.param([8], [0], [0], 80.0, id="all-missing"),
        pytest.param([8], [7], [0], 10.0, id="the-slow-path-decides"),
        pytest.param([201], [200], [0], 20.0, id="fast-memory-decides"),
        pytest.param([8], [2], [5], 10.0, id="three-at-once"),
        pytest.param([8], [2], [6], 12.0, id="the-cpu-decides"),
        pytest.param([8, 8], [8, 7], [0, 0], 10.8, id="layers-add-up"),
    ],
)
def test_step(distinct, resident, on_cpu, seconds):
    assert step(distinct, resident, on_cpu) == pytest.approx(seconds)
    assert step(distinct, resident, on_cpu, other=1.5) == pytest.approx(seconds + 1.5)


def test_step_of_the_paper():
    """Qwen3-30B-A3B in bf16, one token, nothing resident, PCIe 4: 3.6 GB at 25 GB/s are 145 ms (spec, section 8)."""
    expert_bytes = 3 * 2048 * 768 * 2
    seconds = bound.step_bound([8] * 48, [0] * 48, [0] * 48, expert_bytes, 1e12, 25e9, math.inf, 0.0)
    assert expert_bytes == 9437184 and seconds == pytest.approx(0.145, rel=0.01)


@pytest.mark.parametrize(("distinct", "resident", "on_cpu"), [([2], [3], [0]), ([2], [1], [2]), ([2], [-1], [0])])
def test_step_refuses_impossible_counts(distinct, resident, on_cpu):
    with pytest.raises(AssertionError):
        step(distinct, resident, on_cpu)


def test_step_refuses_lists_of_different_length():
    with pytest.raises(ValueError):
        step([1, 2], [1], [0])


def test_run_never_exceeds_the_sum_of_its_steps():
    """The sums know less than the layers, so their bound may be lower and must not be higher."""
    draw = random.Random(0)
    for _ in range(200):
        steps, layers = draw.randint(1, 5), draw.randint(1, 4)
        distinct = [[draw.randint(0, 8) for _ in range(layers)] for _ in range(steps)]
        resident = [[draw.randint(0, count) for count in row] for row in distinct]
        rates = {"fast_rate": draw.uniform(1, 100), "slow_rate": draw.uniform(1, 100)}
        exact = sum(step(u, h, other=0.5, **rates) for u, h in zip(distinct, resident, strict=True))
        hits = sum(map(sum, resident))
        counts = bound.Counts(hits, sum(map(sum, distinct)) - hits, steps)
        assert bound.run_bound(counts, W, rates["fast_rate"], rates["slow_rate"], 0.5) <= exact * (1 + 1e-12)


def test_run_is_exact_where_one_path_decides_everywhere():
    counts = bound.Counts(hits=6, misses=2, steps=2)
    assert bound.run_bound(counts, W, FAST, SLOW, 0.5) == pytest.approx(step([4, 4], [3, 3], other=1.0))


def test_all_resident_is_its_own_bound():
    """T_other is made from that run, so its bound is what it took."""
    counts = bound.Counts(hits=80, misses=0, steps=4)
    rest = bound.other_per_step(9.0, counts, W, FAST)
    assert rest == pytest.approx((9.0 - 8.0) / 4)
    assert bound.run_bound(counts, W, FAST, SLOW, rest) == pytest.approx(9.0)


def test_other_is_never_negative():
    """A rate that was measured too low must not make the rest of the model gain time."""
    assert bound.other_per_step(1.0, bound.Counts(hits=80, misses=0, steps=4), W, FAST) == 0.0


def test_other_is_refused_from_a_run_with_misses():
    with pytest.raises(AssertionError, match="misses"):
        bound.other_per_step(1.0, bound.Counts(hits=1, misses=1, steps=1), W, FAST)


STOCK = plan.Configuration(None, None, "none")
FULL = plan.Configuration("100%", "lru", "none")
QUARTER = plan.Configuration("25%", "lru", "none")
PLAN = plan.configurations(["25%"], ["lru"], ["none"])
RATES = summary.Rates(FAST, SLOW)


def run(configuration, seconds=10.0, tokens=((1, 2, 3), (4, 5, 6)), hits=80, misses=0, repeat=0):
    counters, choices = {}, {}
    if configuration != STOCK:
        counters = {"hits": hits, "misses": misses, "loads": misses, "bytes": {"disk": misses * W}}
        counters |= {"prefetches": 0, "prefetch_hits": 0, "prefetch_wasted": 0}
        counters |= {"cpu_experts": 0, "stall_seconds": 0.5, "waves": 8, "steps": {"prefill": 1, "decode": 3}}
        choices = {"slots": 32 if configuration == FULL else 8, "experts": 32, "expert_bytes": W}
    measured = {"seconds": seconds, "tokens": [list(t) for t in tokens], "ttft": [0.1, 0.2], "tpot": [0.3, None]}
    result = {"load_seconds": 1.0, "choices": choices, "batches": {"1": {**measured, "counters": counters}}}
    return summary.Run(configuration, repeat, result)


def rows_of(*runs):
    return {row.configuration: row for row in summary.rows(PLAN, list(runs), [1], RATES)}


def test_plan_compares_each_with_stock_and_all_resident():
    assert PLAN == [STOCK, FULL, QUARTER]
    assert len(plan.configurations(["10%", "25%"], ["lru", "lfu"], ["none", "ngram"])) == 2 * (2 + 4)
    with pytest.raises(plan.PlanError, match="magic"):
        plan.configurations(["10%"], ["lru"], ["magic"])
    with pytest.raises(plan.PlanError, match=r"lru\+magic.*\+prefetch, \+cpu, \+threshold, \+pointers"):
        plan.configurations(["10%"], ["lru+magic"], ["none"])
    with pytest.raises(plan.PlanError, match=r"lru\+threshold: .*add \+cpu"):
        plan.configurations(["10%"], ["lru+threshold"], ["none"])


def test_stocks_offloading_keeps_as_many_bytes():
    """Six layers of 1 GiB, a quarter of it on the GPU: 4.5 GiB outside, or three layers of four."""
    checkpoint = Checkpoint("toy", 64, 8, dict.fromkeys(range(6), 2**30), 0)
    *others, uva, prefetch = plan.configurations(["25%"], ["lru"], ["none"], (), ("uva", "prefetch"))
    assert others == PLAN and uva.is_stock and prefetch.is_stock and not uva.rounds
    assert (uva.name, prefetch.name) == ("stock uva 25%", "stock prefetch 25%")
    assert uva.stock_options(checkpoint)["cpu_offload_gb"] == 4.5
    options = prefetch.stock_options(checkpoint)
    assert (options["offload_group_size"], options["offload_num_in_group"]) == (4, 3)
    assert set(options) | set(uva.stock_options(checkpoint)) <= {field.name for field in fields(EngineArgs)}
    assert STOCK.stock_options(checkpoint) == {}
    for offload, size in (("disk", "25%"), ("uva", "32")):
        with pytest.raises(plan.PlanError):
            plan.configurations([size], ["lru"], ["none"], (), (offload,))


@pytest.mark.parametrize(
    ("policy", "knobs", "rounds"),
    [
        ("lru", {}, False),
        ("lru+prefetch", {"prefetch": "utility"}, False),
        ("lru+prefetch+cpu", {"prefetch": "utility", "cpu_experts": "waterfill"}, True),
        (
            "lru+prefetch+cpu+threshold",
            {"prefetch": "utility", "cpu_experts": "threshold"},
            True,
        ),
        ("lru+pointers", {"decisions": "device"}, True),
    ],
)
def test_what_follows_a_policys_name_is_knobs(policy, knobs, rounds):
    (configuration,) = plan.configurations(["25%"], [policy], ["none"])[2:]
    assert configuration.knobs() == {"slots": "25%", "policy": "lru", "decisions": "host", **knobs}
    assert configuration.rounds == rounds and not plan.Configuration(None, None, "none").rounds
    SpacConfig.parse(configuration.knobs())


def test_order_rotates_so_that_each_starts_once():
    orders = [plan.rotated(PLAN, repeat, 3) for repeat in range(3)]
    assert [order[0] for order in orders] == PLAN
    assert all(sorted(order, key=PLAN.index) == PLAN for order in orders)


def test_rows_with_stocks_tokens_have_speeds_and_bounds():
    rows = rows_of(run(STOCK, 5.0), run(FULL, 10.0), run(QUARTER, 40.0, hits=60, misses=20))
    assert {row.verdict for row in rows.values()} == {"same"}
    assert rows[FULL].ratio_to_stock == pytest.approx(0.5) and rows[FULL].ratio_to_bound == pytest.approx(1)
    # 10 s less 80 experts from fast memory (8 s) are the rest; 20 experts over the slow path take 200 s.
    assert rows[QUARTER].ratio_to_bound == pytest.approx(40 / (2 + 200))
    assert rows[QUARTER].bound_tokens_per_second == pytest.approx(6 / 202)
    assert rows[QUARTER].ratio_in_turn == pytest.approx(40 / (10 + 200)) and rows[FULL].ratio_in_turn == 1
    assert (rows[QUARTER].hit_rate, rows[QUARTER].cache_ratio) == (0.75, 0.25)


def test_bound_comes_from_the_fastest_resident_run():
    rows = rows_of(run(STOCK), run(FULL, 12.0), run(FULL, 10.0, repeat=1), run(FULL, 30.0, repeat=2))
    assert rows[FULL].ratio_to_bound == pytest.approx(1.2)


@pytest.mark.parametrize("wrong", [((1, 2, 3), (4, 9, 6)), ((1, 2, 3), (4, 5))])
def test_other_tokens_have_no_speed_anywhere(wrong):
    runs = [run(STOCK), run(FULL), run(QUARTER), run(QUARTER, 1.0, wrong, repeat=1)]
    row = rows_of(*runs)[QUARTER]
    assert row.verdict == "differs" and "repeat 1: 1 of 2 requests, number 1" in row.why
    assert row.tokens_per_second is row.ttft is row.ratio_to_stock is row.ratio_to_bound is None
    assert "seconds" not in str(summary.reported(runs[3], [row])["batches"])


def shown(rows) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(report.table(rows, 1, "toy"))
    return console.file.getvalue()


def test_rounding_is_named_and_has_speeds_but_no_bound():
    beside = plan.Configuration("25%", "lru+cpu", "none")
    runs = [run(STOCK), run(FULL), run(beside, 1.0, ((1, 2, 3), (4, 9, 6)), hits=60, misses=20)]
    rows = summary.rows([*PLAN, beside], runs, [1], RATES)
    (row,) = [row for row in rows if row.configuration == beside]
    assert row.verdict == "rounded" and "1 of 2 requests" in row.why
    assert (row.equal_requests, row.requests) == (1, 2)
    assert "rounded 1/2" in shown(rows) and "same 2/2" not in shown(rows)
    assert row.ratio_to_stock == pytest.approx(10) and row.ratio_to_bound is None


def test_a_stock_that_contradicts_itself_is_no_measure():
    rows = rows_of(run(STOCK), run(STOCK, tokens=((1, 2, 3), (4, 5, 7)), repeat=1), run(FULL))
    assert rows[STOCK].verdict == "differs" and rows[FULL].ratio_to_stock is None


def test_failed_and_unchecked_runs_have_no_speed():
    rows = rows_of(run(FULL), summary.Run(QUARTER, 0, error="exit code 1"))
    assert (rows[FULL].verdict, rows[QUARTER].verdict, rows[QUARTER].why) == ("pending", "failed", "exit code 1")
    assert rows[FULL].tokens_per_second is None
