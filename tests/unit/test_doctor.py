"""``vllm-spac check``: each made-up fault is found with its remedy, and nothing is found where nothing is wrong."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_spac.cli.main import app
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.storage.disk import PAGE, DiskStore
from vllm_spac.system.flaws import METADATA, Flaw
from vllm_spac.system.machine import cpus_named
from vllm_spac.tools.machine import gather, installation
from vllm_spac.tools.machine.checks import OLD_DAYS, diagnose
from vllm_spac.tools.machine.facts import Device, Disk, Facts, Installation, Library, Model, PackedFolder, System
from vllm_spac.tools.machine.gather import read_rate

GIB = 1 << 30
TORCH = Library("2.13.0+cpu", "==2.13.0", fits=True)
CPU = Installation("0.32.0", names=20, libraries={"torch": TORCH, "triton": Library(None, "", fits=True)})
GPU = replace(CPU, device=Device("NVIDIA H200", pinned=True, unified=True))
SYSTEM = System(frozenset(range(8)), None, (0,), 64 * GIB, 60 * GIB, None, None, "always")
DISK = Disk(Path("/packed"), 500 * GIB, read_ahead=128 << 10)
MODEL = Model("toy", experts=40 * GIB, smallest=GIB, others=2 * GIB)
HEALTHY = Facts(CPU, SYSTEM, DISK)


def changed(facts: Facts, **changes: dict) -> Facts:
    """``facts`` with attributes of its parts replaced: ``system={"memlock": 1}``."""
    return replace(facts, **{part: replace(getattr(facts, part), **values) for part, values in changes.items()})


@pytest.mark.parametrize("facts", [HEALTHY, replace(HEALTHY, installation=GPU), replace(HEALTHY, model=MODEL)])
def test_nothing_is_wrong_with_a_healthy_machine(facts: Facts) -> None:
    assert {finding.level for finding in diagnose(facts)} == {"ok"}


FOLDER = PackedFolder("f" * 32, 18 * GIB, days=1.0)


@pytest.mark.parametrize(
    ("changes", "check", "level", "said"),
    [
        ({"installation": {"vllm": None, "refusal": "No module named vllm"}}, "vLLM", "problem", "install vllm 0.32"),
        (
            {"installation": {"flaws": (Flaw(METADATA, "no metadata called vllm", "write it"),)}},
            METADATA,
            "problem",
            "vllm-spac check --fix, to write it",
        ),
        (  # and nothing of vLLM, which cannot be imported for this reason
            {
                "installation": {
                    "vllm": None,
                    "refusal": "OSError",
                    "flaws": (Flaw("torchaudio", "for CUDA", "remove it"),),
                }
            },
            "torchaudio",
            "problem",
            "vllm-spac check --fix, to remove it",
        ),
        (
            {"installation": {"libraries": {"torch": Library("2.13.0", "==2.13.0+cpu", fits=False)}}},
            "torch",
            "problem",
            "uv pip install --torch-backend=cpu 'torch==2.13.0+cpu'",
        ),
        (
            {"installation": {"off": ("vllm.a:B.c: no d",)}},
            "switched off",
            "note",
            "by SPAC_WITHOUT_PATCH: vllm.a:B.c: no d",
        ),
        (
            {"installation": {"off_refusal": "spac: SPAC_WITHOUT_PATCH names x"}},
            "switched off",
            "problem",
            "correct or unset SPAC_WITHOUT_PATCH",
        ),
        ({"installation": {"registered": False, "active": False}}, "plugin", "problem", "pip install ."),
        ({"installation": {"active": False, "plugins": "other"}}, "plugin", "problem", "VLLM_PLUGINS"),
        ({"installation": {"active": False}}, "plugin", "problem", "did not load it"),
        ({"installation": {"missing": ("has no a:b",)}}, "vLLM's names", "problem", "has no a:b"),
        (
            {"installation": {"libraries": {"torch": Library("2.9", "==2.13.0", fits=False)}}},
            "torch",
            "problem",
            "torch==2.13.0",
        ),
        ({"installation": {"device": Device("Tesla T4", True, True, "is too old")}}, "GPU", "problem", "is too old"),
        (
            {"installation": {"device": Device("A", False, True)}},
            "pinned memory",
            "problem",
            "--spac-store disk",
        ),
        (
            {"installation": {"device": Device("A", True, False)}},
            "unified addressing",
            "note",
            "--spac-plane slots",
        ),
        ({"installation": {"device": GPU.device}, "system": {"memlock": 8 << 20}}, "locked memory", "note", "8.0 MiB"),
        (
            {"installation": {"device": GPU.device}, "system": {"wsl": True, "memlock": 8 << 20}},
            "locked memory",
            "note",
            ".wslconfig",
        ),
        (
            {"installation": {"device": Device("A", False, True)}, "system": {"wsl": True}},
            "pinned memory",
            "problem",
            "VLLM_WSL2_ENABLE_PIN_MEMORY=1",
        ),
        ({"system": {"huge_pages": "never"}}, "huge pages", "note", "echo madvise"),
        ({"system": {"huge_pages": ""}}, "huge pages", "note", "CONFIG_TRANSPARENT_HUGEPAGE"),
        ({"system": {"nodes": (0, 1)}}, "NUMA", "note", "numactl"),
        ({"system": {"environment": {"OMP_NUM_THREADS": "x"}}}, "threads", "problem", "OMP_NUM_THREADS=8"),
        ({"system": {"environment": {"OMP_NUM_THREADS": "9"}}}, "threads", "problem", "has 8 processors"),
        ({"system": {"quota": 2.0}}, "threads", "problem", "OMP_NUM_THREADS=2"),
        ({"system": {"environment": {"OMP_WAIT_POLICY": "ACTIVE"}}}, "spinning", "problem", "unset OMP_WAIT_POLICY"),
        ({"system": {"environment": {"KMP_BLOCKTIME": "infinite"}}}, "spinning", "problem", "unset KMP_BLOCKTIME"),
        ({"system": {"environment": {"OMP_PROC_BIND": "close"}}}, "binding", "note", "unset OMP_PROC_BIND"),
        (
            {"system": {"environment": {"VLLM_CPU_OMP_THREADS_BIND": "0-3|7-9"}}},
            "binding",
            "problem",
            "[8, 9]",
        ),
        ({"disk": {"unwritable": "Permission denied"}}, "disk", "problem", "--spac-disk-dir"),
        ({"disk": {"unwritable": "Read-only", "packed": (FOLDER,)}}, "disk", "note", "--spac-disk-dir"),
        ({"disk": {"free": 1 << 20}}, "disk", "problem", "vllm-spac packed"),
        ({"disk": {"direct": False}}, "direct I/O", "note", "blockdev --setra"),
        (
            {"disk": {"packed": (replace(FOLDER, unfinished=True),)}},
            "packed experts",
            "problem",
            f"--delete {'f' * 32} --disk-dir /packed",
        ),
        (
            {"disk": {"packed": (replace(FOLDER, leftovers=3),)}},
            "packed experts",
            "problem",
            "3 leftover files",
        ),
        (
            {"disk": {"packed": (replace(FOLDER, days=OLD_DAYS + 5),)}},
            "packed experts",
            "note",
            "18.00 GiB, 35 days old",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:30],
)
def test_each_fault_is_found_with_its_remedy(changes: dict, check: str, level: str, said: str) -> None:
    found = [finding for finding in diagnose(changed(HEALTHY, **changes)) if finding.level != "ok"]
    assert [(finding.check, finding.level) for finding in found] == [(check, level)]
    assert said in f"{found[0].text} -> {found[0].remedy}" and found[0].remedy


@pytest.mark.parametrize(
    ("base", "changes", "check", "level"),
    [
        (CPU, {"system": {"available": 2 * GIB}}, "host memory", "problem"),
        (CPU, {"system": {"available": 4 * GIB}}, "host memory", "problem"),  # 3 GiB of weights, and vLLM itself
        (GPU, {"system": {"available": 30 * GIB}}, "host memory", "note"),
        (CPU, {"disk": {"free": 30 * GIB}}, "disk", "problem"),
        (CPU, {"disk": {"free": 30 * GIB, "packed": (replace(FOLDER, bytes=41 * GIB),)}}, "disk", "note"),
        (GPU, {"disk": {"free": 30 * GIB}}, "disk", "note"),
        (CPU, {"model": {"refusal": "is a dense model"}}, "model", "problem"),
    ],
)
def test_a_model_must_fit(base: Installation, changes: dict, check: str, level: str) -> None:
    facts = changed(replace(HEALTHY, installation=base, model=MODEL), **changes)
    assert [(f.check, f.level) for f in diagnose(facts) if f.level != "ok"] == [(check, level)]


def test_the_disk_must_hold_what_host_memory_does_not() -> None:
    changes = {"disk": {"free": 30 * GIB}, "system": {"available": 45 * GIB}}
    facts = changed(replace(HEALTHY, installation=GPU, model=MODEL), **changes)
    found = {each.check: each.level for each in diagnose(facts) if each.level != "ok"}
    assert found == {"host memory": "note", "disk": "problem"}, "40 GiB of experts, and 6 GiB for the system"


def test_memory_beside_the_slots_is_named_on_a_cpu() -> None:
    on_cpu, on_gpu = (
        next(f.text for f in diagnose(replace(HEALTHY, installation=base)) if f.check == "host memory")
        for base in (CPU, GPU)
    )
    assert "processes take about 1.35 GiB" in on_cpu and "processes" not in on_gpu


def test_what_a_server_uses_is_left_alone() -> None:
    busy = replace(FOLDER, unfinished=True, leftovers=2, days=400, used=True)
    assert {finding.level for finding in diagnose(changed(HEALTHY, disk={"packed": (busy,)}))} == {"ok"}


_SIZES = st.integers(0, 1 << 50)
_TEXTS = st.text(max_size=20)


@given(
    st.builds(
        Facts,
        st.builds(Installation, vllm=st.none() | _TEXTS, plugins=st.none() | _TEXTS),
        st.builds(
            System,
            cpus=st.frozensets(st.integers(0, 64), min_size=1),
            quota=st.none() | st.floats(0.1, 64),
            nodes=st.lists(st.integers(0, 8), max_size=3).map(tuple),
            total=_SIZES,
            available=_SIZES,
            limit=st.none() | _SIZES,
            memlock=st.none() | _SIZES,
            wsl=st.booleans(),
            huge_pages=st.sampled_from(["", "always", "madvise", "never"]),
            environment=st.dictionaries(st.sampled_from(gather.VARIABLES), _TEXTS | st.from_regex(r"\d+-?\d*")),
        ),
        st.builds(Disk, folder=st.just(Path("/x")), free=_SIZES, rate=st.none() | st.floats(0, 1e12)),
        st.none() | st.builds(Model, name=_TEXTS, experts=_SIZES, smallest=_SIZES, others=_SIZES),
    )
)
def test_whatever_the_facts_a_fault_has_a_remedy_and_the_rest_has_none(facts: Facts) -> None:
    for finding in diagnose(facts):
        assert (finding.level == "ok") == (finding.remedy == "")


# -- facts of this machine --


def test_lists_of_cpus() -> None:
    assert cpus_named("0-2,5|7") == {0, 1, 2, 5, 7} and cpus_named("") == cpus_named("auto") == set()


def test_in_windows_half_of_the_memory_can_be_pinned_whatever_the_limit() -> None:
    facts = changed(replace(HEALTHY, installation=GPU), system={"wsl": True, "memlock": 8 << 20})
    for experts, level in ((32 * GIB, "ok"), (33 * GIB, "note")):
        named = replace(facts, model=replace(MODEL, experts=experts))
        (found,) = (finding for finding in diagnose(named) if finding.check == "locked memory")
        assert found.level == level and "ulimit" not in found.text + found.remedy


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    """Two layers of two experts, written by the plugin's own store."""
    shape = MoEShape(("model.layers.3.e", "model.layers.5.e"), 2, 1, {"w": TensorSpec((40, 64), torch.bfloat16)})
    store = DiskStore(shape, "0123456789abcdef" * 2, tmp_path / "packed")
    for key in range(shape.total):
        store.put(key, {"w": torch.full((40, 64), key, dtype=torch.bfloat16)})
    return store


def test_packed_folders_are_looked_at(store: DiskStore) -> None:
    root = store.folder.parent
    (whole,) = gather.disk(root, measure=False).packed
    assert whole.bytes == 4 * (PAGE + store.shape.expert_bytes)
    assert not (whole.unfinished or whole.leftovers or whole.used)
    store.path(3).unlink()
    (root / f"{store.folder.name}.lock").touch()
    (part,) = gather.disk(root, measure=False).packed
    assert part.unfinished and not part.used
    with open(root / f"{store.folder.name}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert gather.disk(root, measure=False).packed[0].used
    assert not list(root.glob(".probe-*")), "the probe is removed"


# -- the command --


def test_the_disk_is_read(store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [store.path(key) for key in range(4)]
    assert read_rate(files, tmp_path, seconds=0.05) > 0
    monkeypatch.setattr("vllm_spac.tools.machine.gather._SCRATCH", 4 << 20)
    assert (gather.disk(tmp_path / "absent", measure=True).rate or 0) > 0
    assert not list(tmp_path.glob(".probe-*"))


def test_the_system_has_processors_and_memory() -> None:
    found = gather.system()
    assert found.cpus and 0 < found.available <= found.total


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *map(str, arguments)], env={"COLUMNS": "200", "NO_COLOR": "1"})
    return result.exit_code, result.output


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installation and system are made up; the disk is the test's."""
    monkeypatch.setattr(installation, "installation", lambda: CPU)
    monkeypatch.setattr(gather, "system", lambda: SYSTEM)


@pytest.mark.usefixtures("healthy")
def test_exit_code_and_json(store: DiskStore, tmp_path: Path) -> None:
    root = store.folder.parent
    code, text = run("--disk-dir", root)
    assert code == 0 and "problems: 0" in text
    store.path(3).unlink()
    code, text = run("--disk-dir", root, "--json")
    found = json.loads(text)
    assert code == 1 and found["problems"] == 1 and found["facts"]["system"]["cpus"] == list(range(8))
    assert [f["check"] for f in found["findings"] if f["level"] == "problem"] == ["packed experts"]
    code, text = run(tmp_path / "absent", "--disk-dir", tmp_path)
    assert code == 1 and "is not a folder" in text and "->" in text


@pytest.mark.usefixtures("healthy")
def test_bad_input(tmp_path: Path) -> None:
    assert run("--disk-dir", "x" * 5000)[0] == 1
    code, text = run("--yes")
    assert code == 1 and "add --fix" in text
    code, text = run("--nonsense")
    assert code == 2 and "--nonsense" in text


@pytest.mark.rest
def test_this_vllm_loads_the_plugin() -> None:
    """In a process of its own, because loading wraps vLLM's methods."""
    code = (
        "from vllm_spac.tools.machine.installation import installation as i; f = i(); "
        "assert f.registered and f.active and not f.missing and not f.refusal, f; "
        "assert f.names > 15 and f.libraries['torch'].fits and f.libraries['torch'].required, f"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.rest
def test_a_plugin_that_vllm_was_told_to_leave_out() -> None:
    code = "from vllm_spac.tools.machine.installation import installation as i; f = i(); assert not f.active, f"
    subprocess.run([sys.executable, "-c", code], check=True, env={"VLLM_PLUGINS": "other", "PATH": "/usr/bin:/bin"})
