"""Each paper's preset starts an engine of the toy model, says what it stands for, and gives way to single knobs.

Tokens are stock vLLM's where the preset is exact.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import engines
import forked
import pytest
from compare import METHODS, TOY, compare, copied, program
from exactness import FLOAT32, assert_same_tokens
from test_predictors import trained  # noqa: F401 - a fixture
from tree_runs import EAGLE3

from vllm_spac.config.presets import PRESETS

TARGET = TOY / "target"
COPY = {"method": "draft_model", "model": copied(TARGET), "num_speculative_tokens": 4}
TREE = {"block_size": 32, "max_num_batched_tokens": 256, "max_num_seqs": 1, "num_gpu_blocks_override": None}
SERVED = {  # preset: knobs that are set beside it, options of the engine, and counters that are above 0
    "moe-spac": ({"slots": "25%"}, {"speculative_config": METHODS["eagle3"]}, ("cpu_experts", "prefetch_hits")),
    "moe-spec": ({"tree": 15, "budget": "16"}, TREE | {"speculative_config": EAGLE3}, ()),
    "sp-moe": ({"slots": "25%"}, {"speculative_config": COPY, "gpu_memory_utilization": 0.2}, ("prefetch_hits",)),
    "speculating-experts": ({"speculate": "off"}, {}, ("prefetch_hits",)),
    "od-moe": (
        {"executor": "processes@workers=2@per_layer=2"},
        {"speculative_config": COPY, "gpu_memory_utilization": 0.2},
        (),
    ),
    "composed": ({"slots": "25%"}, {"speculative_config": METHODS["eagle3"]}, ()),
    "composed-lossy": ({"slots": "25%", "guard": "off"}, {"speculative_config": METHODS["eagle3"]}, ()),
}
LOSSY = "moe-spec", "composed-lossy"
pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_serves(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    given, options, counters = SERVED[name]
    spac, options = {"preset": name, **given}, {**FLOAT32, "max_tokens": 24, **options}
    if name == "speculating-experts":
        spac["prefetch"] = f"quasi_hidden@file={request.getfixturevalue('trained') / 'p.safetensors'}"
    if PRESETS[name].knobs.get("store") != "host":
        spac["disk_dir"] = str(tmp_path)
    done = forked.run(program(TARGET, spac, **options), {"VLLM_LOGGING_LEVEL": "INFO"})
    run = engines.Run(**forked.answer(done))
    [said] = {line.partition(") is ")[2] for line in done.stdout.splitlines() if f"preset={name} (" in line}
    words = shlex.split(said)
    knobs = {
        flag.removeprefix("--spac-").replace("-", "_"): value for flag, value in zip(*[iter(words)] * 2, strict=True)
    }
    assert knobs == {knob: str(value) for knob, value in PRESETS[name].knobs.items() if knob not in spac}
    if name in LOSSY:
        assert "LOSSY" in done.stdout and run.stats["budget"]["dropped_share"] > 0
    else:
        [stock] = compare(TARGET, [None], **options)
        assert_same_tokens(run, stock)
    assert all(run.stats[counter] > 0 for counter in counters), run.stats
