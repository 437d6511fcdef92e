"""Runs ``on_device/check_*.py`` in a process of its own, because Triton reads TRITON_INTERPRET when it is imported and
vLLM, in this process, must not see it: once in Triton's interpreter, on the CPU, and once compiled, on a GPU.
"""

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).with_name("on_device")
FILES = sorted(path.stem for path in FOLDER.glob("check_*.py"))
LIMIT = 900  # seconds; the interpreter needs about 60 on an idle machine

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (there are no wheels for this platform)", allow_module_level=True)


def run(folder: Path, interpret: bool) -> tuple[dict[str, Counter], str]:
    """Outcomes by file, and what pytest printed."""
    report = folder / "report.xml"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += [f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"]
    command += [str(FOLDER / f"{name}.py") for name in FILES]
    # In an empty folder: `-m` puts the working directory on sys.path, where the folder triton_kernels must not be.
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)
    said = done.stdout + done.stderr
    if not report.exists():
        return {}, said
    outcomes: dict[str, Counter] = {name: Counter() for name in FILES}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes[case.get("classname", "").rpartition(".")[2]][bad[0] if bad else "passed"] += 1
    return outcomes, said


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    return run(tmp_path_factory.mktemp("interpreted"), interpret=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: the kernels are interpreted and compiled here, but not run on a GPU")
    return run(tmp_path_factory.mktemp("compiled"), interpret=False)


def judge(outcome: tuple[dict[str, Counter], str], name: str) -> None:
    counts, said = outcome
    print(f"{name}: {dict(counts.get(name, {}))}")
    assert counts.get(name) and set(counts[name]) == {"passed"}, said


@pytest.mark.parametrize("name", FILES)
def test_in_the_interpreter(interpreted, name):
    judge(interpreted, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FILES)
def test_on_the_gpu(compiled, name):
    judge(compiled, name)


def test_every_kernel_has_a_check():
    paths = (ROOT / "triton_kernels").glob("*.py")
    kernels = {path.stem for path in paths if "@triton.jit" in path.read_text(encoding="utf-8")}
    assert {f"check_{name}" for name in kernels} | {"check_orders"} == set(FILES)  # those of ``mailbox``, by itself
