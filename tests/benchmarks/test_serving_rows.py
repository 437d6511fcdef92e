"""The plan and the rows of the serving benchmark."""

from __future__ import annotations

from dataclasses import fields

import pytest
from vllm.engine.arg_utils import EngineArgs

from benchmarks.common import PlanError
from benchmarks.serving import summary
from benchmarks.serving.cases import beside_stock, rotated, slot_counts
from vllm_spac.config.config import SpacConfig
from vllm_spac.storage.checkpoint.headers import Checkpoint

PLAN = beside_stock(["25%"], ["lru"], ["none"])
STOCK, FULL, QUARTER = PLAN


def run(case, seconds=10.0, tokens=((1, 2, 3), (4, 5, 6)), hits=80, misses=0, repeat=0):
    counters, choices = {}, {}
    if case != STOCK:
        counters = {"hits": hits, "misses": misses, "loads": misses, "bytes": {"disk": misses * 100}}
        counters |= {"prefetches": 0, "prefetch_hits": 0, "prefetch_wasted": 0}
        counters |= {"cpu_experts": 0, "stall_seconds": 0.5, "waves": 8, "steps": {"prefill": 1, "decode": 3}}
        choices = {"slots": 32 if case == FULL else 8, "experts": 32, "expert_bytes": 100}
    measured = {"seconds": seconds, "tokens": [list(t) for t in tokens], "ttft": [0.1, 0.2], "tpot": [0.3, None]}
    result = {"load_seconds": 1.0, "choices": choices, "batches": {"1": {**measured, "counters": counters}}}
    return summary.Run(case, repeat, result)


def rows_of(*runs):
    return {row.case.name: row for row in summary.rows(PLAN, list(runs), [1])}


def test_plan_compares_each_with_stock_and_all_resident():
    assert [case.name for case in PLAN] == ["stock", "spac 100%", "spac 25% lru"]
    assert len(beside_stock(["10%", "25%"], ["lru", "lfu"], ["none", "ngram"])) == 2 * (2 + 4)
    with pytest.raises(PlanError, match="magic"):
        beside_stock(["10%"], ["lru"], ["magic"])
    with pytest.raises(PlanError, match=r"lru\+magic.*\+pointers"):
        beside_stock(["10%"], ["lru+magic"], ["none"])


def test_stocks_offloading_keeps_as_many_bytes():
    """Six layers of 1 GiB, a quarter of it on the GPU: 4.5 GiB outside, or three layers of four."""
    checkpoint = Checkpoint("toy", 64, 8, dict.fromkeys(range(6), 2**30), 0)
    *others, uva, prefetch = beside_stock(["25%"], ["lru"], ["none"], ("uva", "prefetch"))
    assert others == PLAN and uva.is_stock and prefetch.is_stock and not uva.rounds
    assert (uva.name, prefetch.name) == ("stock uva 25%", "stock prefetch 25%")
    assert uva.stock_options(checkpoint)["cpu_offload_gb"] == 4.5
    options = prefetch.stock_options(checkpoint)
    assert (options["offload_group_size"], options["offload_num_in_group"]) == (4, 3)
    assert set(options) | set(uva.stock_options(checkpoint)) <= {field.name for field in fields(EngineArgs)}
    for offload, size in (("disk", "25%"), ("uva", "32")):
        with pytest.raises(PlanError):
            beside_stock([size], ["lru"], ["none"], (offload,))


@pytest.mark.parametrize(
    ("policy", "knobs", "rounds"),
    [
        ("lru", {}, False),
        ("lru+pointers", {"decisions": "device"}, True),
    ],
)
def test_pointers_after_a_policys_name_are_a_knob(policy, knobs, rounds):
    (case,) = beside_stock(["25%"], [policy], ["none"])[2:]
    assert case.knobs == {"slots": "25%", "policy": "lru", "decisions": "host", **knobs}
    assert case.rounds == rounds and not STOCK.rounds
    SpacConfig.parse(case.knobs)


def test_order_rotates_so_that_each_starts_once():
    orders = [rotated(PLAN, repeat, 3) for repeat in range(3)]
    assert [order[0] for order in orders] == PLAN
    assert all(sorted(order, key=PLAN.index) == PLAN for order in orders)


def test_rows_with_stocks_tokens_have_speeds():
    rows = rows_of(run(STOCK, 5.0), run(FULL, 10.0), run(QUARTER, 40.0, hits=60, misses=20))
    assert {row.verdict for row in rows.values()} == {"same"}
    assert rows[FULL.name].ratio_to_stock == pytest.approx(0.5) and rows[QUARTER.name].ratio_to_stock == pytest.approx(
        0.125
    )
    assert rows[QUARTER.name].tokens_per_second.median == pytest.approx(6 / 40)
    assert (rows[QUARTER.name].hit_rate, rows[QUARTER.name].cache_ratio) == (0.75, 0.25)


@pytest.mark.parametrize("wrong", [((1, 2, 3), (4, 9, 6)), ((1, 2, 3), (4, 5))])
def test_other_tokens_have_no_speed_anywhere(wrong):
    runs = [run(STOCK), run(FULL), run(QUARTER), run(QUARTER, 1.0, wrong, repeat=1)]
    row = rows_of(*runs)[QUARTER.name]
    assert row.verdict == "differs" and "repeat 1: 1 of 2 requests, number 1" in row.why
    assert row.tokens_per_second is row.ttft is row.ratio_to_stock is None
    assert "seconds" not in str(summary.reported(runs[3], [row])["batches"])


def test_rounding_is_named_and_has_speeds():
    beside = beside_stock(["25%"], ["lru+pointers"], ["none"])[2]
    runs = [run(STOCK), run(FULL), run(beside, 1.0, ((1, 2, 3), (4, 9, 6)), hits=60, misses=20)]
    rows = summary.rows([*PLAN, beside], runs, [1])
    (row,) = [row for row in rows if row.case == beside]
    assert row.verdict == "rounded" and "1 of 2 requests" in row.why
    assert (row.equal_requests, row.requests) == (1, 2)
    assert row.ratio_to_stock == pytest.approx(10)


def test_a_stock_that_contradicts_itself_is_no_measure():
    rows = rows_of(run(STOCK), run(STOCK, tokens=((1, 2, 3), (4, 5, 7)), repeat=1), run(FULL))
    assert rows[STOCK.name].verdict == "differs" and rows[FULL.name].ratio_to_stock is None


def test_failed_and_unchecked_runs_have_no_speed():
    rows = rows_of(run(FULL), summary.Run(QUARTER, 0, error="exit code 1"))
    assert (rows[FULL.name].verdict, rows[QUARTER.name].verdict, rows[QUARTER.name].why) == (
        "pending",
        "failed",
        "exit code 1",
    )
    assert rows[FULL.name].tokens_per_second is None


def test_a_row_of_the_result_says_what_was_asked_for():
    """As in results of before: pages and pictures read these names."""
    *_, quarter = beside_stock(["25%"], ["lru+pointers"], ["ngram"], knobs={"store": "disk"}, guard="off")
    assert quarter.knobs["guard"] == "off" and quarter.knobs["store"] == "disk" and "guard" not in QUARTER.knobs
    plain = summary.Row(quarter, 1, "pending").plain()
    asked = {"slots": "25%", "policy": "lru+pointers", "speculation": "ngram", "offload": None}
    assert (plain["configuration"], plain["name"]) == (asked, "spac 25% lru+pointers")
    stock = beside_stock(["25%"], ["lru"], ["none"], ("uva",))[-1]
    asked = {"slots": "25%", "policy": None, "speculation": "none", "offload": "uva"}
    assert summary.Row(stock, 1, "pending").plain()["configuration"] == asked
    for text in ("", "25%,many"):
        with pytest.raises(PlanError, match="--slots"):
            slot_counts(text)
