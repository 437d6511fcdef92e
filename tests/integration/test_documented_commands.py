"""The commands of README.md and USAGE.md as they are printed: each is run, or has its reason here not to be."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))

from vllm_server import OF_THE_TESTS, TARGET, Server  # noqa: E402

from vllm_spac.cli.main import app  # noqa: E402

pytestmark = pytest.mark.timeout(2 * 600)

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "vllm_spac" / "USAGE.md")
# A smaller model than a user's: nothing that a documented command decides, as how many requests run at once.
SMALL = ["--max-model-len", "512", "--enforce-eager", "--dtype", "float32"]
PLACEHOLDERS = {"Qwen/Qwen3-30B-A3B": str(TARGET), "MODEL": str(TARGET)}
NOT_RUN = {
    "make demo": "it is a run of its own of many minutes",
    "pip install .": "it would replace the installation that is tested; test_packaging.py builds what it installs",
    "vllm-spac check --fix": "it changes the installation; test_doctor.py has its cases",
    "vllm-spac tune MODEL": "it takes ten minutes; test_tune.py measures real engines, for a minute",
}
WATCHED = "vllm-spac stats http://localhost:8000 --watch"  # of the first server below
SAID = {"vllm-spac plan MODEL --machine rtx4090": "vllm serve"}

# Run in this order, in a home of their own: a plan for this machine reads what --measure writes.
MEASURED = {
    "vllm-spac check MODEL --disk": r"plugin +loaded by vLLM.*problems: \d+, notes: \d+.*6 x 64 = 384",
    "vllm-spac check MODEL --measure": r"written: .*profile\.json",
    "vllm-spac plan MODEL": r"vllm serve",
    "vllm-spac check MODEL --engines": r"problems: 0; \d+ s",
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
ALWAYS = "vllm serve MODEL --plugin spac"  # the others are full


def test_each_command_is_run_or_says_why_not() -> None:
    assert len(ALL) > 12 and len(SERVED) > 5
    others = {command for command in ALL if command not in SERVED}
    assert others == {WATCHED} | NOT_RUN.keys() | SAID.keys() | MEASURED.keys()


@pytest.mark.parametrize("command", SAID)
def test_a_documented_command_ends_well(command: str) -> None:
    done = CliRunner().invoke(app, filled(command)[1:], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert SAID[command] in done.output


def _spac(command: str) -> list[str]:
    program, *arguments = filled(command)
    assert program == "vllm-spac"
    return [str(Path(sys.executable).with_name(program)), *arguments]


@pytest.mark.full
def test_documented_commands_that_measure_end_well(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in OF_THE_TESTS}
    environment |= {"HOME": str(tmp_path), "COLUMNS": "200"}
    for command, said in MEASURED.items():
        done = subprocess.run(_spac(command), env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        assert re.search(said, done.stdout, re.DOTALL), f"{command}: {done.stdout}"


def _watched(server: Server) -> bytes:
    """What the command draws in a terminal until it has drawn twice, and is interrupted."""
    command = [part.replace("http://localhost:8000", server.url) for part in _spac(WATCHED)]
    ours, its = pty.openpty()
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=os.environ | {"COLUMNS": "200"})
    os.close(its)
    text = b""
    with open(ours, "rb", buffering=0) as terminal:
        while text.count(server.url.encode()) < 2 and (more := terminal.read(4096)):
            text += more
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the other side is closed
            while more := terminal.read(4096):
                text += more
    assert process.wait() == 0, text
    return text


def _served(command: str):
    return pytest.param(command, marks=() if command == ALWAYS else pytest.mark.full)


@pytest.mark.parametrize("command", [_served(command) for command in SERVED])
def test_a_documented_server_starts_and_answers(command: str, tmp_path: Path) -> None:
    program, verb, model, *flags = filled(command)
    assert (program, verb, model) == ("vllm", "serve", str(TARGET))
    here = [] if "host" in flags else ["--spac-disk-dir", str(tmp_path)]
    server = Server(tmp_path, *flags, *here, common=SMALL)
    try:
        server.wait()
        assert server.complete("import os\n")
        if command == ALWAYS:
            drawn = _watched(server)
            assert b"loads and waits since the start of the server" in drawn and b"Traceback" not in drawn
        log = server.log.read_text()  # vLLM's API server may log a traceback when its engine ends first
    finally:
        server.stop()
    assert log.count("spac: mode=") == 1 and "Traceback" not in log
