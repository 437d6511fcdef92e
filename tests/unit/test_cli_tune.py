"""``vllm-spac tune`` with engines that take no time: what it keeps, writes and refuses, and what it says if stopped."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import imagined_engines
import pytest
from imagined_engines import START, Imagined
from typer.testing import CliRunner

from vllm_spac.cli.main import app
from vllm_spac.config.tuned_profile import TunedProfile
from vllm_spac.decisions.comparison import NEAR
from vllm_spac.tools.tuning import measurer
from vllm_spac.tools.tuning.session import MOST
from vllm_spac.tools.tuning.variants import Variant

TOY = Path(__file__).parents[2] / "benchmarks" / "toy" / "models" / "target"
MINUTES = 30
EAGLE = json.dumps({"method": "eagle3", "model": str(TOY.parent / "eagle3"), "num_speculative_tokens": 4})


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    """The imagined engines, as new, in place of real ones."""
    Imagined.begin()
    monkeypatch.setattr(measurer, "Measurer", Imagined)


def run(folder: Path, *options: object, code: int = 0, model: Path = TOY) -> str:
    given = ["tune", model, "--disk-dir", folder, "--slots", "25%", "--minutes", MINUTES, *options]
    result = CliRunner().invoke(app, [str(a) for a in given], env={"COLUMNS": "250", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output + repr(result.exception)
    assert Imagined.running == []
    return " ".join(result.output.split())


def profile(folder: Path) -> TunedProfile:
    [path] = folder.iterdir()
    return TunedProfile.read(path)


def faster(**speeds: float) -> Callable[[Variant], float]:
    """Tokens per second: 10, times the speed of each knob that is set to anything."""

    def rate(variant: Variant) -> float:
        found = 10.0
        for name, speed in speeds.items():
            found *= speed if name in (variant.knobs or {}) else 1
        return found * (speeds.get("drafts", 1) if variant.drafts else 1)

    return rate


def test_the_fastest_is_kept_with_its_flags(tmp_path: Path) -> None:
    Imagined.rate = staticmethod(faster(io_threads=1.2, policy=1.5, prefetch=0.9))
    text = run(tmp_path)
    found = profile(tmp_path)
    assert found.choice == "policy=layer_lru" and found.knobs == {"slots": "25%", "policy": "layer_lru"}
    assert found.speculative_config is None
    assert found.ratio is not None and found.ratio.median == pytest.approx(1.5) and found.ratio.is_faster
    assert f"run: vllm serve {TOY} --plugin spac --spac-disk-dir {tmp_path}" in text
    assert "--spac-slots 25% --spac-policy layer_lru" in text and "once more in turns, policy=layer_lru" in text


def test_drafts_are_kept_as_they_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the folder of their model: ``vllm serve`` may be started in another one."""
    monkeypatch.chdir(TOY.parent)
    Imagined.rate = staticmethod(lambda v: 20.0 if v.drafts and v.drafts["method"] == "eagle3" else 10.0)
    text = run(tmp_path, "--speculative-config", json.dumps(json.loads(EAGLE) | {"model": "eagle3"}))
    assert profile(tmp_path).speculative_config == json.loads(EAGLE) and "--speculative-config" in text


def test_what_is_not_faster_once_more_is_not_kept(tmp_path: Path) -> None:
    """The best of several was in part the luckiest."""
    lucky = lambda v: 10.0 if Imagined.started.count(v.name) > 1 else faster(io_threads=1.3)(v)  # noqa: E731
    Imagined.rate = staticmethod(lucky)
    text = run(tmp_path)
    found = profile(tmp_path)
    assert found.choice == "default" and found.keeps_default
    assert found.ratio is not None and not found.ratio.is_faster
    assert "the interval includes 1, so the default is kept" in text and "run:" not in text


def test_what_is_slower_gives_its_time_to_the_others(tmp_path: Path) -> None:
    Imagined.rate = staticmethod(faster(io_threads=0.5))
    assert re.search(r"io_threads=8 0.50 \(0.50 - 0.50\) 5.0 [0-9.]+ s 6 equal", run(tmp_path))


def test_with_a_slot_for_every_expert_drafts_alone_are_measured(tmp_path: Path) -> None:
    Imagined.resident = True
    text = run(tmp_path, "--allow-rounding")
    assert set(Imagined.started) == {"default", "drafts=ngram 4"} and "every expert has a slot" in text


def test_wrong_tokens_are_an_error_and_never_kept(tmp_path: Path) -> None:
    Imagined.rate = staticmethod(faster(io_threads=9.0, policy=1.5))
    Imagined.change = staticmethod(lambda v, ids: [0] + ids[1:] if "io_threads" in v.knobs else ids)
    text = run(tmp_path, code=1)
    assert "error: io_threads=8: tokens are WRONG: 1 of 1 answers differ" in text and "is never kept" in text
    assert profile(tmp_path).choice == "policy=layer_lru"


def test_wrong_tokens_once_more_keep_the_default(tmp_path: Path) -> None:
    Imagined.rate = staticmethod(faster(io_threads=1.3))
    Imagined.change = staticmethod(lambda v, ids: [0] + ids[1:] if Imagined.started.count("io_threads=8") > 1 else ids)
    assert "error: io_threads=8: tokens are WRONG" in run(tmp_path, code=1)
    assert profile(tmp_path).keeps_default


def test_near_ties_are_named(tmp_path: Path) -> None:
    """Drafts have other numbers of rows: the second best token, where it was close, is vLLM's too."""
    for near_ties in (True, False):
        Imagined.begin()
        Imagined.near_ties = near_ties
        Imagined.rate = staticmethod(faster(drafts=1.5))
        Imagined.change = staticmethod(lambda v, ids: [ids[0] + 1] + ids[1:] if v.drafts else ids)
        text = run(tmp_path, code=0 if near_ties else 1)
        assert (profile(tmp_path).speculative_config is not None) is near_ties
        if near_ties:
            assert re.search(r"near-ties: (\d+) of \1 answers differ, at a gap of 0.10", text) and NEAR > 0.1
        else:  # float32
            assert "drafts=ngram 4: tokens are WRONG" in text


def test_the_same_steps_have_the_same_tokens_where_kernels_repeat_their_bits(tmp_path: Path) -> None:
    Imagined.change = staticmethod(lambda v, ids: [ids[0] + 1] + ids[1:] if "policy" in v.knobs else ids)
    assert "policy=layer_lru: tokens are WRONG" in run(tmp_path, code=1)


@pytest.mark.parametrize(("on_cpu", "free"), [(True, 1 << 40), (True, 1 << 30), (False, 1 << 40)])
def test_two_engines_take_turns_or_follow_each_other(tmp_path: Path, on_cpu: bool, free: int) -> None:
    Imagined.on_cpu, Imagined.free = on_cpu, free
    Imagined.rate = staticmethod(faster(policy=1.3))
    together, beside = on_cpu and free > 1 << 30, []
    Imagined.interrupt = staticmethod(lambda: beside.append(len(Imagined.running)))
    run(tmp_path, "--minutes", 3 * MINUTES)
    kept = profile(tmp_path)
    assert kept.ratio is not None and kept.ratio.is_faster and kept.ratio.turns == MOST
    assert max(beside) == together
    if together:
        assert Imagined.started.count("default") == 1 and Imagined.started[-1] == kept.choice
    else:
        last = Imagined.started[-16:]
        pairs = list(zip(last[::2], last[1::2], strict=True))
        assert all({a, b} == {"default", kept.choice} for a, b in pairs)
        assert [a for a, _ in pairs].count("default") == len(pairs) / 2, "each is first equally often"


def test_cpu_experts_have_all_experts_in_host_memory_beside_the_default(tmp_path: Path) -> None:
    Imagined.free = (1 << 30) + (2 << 20)  # two engines, and a reserve; the toy's experts have 18 MiB
    for options, together in ((), True), (("--allow-rounding",), False):
        Imagined.started.clear()
        run(tmp_path, *options)
        assert (Imagined.started.count("default") == 1) is together


def test_the_time_is_kept(tmp_path: Path) -> None:
    Imagined.rate = staticmethod(faster(io_threads=1.2, drafts=1.5))
    for minutes in (2, 6, MINUTES):
        Imagined.now = 0.0
        text = run(tmp_path, "--minutes", minutes)
        assert Imagined.now <= 60 * minutes + 2 * START + 2 * 3 * 6.4  # the first start, and a last start and turn
        assert ("no time was left for: " in text) == (minutes < MINUTES)


def test_too_little_time_writes_no_profile(tmp_path: Path) -> None:
    for minutes, rate, says in (
        (1.5, faster(), "nothing was faster than the default, as far as it came"),
        (2.2, faster(drafts=1.3), "was the fastest; it could not be compared with the default once more"),
    ):
        Imagined.rate = staticmethod(rate)
        text = run(tmp_path, "--minutes", minutes)
        assert says in text and "no profile was written: the time was too short; give it more --minutes" in text
        assert list(tmp_path.iterdir()) == []


def test_what_each_comparison_found_is_said_while_it_runs(tmp_path: Path) -> None:
    """With the time that the rest takes at most, which gets shorter."""
    Imagined.rate = staticmethod(faster(io_threads=1.2))
    Imagined.change = staticmethod(lambda v, ids: [0] + ids[1:] if v.drafts else ids)
    text = run(tmp_path, code=1)
    named = "drafts=ngram 4, policy=layer_lru, io_threads=8, prefetch=gate"
    assert f"in turns with the default, in at most 30 min: {named}" in text
    assert re.search(r"io_threads=8: 1.20 \(95 % .*?\) times the default's tokens/s; at most \d+ min left", text)
    assert re.search(r"drafts=ngram 4: WRONG: .*?; at most \d+ min left", text)
    left = [int(found) for found in re.findall(r"at most (\d+) min left", text)]
    assert left == sorted(left, reverse=True) and len(left) == 5 and left[-1] < left[0]


def control_c() -> None:
    raise KeyboardInterrupt


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("stop", "code"), [(control_c, 130), (sigterm, 143)])
@pytest.mark.parametrize(
    ("start", "says"),
    [
        (0, "stopped: nothing was compared so far; nothing was written"),
        (1, "stopped: nothing was compared so far; nothing was written"),
        (2, "stopped: the default is the fastest so far; nothing was written"),
        (4, "stopped: the fastest so far is io_threads=8: 1.20 (95 % interval 1.20 - 1.20, "),
        (5, "stopped: the fastest so far is io_threads=8: 1.20 (95 % interval 1.20 - 1.20, "),  # once more
    ],
)
def test_a_run_that_is_stopped_names_the_best_so_far(
    tmp_path: Path, stop: Callable[[], None], code: int, start: int, says: str
) -> None:
    Imagined.rate = staticmethod(faster(io_threads=1.2))
    Imagined.interrupt = staticmethod(lambda: stop() if len(Imagined.started) == start else None)
    handler = signal.getsignal(signal.SIGTERM)
    text = run(tmp_path, code=code)
    assert says in text and list(tmp_path.iterdir()) == []
    assert ("to serve so: vllm serve" in text and "--spac-io-threads 8" in text) == (start > 2)
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_variant_that_does_not_start_is_reported_and_left_out(tmp_path: Path) -> None:
    Imagined.fails = {"prefetch=gate"}
    Imagined.rate = staticmethod(faster(policy=1.2))
    text = run(tmp_path)
    assert "prefetch=gate: failed: no room for the KV cache; at most" in text
    assert profile(tmp_path).choice == "policy=layer_lru"


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_default_that_does_not_start_is_an_error(tmp_path: Path, on_cpu: bool) -> None:
    Imagined.on_cpu = on_cpu
    Imagined.interrupt = staticmethod(lambda: Imagined.fails.add("default") if on_cpu or Imagined.started else None)
    text = run(tmp_path, code=1)
    assert "error: the default's engine failed: no room for the KV cache" in text
    assert "Traceback" in text and list(tmp_path.iterdir()) == []


def test_on_a_gpu_rounding_needs_no_consent_and_can_be_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("vllm_spac.system.machine.gpu_names", lambda: ["NVIDIA H100 80GB HBM3"])
    Imagined.rate = staticmethod(lambda v: 30.0 if v.rounds else 10.0)
    text = run(tmp_path)
    assert profile(tmp_path).knobs["cpu_experts"] == "waterfill" and "@allow=" not in text
    run(tmp_path, "--exact")
    assert profile(tmp_path).keeps_default


def test_rounding_needs_consent_and_the_server_s_too(tmp_path: Path) -> None:
    Imagined.rate = staticmethod(lambda v: 30.0 if v.rounds else 10.0)
    assert "@allow=" not in run(tmp_path)
    assert profile(tmp_path).keeps_default
    text = run(tmp_path, "--allow-rounding")
    assert profile(tmp_path).knobs == {"slots": "25%", "store": "host", "cpu_experts": "waterfill"}
    assert "--plugin spac --spac-disk-dir" in text and "--spac-tuned auto@allow=rounding" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
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
        (("--prompts", "/none"), "cannot be read"),
    ],
)
def test_bad_options(tmp_path: Path, options: tuple, says: str) -> None:
    text = run(tmp_path, *options, code=1)
    assert says in text and "error:" in text and Imagined.started == []


def test_bad_models(tmp_path: Path) -> None:
    (bare := tmp_path / "bare").mkdir()
    shutil.copy(TOY / "config.json", bare)
    assert "has no weights to measure" in run(tmp_path, code=1, model=bare)
    assert "is not a folder" in run(tmp_path, code=1, model=tmp_path / "absent")


def test_prompts_of_the_user_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    answer = imagined_engines._Imagined.answer
    monkeypatch.setattr(imagined_engines._Imagined, "answer", lambda self, p, n: asked.append(p) or answer(self, p, n))
    (folder := tmp_path / "packed").mkdir()
    (file := tmp_path / "p.jsonl").write_text(json.dumps({"prompt_token_ids": [1, 2, 3]}) + "\n")
    run(folder, "--prompts", file)
    assert asked and all(prompt == [1, 2, 3] for prompt in asked)
