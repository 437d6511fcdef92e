"""The machine that is planned for: its memory, and what loads and experts cost on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from vllm_spac.decisions.costs import PROFILE, Costs, Rate, names
from vllm_spac.errors import ConfigError
from vllm_spac.storage.checkpoint.packed_folder import scan
from vllm_spac.storage.checkpoint.quantisation import Capability
from vllm_spac.system.host_memory import SYSTEM_RESERVE, available_host_bytes, gib
from vllm_spac.system.machine import DISK_DIR, has_amx
from vllm_spac.system.untrusted import path_named
from vllm_spac.tools.planning.planned_model import ServedModel

HERE = "here"
UTILIZATION = 0.92  # vLLM's default --gpu-memory-utilization
OTHERS = "for another GPU, the one with its generation of PCIe and --fast-memory"
USABLE = 62.5 / 64  # of nominal host memory: firmware and kernel keep the rest
# Share of the rate of GPU memory at which our kernel reads an expert in a slot: INT4 13 to 21 % on an H100, bound by
# arithmetic. MXFP4 and NVFP4 are decoded likewise and were not timed; the same is assumed.
HIT_SHARE = dict.fromkeys(("int4", "int4-zeros", "mxfp4", "nvfp4"), 0.17)

Store = Literal["none", "host", "disk", "tiers"]


@dataclass(frozen=True)
class PlannedMachine:
    """A machine."""

    name: str
    costs: Costs  # its profile; of data sheets, what a machine is assumed to attain of them
    gpu: int  # bytes of GPU memory, of all ``cards`` together; 0: there is none
    host: int  # bytes of host memory that may be used
    disk_free: int | None = None  # where experts are packed, with the largest packed folder: it may be this model's
    memory: tuple[str, ...] = ()  # where its sizes of memory are from, in sentences
    taken: int = 0  # bytes of host memory that vLLM takes for n-gram tables of the model
    cards: tuple[int, ...] = ()  # bytes of each of several GPUs, which are pipeline stages; empty: there is one

    @classmethod
    def of(
        cls, name: str, fast_memory: int | None = None, host_memory: int | None = None, folder: Path | None = None
    ) -> PlannedMachine:
        """Returns the machine ``name``: ``here``, a packaged profile, or a file of ``vllm-spac check --measure``.

        Args:
            fast_memory, host_memory: bytes, instead of the profile's; the first is of a GPU.
            folder: where experts are packed and the profile of ``here`` is; None: ``DISK_DIR``.

        Raises:
            ConfigError: there is no such profile, it lacks what planning needs, or there is no GPU to have memory.
        """
        here = path_named(folder or DISK_DIR, "the folder") if name == HERE else None
        costs = (_profile(name) if here is None else _profile_here(here)).as_attained()
        capacity = costs.capacity
        if capacity is None:
            raise ConfigError(
                f"the profile {name} does not say how much memory its machine has; run vllm-spac check --measure there"
            )
        if fast_memory is not None and not capacity.gpu:
            raise ConfigError(f"--fast-memory is that of a GPU, and {name} has none; use --host-memory")
        gpu = fast_memory or capacity.gpu
        host = host_memory or (capacity.host if here is None else available_host_bytes())
        found = cls(name, costs, gpu, host, None if here is None else _free(here))
        return replace(found, memory=tuple(found._origins(fast_memory is not None, host_memory is not None)))

    def with_cards(self, cards: Sequence[int | None]) -> PlannedMachine:
        """Returns the machine with several GPUs of its kind.

        Args:
            cards: bytes of the memory of each; None: its own.

        Raises:
            ConfigError: it has no GPU, or ``cards`` are not several.
        """
        if not self.gpu:
            raise ConfigError(f"--gpus are pipeline stages, and {self.name} has no GPU; leave it out")
        if len(cards) < 2:
            raise ConfigError("--gpus names one GPU; leave it out, and name its memory with --fast-memory")
        each = tuple(card or self.gpu for card in cards)
        sizes = f"{len(each)} GPUs of its kind, of {', '.join(map(gib, each))}, as --gpus says"
        return replace(self, gpu=sum(each), cards=each, memory=(sizes, *self.memory[1:]))

    @property
    def smallest(self) -> int:
        """Bytes of the smallest GPU; 0: there is none."""
        return min(self.cards, default=self.gpu)

    @property
    def capability(self) -> Capability | None:
        """Compute capability of the GPU; None: there is none, or it is not known."""
        return self.costs.capacity.capability if self.costs.capacity else None

    @property
    def amx(self) -> bool:
        """Whether its CPU has AMX; taken for granted of another machine."""
        return self.name != HERE or has_amx()

    @property
    def fast(self) -> int:
        """Bytes of fast memory that vLLM may use: of the GPU, or of the host where there is none."""
        return int(UTILIZATION * self.gpu) if self.gpu else min(self.host, int(UTILIZATION * self.host)) - self.taken

    @property
    def spare(self) -> int:
        """Bytes of host memory that may hold experts; 0 without a GPU, where it is fast memory.

        Negative if not even the tables of n-grams fit.
        """
        usable = self.host if self.name == HERE else int(USABLE * self.host)  # here it is what is free
        return max(0, usable - SYSTEM_RESERVE) - self.taken if self.gpu else 0

    @property
    def disk(self) -> Rate | None:
        """Cost of a load from disk, if it is known."""
        return self.costs.load if self._loads_from_disk else self.costs.disk

    @property
    def link(self) -> Rate | None:
        """Cost of a load from host memory, if it is known."""
        return self.costs.host if self._loads_from_disk else self.costs.load

    def costs_of(self, store: Store, model: ServedModel, *, cpu: bool = False) -> Costs:
        """Returns the costs with loads from ``store``, and with what this model reads outside of experts.

        Their ``other`` has vLLM's own work, too, but for ``host_step``. ``cpu``: the CPU computes some experts.
        """
        costs, load = self.costs, self.link if store in ("none", "host") else self.disk
        fixed = costs.other if costs.provenance.how == "measured" else 0.0
        other = fixed or model.read_bytes / costs.fast.bytes_per_second + self._own(store, model, cpu)
        origin = costs.provenance.model_copy(update={"store": "disk" if store in ("disk", "tiers") else "host"})
        host, memory = self.link if store == "tiers" else None, costs.memory if store in ("host", "tiers") else None
        if self.gpu and model.execution != "slots" and store != "none":
            rate = HIT_SHARE.get(model.kind, 1.0) * costs.fast.bytes_per_second
            costs = costs.model_copy(update={"fast": costs.fast.model_copy(update={"bytes_per_second": rate})})
        elif not self.gpu and not model.stock:  # hits, too, are computed by what computes CPU experts
            costs = costs.model_copy(update={"fast": costs.with_experts(model.kind).cpu})
        changes = {"load": load or costs.load, "host": host, "memory": memory, "other": other, "draft": 0.0}
        return costs.with_experts(model.kind).model_copy(update=changes | {"provenance": origin})

    def host_step(self, store: Store, model: ServedModel, *, cpu: bool = False) -> float:
        """Returns the host's seconds in a step that pass while a GPU computes the step before (async scheduling).

        A step takes as long as the slower of the two. There are none where layers wait for the host's decisions, nor
        where the CPU computes experts: on an H100 steps took longer by as much (``gpu_h100.json``, run 11), with
        experts computed by a thread in Python. Compiled kernels, which need no interpreter, were not timed there.
        """
        if not self.gpu or cpu or self._host_decides(store, model):
            return 0.0
        return self._step(model)

    def _step(self, model: ServedModel) -> float:
        return self.costs.vllm.step + (self.costs.host_work.step if model.execution == "pointers" else 0.0)

    def _own(self, store: Store, model: ServedModel, cpu: bool) -> float:
        """Returns the seconds of vLLM and of the plugin in a step, but for those of layers and for ``host_step``."""
        vllm, decides = self.costs.vllm, self._host_decides(store, model)
        if decides:  # its work in layers has them, if it is assumed
            return 0.0 if self.costs.attained is not None else vllm.step + model.layers * vllm.layer
        launched = 2 if cpu else 1  # once more for what the CPU was late with
        hidden = self.host_step(store, model, cpu=cpu) > 0
        return launched * model.layers * vllm.layer + (0.0 if hidden else self._step(model))

    def _host_decides(self, store: Store, model: ServedModel) -> bool:
        return bool(self.gpu) and store != "none" and model.execution != "pointers"

    def _origins(self, gpu_given: bool, host_given: bool) -> Iterator[str]:
        """Yields a sentence for each size of memory: how much it is, and how that is known."""
        measured = self.costs.provenance.how == "measured"
        if self.gpu:
            known = "as --fast-memory says" if gpu_given else "as measured" if measured else "as its data sheet says"
            yield f"{gib(self.gpu)} of GPU memory, {known}"
        known = "as the profile has it" if measured else "which no data sheet says; --host-memory replaces it"
        known = "that are free now" if self.name == HERE else known
        yield f"{gib(self.host)} of host memory, {'as --host-memory says' if host_given else known}"

    @property
    def _loads_from_disk(self) -> bool:
        return self.costs.provenance.store == "disk"


def profile_path(folder: Path | None = None) -> Path:
    """Returns where the profile of this machine is, or would be."""
    return path_named(folder or DISK_DIR, "--disk-dir") / PROFILE


def _profile_here(folder: Path) -> Costs:
    path = profile_path(folder)
    if not path.exists():
        raise ConfigError(
            f"this machine was not measured: there is no {path}; run vllm-spac check --measure MODEL or --expert-bytes "
            f"N, which takes a minute or two, or plan for another: --machine {', '.join(names())} ({OTHERS}) or a file "
            "of vllm-spac check --measure"
        )
    return Costs.read(path, here=True, disk_dir=folder)


def _profile(name: str) -> Costs:
    try:
        return Costs.read(name)
    except ConfigError as error:
        if name in names() or Path(name).exists():
            raise
        raise ConfigError(f"{error}; {OTHERS}") from error


def _free(folder: Path) -> int:
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    return psutil.disk_usage(str(there)).free + max((item.bytes for item in scan(folder)), default=0)
