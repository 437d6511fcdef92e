"""Facts about an installation and its machine that ``checks`` judges. Plain data; ``gather`` collects it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vllm_spac.system.flaws import Flaw


@dataclass(frozen=True)
class Library:
    """A library beside vLLM.

    Attributes:
        version: the installed one; None: it is not installed.
        required: what vLLM's own metadata requires of it, e.g. ``==2.13.0``; empty: nothing.
    """

    version: str | None
    required: str
    fits: bool


@dataclass(frozen=True)
class Device:
    """The accelerator that vLLM would use.

    Attributes:
        unified: it reads pinned host memory at the host's addresses.
        refusal: why the plugin cannot run on it; empty if it can.
    """

    name: str
    pinned: bool
    unified: bool
    refusal: str = ""


@dataclass(frozen=True)
class Installation:
    """vLLM, and the plugin in it.

    Attributes:
        vllm: its version; None: it cannot be imported.
        refusal: why it cannot be imported, or is refused by its version; empty if neither.
        registered: the plugin's entry point is installed.
        active: vLLM loaded the plugin.
        plugins: the environment's ``VLLM_PLUGINS``; None: not set, all plugins are loaded.
        names: names of vLLM that the plugin needs; ``missing``: what is wrong with those that are not as needed.
        libraries: torch and triton.
        device: None on a CPU build.
        off: what ``SPAC_WITHOUT_PATCH`` switches off: names of vLLM, and what is lost; ``off_refusal``: why an engine
            would refuse its value; empty if it would not.
        flaws: what ends the ``vllm`` command, and ``vllm-spac check --fix`` mends.
    """

    vllm: str | None
    refusal: str = ""
    registered: bool = True
    active: bool = True
    plugins: str | None = None
    names: int = 0
    missing: tuple[str, ...] = ()
    libraries: dict[str, Library] = field(default_factory=dict)
    device: Device | None = None
    off: tuple[str, ...] = ()
    off_refusal: str = ""
    flaws: tuple[Flaw, ...] = ()


@dataclass(frozen=True)
class PackedFolder:
    """A folder of packed experts.

    Attributes:
        name: its fingerprint.
        days: since its last file was written.
        leftovers: files set aside as damaged or left by a killed process.
        unfinished: experts are missing, or a read failed since they were checked.
        used: a server or a packing process holds its lock.
    """

    name: str
    bytes: int
    days: float
    leftovers: int = 0
    unfinished: bool = False
    used: bool = False


@dataclass(frozen=True)
class Disk:
    """The disk of the packed experts.

    Attributes:
        folder: the configured one, which may not exist yet.
        free: bytes.
        unwritable: why it cannot be written to; empty if it can.
        direct: it supports O_DIRECT; None: unknown, because it cannot be written to.
        read_ahead: bytes that the kernel reads ahead on its device; None: unknown.
        rate: bytes per second that were read from it; None: not measured.
    """

    folder: Path
    free: int
    unwritable: str = ""
    direct: bool | None = True
    read_ahead: int | None = None
    rate: float | None = None
    packed: tuple[PackedFolder, ...] = ()


@dataclass(frozen=True)
class System:
    """Processors and memory.

    Attributes:
        cpus: that this process may use.
        quota: processors' worth of time that the control group allows; None: no limit.
        nodes: NUMA nodes of ``cpus``.
        total, available: bytes of host memory; ``limit``: of the control group, None: none.
        memlock: bytes that may be locked; None: any number.
        huge_pages: the kernel's setting: ``always``, ``madvise`` or ``never``; empty: unknown.
        environment: the variables of OpenMP and of vLLM's binding that are set.
    """

    cpus: frozenset[int]
    quota: float | None
    nodes: tuple[int, ...]
    total: int
    available: int
    limit: int | None
    memlock: int | None
    huge_pages: str
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """A model that is to be served.

    Attributes:
        refusal: why it cannot be; the sizes are then 0.
        experts: bytes of all experts; ``smallest``: of the fewest slots; ``others``: of all other weights.
    """

    name: str
    refusal: str = ""
    experts: int = 0
    smallest: int = 0
    others: int = 0


@dataclass(frozen=True)
class Facts:
    """Everything that ``checks`` judges; ``model``: None if none was named."""

    installation: Installation
    system: System
    disk: Disk
    model: Model | None = None
