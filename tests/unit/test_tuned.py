"""When an engine takes the knobs of a tuned profile, and when it says why not."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_spac.config import SpacConfig
from vllm_spac.errors import ConfigError
from vllm_spac.integration.tuning import applied
from vllm_spac.system.machine import Machine
from vllm_spac.tuning import identity
from vllm_spac.tuning.comparison import Ratio
from vllm_spac.tuning.profile import TunedProfile, path_of

TOY = Path(__file__).parents[2] / "benchmarks" / "toy" / "models" / "target"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
KNOBS = {"slots": "25%", "policy": "lru"}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(cpu="c", cores=4, gpus=("g",), disk="d")
    monkeypatch.setattr(Machine, "here", lambda folder, gpus: machine)
    monkeypatch.setattr(applied.device, "names", lambda: ["g"])
    return machine


@pytest.fixture
def folder(tmp_path: Path, here: Machine) -> Path:
    write(tmp_path, here)
    return tmp_path


def write(folder: Path, here: Machine, **changes: Any) -> Path:
    given: dict[str, Any] = {
        "model": "toy",
        "identity": identity.identity(TOY),
        "machine": here,
        "versions": identity.relevant_versions(),
        "choice": "policy=lru",
        "knobs": KNOBS,
        "ratio": Ratio(median=1.2, low=1.1, high=1.3, turns=9),
    }
    path = path_of(folder, identity.identity(TOY))
    TunedProfile(**given | changes).write(path)
    return path


def serve(
    folder: Path, *, command: bool = True, model: Path = TOY, drafts: dict | None = None, ranks: int = 1, **knobs
):
    """The arguments of an engine, and its configuration after the profile."""
    spac = {"disk_dir": str(folder), **knobs}
    args = SimpleNamespace(
        model=str(model),
        additional_config={"spac": spac, "other": 1},
        speculative_config=drafts,
        tensor_parallel_size=ranks,
    )
    if command:
        args.spac_command = True
    return args, applied.apply(args, SpacConfig.parse(spac))


def test_the_knobs_are_added_and_the_first_line_names_the_profile(folder: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    args, config = serve(folder)
    assert (config.slots, config.policy) == ("25%", "lru")
    assert SpacConfig.parse(args.additional_config["spac"]) == config and args.additional_config["other"] == 1
    [record] = caplog.records
    assert record.levelname == "INFO" and f"tuned={folder}" in record.message
    assert "slots=25%, policy=lru" in record.message and "1.20 (95 % interval 1.10 - 1.30" in record.message
    assert applied.apply(args, config) is config, "once"


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


def test_knobs_that_do_not_go_together_are_named(folder: Path, here: Machine, caplog) -> None:
    write(folder, here, knobs={"prefetch": "utility"})
    args = SimpleNamespace(
        model=str(TOY),
        additional_config={"spac": {"execution": "pointers", "tuned": str(path_of(folder, identity.identity(TOY)))}},
        speculative_config=None,
        tensor_parallel_size=1,
    )
    with pytest.raises(ConfigError, match="its knobs do not go with yours.*drop --spac-prefetch.*--spac-tuned off"):
        applied.apply(args, SpacConfig.parse(args.additional_config["spac"]))


@pytest.mark.parametrize(("requests", "used"), [(None, False), (16, False), (8, True), (4, True)])
def test_trees_need_as_few_requests_as_when_they_were_measured(
    folder: Path, here: Machine, caplog, requests: int | None, used: bool
) -> None:
    drafts = {"method": "eagle3", "model": "head", "num_speculative_tokens": 16}
    write(folder, here, knobs={"tree": 16}, speculative_config=drafts, engine={"max_num_seqs": 8})
    args = SimpleNamespace(
        model=str(TOY),
        additional_config={"spac": {"disk_dir": str(folder)}},
        speculative_config=None,
        tensor_parallel_size=1,
        max_num_seqs=requests,
        spac_command=True,
    )
    config = applied.apply(args, SpacConfig.parse(args.additional_config["spac"]))
    assert (config.tree, args.speculative_config) == ((16, drafts) if used else (0, None))
    assert ("add that, or set --spac-tuned off" in caplog.text) is not used


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"machine": Machine(cpu="c", cores=8, gpus=("g",), disk="d")}, "cores: 8, not 4.*run vllm-spac tune again"),
        ({"versions": {"vllm": "0.31.0"}}, "vllm: 0.31.0, not .*run vllm-spac tune again"),
        ({"engine": {"tensor_parallel_size": 2}}, "--tensor-parallel-size 2"),
        ({"knobs": {"prefetch": "linear", "predictor_file": "/none/p"}}, "/none/p, which is not there any more"),
    ],
    ids=["machine", "versions", "ranks", "files"],
)
def test_a_profile_of_other_conditions_is_ignored_with_one_warning(
    folder: Path, here: Machine, caplog, changes: dict, says: str
) -> None:
    path = write(folder, here, **changes)
    args, config = serve(folder)
    assert config == SpacConfig.parse({"disk_dir": str(folder)}) and args.speculative_config is None
    [record] = caplog.records
    assert record.levelname == "WARNING" and "is ignored" in record.message
    with pytest.raises(ConfigError, match=says) as found:
        serve(folder, tuned=str(path))
    assert "--spac-tuned" in str(found.value)


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
    path = path_of(folder, identity.identity(TOY))
    with pytest.raises(ConfigError, match="made for another model .toy. than"):
        serve(folder, model=other, tuned=str(path))


def test_a_file_that_is_no_profile(folder: Path, caplog) -> None:
    path = path_of(folder, identity.identity(TOY))
    path.write_text("{")
    assert serve(folder)[1].policy == "reuse"
    [record] = caplog.records
    assert record.levelname == "WARNING" and "no tuned profile" in record.message
    for given, says in ((path, "no tuned profile"), (folder / "absent", "there is no tuned profile")):
        with pytest.raises(ConfigError, match=f"tuned=.*--spac-tuned.*{says}"):
            serve(folder, tuned=str(given))


def test_a_profile_that_keeps_the_default_changes_nothing(folder: Path, here: Machine, caplog) -> None:
    caplog.set_level(logging.INFO)
    write(folder, here, choice="default", knobs={}, ratio=None)
    _, config = serve(folder)
    assert config == SpacConfig.parse({"disk_dir": str(folder)})
    [record] = caplog.records
    assert "nothing was faster than the default" in record.message
