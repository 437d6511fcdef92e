"""Facts about an installation and its machine that ``checks`` judges. Plain data; ``gather`` collects it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vllm_spac.system.flaws import Flaw


@dataclass(frozen=True)
class Library:
    """A library beside vLLM."""

    version: str | None  # the installed one; None: it is not installed
    required: str  # what vLLM's own metadata requires of it, e.g. ``==2.13.0``; empty: nothing
    fits: bool


@dataclass(frozen=True)
class Device:
    """The accelerator that vLLM would use."""

    name: str
    pinned: bool
    unified: bool  # it reads pinned host memory at the host's addresses
    refusal: str = ""  # why the plugin cannot run on it; empty if it can


@dataclass(frozen=True)
class Installation:
    """vLLM, and the plugin in it."""

    vllm: str | None  # its version; None: it cannot be imported
    refusal: str = ""  # why it cannot be imported, or is refused by its version; empty if neither
    registered: bool = True  # the plugin's entry point is installed
    active: bool = True  # vLLM loaded the plugin
    plugins: str | None = None  # the environment's ``VLLM_PLUGINS``; None: not set, all plugins are loaded
    names: int = 0  # names of vLLM that the plugin needs
    missing: tuple[str, ...] = ()  # what is wrong with those that are not as needed
    libraries: dict[str, Library] = field(default_factory=dict)  # torch and triton
    device: Device | None = None  # None on a CPU build
    off: tuple[str, ...] = ()  # what ``SPAC_WITHOUT_PATCH`` switches off: names of vLLM, and what is lost
    off_refusal: str = ""  # why an engine would refuse its value; empty if it would not
    flaws: tuple[Flaw, ...] = ()  # what ends the ``vllm`` command, and ``vllm-spac check --fix`` mends


@dataclass(frozen=True)
class PackedFolder:
    """A folder of packed experts."""

    name: str  # its fingerprint
    bytes: int
    days: float  # since its last file was written
    leftovers: int = 0  # files set aside as damaged or left by a killed process
    unfinished: bool = False  # experts are missing, or a read failed since they were checked
    used: bool = False  # a server or a packing process holds its lock


@dataclass(frozen=True)
class Disk:
    """The disk of the packed experts."""

    folder: Path  # the configured one, which may not exist yet
    free: int  # bytes
    unwritable: str = ""  # why it cannot be written to; empty if it can
    direct: bool | None = True  # it supports O_DIRECT; None: unknown, because it cannot be written to
    read_ahead: int | None = None  # bytes that the kernel reads ahead on its device; None: unknown
    rate: float | None = None  # bytes per second that were read from it; None: not measured
    packed: tuple[PackedFolder, ...] = ()


@dataclass(frozen=True)
class System:
    """Processors and memory."""

    cpus: frozenset[int]  # that this process may use
    quota: float | None  # processors' worth of time that the control group allows; None: no limit
    nodes: tuple[int, ...]  # NUMA nodes of ``cpus``
    # total, available: bytes of host memory
    total: int
    available: int
    limit: int | None  # of the tightest control group, None: none has less
    memlock: int | None  # bytes that may be locked; None: any number
    huge_pages: str  # the kernel's setting: ``always``, ``madvise`` or ``never``; empty: unknown
    wsl: bool = False  # Linux under Windows
    # the variables of OpenMP and of vLLM's binding that are set
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """A model that is to be served."""

    name: str
    refusal: str = ""  # why it cannot be; the sizes are then 0
    experts: int = 0  # bytes of all experts
    smallest: int = 0  # of the fewest slots
    others: int = 0  # of all other weights


@dataclass(frozen=True)
class Facts:
    """Everything that ``checks`` judges; ``model``: None if none was named."""

    installation: Installation
    system: System
    disk: Disk
    model: Model | None = None
