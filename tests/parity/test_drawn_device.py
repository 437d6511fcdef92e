"""Two hundred drawn settings of a GPU, where the device decides: stock vLLM's tokens. With the V2 runner alone.

``make test-v2`` tries a few. ``SPAC_DRAWN=FILE`` asks for all of them, in an hour: FILE keeps what came of each, and a
run that was interrupted goes on.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import drawn_device
import engines
import pytest
from drawn_device import COUNT, FILE, drawn
from test_matrix import trained

__all__ = ["trained"]  # a fixture
pytestmark = [
    pytest.mark.v2,
    pytest.mark.skipif(not engines.V2, reason="vLLM's V2 runner has these graphs; `make test-v2` runs them"),
]
FEW = 4


def check(seeds: list[int], trained: Path | None, folder: Path) -> None:
    """Tries all of them, also after one that is wrong."""
    kept = Path(os.environ["SPAC_DRAWN"]) if "SPAC_DRAWN" in os.environ else None
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept is not None and kept.exists() else []
    done = {line["seed"] for line in lines if line.get("wrong") is None}
    models, lines = drawn_device.Models(folder, trained), []
    for seed in seeds:
        if seed in done:
            continue
        lines.append(drawn_device.outcome(models, seed))
        if kept is not None:
            with kept.open("a") as file:
                print(json.dumps(lines[-1]), file=file)
    wrong = [line for line in lines if line.get("wrong") is not None]
    assert not wrong, "\n\n".join(map(str, wrong))


def test_a_few_of_them(tmp_path: Path) -> None:
    """Without predictors that have to be trained."""
    few = [seed for seed in range(COUNT) if FILE not in drawn(seed).spac.get("prefetch", "")]
    check(few[:FEW], None, tmp_path)


@pytest.mark.skipif("SPAC_DRAWN" not in os.environ, reason="an hour; SPAC_DRAWN=FILE asks for it")
@pytest.mark.timeout(0)  # an hour; each engine has a limit of its own
def test_all_of_them(trained: Path, tmp_path: Path) -> None:
    check(list(range(COUNT)), trained, tmp_path)


def test_the_draw_covers_what_a_setting_has() -> None:
    every = [drawn(seed) for seed in range(COUNT)]
    assert {setting.form for setting in every} == set(drawn_device.FORMATS)
    assert {setting.drafts for setting in every} == set(drawn_device.DRAFTS)
    known = {"policy": drawn_device.POLICIES, "prefetch": drawn_device.PREDICTORS, "tree": drawn_device.TREES}
    for knob, values in known.items():
        assert set(values) <= {setting.spac.get(knob) for setting in every}, knob
