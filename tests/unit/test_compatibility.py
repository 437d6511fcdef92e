"""The table of what goes with what: complete, true in pairs, and the page that is made of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_spac.cli.main import app
from vllm_spac.config.config import SpacConfig
from vllm_spac.integration import compatibility
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
    assert len(cells) == len(set(cells)) == 4 * 1014, "each kind of drafts has 1,014"
    assert sum(cell.speculation != "copy" for cell in cells) == 3042


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
    assert len(cells) == 4 * 1014
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
