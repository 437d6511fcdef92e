"""Identifies the machine that a measurement belongs to."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

from vllm_spac.system.cpu_affinity import cpus

DISK_DIR = Path("~/.cache/vllm_spac")  # where experts are packed, unless --spac-disk-dir is given


class Machine(BaseModel):
    """The properties of a machine that the speed of experts depends on.

    Attributes:
        cores: number of cores that an engine may use.
        gpus: name of each GPU.
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
    path = folder.expanduser().absolute()
    while not path.exists():
        path = path.parent
    path = path.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    size = f"{psutil.disk_usage(str(path)).total / 1e9:.0f} GB"
    if not mounts:
        return size
    mount = max(mounts, key=lambda part: len(part.mountpoint))
    return f"{mount.device} {mount.fstype} {size}"
