"""Steps in full CUDA graphs, emulated: drafts that are cut in them, steps without drafts beside them, draft trees.

Tokens are stock's, eager and without drafts, in float32. With the V2 runner alone, see ``full_graphs``.
"""

from __future__ import annotations

import functools

import engines
import graph_runs
import pytest
from graph_runs import EAGLE3, NGRAM

pytestmark = [
    pytest.mark.v2,
    pytest.mark.skipif(not engines.V2, reason="vLLM's V2 runner has these graphs; `make test-v2` runs them"),
]
POINTERS = {"slots": "25%", "plane": "pointers"}
CUT = POINTERS | {"guard": "on@cut=always"}
CHAIN = {"speculative_config": EAGLE3 | {"num_speculative_tokens": 4}}
TREE = {"speculative_config": EAGLE3}


@functools.cache
def stock() -> list[list[int]]:
    said = graph_runs.run(None, graphs=False)["said"]
    assert len({tuple(tokens) for tokens in said}) > 4
    return said


def test_stock_s_own_graphs_are_emulated() -> None:
    found = graph_runs.run(None, **CHAIN)
    assert found["said"] == stock() and found["replays"] > 30, "of the target and of the drafter"


def test_drafts_are_cut_in_graphs() -> None:
    found = graph_runs.run(CUT, ("plan", "cut"), **CHAIN)
    assert found["said"] == stock() and found["replays"] > 30
    cuts = found["stats"]["device_chooser"]
    assert 0 < cuts["cut_drafts"] < cuts["drafts"], "some"
    assert found["stats"]["guard"]["steps"].keys() >= {"0", "4"} and not found["cold"], "nothing ran for the first time"


def test_without_the_flag_none_is() -> None:
    found = graph_runs.run(POINTERS, ("plan", "cut"), **CHAIN)
    assert found["said"] == stock() and found["replays"] > 30 and "device_chooser" not in found["stats"]


def test_drafts_of_n_grams_are_planned_beside_graphs() -> None:
    found = graph_runs.run(CUT, ("plan",), speculative_config=NGRAM)
    assert found["said"] == stock() and found["replays"] > 30


def test_one_request_at_a_time_has_graphs_without_drafts() -> None:
    found = graph_runs.run(CUT, ("plan", "cut"), max_num_seqs=1, **CHAIN)
    steps = found["stats"]["guard"]["steps"]
    assert found["said"] == stock() and steps["0"] > 5 and steps["4"] > 5
    # each of these steps replays the target's graph, and some the drafter's: only prompts run without one
    assert found["replays"] >= steps["0"] + steps["4"]


@pytest.mark.parametrize("guard", ["off", "on", "on@cut=always"])
def test_trees_are_verified_and_grown_in_graphs(guard: str) -> None:
    """Three requests in the graph of four, too."""
    found = graph_runs.run(POINTERS | {"tree": "16", "guard": guard}, ("plan", "cut"), **TREE)
    assert found["said"] == stock() and found["replays"] > 20
    trees = found["stats"]["trees"]
    assert trees["trees"] > 10 and trees["unknown"] == 0
    if guard == "on@cut=always":
        assert found["stats"]["device_chooser"]["cut_drafts"] > 0 and not found["cold"]


def test_more_requests_than_run_at_once_have_trees_in_turn() -> None:
    """In graphs of one, two and three requests."""
    found = graph_runs.run(POINTERS | {"tree": "7@depth=3@width=3", "guard": "off"}, tokens=40, max_num_seqs=3, **TREE)
    assert found["said"] == graph_runs.run(None, graphs=False, tokens=40)["said"]


@pytest.mark.parametrize(("budget", "exact"), [("64@votes=path", True), ("16@votes=path", False)])
def test_a_budget_with_path_votes_holds_in_graphs_of_trees(budget: str, exact: bool) -> None:
    """Beside reads ahead and a share of the CPU, and as where the host decides, without these: to the token."""
    spac, tricks = CUT | {"tree": "16", "budget": budget}, ("plan", "cut")
    found = graph_runs.run(spac | {"prefetch": "gate", "cpu_experts": "1"}, tricks, **TREE)
    host = graph_runs.run(spac | {"plane": "slots"}, tricks, graphs=False, **TREE)
    assert found["said"] == host["said"] and found["replays"] > 20
    assert (found["said"] == stock()) is exact
    stats = found["stats"]
    assert stats["budget"]["experts"] > 0 or exact
    assert stats["prefetch_hits"] > 0 and stats["cpu_experts"] > 0 and stats["device_chooser"]["cut_drafts"] > 0


def test_graphs_wait_for_what_is_not_pinned() -> None:
    """Beside drafts, a share of the CPU, a budget that cuts nothing and what a predictor reads ahead."""
    spac = CUT | {"cpu_experts": "1", "budget": "64", "prefetch": "gate"}
    found = graph_runs.run(spac, ("plan", "cut", "unpin"), **CHAIN)
    assert found["said"] == stock() and found["replays"] > 30 and found["stats"]["stall_seconds"] > 0


@pytest.mark.parametrize(("host_memory", "rows", "cpu"), [("6MiB", 64, "off"), ("96KiB", 1, "off"), ("6MiB", 64, "1")])
def test_graphs_wait_for_what_is_on_a_disk(host_memory: str, rows: int, cpu: str, tmp_path) -> None:
    """With host memory for a sixth of the experts, of which the CPU computes some, or for one of them.

    Of fewer rows than slots many change hands: an address that is not taken away shows. With half of the experts it did
    not.

    Beside cut drafts, a budget and reads ahead.
    """
    disk = {"store": "disk", "disk_dir": str(tmp_path), "host_memory": host_memory, "cpu_experts": cpu}
    found = graph_runs.run(CUT | disk | {"budget": "64", "prefetch": "gate"}, ("plan", "cut"), **CHAIN)
    stats = found["stats"]
    assert found["said"] == stock() and found["replays"] > 30 and stats["execution"] == "pointers"
    assert stats["bytes"]["disk"] > 0 and stats["stall_seconds"] > 0 and stats["misses"] > 0
    assert int(rows * 0.7) <= stats["host_experts"] <= rows and (stats["cpu_experts"] > 20) == (cpu != "off")


@pytest.mark.parametrize("bug", ["not warmed up", "new memory", "padding writes"])
def test_the_emulation_shows_bugs(bug: str) -> None:
    spac, drafts = (CUT, CHAIN) if bug == "not warmed up" else (POINTERS | {"tree": "16", "guard": "off"}, TREE)
    found = graph_runs.run(spac, ("plan", "cut", bug), **drafts)
    assert found["cold"] if bug == "not warmed up" else found["said"] != stock()
