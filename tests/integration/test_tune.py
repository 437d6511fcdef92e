"""``vllm-spac tune`` with real engines on the toy model, and ``vllm serve``'s configuration with a tuned profile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import vllm_server

from vllm_spac.config import tuned_profile
from vllm_spac.config.tuned_profile import TunedProfile, path_of
from vllm_spac.integration.hooks import device
from vllm_spac.system.machine import Machine

TOY = Path(__file__).parents[2] / "benchmarks" / "toy" / "models" / "target"
ENGINE = {"enforce_eager": True, "max_model_len": 512, "dtype": "float32"}
_PARSE = """
import json, sys
import vllm_spac; vllm_spac.register()
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import configure_logging_from_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
EngineArgs.add_cli_args(parser)
args = parser.parse_args(sys.argv[1:])
configure_logging_from_args(args)  # as vllm serve does
config = EngineArgs.from_cli_args(args).create_engine_config()
drafts = config.speculative_config
print(json.dumps([config.additional_config["spac"], None if drafts is None else drafts.num_speculative_tokens]))
"""


def environment() -> dict[str, str]:
    """As a user starts it: without what engines of other tests in this process have set for themselves."""
    own = {name: value for name, value in os.environ.items() if name not in vllm_server.OF_THE_TESTS}
    return own | {"VLLM_CPU_KVCACHE_SPACE": "1", "COLUMNS": "200"}


def process(*command: object) -> subprocess.CompletedProcess:
    given = [sys.executable, "-P", *map(str, command)]
    return subprocess.run(given, capture_output=True, text=True, env=environment())


def tuning(folder: Path, minutes: float, *options: object) -> list[object]:
    given = ["--minutes", minutes, "--output-tokens", 16, "--slots", "25%", "--disk-dir", folder, *options]
    return ["-m", "vllm_spac.cli.main", "tune", TOY, *given, "--engine", json.dumps(ENGINE)]


@pytest.mark.full
def test_real_engines_are_measured_and_give_the_same_tokens(tmp_path: Path) -> None:
    """Two minutes are enough for a variant; which are tried depends on the machine."""
    done = process(*tuning(tmp_path, 2, "--allow-rounding"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout and "first start" not in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.strip().startswith("CPU experts")]
    assert len(rows) == 1 and "equal" in rows[0], done.stdout + done.stderr
    assert "no profile was written" in done.stdout or "\nwritten: " in done.stdout
    assert len(list(tmp_path.glob("tuned-*.json"))) == ("\nwritten: " in done.stdout)


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_stopped_says_so_and_leaves_no_engine(tmp_path: Path, number: int, code: int) -> None:
    """As a service manager stops it, and as Ctrl-C does, while a second engine starts."""
    command = [sys.executable, "-P", *map(str, tuning(tmp_path, 30))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if line.startswith("in turns with the default"):
                break
        engines = psutil.Process(child.pid).children()
        child.send_signal(number)
        said = child.stderr.read()
    assert child.returncode == code and said.startswith("stopped: nothing was compared so far"), said
    assert engines and not any(engine.is_running() for engine in engines)
    assert not list(tmp_path.glob("tuned-*.json"))


@pytest.mark.full
def test_vllm_is_configured_as_a_profile_says(tmp_path: Path) -> None:
    drafts: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    name = tuned_profile.identity(TOY)
    profile = TunedProfile(
        model="toy",
        identity=name,
        machine=Machine.here(tmp_path, device.names()),
        versions=tuned_profile.relevant_versions(),
        choice="c",
        knobs={"slots": "25%", "policy": "lru"},
        speculative_config=drafts,
    )
    profile.write(path := path_of(tmp_path, name))
    serve = ["-c", _PARSE, "--model", TOY, "--plugin", "spac", "--spac-disk-dir", tmp_path, "--enforce-eager"]
    found = process(*serve, "--max-model-len", 512)
    spac, length = json.loads(found.stdout.splitlines()[-1])
    assert spac == {"disk_dir": str(tmp_path), "slots": "25%", "policy": "lru", "tuned": f"{path}@allow=exact"}
    assert length == 3
    lines = [line for line in (found.stdout + found.stderr).splitlines() if "spac: " in line]
    assert f"tuned={path} sets slots=25%, policy=lru, drafts=ngram 3" in lines[0]
    other = process(*serve, "--max-model-len", 512, "--spac-policy", "lfu")
    spac, length = json.loads(other.stdout.splitlines()[-1])
    assert spac == {"disk_dir": str(tmp_path), "policy": "lfu"} and length is None
    assert "starts untuned: you set --spac-policy" in other.stdout + other.stderr
