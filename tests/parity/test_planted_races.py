"""Races in an engine that has all that moves experts: each is found by its tokens, or by who has which slot.

With the V2 runner alone, see ``planted_races``; three more are in ``test_full_graphs.py``.
"""

from __future__ import annotations

import drawn_device
import engines
import planted_races
import pytest
from planted_races import RACES

pytestmark = [
    pytest.mark.v2,
    pytest.mark.skipif(not engines.V2, reason="vLLM's V2 runner has these graphs; `make test-v2` runs them"),
]
QUICK = ("publish_before_the_fill", "leave_the_victim_s_address")  # an engine takes 10 seconds


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return drawn_device.Models(tmp_path_factory.mktemp("models"), None).expected("bf16").of(planted_races.SETTING)


@pytest.mark.parametrize("mode", ["none", "late"])
def test_without_a_race_tokens_are_stock_s(mode: str, stock: list[list[int]]) -> None:
    found = planted_races.run(mode)
    assert found["said"] == stock and found["looked"] == "" and found["replays"] > 30
    stats = found["stats"]
    moved = [stats["bytes"][f"host{way}"] for way in ("", " ahead", " staged", " streamed")]
    assert all(moved) and stats["cpu_experts"] + stats["cpu_late"] > 0
    assert stats["settled"] == planted_races.SETTLED and {"prefill", "verify", "decode"} <= stats["steps"].keys()


@pytest.mark.parametrize(
    "race", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in RACES]
)
def test_a_race_is_found(race: str, stock: list[list[int]]) -> None:
    found = planted_races.run(race)
    assert "ended" in found or found["said"] != stock or found["looked"] != ""
