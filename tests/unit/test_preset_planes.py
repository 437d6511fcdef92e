"""Where the papers' presets land on a GPU, and why: over every part of them that is set without the others.

``python tests/unit/test_preset_planes.py`` prints the table of the document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
from test_gpu_defaults import gpu, model, started

from vllm_spac.config.config import SpacConfig
from vllm_spac.config.presets import PRESETS
from vllm_spac.errors import ConfigError
from vllm_spac.integration import gpu_defaults

__all__ = ["gpu"]  # a fixture
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "vllm_spac" / "integration" / "README.md"
WHOLE = "each expert has a slot"


def knobs_of(name: str) -> dict[str, Any]:
    """What a preset sets; a predictor that must be trained has its file."""
    knobs = dict(PRESETS[name].knobs)
    if knobs.get("prefetch") == "quasi_hidden":
        knobs["prefetch"] += "@file=FILE"
    return knobs


def settings() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each preset's name with each part of its knobs; what executes predictions has their predictor."""
    for name in PRESETS:
        knobs = knobs_of(name)
        for some in chain.from_iterable(combinations(knobs, count) for count in range(len(knobs) + 1)):
            if "speculate" not in some or "prefetch" in some:
                yield name, {knob: knobs[knob] for knob in some}


def landed(knobs: Mapping[str, Any]) -> tuple[str, str]:
    """The plane of an engine with these knobs on a GPU, and the reason."""
    config = SpacConfig.parse(dict(knobs))
    if config.has_workers:
        return "workers", ""
    args = type("Args", (), {"additional_config": {"spac": dict(knobs)}, "nnodes": 1})()
    reason = gpu_defaults._of_engine(args, config)
    return ("pointers", "") if reason is None else ("slots", reason)


def table() -> list[str]:
    """The rows of the document."""
    rows = []
    for name in PRESETS:
        plane, reason = landed(knobs_of(name))
        blame = [f"`{knob}={knobs_of(name)[knob]}`" for knob in blamed(name) if reason]
        rows.append(f"| `{name}` | {plane} | {', '.join(blame)} |")
    return rows


def blamed(name: str) -> list[str]:
    """The knobs of a preset that keep it from the device's plane, each by itself."""
    every = ((part, knobs) for of, knobs in settings() if of == name for part in knobs if [*knobs] == [part])
    return [part for part, knobs in every if landed(knobs)[0] == "slots"]


def test_the_document_has_the_table() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Where a preset lands on a GPU")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `.*$", section, re.MULTILINE) == table()


def test_a_part_of_a_preset_lands_where_its_knobs_do() -> None:
    """On the host's plane if one of them alone does, which the reason names."""
    count = 0
    for name, knobs in settings():
        plane, reason = landed(knobs)
        count += 1
        if "executor" in knobs:
            assert plane == "workers"
            continue
        alone = [knob for knob in knobs if knob in blamed(name)]
        if alone == ["slots"] and "budget" in knobs and "tree" not in knobs:  # only graphs of ours hold a budget
            alone = []
        assert (plane == "slots") == bool(alone), (name, knobs, reason)
        if plane == "slots" and WHOLE not in reason:
            assert all(knob in reason for knob in alone), (name, knobs, reason)
    assert count > 90


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "od-moe"])
def test_the_log_says_where_a_preset_lands(gpu, caplog, name: str) -> None:
    caplog.set_level("INFO")
    given = {"preset": name, **{knob: value for knob, value in knobs_of(name).items() if "FILE" in str(value)}}
    config, _ = started(given, of=model())
    plane, reason = landed(knobs_of(name))
    assert config.execution_name == plane
    said = f"preset={name} is served by plane={plane}: {reason}" if reason else "plane=pointers: no layer waits"
    assert said in caplog.text


def test_figures_of_refusals_are_those_of_results() -> None:
    """A part that no device has is slower, or hits less, than what the device has in its place."""
    with pytest.raises(ConfigError, match="took 1.0 to 1.1 times as long as waterfill"):
        SpacConfig.parse({"plane": "pointers", "cpu_experts": "threshold"})
    found = json.loads((ROOT / "benchmarks" / "results" / "real_tables.json").read_text())
    theirs, ours = found["table2"]["MoE-SpAc"], found["table2"]["reuse, CPU experts, drafts"]
    over = [a["tpot_ms"] / b["tpot_ms"] for a, b in zip(theirs, ours, strict=True)]
    assert (round(min(over), 1), round(max(over), 1)) == (1.0, 1.1)
    with pytest.raises(ConfigError, match="on average fewer hits than reuse"):
        SpacConfig.parse({"plane": "pointers", "policy": "layer_lru"})
    hits = json.loads((ROOT / "benchmarks" / "results" / "real_policies.json").read_text())["mean_hit_rates"]
    assert all(a < b for a, b in zip(hits["layer_lru"], hits["reuse"], strict=True))


if __name__ == "__main__":
    print(*table(), sep="\n")
