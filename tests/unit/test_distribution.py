"""The wheel and the source distribution: what they hold, and that the wheel alone is a working installation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
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


def build(folder: Path, kind: str) -> Path:
    """Builds the ``wheel`` or ``sdist`` of ``folder``, as pip and build do, with the setuptools that is installed."""
    out = folder / "dist"
    program = f"from setuptools import build_meta as b; print(b.build_{kind}({str(out)!r}))"
    out.mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(copy_sources(tmp_path_factory.mktemp("wheel")), "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a new environment with the wheel; everything else is that of this environment."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=120)
    python = venv / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install"]
    subprocess.run([*command, "--quiet", "--no-index", "--no-deps", wheel], check=True, timeout=300)
    site = next(venv.glob("lib/python*/site-packages"))
    # The folder alone, without its .pth files, among which is that of the editable installation.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(python: Path, code: str, folder: Path) -> str:
    done = subprocess.run([python, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
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
    assert {name for name in found if not name.startswith(info)} == kernels | package


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
        [installed.parent / "vllm-spac", "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "doctor" in done.stdout
    code = (
        "from importlib.metadata import entry_points as e; import inspect\n"
        "for group in ('vllm.general_plugins', 'vllm.endpoint_plugins'):\n"
        "    [entry] = e(group=group, name='spac'); print(inspect.getfile(entry.load()))"
    )
    assert all(Path(path).is_relative_to(installed.parents[1]) for path in run(installed, code, tmp_path).split())


@pytest.mark.full
def test_an_installed_wheel_serves(installed: Path, tmp_path: Path) -> None:
    code = (
        "from vllm import LLM, SamplingParams; import vllm_spac\n"
        f"llm = LLM({str(TOY)!r}, enforce_eager=True, max_model_len=64, additional_config={{'spac': "
        f"{{'slots': '25%', 'store': 'disk', 'disk_dir': {str(tmp_path)!r}}}}})\n"
        "llm.generate(['def'], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)\n"
        "print(vllm_spac.__file__, vllm_spac.stats(llm)['workers'][0]['loads'])"
    )
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [installed, "-c", code], cwd=tmp_path, env=os.environ | settings, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    path, loads = done.stdout.split()[-2:]
    assert Path(path).is_relative_to(installed.parents[1]) and int(loads) > 0
