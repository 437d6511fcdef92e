"""The commands of README.md and USAGE.md as they are printed: each is run, or has its reason here not to be."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))

from vllm_server import TARGET, Server  # noqa: E402

from vllm_spac.cli.main import app  # noqa: E402

pytestmark = pytest.mark.timeout(2 * 600)

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "vllm_spac" / "USAGE.md")
# A smaller model than a user's: nothing that a documented command decides, as how many requests run at once.
SMALL = ["--max-model-len", "512", "--enforce-eager", "--dtype", "float32"]
PLACEHOLDERS = {"MODEL": str(TARGET), "HEAD": str(TARGET.parent / "eagle3")}
NOT_RUN = {
    "make demo": "it is a run of its own of many minutes",
    "make test": "it is what runs this test",
    "pip install .": "test_packaging.py builds the wheel",
    "vllm-spac doctor --fix": "it changes the installation; test_doctor.py has its cases",
    "vllm-spac tune MODEL": "test_tune.py measures, for fewer minutes",
    "vllm-spac doctor MODEL --disk": "test_doctor.py has its cases; here it would fill the disk that it measures",
    "vllm-spac profile --model MODEL": "test_profile.py measures; it takes the machine for itself",
    "vllm-spac selftest MODEL": "test_selftest.py runs its parts; all of them take minutes",
    "vllm-spac plan MODEL": "it needs a profile of this machine; with --machine it is run",
    "vllm-spac stats http://localhost:8000 --watch": "it ends with Ctrl-C; test_guarded_server.py asks once",
}
SAID = {
    "vllm-spac plan MODEL --machine rtx4090": "vllm serve",
    "vllm-spac inspect MODEL": "6 x 64 = 384",
}


def commands(path: Path) -> list[str]:
    """Those of the page's bash blocks, one line each, without comments."""
    found: list[str] = []
    for block in re.findall(r"^```bash\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if parts := shlex.split(line, comments=True):
                found.append(shlex.join(parts))
    return found


def filled(command: str) -> list[str]:
    """The arguments, with the tests' own models for the placeholders."""
    return [
        re.sub(rf"\b({'|'.join(PLACEHOLDERS)})\b", lambda name: PLACEHOLDERS[name[0]], part)
        for part in shlex.split(command)
    ]


ALL = list(dict.fromkeys(command for page in PAGES for command in commands(page)))
SERVED = [command for command in ALL if command.startswith("vllm serve")]
ALWAYS = ("vllm serve MODEL --plugin spac", "--spac-tree")  # the whole command, and an end of another


def test_each_command_is_run_or_says_why_not() -> None:
    assert len(ALL) > 12 and len(SERVED) > 5
    assert {command for command in ALL if command not in SERVED} == NOT_RUN.keys() | SAID.keys()


@pytest.mark.parametrize("command", SAID)
def test_a_documented_command_ends_well(command: str) -> None:
    done = CliRunner().invoke(app, filled(command)[1:], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert SAID[command] in done.output


def _served(command: str):
    often = command == ALWAYS[0] or ALWAYS[1] in command
    return pytest.param(command, marks=() if often else pytest.mark.full)


@pytest.mark.parametrize("command", map(_served, SERVED))
def test_a_documented_server_starts_and_answers(command: str, tmp_path: Path) -> None:
    program, verb, model, *flags = filled(command)
    assert (program, verb, model) == ("vllm", "serve", str(TARGET))
    here = [] if "host" in flags else ["--spac-disk-dir", str(tmp_path)]
    server = Server(tmp_path, *flags, *here, common=SMALL)
    try:
        server.wait()
        assert server.complete("import os\n")
    finally:
        server.stop()
    log = server.log.read_text()
    assert log.count("spac: mode=") == 1 and "Traceback" not in log
    if "--spac-tree" in flags:
        assert re.search(r"spac: trees set --max-num-seqs \d+:", log) and "prefetch=gate" in log
