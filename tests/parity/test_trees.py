"""Draft trees say what stock vLLM says without speculation: greedy, seeded, constrained, cut short and preempted."""

from __future__ import annotations

from typing import Any

import engines
import numpy as np
import pytest
import tree_runs

from vllm_spac.config.config import SpacConfig
from vllm_spac.methods.trees.tensors import Scratch
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.traces.trace_text import Text

LOGPROB = 1e-4  # float32 sums in another order move a logit by some 1e-6; a wrong key moves it by far more
EXACT = {"slots": "25%", "guard": "off"}


@pytest.fixture(scope="module")
def stock() -> dict[str, list[dict]]:
    """Answers by kind, in float32: a tree's rows and a single row are steps of different shapes."""
    return tree_runs.run(None)["answers"]


def assert_same(found: dict, stock: dict[str, list[dict]]) -> None:
    for kind, answers in stock.items():
        same = [agree(ours, theirs) for ours, theirs in zip(found["answers"][kind], answers, strict=True)]
        assert all(same), f"{kind}: answers {[i for i, equal in enumerate(same) if not equal]} of {len(same)} differ"


def agree(ours: dict, theirs: dict) -> bool:
    """The same tokens, and the same candidates with the same log-probabilities."""
    pairs = [
        pair for both in zip(ours["logprobs"], theirs["logprobs"], strict=True) for pair in zip(*both, strict=True)
    ]
    near = all(a[0] == b[0] and abs(a[1] - b[1]) < LOGPROB for a, b in pairs)
    return ours["tokens"] == theirs["tokens"] and near


def trees_of(found: dict) -> dict[str, Any]:
    return found["stats"]["trees"]


def test_sixteen_nodes(stock) -> None:
    """And without its two essential parts it does not: the test would see a row that attends to the wrong keys."""
    spac = EXACT | {"store": "host", "tree": 16}
    controls = "without compaction", "without positions"
    poison = () if engines.V2 else ("poison",)  # it reads V1's batch
    found = tree_runs.run(spac, tricks=(*poison, "refusals", *controls), speculative_config=tree_runs.EAGLE3)
    assert_same(found, stock)
    assert set(found["refused"]) == {"min_p", "logit_bias"}, "vLLM serves neither with drafts"
    assert trees_of(found)["trees"] > 500 and found["stats"]["misses"] > 0 and found["stats"]["steps"]["mixed"] > 0
    assert sum(int(tokens) * count for tokens, count in found["stats"]["tree_accepted"].items()) > 500
    for control in controls:
        said = [answer["tokens"] for answer in found["answers"][control]]
        same = sum(ours == answer["tokens"] for ours, answer in zip(said, stock["greedy"], strict=True))
        assert same < len(said) / 2, control  # accepted rows of a tree's first path are in place without compaction


@pytest.mark.full
@pytest.mark.parametrize(
    "spac",
    [
        {"store": "disk", "tree": "63@width=4"},
        {"store": "host", "slots": "13%", "tree": 63},
        {"store": "host", "slots": "13%", "tree": "8@depth=3"},
        {"slots": "100%", "tree": 63, "guard": "on"},
    ],
    ids=["63, narrow", "63", "8", "63 with the guard"],
)
def test_trees_that_are_cut_preempted_and_resumed(stock, spac) -> None:
    """With prefix caching, and a cache that holds a few requests only.

    A step has room for all seeded requests with all that they have said: stock fails on a CPU where a seeded one is
    prefilled in parts ("CPU Generator does not use offset"), also when it is resumed.
    """
    shape = SpacConfig(**EXACT | spac).draft_tree
    assert shape is not None
    requests, rows = tree_runs.SETTINGS["max_num_seqs"], max(shape.nodes + 1, shape.expanded)
    scratch = Scratch(shape, requests, tree_runs.SETTINGS["block_size"])
    found = tree_runs.run(
        EXACT | spac,
        tricks=("cut", "poison", "small cache"),
        speculative_config=tree_runs.EAGLE3,
        enable_prefix_caching=True,
        num_gpu_blocks_override=scratch.count + 20,
        max_num_batched_tokens=max(tree_runs.SEEDED_TOKENS, requests * rows),
    )
    assert_same(found, stock)
    enough = 100 if (EXACT | spac)["guard"] == "off" else 20
    assert found["preempted"] > 0 and trees_of(found)["trees"] > enough


@pytest.mark.full
def test_structured_output_beside_trees() -> None:
    """Its requests get chains, by vLLM's masks; the others in the same steps get trees."""
    options = {"skip_tokenizer_init": False}
    plain = tree_runs.run(None, tree_runs.WITH_TOKENIZER, **options)
    spac = EXACT | {"store": "host", "tree": 16}
    found = tree_runs.run(spac, tree_runs.WITH_TOKENIZER, ("poison",), speculative_config=tree_runs.EAGLE3, **options)
    assert_same(found, plain["answers"])
    assert trees_of(found)["chains"] > 0 and trees_of(found)["trees"] > 20


@pytest.mark.full
def test_a_compiled_engine() -> None:
    """Against a compiled one of stock vLLM, whose sums may have another order than an eager one's."""
    kinds, options = ("greedy", "seeds"), {"enforce_eager": False}
    plain = tree_runs.run(None, kinds, **options)
    spac = EXACT | {"store": "host", "tree": 16}
    found = tree_runs.run(spac, kinds, ("poison",), speculative_config=tree_runs.EAGLE3, **options)
    assert_same(found, plain["answers"])
    assert trees_of(found)["trees"] > 100


@pytest.mark.full
def test_a_budget_ranks_experts_across_the_tree() -> None:
    """Votes to the power 0 are uniform ones, token by token; the drafter's probabilities weigh every tree."""
    budgeted = EXACT | {"store": "host", "tree": 16}
    weighted = {"uniform": "24", "path 0": "24@votes=path@alpha=0", "path": "24@votes=path"}
    found = {
        name: tree_runs.run(budgeted | {"budget": budget}, ("greedy",), speculative_config=tree_runs.EAGLE3)
        for name, budget in weighted.items()
    }
    said = {name: [answer["tokens"] for answer in run["answers"]["greedy"]] for name, run in found.items()}
    assert said["path 0"] == said["uniform"] != said["path"]
    budget = found["path"]["stats"]["budget"]
    assert budget["unweighted"] <= 1 and 0 < budget["experts"] <= 24 * budget["shortlists"]


@pytest.mark.full
def test_the_trace_of_a_tree_has_the_text_that_plain_decoding_has(tmp_path) -> None:
    """Which rows of a tree are text, and which experts its tokens chose, follow from the trace alone."""
    runs = {"plain": ({}, None), "tree": ({"tree": 16}, tree_runs.EAGLE3)}
    texts, traces = {}, {}
    for name, (knobs, speculation) in runs.items():
        options = {} if speculation is None else {"speculative_config": speculation}
        spac = {"slots": "25%", "store": "host", "record": f"trace={tmp_path / name}"} | knobs
        tree_runs.run(spac | ({"guard": "off"} if speculation else {}), ("to the end",), **options)
        traces[name] = Trace.load(tmp_path / name)
        texts[name] = Text.of(traces[name])
    assert traces["tree"].steps < 0.8 * traces["plain"].steps and traces["tree"].row_back.max() > 1
    assert len(texts["plain"].start) == len(texts["tree"].start) == 2, "one request"
    tokens = min(len(texts["plain"]), len(texts["tree"]))  # the last step of the tree may accept more than is asked for
    assert tokens > 200
    same = np.sort(texts["plain"].ids[:tokens], axis=2) == np.sort(texts["tree"].ids[:tokens], axis=2)
    assert same.all(axis=(1, 2)).mean() > 0.99, "but for ties of routers, between rows alone and rows of a batch"
