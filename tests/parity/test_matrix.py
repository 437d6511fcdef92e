"""Engines drawn from all combinations that are accepted on a CPU, in float32.

With V2's runner (``make test-v2``), from those that it accepts on a GPU, which has this runner.

Exact ones say what stock vLLM of as many ranks says. Lossy ones say what an engine with a slot for each expert says,
which reads nothing ahead and leaves nothing to the CPU: what is dropped depends on no cache. Hypothesis draws the same
combinations in each run. ``SPAC_MATRIX=FILE`` keeps what came of each: a run that was interrupted goes on, and one that
failed tries again what failed.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import engines
import forked
import pytest
from combinations import FILE, Cell, RankCount, cells
from compare import METHODS, TOY, copied, program
from exactness import FLOAT32, assert_same_tokens
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

QUICK, ENGINES = 3, 300
TEXTS = Path(__file__).parents[2] / "benchmarks" / "toy" / "texts.py"
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
COPY = {"method": "draft_model", "model": copied(TOY / "target"), "num_speculative_tokens": 4}
HEAD = {name: value for name, value in METHODS["eagle3"].items() if name != "num_speculative_tokens"}
DRAFTS = {"none": None, "chain": METHODS["eagle3"], "tree": HEAD, "copy": COPY}
# Trees need rows and blocks of their own.
ROOM = {"max_num_batched_tokens": 256, "max_num_seqs": 2, "block_size": 32, "num_gpu_blocks_override": None}
ASKED = {"prompts": engines.PROMPTS[2:5], "max_tokens": 12, "kv_cache_memory_bytes": 128 << 20, **ROOM, **FLOAT32}

PLATFORM = "gpu" if engines.V2 else "cpu"
accepted = [cell for cell in cells() if cell.platform == PLATFORM and cell.refusal is None]
drawn = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # an engine takes half a minute: the first one that differs is reported as it is
    suppress_health_check=list(HealthCheck),
)


def run(cell: Cell | None, spac: dict | None, ranks: int = 1, divided: bool = False) -> engines.Run:
    options = dict(ASKED)
    if ranks > 1:
        options |= {"tensor_parallel_size": ranks, "enable_expert_parallel": divided}
    if cell is not None and DRAFTS[cell.speculation] is not None:
        options["speculative_config"] = DRAFTS[cell.speculation]
    changes = ONE_THREAD if ranks > 1 else {}
    return engines.Run(**forked.answer(forked.run(program(TOY / "target", spac, **options), changes)))


@cache
def stock(ranks: int) -> engines.Run:
    """Its ranks divide each expert: where they divide experts instead, its own CPU kernel ends a worker."""
    return run(None, None, ranks)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Predictors of the toy."""
    folder = tmp_path_factory.mktemp("trained")
    fast = "from vllm_spac.methods.speculating_experts import neural_predictor as n; n._STEPS = 20"
    texts, found = folder / "texts.jsonl", folder / "predictors.safetensors"
    assert forked.run([TEXTS, texts, "--training", "--count", "6"]).returncode == 0
    arguments = ["predictors", "train", TOY / "target", "--prompts", texts, "--output", found]
    arguments += ["--disk-dir", folder, "--slots", "60%"]
    done = forked.run(["-c", f"{fast}; from vllm_spac.cli.main import app; app()", *arguments])
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return found


def check(cell: Cell, trained: Path | None, folder: Path) -> None:
    knobs = knobs_of(cell, trained)
    if cell.plane != "device" and knobs.get("store") != "host":
        knobs["disk_dir"] = str(folder)
    ranks, divided = cell.ranks.count, cell.ranks.divide_experts
    found = run(cell, knobs, ranks, divided)
    assert max(found.stats.get("misses", 0), found.stats.get("hits", 0)) > 0, cell
    assert_same_tokens(found, stock(ranks) if cell.exact else uncached(without_cache(cell), trained), cell)


def without_cache(cell: Cell) -> Cell:
    """The lossy combination that says the same: what is read ahead counts only where it chooses what runs."""
    kept = {"speculate", "prefetch"} if "speculate" in dict(cell.settings) else {"budget"}
    return replace(cell, settings=tuple((knob, value) for knob, value in cell.settings if knob in kept))


def knobs_of(cell: Cell, trained: Path | None) -> dict:
    knobs = cell.knobs | {"guard": "off"}
    knobs["prefetch"] = knobs.get("prefetch", "off").replace(FILE, str(trained))
    if "budget" in knobs:
        knobs["budget"] = f"{knobs['budget']}@when=all"
    return knobs


_uncached: dict[Cell, engines.Run] = {}


def uncached(cell: Cell, trained: Path | None) -> engines.Run:
    """What it says with a slot for each expert; once per session."""
    if cell not in _uncached:
        knobs = knobs_of(cell, trained) | {"slots": "100%"}
        _uncached[cell] = run(cell, knobs, cell.ranks.count, cell.ranks.divide_experts)
    return _uncached[cell]


def try_some(count: int, among: list[Cell], trained: Path | None, folder: Path) -> None:
    """Tries all that are drawn, also after one that fails: an engine takes a while, and a failure need not be alone."""
    kept = Path(os.environ["SPAC_MATRIX"]) if "SPAC_MATRIX" in os.environ else None
    lines = kept.read_text().splitlines() if kept is not None and kept.exists() else []
    passed = {line["cell"] for line in map(json.loads, lines) if line["failure"] is None}
    failures = {}

    @settings(drawn, max_examples=count)
    @given(st.sampled_from(among))
    def tried(cell: Cell) -> None:
        name = repr(cell)
        if name in passed or name in failures:
            return
        try:
            check(cell, trained, folder)
        except AssertionError as error:
            failures[name] = str(error)
        passed.update({name} - failures.keys())
        if kept is not None:
            with kept.open("a") as file:
                print(json.dumps({"cell": name, "failure": failures.get(name)}), file=file)

    tried()
    assert not failures, "\n\n".join(f"{name}\n{text}" for name, text in failures.items())


def test_a_few_of_what_is_accepted(tmp_path: Path) -> None:
    """Of one rank, and without predictors, which have to be trained."""
    few = [cell for cell in accepted if cell.ranks.count == 1 and FILE not in cell.knobs.get("prefetch", "")]
    try_some(QUICK, few, None, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(0)  # hours; each engine has a limit of its own
@pytest.mark.parametrize("ranks", [1, 2])
def test_whatever_is_accepted_says_what_it_should(ranks: int, trained, tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < ranks:
        pytest.skip("two ranks spin while they wait: needs 2 CPUs")
    try_some(ENGINES // 2, [cell for cell in accepted if cell.ranks.count == ranks], trained, tmp_path)


@pytest.mark.v2
@pytest.mark.full
def test_the_parts_together() -> None:
    """Experts ranked over a draft tree by the votes of paths, in slots for our kernel, read a layer ahead.

    A quarter has slots, and the CPU computes a share. With a budget of all experts: stock's tokens.
    """
    every = {
        "slots": "25%",
        "plane": "table",
        "tree": 16,
        "budget": "64@votes=path@alpha=0.5",
        "prefetch": "gate",
        "store": "host",
        "cpu_experts": "2",
        "guard": "off",
    }
    tree = Cell(PLATFORM, "host", (), "tree", RankCount())
    exact, cut = run(tree, every), run(tree, every | {"budget": "16@votes=path@alpha=0.5"})
    assert_same_tokens(exact, stock(1))
    for found in (exact, cut):
        assert found.stats["execution"] == "table" and found.stats["trees"]["trees"] > 0
        assert found.stats["cpu_experts"] > 0 and found.stats["prefetch_hits"] > 0
    assert cut.tokens != exact.tokens and cut.stats["budget"]["dropped_share"] > 0
