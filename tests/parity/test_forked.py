"""Programs that are forked: as processes of their own, and none of their ends is silent. Nothing is preloaded here."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import engines
import forked
import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux alone")


@pytest.fixture(scope="module")
def server() -> Iterator[forked.Server]:
    with contextlib.closing(forked.Server(("decimal", "threading"))) as server:
        yield server


def run(server: forked.Server, code: str, *arguments: str, timeout: float = 60, **changes: str):
    return server.run(["-c", code, *arguments], changes, timeout)


SHOW = """
import json, os, sys
print("text")
sys.stderr.write("problem")
import __main__
file = __main__.__dict__.get("__file__")
found = [sys.argv, sys.path[0], __name__, file, sys.stdin.read(), os.environ.get("COLUMNS")]
print(json.dumps([*found, "decimal" in sys.modules, os.getcwd()]))
"""


@pytest.mark.skipif(engines.V2, reason="v2_on_cpu has imported what these ask for")
def test_a_program_is_as_in_an_interpreter_of_its_own(server, tmp_path: Path, monkeypatch) -> None:
    """Except that a module is there before it is imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SHOW)
    for line in (["-c", SHOW, "a", "b"], [str(tmp_path / "script.py"), "a"]):
        done = server.run(line, {"COLUMNS": "77"}, 60)
        fresh = subprocess.run(
            [sys.executable, *line], capture_output=True, text=True, stdin=subprocess.DEVNULL,
            env=forked.ENVIRONMENT | {"COLUMNS": "77"},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (fresh.returncode, fresh.stderr) == (0, "problem")
        ours, theirs = forked.answer(done), forked.answer(fresh)
        assert (ours[-2], theirs[-2]) == (True, False)
        assert ours[:-2] == theirs[:-2] and ours[-1] == theirs[-1] and done.stdout.startswith("text\n")


def test_programs_leave_nothing_behind(server) -> None:
    change = "import decimal, os, sys; decimal.kept = 1; os.environ['COLUMNS'] = '1'; os.chdir('/'); sys.path[:] = []"
    assert run(server, change).returncode == 0
    shown = run(server, "import decimal, os; print(hasattr(decimal, 'kept'), os.environ.get('COLUMNS'), os.getcwd())")
    assert shown.stdout == f"False {forked.ENVIRONMENT.get('COLUMNS')} {os.getcwd()}\n"


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise ValueError('wrong expert')", 1, "ValueError: wrong expert"),
        ("import sys; sys.exit('spac: no')", 1, "spac: no"),
        ("import os, sys; print('so far', flush=True); os._exit(3)", 3, "so far"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV, "Segmentation fault"),
        ("if", 1, "SyntaxError"),
    ],
    ids=["exception", "exit", "dies", "killed", "crash", "no program"],
)
def test_a_program_that_fails_says_why(server, code: str, status: int, said: str) -> None:
    done = run(server, code)
    assert done.returncode == status and said in done.stdout + done.stderr
    with pytest.raises(AssertionError, match=f"(?s)status {status}.*{said}"):
        forked.answer(done)
    assert run(server, "print(1)").stdout == "1\n", "the next one is not affected"


def test_a_program_that_hangs_is_ended_and_shows_where(server) -> None:
    """And what it started ends with it."""
    child = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
    with pytest.raises(AssertionError, match=r"(?s)not over after 1 s:\n\d+\n.*in stuck") as caught:
        run(server, f"{child}import time\ndef stuck(): time.sleep(600)\nstuck()", timeout=1)
    pid = int(str(caught.value).splitlines()[1])
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(10)
    assert run(server, "print(1)").stdout == "1\n"


def test_a_program_may_print_much(server) -> None:
    done = run(server, "import sys\nfor _ in range(4000): print('x' * 999); sys.stderr.write('y' * 1000)\nprint('[2]')")
    assert len(done.stdout) == len(done.stderr) + 4 == 4_000_004 and forked.answer(done) == [2]


def test_a_server_that_dies_is_no_hang() -> None:
    with contextlib.closing(forked.Server(())) as server:
        for _ in range(2):
            with pytest.raises(AssertionError, match="server of forks ended with status -9"):
                run(server, "import os, time; os.kill(os.getppid(), 9); time.sleep(1)")


def test_the_program_of_a_session_that_is_gone_ends(tmp_path: Path) -> None:
    """Whether the session was stopped or killed."""
    pids = tmp_path / "pids"
    session = (
        "import sys; sys.path.insert(0, sys.argv[1]); import forked\n"
        "server = forked.Server(())\n"
        "server.run(['-c', 'import os, sys, time; print(os.getpid(), os.getppid(), file=open(sys.argv[1], \"w\"),"
        " flush=True); time.sleep(600)', sys.argv[2]], {}, 600)"
    )
    with subprocess.Popen([sys.executable, "-c", session, str(Path(__file__).parent), str(pids)]) as process:
        while not (pids.exists() and pids.read_text().endswith("\n")):
            assert process.poll() is None
        process.kill()
    for pid in map(int, pids.read_text().split()):
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(30)


@pytest.mark.skipif(engines.V2, reason="v2_on_cpu has imported what these ask for")
@pytest.mark.parametrize(("changes", "forks"), [({"COLUMNS": "9"}, True), ({"VLLM_LOGGING_LEVEL": "INFO"}, False)])
def test_what_vllm_reads_while_it_is_imported_needs_a_fresh_interpreter(monkeypatch, server, changes, forks) -> None:
    monkeypatch.setattr(forked, "_server", lambda: server)
    monkeypatch.setattr(forked, "FORKS", True)
    (name,) = changes
    done = forked.run(["-c", f"import os, sys; print(os.environ[{name!r}], 'decimal' in sys.modules)"], changes)
    assert done.stdout == f"{changes[name]} {forks}\n"
    same = {"VLLM_LOGGING_LEVEL": forked.ENVIRONMENT["VLLM_LOGGING_LEVEL"]}
    assert forked.run(["-c", "import sys; print('decimal' in sys.modules)"], same).stdout == "True\n"
