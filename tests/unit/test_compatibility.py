"""The table of what goes with what: complete, true in pairs, and the page that is made of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from typer.testing import CliRunner

from vllm_spac.cli.main import app
from vllm_spac.config.config import SpacConfig
from vllm_spac.errors import UnsupportedError
from vllm_spac.integration import compatibility
from vllm_spac.integration.hooks import drafts
from vllm_spac.integration.stepping import tree_arguments
from vllm_spac.tools.planning import compatibility_table
from vllm_spac.tools.planning.compatibility_table import Cell, RankCount

PAGE = Path(__file__).parents[2] / "vllm_spac" / "COMPATIBILITY.md"
KINDS = ("budget", "prefetch", "cpu_experts", "speculate")  # in the order in which a cell has them


def parts(cell: Cell) -> list[Cell]:
    """The cells of no more than two settings that a cell consists of; more than one rank is a setting."""
    groups = [(pair,) for pair in cell.settings if pair[0] not in ("prefetch", "speculate")]
    if ahead := tuple(pair for pair in cell.settings if pair[0] in ("prefetch", "speculate")):
        groups.append(ahead)  # speculation is by a predictor
    two = [(), *groups, *(sorted(one + other, key=lambda p: KINDS.index(p[0])) for one, other in pairs_of(groups))]
    alone = [Cell(cell.platform, cell.plane, tuple(some), cell.speculation, RankCount()) for some in two]
    return alone + [Cell(cell.platform, cell.plane, some, cell.speculation, cell.ranks) for some in [(), *groups]]


def pairs_of(groups: list) -> list:
    return list(itertools.combinations(groups, 2))


def test_the_combinations_are_all_there_once() -> None:
    cells = list(compatibility_table.cells())
    assert len(cells) == len(set(cells)) == 4 * 624, "each kind of drafts has 624"
    assert sum(cell.speculation != "copy" for cell in cells) == 3 * 624


def test_what_goes_in_pairs_goes_together() -> None:
    """So the page, which shows pairs, says all."""
    for cell in compatibility_table.cells():
        assert (cell.refusal is None) == all(part.refusal is None for part in parts(cell)), cell


def test_a_refusal_says_why_and_what_helps() -> None:
    for cell in compatibility_table.cells():
        if cell.refusal is not None:
            assert cell.refusal.problem and cell.refusal.remedies, cell


def test_the_page_is_what_the_table_says() -> None:
    """Otherwise: `vllm-spac compatibility --markdown > vllm_spac/COMPATIBILITY.md`."""
    assert PAGE.read_text(encoding="utf-8") == compatibility_table.page()


def engine(method: str, v2: bool = False, **speculation: object) -> SimpleNamespace:
    """As much of a ``VllmConfig`` as these rules read."""
    speculation = {"parallel_drafting": method in ("dflash", "dspark")} | speculation
    hidden = {"use_local_argmax_reduction": False, "use_heterogeneous_vocab": False}
    model, draft = (SimpleNamespace(model=name, revision=None) for name in ("MODEL", "DRAFT"))
    return SimpleNamespace(
        use_v2_model_runner=v2,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, enable_expert_parallel=False, distributed_executor_backend="uni"
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


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_nothing_looks_at_drafts_of_one_parallel_forward(method: str, v2: bool) -> None:
    """DFlash, XPress (which is DFlash by its method) and DSpark."""
    assert f"parallel drafting ({method})" in refused({"budget": 16, "budget_votes": "path"}, engine(method, v2))
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


def test_a_refusal_more_is_seen_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusals(config: SpacConfig, *_):
        yield config.uses_cpu_experts, "CPU experts are on holiday", ()

    compatibility_table._refusal.cache_clear()
    monkeypatch.setattr(compatibility, "_refusals", refusals)
    assert "CPU experts are on holiday" in compatibility_table.page()
    compatibility_table._refusal.cache_clear()


def test_as_json() -> None:
    result = CliRunner().invoke(app, ["compatibility", "--json"])
    cells = json.loads(result.stdout)
    assert len(cells) == 4 * 624
    for cell in cells:
        assert list(cell) == [
            "platform", "knobs", "speculation", "ranks", "expert_parallel", "exact", "accepted", "reason",
        ]  # fmt: skip
        assert cell["accepted"] == (cell["reason"] == "")
        if cell["accepted"]:
            SpacConfig.parse(cell["knobs"])
    assert any("budget" in cell["knobs"] and not cell["exact"] for cell in cells)
    text = CliRunner().invoke(app, ["compatibility"]).stdout
    assert "combinations are accepted" in text and "Reasons" in text
