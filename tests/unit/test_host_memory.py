"""``auto`` and ``store=host`` trust this number: too high and the machine swaps, too low and nothing starts."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_spac.system import host_memory

GIB = 2**30


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine with 10 GiB available; call it to write the files of its container."""
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(
        host_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GIB, total=16 * GIB)
    )

    def write(**files: str | int) -> None:
        for name, value in files.items():
            (tmp_path / f"memory.{name}").write_text(f"{value}\n")

    return write


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 10 * GIB),
        ({"max": "max", "current": 3 * GIB}, 10 * GIB),
        ({"max": 4 * GIB, "current": GIB}, 3 * GIB),
        ({"max": 64 * GIB, "current": GIB}, 10 * GIB),
        ({"max": 4 * GIB, "current": 5 * GIB}, 0),
        ({"max": 4 * GIB}, 10 * GIB),
        ({"current": GIB}, 10 * GIB),
        ({"max": "", "current": ""}, 10 * GIB),
    ],
)
def test_a_container_has_the_less_of_its_limit_and_the_machine_s(cgroup, files: dict, available: int) -> None:
    """Half a container, without a limit or a use, is none."""
    cgroup(**files)
    assert host_memory.available_host_bytes() == available


def test_page_cache_of_the_container_can_be_used(cgroup) -> None:
    """``memory.current`` counts the checkpoint that was just read through the page cache, which goes when needed.

    Otherwise a container that has read a 60 GiB checkpoint once has no memory left for its experts.
    """
    cgroup(max=8 * GIB, current=7 * GIB, stat=f"anon {GIB}\nfile {6 * GIB}\ninactive_file {6 * GIB}\nactive_file 0")
    assert host_memory.available_host_bytes() == 7 * GIB


def nested(root: Path, own: str, groups: dict[str, dict[str, int | str]]) -> None:
    """Writes what ``/proc/self/cgroup`` says, and the files of groups by their folders."""
    (root / "own").write_text(own)
    for folder, files in groups.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (root / folder / name).write_text(f"{value}\n")


@pytest.mark.parametrize("limited", ["slurm", "slurm/job_1", "slurm/job_1/step_0"])
def test_each_group_around_this_process_may_have_the_limit(cgroup, tmp_path: Path, limited: str) -> None:
    """A job of Slurm, or a scope of systemd, where the root of all groups is seen: its limit is killed for."""
    none = {"memory.max": "max", "memory.current": GIB}
    groups = dict.fromkeys(["slurm", "slurm/job_1", "slurm/job_1/step_0"], none)
    nested(tmp_path, "0::/slurm/job_1/step_0\n", groups | {limited: {"memory.max": 4 * GIB, "memory.current": GIB}})
    assert host_memory.available_host_bytes() == 3 * GIB and host_memory.host_limit() == 4 * GIB


def test_a_limit_above_the_machines_memory_is_none(cgroup, tmp_path: Path) -> None:
    assert host_memory.host_limit() is None
    cgroup(max=16 * GIB, current=GIB)
    assert host_memory.host_limit() is None
    cgroup(max=16 * GIB - 1)
    assert host_memory.host_limit() == 16 * GIB - 1


def test_groups_of_the_first_version(cgroup, tmp_path: Path) -> None:
    files = {"memory.limit_in_bytes": 4 * GIB, "memory.usage_in_bytes": 3 * GIB}
    statistics = f"inactive_file 0\ntotal_inactive_file {GIB}"
    none = {"memory.limit_in_bytes": 2**63 - 4096, "memory.usage_in_bytes": 3 * GIB}
    groups = {"memory/job": files | {"memory.stat": statistics}, "memory/job/step": none, "memory": none}
    nested(tmp_path, "9:name=systemd:/\n4:cpu,memory:/job/step\n3:cpuset:/other\n0::/\n", groups)
    assert host_memory.available_host_bytes() == 2 * GIB and host_memory.host_limit() == 4 * GIB


def test_releasing_the_pages_of_checkpoints_changes_no_byte(tmp_path: Path) -> None:
    """Also not those that were changed in memory, nor those of a file whose name has a blank in it."""
    path = tmp_path / "model 1.safetensors"
    path.write_bytes(bytes(range(256)) * 64)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
        pages[5000:5004] = b"mine"
        expected = bytes(pages)
        host_memory.release_file_pages()
        assert bytes(pages) == expected
    assert path.read_bytes() == bytes(range(256)) * 64


def resident() -> int:
    """Bytes of this process's own memory that are in RAM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_zeros_are_released_and_read_as_zeros_and_their_neighbours_stay() -> None:
    everything = torch.ones(64 << 20, dtype=torch.uint8)
    zeros = everything[5000:-5000].zero_()
    before = resident()
    host_memory.release_zeros(zeros)
    assert before - resident() > 60 << 20
    assert not zeros.any() and everything[:5000].all() and everything[-5000:].all()
    host_memory.release_zeros(everything[:100])  # not a whole page
    assert everything[:100].all()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library is not glibc")
def test_freed_memory_that_the_heap_would_keep_is_returned() -> None:
    """Pieces below the size that glibc maps one by one, with one at the end that is still used."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [libc.malloc(ctypes.c_size_t(60_000)) for _ in range(2000)]
    for piece in pieces:
        ctypes.memset(piece, 1, 60_000)
    for piece in pieces[:-1]:
        libc.free(piece)
    before = resident()
    host_memory.release_freed_memory()
    assert before - resident() > 100 << 20
    libc.free(pieces[-1])


def test_what_tcmalloc_keeps_is_returned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    library = SimpleNamespace(MallocExtension_ReleaseFreeMemory=lambda: called.append("tcmalloc"))
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: library)
    host_memory.release_freed_memory()
    assert called == ["tcmalloc"]


def test_this_process_takes_memory() -> None:
    before = host_memory.own_memory()
    kept = torch.ones(64 << 20, dtype=torch.uint8)
    assert host_memory.own_memory() - before > 48 << 20 and kept.all()  # threads of other tests may free some


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (int(4.5 * 2**20), "4.5 MiB"),
        (GIB, "1.00 GiB"),
        (1.25 * GIB, "1.25 GiB"),
        (3000 * GIB, "3000.00 GiB"),
    ],
)
def test_gib(count: float, text: str) -> None:
    assert host_memory.gib(count) == text
