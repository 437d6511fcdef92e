"""What goes with what: the table of the document, and ways to draft."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from combinations import Cell, cells

from vllm_spac.config.config import SpacConfig
from vllm_spac.errors import UnsupportedError
from vllm_spac.integration import compatibility
from vllm_spac.integration.hooks import drafts
from vllm_spac.integration.stepping import tree_arguments

PAGE = Path(__file__).parents[2] / "vllm_spac" / "integration" / "README.md"


def in_words(cell: Cell) -> set[str]:
    """What the table calls the parts of a combination."""
    given, head = dict(cell.settings), cell.speculation in ("chain", "tree")
    parts = {
        "executor=processes": cell.plane == "workers",
        "plane=pointers": cell.plane == "device",
        "no prefetch": "prefetch" not in given,
        "no drafter": cell.speculation == "none",
        "EAGLE heads": head,
        "a draft model with experts": cell.speculation == "copy",
        "several ranks": cell.ranks.count > 1,
        "divided experts on a CPU": cell.ranks.divide_experts and cell.platform == "cpu",
    }
    return {part for part, there in parts.items() if there} | {f"prefetch={given.get('prefetch')}", *given}


def test_all_goes_together_but_what_the_table_names(monkeypatch) -> None:
    monkeypatch.setattr(compatibility, "missing", lambda: "")  # whether or not there is a compiler
    section = PAGE.read_text(encoding="utf-8").partition("## What goes with what")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \|$", section.replace("`", ""), re.MULTILINE)
    never = [pair for row in rows for pair in product(*(text.split(", ") for text in row))]
    assert len(rows) <= 25 and len(never) == len(set(never)), "a short table that says nothing twice"
    needed, every = set(), set()
    for cell in cells():
        every.add(cell)
        found = in_words(cell)
        named = [pair for pair in never if found.issuperset(pair)]
        assert (cell.refusal is not None) == bool(named), (cell, named)
        if len(named) == 1:
            needed.update(named)
        if cell.refusal is not None:
            assert cell.refusal.problem and cell.refusal.remedies, cell
    assert needed == set(never) and len(every) == 4 * 1152


def engine(method: str, v2: bool = False, **speculation: object) -> SimpleNamespace:
    """As much of a ``VllmConfig`` as these rules read."""
    speculation = {"parallel_drafting": method in ("dflash", "dspark")} | speculation
    hidden = {"use_local_argmax_reduction": False, "use_heterogeneous_vocab": False}
    model, draft = (SimpleNamespace(model=name, revision=None) for name in ("MODEL", "DRAFT"))
    return SimpleNamespace(
        use_v2_model_runner=v2,
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            tensor_parallel_size=1,
            enable_expert_parallel=False,
            distributed_executor_backend="uni",
        ),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        speculative_config=SimpleNamespace(method=method, draft_model_config=draft, **hidden, **speculation),
        model_config=model,
    )


def refused(knobs: dict, vllm_config: SimpleNamespace) -> str:
    """Why an engine with drafts would not start; empty if it would."""
    try:
        compatibility.check(SpacConfig.parse({"slots": "25%"} | knobs), vllm_config, gpu=False)
    except UnsupportedError as error:
        return str(error)
    return ""


def test_every_way_to_draft_that_vllm_has_is_served_or_refused_by_name() -> None:
    from vllm.config.speculative import MTPModelTypes, SpeculativeMethod

    ways = set(get_args(SpeculativeMethod)) - set(get_args(MTPModelTypes)) | {"mtp", "dflash", "dspark"}
    assert {way for way in ways if refused({}, engine(way))} == {"extract_hidden_states"}
    problem = refused({}, engine("of_tomorrow"))
    assert "does not know what of_tomorrow does" in problem and "use EAGLE, EAGLE-3 or a draft model" in problem


def test_pipeline_stages_have_no_files_about_all_layers() -> None:
    stages = engine("ngram")
    stages.parallel_config.pipeline_parallel_size = 2
    flags = "with --pipeline-parallel-size 2"
    assert f"neural@file=x (--spac-prefetch) {flags} (the file is for" in refused({"prefetch": "neural@file=x"}, stages)
    assert f"trace=x (--spac-record) {flags} (no stage has" in refused({"record": "trace=x"}, stages)
    assert refused({"prefetch": "gate"}, stages) == ""


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_nothing_looks_at_drafts_of_one_parallel_forward(method: str, v2: bool) -> None:
    """DFlash, XPress (which is DFlash by its method) and DSpark."""
    assert f"parallel drafting ({method})" in refused({"budget": "16@votes=path"}, engine(method, v2))
    assert "a copy of this model" in refused({"prefetch": "shadow"}, engine(method, v2))
    config = engine(method, v2)
    config.model_config = None
    no, what, _ = next(tree_arguments._refusals(SpacConfig.parse({"tree": 4}), config))
    assert no and what == f"drafts of {method}"


@pytest.mark.parametrize(
    ("method", "v2", "reason"),
    [
        ("dflash", False, ""),  # run with V1: parity/test_speculation.py
        ("dflash", True, "was not tried with drafts of dflash in V2"),
        ("dspark", True, "was not tried with drafts of dspark"),
        ("suffix", False, "was not tried with drafts of suffix"),
    ],
)
def test_the_guard_leaves_drafts_alone_that_it_was_not_tried_with(method: str, v2: bool, reason: str) -> None:
    vllm_config = engine(method, v2)
    assert refused({}, vllm_config) == ""
    assert bool(drafts.unguarded(vllm_config)) == bool(reason)
    assert reason in (problem := refused({"guard": "on"}, vllm_config)) and bool(problem) == bool(reason)


@pytest.mark.parametrize("way", ["synthetic", "fly"])
def test_the_guard_leaves_lossy_verification_alone(way: str) -> None:
    """Its tokens depend on how many drafts a step has, and stock's are those of all."""
    found = drafts.unguarded(engine("eagle3", rejection_sample_method=way))
    assert f"{way} is lossy" in str(found) and "drop rejection_sample_method" in str(found)
    assert drafts.unguarded(engine("eagle3", rejection_sample_method="block")) is None
