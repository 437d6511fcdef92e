"""``vllm-spac tune`` with engines that take no time: what it keeps, writes, continues and refuses."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_spac.cli.main import app
from vllm_spac.config.tuned_profile import Candidate, TunedProfile, digest
from vllm_spac.decisions.comparison import NEAR
from vllm_spac.decisions.costs import Costs
from vllm_spac.system.machine import Machine
from vllm_spac.tools.tuning import session

TOY = Path(__file__).parents[2] / "benchmarks" / "toy" / "models" / "target"
MINUTES = 30


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module with the imagined engines, as new."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import imagined_engines

    def turns(*given: Any) -> None:
        imagined_engines.in_turns = True
        take_turns(*given)

    imagined_engines.Imagined.begin()
    imagined_engines.in_turns, take_turns = False, session.take_turns
    monkeypatch.setattr(session, "take_turns", turns)
    return imagined_engines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for packed experts, with the profile of this machine: it need not be measured."""
    costs = Costs.read("rtx4090")
    origin = costs.provenance.model_copy(update={"how": "measured", "machine": Machine.here(tmp_path), "store": "disk"})
    capacity = costs.capacity.model_copy(update={"gpu": 0})  # type: ignore[union-attr]
    changes = {"provenance": origin, "load": costs.disk, "host": costs.load, "disk": None, "capacity": capacity}
    (tmp_path / "profile.json").write_text(costs.model_copy(update=changes).model_dump_json())
    return tmp_path


def run(folder: Path, *options: object, code: int = 0, model: Path = TOY) -> str:
    given = ["tune", model, "--disk-dir", folder, "--slots", "25%", "--minutes", MINUTES, *options]
    given += ["--measurer", "imagined_engines:Imagined"]
    result = CliRunner().invoke(app, [str(a) for a in given], env={"COLUMNS": "250", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output + repr(result.exception)
    return " ".join(result.output.split())


def written(folder: Path) -> list[str]:
    return sorted(path.name.split("-")[0] for path in folder.iterdir() if path.name != "profile.json")


def profile(folder: Path) -> TunedProfile:
    [path] = folder.glob("tuned-*.json")
    return TunedProfile.read(path)


def faster(**speeds: float) -> Callable[[Candidate], float]:
    """Tokens per second: 10, times the speed of each knob that is set to anything."""

    def rate(candidate: Candidate) -> float:
        found = 10.0
        for name, speed in speeds.items():
            found *= speed if name in (candidate.knobs or {}) else 1
        return found * (speeds.get("drafts", 1) if candidate.drafts else 1)

    return rate


def test_the_best_of_each_kind_are_kept_together(world: ModuleType, folder: Path) -> None:
    world.Imagined.rate = staticmethod(lambda c: faster(io_threads=1.2, drafts=1.5, guard=0.5, policy=0.9)(c))
    text = run(folder)
    found = profile(folder)
    assert found.choice in ("drafts=ngram 4 + io_threads=2", "drafts=ngram 2 + io_threads=2")
    assert found.knobs == {"slots": "25%", "io_threads": 2} and found.speculative_config["method"] == "ngram"
    assert found.ratio is not None and found.ratio.median == pytest.approx(1.8) and found.ratio.is_faster
    assert {row.name for row in found.measured} >= {"default", "policy=lru"}
    assert written(folder) == ["tuned"], "what was unfinished is gone"
    assert f"run: vllm serve {TOY} --plugin spac --spac-disk-dir {folder}" in text
    assert "--spac-slots 25% --spac-io-threads 2" in text and "--speculative-config" in text
    assert "stock vLLM's own offloading is not measured" in text


def test_what_is_not_faster_in_turns_is_not_kept(world: ModuleType, folder: Path) -> None:
    """A candidate that was fast in the rounds alone: machines drift."""
    world.Imagined.rate = staticmethod(lambda c: 10.0 if world.in_turns else faster(io_threads=1.3)(c))
    text = run(folder)
    found = profile(folder)
    assert found.choice == "default" and found.knobs == {} and found.keeps_default
    assert found.ratio is not None and not found.ratio.is_faster
    assert "the interval includes 1, so the default is kept" in text and "run:" not in text


def test_nothing_is_faster(world: ModuleType, folder: Path) -> None:
    world.Imagined.rate = staticmethod(faster(io_threads=0.9, drafts=0.9, policy=0.9, prefetch=0.9))
    assert "nothing was faster than the default: it is kept" in run(folder)
    assert profile(folder).keeps_default and profile(folder).ratio is None


def test_lru_may_be_the_best(world: ModuleType, folder: Path) -> None:
    world.Imagined.rate = staticmethod(lambda c: 20.0 if (c.knobs or {}).get("policy") == "lru" else 10.0)
    run(folder)
    assert profile(folder).knobs == {"slots": "25%", "policy": "lru"}


def test_wrong_tokens_are_an_error_and_never_kept(world: ModuleType, folder: Path) -> None:
    world.Imagined.rate = staticmethod(faster(io_threads=9.0, policy=1.5))
    world.Imagined.change = staticmethod(lambda c, ids: [0] + ids[1:] if "io_threads" in c.knobs else ids)
    text = run(folder, code=1)
    assert "error: io_threads=2: tokens are WRONG: 3 of 3 answers differ" in text and "is never kept" in text
    assert "io_threads" not in profile(folder).knobs and "policy" in profile(folder).knobs


def test_wrong_tokens_in_turns_keep_the_default(world: ModuleType, folder: Path) -> None:
    world.Imagined.rate = staticmethod(faster(io_threads=1.3))
    wrong = lambda c: world.in_turns and "io_threads" in c.knobs  # noqa: E731
    world.Imagined.change = staticmethod(lambda c, ids: [0] + ids[1:] if wrong(c) else ids)
    assert "gave other tokens in turns with the default, which is kept" in run(folder, code=1)
    assert profile(folder).keeps_default


def test_near_ties_are_named(world: ModuleType, folder: Path) -> None:
    """Drafts have other numbers of rows: the second best token, where it was close, is vLLM's too."""
    world.Imagined.rate = staticmethod(faster(drafts=1.5))
    world.Imagined.change = staticmethod(lambda c, ids: [ids[0] + 1] + ids[1:] if c.drafts else ids)
    text = run(folder)
    assert re.search(r"near-ties: (\d+) of \1 answers differ, at a gap of 0.10", text) and NEAR > 0.1
    assert profile(folder).speculative_config is not None
    world.Imagined.begin()
    world.Imagined.near_ties = False  # float32
    world.Imagined.rate = staticmethod(faster(drafts=1.5))
    world.Imagined.change = staticmethod(lambda c, ids: [ids[0] + 1] + ids[1:] if c.drafts else ids)
    assert "drafts=ngram 4: tokens are WRONG" in run(folder, code=1)
    assert profile(folder).keeps_default


@pytest.mark.parametrize("exclusive", [False, True])
def test_two_engines_take_turns_or_follow_each_other(world: ModuleType, folder: Path, exclusive: bool) -> None:
    world.Imagined.exclusive = exclusive
    world.Imagined.rate = staticmethod(faster(policy=1.3))
    run(folder, "--minutes", 2 * MINUTES)
    kept = profile(folder)
    last = [name for name in world.Imagined.started if name in ("default", kept.choice)][-4:]
    starts = world.Imagined.started[-16:]
    assert kept.ratio is not None and kept.ratio.is_faster and kept.ratio.turns == 40
    if exclusive:
        assert starts.count("default") == starts.count(kept.choice) == 8
        assert all({a, b} == {"default", kept.choice} for a, b in zip(starts[::2], starts[1::2], strict=True))
    else:
        assert last[-2:] == ["default", kept.choice]


def test_the_time_is_kept(world: ModuleType, folder: Path) -> None:
    world.Imagined.rate = staticmethod(faster(io_threads=1.2, drafts=1.5))
    for minutes in (6, MINUTES):
        world.Imagined.now = 0.0
        text = run(folder, "--minutes", minutes)
        longest = world.START + 24 * 6.4 + 1  # of a run, with all prompts
        assert world.Imagined.now <= 60 * minutes + 2 * longest
        assert ("were not tried" in text) == (minutes == 6) == ("tuning" in written(folder))


def test_too_little_time_writes_no_profile_and_more_continues(world: ModuleType, folder: Path) -> None:
    world.Imagined.rate = staticmethod(faster(policy=1.3))
    text = run(folder, "--minutes", 1.5)
    assert (
        "the time was too short" in text
        and "no profile was written: the same command with more --minutes continues" in text
    )
    assert written(folder) == ["tuning"]
    world.Imagined.started.clear()
    assert "continuing, " in run(folder)
    assert written(folder) == ["tuned"] and profile(folder).choice.startswith("policy=")


def test_the_default_is_not_said_to_be_the_best_of_what_was_not_tried(world: ModuleType, folder: Path) -> None:
    text = run(folder, "--minutes", 2)
    assert "nothing that was tried so far was faster" in text and "no profile was written" in text
    assert written(folder) == ["tuning"] and "no time was left" in text
    run(folder)
    assert written(folder) == ["tuned"] and profile(folder).keeps_default


BEST_SO_FAR = {
    0: "stopped: nothing was compared so far;",
    1: "stopped: nothing was compared so far;",
    2: "stopped: the default is the fastest so far;",
    4: "stopped: the fastest so far is drafts=ngram ",
    9: "stopped: the fastest so far is ",
}


def test_what_each_measurement_found_is_said_while_it_runs(world: ModuleType, folder: Path) -> None:
    """With the time that the rest takes at most, which gets shorter."""
    world.Imagined.rate = staticmethod(faster(io_threads=1.2))
    world.Imagined.change = staticmethod(lambda c, ids: [0] + ids[1:] if c.drafts else ids)
    text = run(folder, code=1)
    assert re.search(r"\d+ ways to serve are measured in about 30 min, after the first start", text)
    assert "round 1, default: 10.0 tokens/s; at most 30 min left" in text
    assert re.search(r"round 1, io_threads=2: 12.0 tokens/s, 1.20 times the default's; at most \d+ min left", text)
    assert re.search(r"round 1, drafts=ngram 4: 10.0 tokens/s, and wrong tokens; at most", text)
    left = [int(found) for found in re.findall(r"at most (\d+) min left", text)]
    assert left == sorted(left, reverse=True) and left[-1] < left[0]


@pytest.mark.parametrize("starts", BEST_SO_FAR)
def test_an_interrupted_run_leaves_no_profile_and_continues(world: ModuleType, folder: Path, starts: int) -> None:
    world.Imagined.rate = staticmethod(faster(io_threads=1.2, drafts=1.5))
    world.Imagined.interrupt = starts
    text = run(folder, code=130)
    assert f"; {starts} measurements are kept; the same command continues" in text
    assert BEST_SO_FAR[starts] in text
    assert ("to serve so: vllm serve" in text) == (starts > 2)
    assert written(folder) == ["tuning"]
    world.Imagined.interrupt, before = None, list(world.Imagined.started)
    world.Imagined.started.clear()
    text = run(folder)
    assert ("continuing, " in text) == (starts > 0)
    resumed, continued = profile(folder), list(world.Imagined.started)
    world.Imagined.started.clear()
    run(folder)
    assert before + continued == world.Imagined.started, "as if nothing had happened"
    assert resumed.choice == profile(folder).choice and written(folder) == ["tuned"]


def test_fresh_forgets_and_other_arguments_are_another_run(world: ModuleType, folder: Path) -> None:
    world.Imagined.interrupt = 3
    run(folder, code=130)
    world.Imagined.interrupt = 5
    assert "continuing" not in run(folder, "--fresh", code=130)
    world.Imagined.interrupt = 7
    assert "continuing" not in run(folder, "--output-tokens", 32, code=130)
    assert written(folder) == ["tuning", "tuning"]


def test_a_candidate_that_does_not_start_is_reported_and_left_out(world: ModuleType, folder: Path) -> None:
    world.Imagined.fails = {"prefetch=utility"}
    world.Imagined.rate = staticmethod(faster(policy=1.2))
    assert "no room for the KV cache" in run(folder)
    [row] = [row for row in profile(folder).measured if row.name == "prefetch=utility"]
    assert row.speed is None and row.problem == "no room for the KV cache"


def test_a_default_that_does_not_start_is_an_error(world: ModuleType, folder: Path) -> None:
    world.Imagined.fails = {"default"}
    text = run(folder, code=1)
    assert "error: an engine that is needed for a comparison failed: no room for the KV cache" in text
    assert "Traceback" in text and written(folder) == ["tuning"]
    world.Imagined.fails = set()
    run(folder)
    assert written(folder) == ["tuned"], "it is tried again"


def test_a_choice_is_kept_with_what_a_server_needs_to_use_it(
    world: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = [({}, None), ({"decisions": "device"}, "rounding"), ({"budget": 8, "cpu_experts": 2}, "lossy")]
    for knobs, level in levels:
        assert Candidate("c", "g", knobs).allowance == level
    (file := tmp_path / "p").write_bytes(b"predictors")
    monkeypatch.setattr(
        importlib.import_module("vllm_spac.cli.tune"), "_predictors", lambda path: ("neural",) if path else ()
    )
    world.Imagined.rate = staticmethod(lambda c: 30.0 if (c.knobs or {}).get("prefetch") == "neural" else 10.0)
    run(folder, "--predictor-file", file)
    assert profile(folder).knobs["prefetch"] == "neural" and profile(folder).files == {str(file): digest(file)}
    assert "@allow=" not in run(folder)


def test_rounding_and_lossy_choices_need_consent(world: ModuleType, folder: Path, tmp_path: Path) -> None:
    quality = Path(__file__).parents[2] / "benchmarks" / "results" / "toy_quality.json"
    world.Imagined.rate = staticmethod(lambda c: 30.0 if c.departures else 10.0)
    run(folder)
    assert profile(folder).keeps_default
    text = run(folder, "--lossy", "--quality", quality)
    assert "budget" in profile(folder).knobs
    assert "--plugin spac --spac-disk-dir" in text and "--spac-tuned auto@allow=lossy" in text
    assert "is LOSSY: " in text and "of tokens agree" in text
    assert "--lossy tries budgets whose quality is known" in run(folder, "--lossy", "--quality", "absent", code=1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--fast-memory", "1GiB"), "--slots and --fast-memory limit the same memory"),
        (("--slots", "many"), "--slots 'many' is not understood"),
        (("--engine", "[1]"), "use a JSON object"),
        (("--speculative-config", "{"), "use a JSON object"),
        (
            ("--speculative-config", '{"method": "custom_class", "model": "m:C"}'),
            "--speculative-config has what a profile may not set (method: ",
        ),
        (
            ("--speculative-config", '{"method": "ngram", "rejection_sample_method": "synthetic"}'),
            "rejection_sample_method",
        ),
        (("--eagle3", "/none"), "--eagle3 /none is no folder of a model"),
        (("--prompts", "/none"), "cannot be read"),
        (("--predictor-file", "/none"), "/none"),
    ],
)
def test_bad_options(world: ModuleType, folder: Path, options: tuple, says: str) -> None:
    text = run(folder, *options, code=1)
    assert says in text and "error:" in text and world.Imagined.started == []


def test_bad_models_and_folders(world: ModuleType, folder: Path, tmp_path: Path) -> None:
    (bare := tmp_path / "bare").mkdir()
    shutil.copy(TOY / "config.json", bare)
    assert "has no weights to measure" in run(folder, code=1, model=bare)
    assert "is not a folder" in run(folder, code=1, model=tmp_path / "absent")
    world.Imagined.interrupt = 1
    run(folder, code=130)
    [state] = folder.glob("tuning-*.json")
    state.write_text("{")
    assert "--fresh" in run(folder, code=1)
    world.Imagined.interrupt = None
    run(folder, "--fresh")


def test_prompts_of_the_user_are_measured(world: ModuleType, folder: Path, tmp_path: Path) -> None:
    (file := tmp_path / "p.jsonl").write_text(json.dumps({"prompt_token_ids": [1, 2, 3]}) + "\n")
    run(folder, "--prompts", file)
    assert profile(folder).arguments["prompts"] != ""


def test_help_has_examples() -> None:
    text = " ".join(CliRunner().invoke(app, ["tune", "--help"], env={"COLUMNS": "200"}).output.split())
    assert "Examples vllm-spac tune" in text and "--measurer" not in text
