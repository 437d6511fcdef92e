"""When an engine takes the knobs of a tuned profile, and when it says why not."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_spac.config import tuned_profile
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.tuned_profile import TunedProfile, path_of
from vllm_spac.decisions.comparison import Ratio
from vllm_spac.errors import ConfigError
from vllm_spac.integration import tuned_start
from vllm_spac.system.machine import Machine

TOY = Path(__file__).parents[2] / "benchmarks" / "toy" / "models" / "target"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
EAGLE = {"method": "eagle3", "num_speculative_tokens": 4}
KNOBS = {"slots": "25%", "policy": "lru"}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(cpu="c", cores=4, gpus=("g",), disk="d")
    monkeypatch.setattr(Machine, "here", lambda folder, gpus: machine)
    monkeypatch.setattr(tuned_start.device, "names", lambda: ["g"])
    return machine


@pytest.fixture
def folder(tmp_path: Path, here: Machine) -> Path:
    write(tmp_path, here)
    return tmp_path


def write(folder: Path, here: Machine, **changes: Any) -> Path:
    given: dict[str, Any] = {
        "model": "toy",
        "identity": tuned_profile.identity(TOY),
        "machine": here,
        "versions": tuned_profile.relevant_versions(),
        "choice": "policy=lru",
        "knobs": KNOBS,
        "ratio": Ratio(median=1.2, low=1.1, high=1.3, turns=9),
    }
    path = path_of(folder, tuned_profile.identity(TOY))
    TunedProfile(**given | changes).write(path)
    return path


def serve(
    folder: Path,
    *,
    command: bool = True,
    model: Path = TOY,
    drafts: dict | None = None,
    ranks: int = 1,
    trust: bool = False,
    **knobs,
):
    """The arguments of an engine, and its configuration after the profile."""
    spac = {"disk_dir": str(folder), **knobs}
    args = SimpleNamespace(
        model=str(model),
        additional_config={"spac": spac, "other": 1},
        speculative_config=drafts,
        tensor_parallel_size=ranks,
        pipeline_parallel_size=1,
        trust_remote_code=trust,
    )
    if command:
        args.spac_command = True
    return args, tuned_start.apply(args, SpacConfig.parse(spac))


def test_the_knobs_are_added_and_the_first_line_names_the_profile(folder: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    args, config = serve(folder)
    assert (config.slots, config.policy) == ("25%", "lru")
    assert SpacConfig.parse(args.additional_config["spac"]) == config and args.additional_config["other"] == 1
    [record] = caplog.records
    assert record.levelname == "INFO" and f"tuned={folder}" in record.message
    assert "slots=25%, policy=lru" in record.message and "1.20 (95 % interval 1.10 - 1.30" in record.message
    assert tuned_start.apply(args, config) is config, "once"


def test_drafts_are_added(folder: Path, here: Machine) -> None:
    write(folder, here, speculative_config=NGRAM)
    args, config = serve(folder)
    assert args.speculative_config == NGRAM and config.policy == "lru"


@pytest.mark.parametrize(
    "given",
    [{"slots": "50%"}, {"policy": "reuse"}, {"policy": "lfu", "slots": "25%"}, {"drafts": dict(NGRAM)}],
    ids=str,
)
def test_the_users_knobs_win_and_it_says_so(folder: Path, here: Machine, caplog, given: dict) -> None:
    write(folder, here, speculative_config=NGRAM)
    args, config = serve(folder, **given)
    drafts = given.pop("drafts", None)
    assert config == SpacConfig.parse({"disk_dir": str(folder), **given}) and args.speculative_config == drafts
    [record] = caplog.records
    flag = "--speculative-config" if drafts else "--spac-policy" if "policy" in given else "--spac-slots"
    assert record.levelname == "WARNING" and f"you set {flag}" in record.message


def test_what_the_user_set_to_the_same_or_besides_is_no_contradiction(folder: Path) -> None:
    _, config = serve(folder, slots="25%", io_threads=2)
    assert (config.slots, config.policy, config.io_threads) == ("25%", "lru", 2)


def ignored(caplog: pytest.LogCaptureFixture) -> str:
    """The one warning, in one line, that a profile is not used."""
    [record] = caplog.records
    caplog.clear()
    assert record.levelname == "WARNING" and "is not used, and the server starts untuned: " in record.message
    assert record.message.isprintable()
    return record.message


def test_knobs_that_do_not_go_together_are_named(folder: Path, here: Machine, caplog) -> None:
    write(folder, here, knobs={"policy": "layer_lru"})
    args = SimpleNamespace(
        model=str(TOY),
        additional_config={"spac": {"plane": "pointers", "tuned": str(path_of(folder, tuned_profile.identity(TOY)))}},
        speculative_config=None,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
    )
    assert tuned_start.apply(args, config := SpacConfig.parse(args.additional_config["spac"])) is config
    assert re.search("its knobs do not go with yours.*--spac-policy.*--spac-tuned off", ignored(caplog))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"machine": Machine(cpu="c", cores=8, gpus=("g",), disk="d")}, "cores: 8, not 4.*run vllm-spac tune again"),
        ({"versions": {"vllm": "0.31.0"}}, "vllm: 0.31.0, not .*run vllm-spac tune again"),
        ({"engine": {"tensor_parallel_size": 2}}, "--tensor-parallel-size 2"),
        (
            {"speculative_config": EAGLE | {"model": "/none/head"}},
            "draft model /none/head, which is not there any more",
        ),
        ({"speculative_config": EAGLE | {"model": "no/such-head"}}, "draft model no/such-head, which is not there"),
        ({"speculative_config": EAGLE | {"model": "\0\n"}}, "which is not there any more"),
        ({"speculative_config": EAGLE | {"model": str(Path(__file__).parent)}}, "which is not there any more"),
        ({"speculative_config": NGRAM | {"model": "m.C"}}, "ngram drafts name a model"),
        ({"knobs": {"slots": "many"}}, "its knobs are none: slots='many'"),
        ({"knobs": {"slots": "25%", "store": "host", "cpu_experts": "auto"}}, "@allow=rounding"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_a_profile_of_other_conditions_is_ignored_with_one_warning(
    folder: Path, here: Machine, caplog, changes: dict, says: str
) -> None:
    path = write(folder, here, **changes)
    args, config = serve(folder)
    assert config == SpacConfig.parse({"disk_dir": str(folder)}) and args.speculative_config is None
    said = ignored(caplog)
    assert re.search(says, said) and str(path) in said
    assert "--spac-tuned" in said
    _, config = serve(folder, tuned=str(path))
    assert config == SpacConfig.parse({"disk_dir": str(folder), "tuned": str(path)}), "also if it was asked for"
    assert re.search(says, ignored(caplog))


def test_a_profile_of_an_older_format_is_ignored_with_one_warning(folder: Path, here: Machine, caplog) -> None:
    path = write(folder, here)
    older = {"format": "spac-tuned-3", "files": {}}
    path.write_text(json.dumps(json.loads(path.read_text()) | older))
    assert serve(folder)[1] == SpacConfig.parse({"disk_dir": str(folder)})
    assert re.search("is no tuned profile of format spac-tuned-4: .*run vllm-spac tune again", ignored(caplog))


def test_off_and_programs_take_none(folder: Path, caplog) -> None:
    for given in ({"tuned": "off"}, {"command": False}):
        _, config = serve(folder, **given)
        assert config.policy == "reuse"
    assert caplog.records == []
    assert serve(folder, command=False, tuned="auto")[1].policy == "lru", "if it asks"


def test_another_model_has_none(folder: Path, tmp_path: Path, caplog) -> None:
    shutil.copytree(TOY, other := tmp_path / "other")
    (other / "config.json").write_text((TOY / "config.json").read_text() + "\n")
    assert serve(folder, model=other)[1].policy == "reuse"
    assert serve(folder, model=Path("absent/model"))[1].policy == "reuse" and caplog.records == []
    path = path_of(folder, tuned_profile.identity(TOY))
    assert serve(folder, model=other, tuned=str(path))[1].policy == "reuse"
    assert re.search("made for another model .toy. than.*tune again", ignored(caplog))


def test_a_file_that_is_no_profile(folder: Path, caplog) -> None:
    path = path_of(folder, tuned_profile.identity(TOY))
    path.write_text("{")
    os.mkfifo(folder / "pipe")
    (folder / "nowhere").symlink_to(folder / "absent")
    assert serve(folder)[1].policy == "reuse" and "no tuned profile" in ignored(caplog)
    for given, says in (
        (path, "no tuned profile.*tune again"),
        (folder / "pipe", "not a regular file"),
        (folder, "not a regular file"),
    ):
        assert serve(folder, tuned=str(given))[1].policy == "reuse"
        assert re.search(says, ignored(caplog))
    path.unlink()
    path.symlink_to(folder / "absent")
    assert serve(folder)[1].policy == "reuse" and "there is no tuned profile" in ignored(caplog)


@pytest.mark.parametrize("named", ["absent", "link", "file/below"])
def test_a_profile_that_is_named_and_not_there_is_refused(folder: Path, named: str) -> None:
    (folder / "link").symlink_to(folder / "absent")
    (folder / "file").write_text("{")
    with pytest.raises(ConfigError, match=rf"{named} \(--spac-tuned\): there is no such file; make it with vllm-spac"):
        serve(folder, tuned=str(folder / named))


def test_a_profile_of_another_user_is_not_used(folder: Path, caplog) -> None:
    path = path_of(folder, tuned_profile.identity(TOY))
    path.chmod(0o666)
    assert serve(folder)[1].policy == "reuse" and "every user; if you trust it, run `chmod" in ignored(caplog)
    path.chmod(0o644)
    assert serve(folder)[1].policy == "lru"
    caplog.clear()
    if os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    os.chown(path, 65534, -1)
    assert serve(folder)[1].policy == "reuse" and "(uid 65534), not to" in ignored(caplog)


@pytest.mark.parametrize("level", ["exact", "rounding"])
def test_the_command_line_decides_how_exact_it_is(folder: Path, here: Machine, caplog, level: str) -> None:
    for knobs, exact in ((KNOBS, True), ({"cpu_experts": "waterfill", "store": "host"}, False)):
        path = write(folder, here, knobs=knobs)
        args = SimpleNamespace(
            model=str(TOY),
            additional_config={"spac": (spac := {"tuned": f"{path}@allow={level}"})},
            speculative_config=None,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
        )
        config = tuned_start.apply(args, SpacConfig.parse(spac))
        used = exact or level == "rounding"
        assert all((getattr(config, name) == value) is used for name, value in knobs.items())
        assert ("@allow=rounding" in caplog.text) is not used
        caplog.clear()


@pytest.mark.parametrize(
    ("on_cpu", "given", "used"),
    [
        (True, {}, False),
        (False, {}, True),
        (False, {"plane": "slots"}, False),
        (False, {"tuned": "auto@allow=exact"}, False),
        (True, {"tuned": "auto@allow=rounding"}, True),
    ],
    ids=str,
)
def test_on_a_gpu_a_profile_may_round_unless_stocks_bits_are_asked_for(
    folder: Path, here: Machine, caplog, monkeypatch, on_cpu: bool, given: dict, used: bool
) -> None:
    path = write(folder, here, knobs={"cpu_experts": "waterfill", "store": "host"})
    monkeypatch.setattr(tuned_start.device, "is_cpu", lambda: on_cpu)
    monkeypatch.setattr(tuned_start, "_beside", lambda engine_args, config: path)
    args = SimpleNamespace(
        model=str(TOY),
        additional_config={"spac": given},
        speculative_config=None,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
    )
    config = tuned_start.apply(args, SpacConfig.parse(given))
    assert (config.cpu_experts == "waterfill") is used
    assert ("exact up to rounding" in caplog.text) is not used


def test_a_profile_names_no_model_with_code(folder: Path, here: Machine, caplog) -> None:
    write(folder, here, speculative_config=EAGLE | {"model": str(TOY)})
    assert serve(folder)[0].speculative_config == EAGLE | {"model": str(TOY)}
    caplog.clear()
    assert serve(folder, trust=True)[0].speculative_config is None and "could run code" in ignored(caplog)


def test_a_profile_that_keeps_the_default_changes_nothing(folder: Path, here: Machine, caplog) -> None:
    caplog.set_level(logging.INFO)
    write(folder, here, choice="default", knobs={}, ratio=None)
    _, config = serve(folder)
    assert config == SpacConfig.parse({"disk_dir": str(folder)})
    [record] = caplog.records
    assert "nothing was faster than the default" in record.message
