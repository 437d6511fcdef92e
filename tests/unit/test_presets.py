"""Presets: what each paper's recipe stands for, what it lacks, and what the log says of it."""

from __future__ import annotations

import logging
import shlex
from types import SimpleNamespace

import pytest

from vllm_spac.config import presets
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.presets import PRESETS
from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.integration import compatibility, tuned_start

LOSSY = ("moe-spec", "speculating-experts", "composed-lossy")
NEEDS = {"speculating-experts": {"prefetch": "quasi_hidden@file=FILE"}}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_knobs_as_the_log_prints_them(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.spac")
    given = {"preset": name, **NEEDS.get(name, {})}
    config = SpacConfig.parse(given)
    presets.report(name, given, config.lossy)
    [record] = caplog.records
    words = shlex.split(record.message.partition(") is ")[2])
    knobs = [flag.removeprefix("--spac-").replace("-", "_") for flag in words[::2]]
    by_hand = SpacConfig.parse(dict(zip(knobs, words[1::2], strict=True)) | NEEDS.get(name, {}))
    assert by_hand == config.model_copy(update={"preset": None})
    assert config.lossy == (name in LOSSY) == ("LOSSY" in record.message) == (record.levelname == "WARNING")


def test_single_knobs_that_are_set_win(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.spac")
    given = {"preset": "moe-spac", "slots": "25%", "cpu_experts": "threshold@misses=load", "prefetch": "off"}
    config = SpacConfig.parse(given)
    assert (config.slots, config.cpu_experts, config.prefetch) == ("25%", "threshold@misses=load", "off")
    assert (config.policy, config.store, config.guard) == ("utility@recycle=True", "host", "off")
    presets.report("moe-spac", given, config.lossy)
    assert "--spac-policy" in caplog.text and "--spac-slots" not in caplog.text


def test_a_preset_that_executes_predictions_is_exact_without_it() -> None:
    given = {"preset": "speculating-experts", "prefetch": "quasi_hidden@file=FILE"}
    assert SpacConfig.parse(given).lossy and not SpacConfig.parse(given | {"speculate": "off"}).lossy


@pytest.mark.parametrize("unknown", ["moe", "", 3, ["sp-moe"]])
def test_an_unknown_preset_is_refused_with_the_list(unknown) -> None:
    with pytest.raises(ConfigError, match="no preset is called .*use one of moe-spac, moe-spec, sp-moe, speculating-"):
        SpacConfig.parse({"preset": unknown})


@pytest.mark.parametrize("name", NEEDS)
def test_a_preset_without_its_predictors_says_what_to_add(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"preset={name} .*trained for a model; use --spac-prefetch quasi_hidden@file"
    ):
        SpacConfig.parse({"preset": name})
    assert SpacConfig.parse({"preset": name, "prefetch": "gate"}).predictor_file is None, "another recipe needs none"


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.drafts])
def test_a_preset_without_its_drafter_says_what_to_add(name: str) -> None:
    config = SpacConfig.parse({"preset": name, **NEEDS.get(name, {})})
    with pytest.raises(UnsupportedError, match=f"preset={name} .*nothing drafts; add --speculative-config") as caught:
        compatibility.check(config, SimpleNamespace(speculative_config=None), gpu=False)
    assert caught.value.remedies[0].changes["--speculative-config"] == PRESETS[name].drafts


def test_what_a_preset_sets_is_refused_with_the_preset_as_a_way_out() -> None:
    workers = {"preset": "moe-spac", "executor": "processes@workers=2"}
    with pytest.raises(ConfigError, match=r"cpu_experts=threshold .*drop --spac-preset$") as caught:
        SpacConfig.parse(workers)
    assert [remedy.changes for remedy in caught.value.remedies] == [{"preset": None}]
    device = {"preset": "moe-spac", "plane": "pointers", "prefetch": "off"}
    with pytest.raises(ConfigError, match=r"cpu_experts=threshold .*; use --spac-cpu-experts auto, or use --spac-pl"):
        SpacConfig.parse(device)
    SpacConfig.parse({**device, "cpu_experts": "auto"})


def test_a_tuned_profile_beside_the_experts_is_not_mixed_with_a_preset(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tuned_start, "_identity", lambda _: "x")
    (tmp_path / "tuned-x.json").write_text("no profile")
    for preset, tuned, found in ((None, None, True), ("moe-spac", None, False), ("moe-spac", "auto", True)):
        given = {"disk_dir": str(tmp_path), "preset": preset, "tuned": tuned}
        config = SpacConfig.parse({name: value for name, value in given.items() if value is not None})
        assert (tuned_start._beside(SimpleNamespace(spac_command=True, model="m"), config) is not None) is found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("auto@allow=rounding", ("auto", "rounding")),
        ("off", ("off", None)),
        ("/a@b.json@allow=rounding", ("/a@b.json", "rounding")),
    ],
)
def test_what_a_tuned_profile_may_set_is_an_argument(text: str, found: tuple[str, str | None]) -> None:
    config = SpacConfig.parse({"tuned": text})
    assert (config.tuned_profile, config.tuned_allow) == found
    with pytest.raises(ConfigError, match="allow='all': use allow=exact or rounding"):
        SpacConfig.parse({"tuned": "auto@allow=all"})
