"""``vllm-spac tune`` with real engines on the toy model, and ``vllm serve``'s configuration with a tuned profile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def process(*command: object) -> subprocess.CompletedProcess:
    """As a user starts it: without what engines of other tests in this process have set for themselves."""
    own = {name: value for name, value in os.environ.items() if name not in vllm_server.OF_THE_TESTS}
    env = own | {"VLLM_CPU_KVCACHE_SPACE": "1", "COLUMNS": "200"}
    return subprocess.run([sys.executable, "-P", *map(str, command)], capture_output=True, text=True, env=env)


@pytest.mark.full
def test_real_engines_are_measured_and_give_the_same_tokens(tmp_path: Path) -> None:
    """A minute is enough for the baselines; what else is tried depends on the machine."""
    options = ["--minutes", 1, "--output-tokens", 16, "--slots", "25%", "--disk-dir", tmp_path]
    done = process("-m", "vllm_spac.cli.main", "tune", TOY, *options, "--engine", json.dumps(ENGINE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout
    rows = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if line.count("│") > 2}
    for name in ("default", "policy=lru"):
        assert "equal" in rows[name], done.stdout
    undecided = "no profile was written" in done.stdout
    assert len(list(tmp_path.glob("tuned-*.json"))) == (not undecided)
    assert not undecided or len(list(tmp_path.glob("tuning-*.json"))) == 1


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
    assert spac == {"disk_dir": str(tmp_path), "slots": "25%", "policy": "lru", "tuned": str(path)} and length == 3
    lines = [line for line in (found.stdout + found.stderr).splitlines() if "spac: " in line]
    assert f"tuned={path} sets slots=25%, policy=lru, drafts=ngram 3" in lines[0]
    other = process(*serve, "--max-model-len", 512, "--spac-policy", "lfu")
    spac, length = json.loads(other.stdout.splitlines()[-1])
    assert spac == {"disk_dir": str(tmp_path), "policy": "lfu"} and length is None
    assert "starts untuned: you set --spac-policy" in other.stdout + other.stderr
