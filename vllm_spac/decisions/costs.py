"""The costs of expert operations on a machine, in seconds, read from a profile file with its provenance.

Rates are fitted to measured seconds: a fixed part, and a part that grows with bytes or rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Final, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_spac.core import MoEShape, Rates, TensorSpec
from vllm_spac.decisions.core_rates import CORE_RATES, PLAIN, ROWS, limited
from vllm_spac.errors import ConfigError
from vllm_spac.system.machine import Machine
from vllm_spac.system.untrusted import read_text


def fit_load(points: Mapping[int, float], nbytes: int) -> Rate:
    """Fits ``fixed`` + loads at once * bytes / ``bytes_per_second`` by least squares; neither is negative."""
    counts, seconds = np.array(list(points), dtype=float), np.array(list(points.values()))
    slope, fixed = np.polyfit(counts, seconds, 1) if len(points) > 1 else (0.0, -1.0)
    if slope <= 0:  # more loads at once take no longer: only the total throughput can be fitted
        slope, fixed = float((seconds / counts).min()), 0.0
    elif fixed < 0:
        slope, fixed = float((counts * seconds).sum() / (counts**2).sum()), 0.0
    return Rate(fixed=float(fixed), bytes_per_second=float(nbytes / slope))


def fit_compute(points: Mapping[int, float], nbytes: int, fixed: float) -> Rate:
    """Fits a rate that is exact at the fewest and the most rows.

    Args:
        fixed: seconds of an expert without bytes; capped at half the seconds at the fewest rows.
    """
    fewest, most = min(points), max(points)
    fixed = min(fixed, points[fewest] / 2)
    memory = points[fewest] - fixed
    arithmetic = (points[most] - fixed) / most
    limited = arithmetic > 0 and most > fewest and points[most] > points[fewest]
    return Rate(
        fixed=fixed,
        bytes_per_second=nbytes / memory,
        flops_per_second=nbytes / min(arithmetic, memory / fewest) if limited else None,
    )


def fit_vllm_step(points: Mapping[int, float]) -> VllmStep:
    """Returns vLLM's own seconds from those per token by the number of layers, of which there are two."""
    (few, less), (many, more) = sorted(points.items())
    layer = max(0.0, (more - less) / (many - few))
    return VllmStep(step=max(0.0, less - few * layer), layer=layer)


def fit_host_work(
    resident: float, loading: Mapping[int, float], loads: Mapping[int, float], dividing: Mapping[int, float]
) -> HostWork:
    """Returns the medians over the numbers of missed experts; none is negative.

    Args:
        resident: seconds of a layer of which every expert has its slot.
        loading: missed experts -> seconds of a layer that loads them; 0 for a layer that misses none.
        loads: the same numbers, except 0 -> seconds of the loads alone.
        dividing: missed experts -> seconds of a layer that leaves them to the CPU.
    """
    hit = loading[0]
    load = median(loading[count] - hit - alone for count, alone in loads.items())
    divide = median(seconds - hit for seconds in dividing.values())
    return HostWork(layer=max(0.0, hit - resident), load=max(0.0, load), divide=max(0.0, divide))


WIDTH = 32  # sizes are multiples of it: kernels work in tiles


@dataclass(frozen=True)
class ExpertSize:
    """A bfloat16 expert with gate, up and down projections, 3 * hidden * intermediate * 2 bytes."""

    hidden: int
    intermediate: int

    @classmethod
    def of(cls, nbytes: int) -> ExpertSize:
        """Returns the size nearest to ``nbytes``: multiples of 32, hidden one to four times intermediate.

        Raises:
            ConfigError: ``nbytes`` is below 6144.
        """
        smallest = 6 * WIDTH**2
        if nbytes < smallest:
            raise ConfigError(f"an expert of {nbytes} bytes is too small to be measured; use at least {smallest}")
        least, most = (max(1, math.floor(math.sqrt(nbytes / 6 / ratio) / WIDTH)) for ratio in (4, 1))
        widths = (WIDTH * count for count in range(least, most + 1))
        sizes = [cls(max(WIDTH, round(nbytes / 6 / width / WIDTH) * WIDTH), width) for width in widths]
        return min(sizes, key=lambda size: abs(size.nbytes - nbytes))

    @property
    def nbytes(self) -> int:
        return 6 * self.hidden * self.intermediate

    def shape(self, experts: int) -> MoEShape:
        """Returns the shape of one layer of ``experts`` such experts."""
        tensors = {
            "w13_weight": TensorSpec((2 * self.intermediate, self.hidden), torch.bfloat16),
            "w2_weight": TensorSpec((self.hidden, self.intermediate), torch.bfloat16),
        }
        return MoEShape(("profile",), experts, 1, tensors)


FORMAT: Final = "spac-profile-1"
PROFILE = "profile.json"  # that ``vllm-spac check --measure`` writes by default, beside packed experts
_FOLDER = "profiles"


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Rate(_Frozen):
    """Cost of an expert: ``fixed`` + max(bytes / ``bytes_per_second``, rows * bytes / ``flops_per_second``) seconds.

    The last term is arithmetic: a row takes two operations per parameter, which equals the bytes of a 16-bit expert.
    ``flops_per_second`` None: memory bandwidth is always the limit.
    """

    fixed: float = Field(0.0, ge=0)
    bytes_per_second: float = Field(gt=0)
    flops_per_second: float | None = Field(None, gt=0)

    def seconds(self, nbytes: int, rows: np.ndarray | int = 1) -> np.ndarray | float:
        """Returns the seconds that an expert of ``nbytes`` takes for ``rows`` rows, in the shape of ``rows``."""
        return self.fixed + self.ideal(nbytes, rows)

    def ideal(self, nbytes: int, rows: np.ndarray | int = 1) -> np.ndarray | float:
        """Returns the same without ``fixed``: a lower bound for any implementation."""
        memory = nbytes / self.bytes_per_second
        if self.flops_per_second is None:
            return memory + 0.0 * rows
        return np.maximum(memory, rows * (nbytes / self.flops_per_second))


class Provenance(_Frozen):
    """Origin of a profile's numbers: ``measured`` by ``source`` (a command) or ``calculated`` from it (data sheets).

    ``points``: the measurements, median seconds keyed by the quantity in their name; the rates are fitted to them.
    ``expert_bytes``: size of the experts that were measured. ``store``: what loads read.
    """

    how: Literal["measured", "calculated"]
    source: str = Field(min_length=1)
    assumes: tuple[str, ...] = ()
    date: str = ""
    machine: Machine | None = None
    versions: dict[str, str] = {}
    points: dict[str, dict[int, float]] = {}
    expert_bytes: int | None = None
    store: str = ""


class Capacity(_Frozen):
    """Memory of a machine in bytes; ``gpu`` is 0 where there is no GPU, and fast memory is then host memory.

    ``capability``: of the GPU, major and minor; None: not known.
    """

    gpu: int = Field(0, ge=0)
    host: int = Field(gt=0)
    capability: tuple[int, int] | None = None


class HostWork(_Frozen):
    """The host's own work in a layer over fewer slots than experts, in seconds beside those of loads and experts.

    It hardly depends on the number of experts.

    Attributes:
        layer: of any such layer, also if it misses nothing: to find out where its experts are.
        load: in addition, of a part of a layer that loads experts: to find slots, to submit loads and to wait for them.
        divide: in addition, of a layer of which the CPU computes experts: to divide its rows, to submit some of them,
            to wait for them and to combine them.
        step: of a step whose loads the device decides: to offer slots before it, and to learn from its report.
    """

    layer: float = Field(0.0, ge=0)
    load: float = Field(0.0, ge=0)
    divide: float = Field(0.0, ge=0)
    step: float = Field(0.0, ge=0)


class VllmStep(_Frozen):
    """Seconds that vLLM itself takes, without reading weights.

    Attributes:
        step: of any step: to schedule, to prepare, to sample.
        layer: of each layer: attention, norms and what surrounds them. In a CUDA graph, to launch its kernels.
    """

    step: float = Field(0.0, ge=0)
    layer: float = Field(0.0, ge=0)


class Attained(_Frozen):
    """What a machine attains of a data sheet's peaks, and what it does beside them: assumed, and counted by plans only.

    Attributes:
        host_work: the plugin's own, about what it was on another machine; where the host decides, with vLLM's own.
    """

    link: float = Field(gt=0, le=1)  # share of the peak of loads from host memory
    cores: int = Field(gt=0)  # that compute experts
    memory: float = Field(1.0, gt=0, le=1)  # share of the peak of host memory that all reads of it attain
    host_work: HostWork
    vllm: VllmStep = VllmStep()  # vLLM's own in CUDA graphs, what it was on another machine


class Costs(_Frozen):
    """A machine's profile of costs.

    Attributes:
        fast: cost of computing an expert in fast memory.
        load: cost of bringing an expert into fast memory (copied, or read from disk); concurrent loads share
            ``bytes_per_second``.
        load_at_once: loads in flight whose ``fixed`` parts overlap.
        host: cost of bringing an expert from host memory beside the store that ``load`` reads, if that is a disk; None
            where it was not measured.
        disk: cost of bringing an expert from disk, if ``load`` reads host memory; None where it is not known.
        capacity: memory of the machine; None in files of older versions.
        cpu: cost of computing an expert on the CPU from host memory.
        memory: bytes per second of host memory, for CPU experts and loads of ``load`` together; None where it is not
            known, or these loads are from elsewhere.
        other: seconds per step outside of the experts.
        draft: seconds per draft token.
        host_work: the plugin's own in layers over slots; 0 where it was not measured, as in files of older versions.
        vllm: vLLM's own; 0 where it was not measured.
        attained: what is assumed where a profile has data sheets only; see ``as_attained``.
    """

    format: Literal["spac-profile-1"]
    name: str
    provenance: Provenance
    fast: Rate
    load: Rate
    cpu: Rate
    memory: float | None = Field(None, gt=0)
    host: Rate | None = None
    disk: Rate | None = None
    capacity: Capacity | None = None
    load_at_once: int = Field(1, ge=1)
    other: float = Field(0.0, ge=0)
    draft: float = Field(0.0, ge=0)
    host_work: HostWork = HostWork()
    vllm: VllmStep = VllmStep()
    attained: Attained | None = None

    def as_attained(self) -> Costs:
        """Returns these costs with what ``attained`` assumes in place of peaks; the same ones if they were measured."""
        if self.attained is None or self.provenance.how == "measured":
            return self
        assumed = self.attained
        load = self.load.model_copy(update={"bytes_per_second": assumed.link * self.load.bytes_per_second})
        changes = {"load": load, "host_work": assumed.host_work, "vllm": assumed.vllm}
        if self.memory is not None:
            memory = assumed.memory * self.memory
            rate = limited(PLAIN, memory, assumed.cores)
            cpu = Rate(bytes_per_second=rate.one, flops_per_second=ROWS * rate.many)
            return self.model_copy(update=changes | {"memory": memory, "cpu": cpu})
        return self.model_copy(update=changes)

    def with_experts(self, kind: str) -> Costs:
        """Returns these costs with CPU experts of ``kind``, one of ``CORE_RATES``, in place of bfloat16 (calculated).

        What they take relative to bfloat16 depends on whether memory or the ``attained`` cores are the limit; of a
        machine that was measured it is what it was in ``CORE_RATES``.
        """
        if self.attained is None or self.memory is None:
            this, plain = CORE_RATES[kind], CORE_RATES[PLAIN]
        else:
            this, plain = (limited(each, self.memory, self.attained.cores) for each in (kind, PLAIN))
        changes = {"bytes_per_second": self.cpu.bytes_per_second * this.one / plain.one}
        if self.cpu.flops_per_second is not None:
            changes["flops_per_second"] = self.cpu.flops_per_second * this.many / plain.many
        return self.model_copy(update={"cpu": self.cpu.model_copy(update=changes)})

    @classmethod
    def read(cls, profile: str | Path, *, here: bool = False, disk_dir: Path | None = None) -> Costs:
        """Reads a profile from a file, or a packaged profile by its name.

        Args:
            here: refuse a profile that was not measured on this machine, with the disk of ``disk_dir`` (default: where
                experts are packed by default).

        Raises:
            ConfigError: there is none, it is not a profile, or it was measured on another machine.
        """
        try:
            text = read_text(profile)
        except (OSError, ValueError) as error:
            packaged, missing = _packaged(str(profile)), isinstance(error, FileNotFoundError)
            if packaged is None:
                problem = f"there is no profile {profile}" if missing else f"the profile {profile}: {error}"
                raise ConfigError(f"{problem}; name a file or one of {', '.join(names())}") from error
            text = packaged
        try:
            costs = cls.model_validate_json(text)
        except ValidationError as error:
            found = error.errors()[:3]
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in found)
            raise ConfigError(f"{profile} is no profile of format {FORMAT}: {problems}") from None
        if here:
            costs._check_machine(profile, Machine.here(disk_dir))
        return costs

    def _check_machine(self, profile: str | Path, machine: Machine) -> None:
        origin = self.provenance
        if origin.how == "measured" and origin.machine is not None:
            differences = origin.machine.differences(machine)
            if not differences:
                return
            problem = f"was measured on another machine ({'; '.join(differences)})"
        else:
            problem = f"was {origin.how}, not measured on this machine"
        raise ConfigError(f"the profile {profile} {problem}; run vllm-spac check --measure here")

    def check_experts(self, profile: str | Path, nbytes: int, store: str) -> None:
        """Raises ``ConfigError`` unless experts of ``nbytes``, loaded from ``store``, were measured."""
        origin = self.provenance
        if origin.expert_bytes != nbytes or origin.store != store:
            measured = f"{origin.expert_bytes or 'unknown'} bytes from {origin.store or 'an unknown store'}"
            raise ConfigError(
                f"the profile {profile} is of experts of {measured}, not of {nbytes} bytes from {store}; "
                f"run vllm-spac check --measure --expert-bytes {nbytes} --store {store}"
            )

    def rates(self, nbytes: int) -> Rates:
        """Returns the rates that a balancer weighs, for experts of ``nbytes``."""
        return Rates(
            fast=float(self.fast.seconds(nbytes)),
            stream=float(self.load.seconds(nbytes)),
            cpu=float(self.cpu.seconds(nbytes)),
            cpu_row=nbytes / self.cpu.flops_per_second if self.cpu.flops_per_second else 0.0,
            draft=self.draft,
            memory=nbytes / self.memory if self.memory else 0.0,
        )

    def sharing(self, nbytes: int, link: int, cpu: int) -> float:
        """Returns the least seconds in which host memory serves these loads and CPU experts; 0 unless both read it."""
        return (link + cpu) * nbytes / self.memory if self.memory and link and cpu else 0.0

    def loading(self, count: int, nbytes: int) -> float:
        """Returns the seconds until ``count`` loads that start together have finished."""
        return -(-count // self.load_at_once) * self.load.fixed + count * nbytes / self.load.bytes_per_second

    def bound(self, nbytes: int, hit: int, stream: int, cpu: int, near: int = 0) -> float:
        """Returns the least seconds of a layer: processors and links work concurrently, each reads its experts once.

        ``near``: those of the ``stream`` loads that host memory beside the store serves.
        """
        ideal = [hit * self.fast.ideal(nbytes), (stream - near) * self.load.ideal(nbytes), cpu * self.cpu.ideal(nbytes)]
        if self.host is not None:
            ideal.append(near * self.host.ideal(nbytes))
        ideal.append(self.sharing(nbytes, stream, cpu))
        return float(max(ideal))


def names() -> list[str]:
    """Returns the names of the packaged profiles."""
    return sorted(item.name.removesuffix(".json") for item in files("vllm_spac.decisions").joinpath(_FOLDER).iterdir())


def of_gpu(name: str, capability: tuple[int, int]) -> Costs:
    """Returns the packaged profile of a GPU by the name that its driver has for it, else of one of its generation.

    Args:
        capability: of the GPU, major and minor.
    """
    found, plain = [Costs.read(each) for each in names()], name.lower().replace(" ", "")
    for each in found:
        if each.name in plain:
            return each

    def near(each: Costs) -> tuple[bool, tuple[int, int]]:
        known = (each.capacity and each.capacity.capability) or (0, 0)
        return known <= capability, known

    return max(found, key=near)


def _packaged(name: str) -> str | None:
    if name not in names():
        return None
    return files("vllm_spac.decisions").joinpath(_FOLDER, f"{name}.json").read_text(encoding="utf-8")
