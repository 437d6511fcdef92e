"""The machine that is planned for: its memory, and what loads and experts cost on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from vllm_spac.checkpoint.packed import scan
from vllm_spac.errors import ConfigError
from vllm_spac.planning.model import ServedModel
from vllm_spac.profiling.costs import Costs, Rate, names
from vllm_spac.system.host_memory import available_host_bytes
from vllm_spac.system.machine import DISK_DIR

HERE = "here"
PROFILE = "profile.json"  # that `vllm-spac profile` writes by default, beside packed experts
UTILIZATION = 0.92  # vLLM's default --gpu-memory-utilization
HOST_RESERVE = 4 << 30  # bytes of host memory left to the system and to vLLM's processes; assumed

Store = Literal["none", "host", "disk", "tiers"]


@dataclass(frozen=True)
class PlannedMachine:
    """A machine.

    Attributes:
        name: as it was asked for.
        costs: its profile.
        gpu: bytes of GPU memory; 0: there is none.
        host: bytes of host memory that may be used.
        disk_free: bytes free where experts are packed, or taken by the largest packed folder, which may be this
            model's; None: unknown.
    """

    name: str
    costs: Costs
    gpu: int
    host: int
    disk_free: int | None = None

    @classmethod
    def of(
        cls,
        name: str,
        fast_memory: int | None = None,
        host_memory: int | None = None,
        folder: Path | None = None,
    ) -> PlannedMachine:
        """Returns the machine ``name``: ``here``, a packaged profile, or a file of ``vllm-spac profile``.

        Args:
            fast_memory, host_memory: bytes, instead of the profile's; the first is of a GPU.
            folder: where experts are packed and the profile of ``here`` is; None: ``DISK_DIR``.

        Raises:
            ConfigError: there is no such profile, it lacks what planning needs, or there is no GPU to have memory.
        """
        folder = (folder or DISK_DIR).expanduser()
        costs = _profile_here(folder) if name == HERE else Costs.read(name)
        capacity = costs.capacity
        if capacity is None:
            raise ConfigError(
                f"the profile {name} does not say how much memory its machine has; run vllm-spac profile there again"
            )
        here = name == HERE
        gpu, host = capacity.gpu, available_host_bytes() if here else capacity.host
        found = cls(name, costs, gpu, host, _free(folder) if here else None)
        if fast_memory is not None:
            if not gpu:
                raise ConfigError(f"--fast-memory is that of a GPU, and {name} has none; use --host-memory")
            found = replace(found, gpu=fast_memory)
        return found if host_memory is None else replace(found, host=host_memory)

    @property
    def fast(self) -> int:
        """Bytes of fast memory that vLLM may use: of the GPU, or of the host where there is none."""
        return int(UTILIZATION * self.gpu) if self.gpu else min(self.host, int(UTILIZATION * self.host))

    @property
    def spare(self) -> int:
        """Bytes of host memory that may hold experts; 0 without a GPU, where it is fast memory."""
        return max(0, self.host - HOST_RESERVE) if self.gpu else 0

    @property
    def disk(self) -> Rate | None:
        """Cost of a load from disk, if it is known."""
        return self.costs.load if self._loads_from_disk else self.costs.disk

    @property
    def link(self) -> Rate | None:
        """Cost of a load from host memory, if it is known."""
        return self.costs.host if self._loads_from_disk else self.costs.load

    def costs_of(self, store: Store, model: ServedModel) -> Costs:
        """Returns the costs with loads from ``store`` and with what this model reads outside of experts."""
        costs, load = self.costs, self.link if store in ("none", "host") else self.disk
        fixed = costs.other if costs.provenance.how == "measured" else 0.0
        own = costs.vllm.step + model.layers * costs.vllm.layer
        other = fixed or model.read_bytes / costs.fast.bytes_per_second + own
        origin = costs.provenance.model_copy(update={"store": "disk" if store in ("disk", "tiers") else "host"})
        host = self.link if store == "tiers" else None
        changes = {"load": load or costs.load, "host": host, "other": other, "draft": 0.0, "provenance": origin}
        return costs.model_copy(update=changes)

    @property
    def _loads_from_disk(self) -> bool:
        return self.costs.provenance.store == "disk"


def _profile_here(folder: Path) -> Costs:
    path = folder / PROFILE
    if not path.exists():
        raise ConfigError(
            f"this machine was not measured: there is no {path}; run vllm-spac profile --model MODEL or --expert-bytes "
            f"N, which takes a minute or two, or plan for another: --machine {', '.join(names())} or a file of "
            "vllm-spac profile"
        )
    return Costs.read(path, here=True, disk_dir=folder)


def _free(folder: Path) -> int:
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    return psutil.disk_usage(str(there)).free + max((item.bytes for item in scan(folder)), default=0)
