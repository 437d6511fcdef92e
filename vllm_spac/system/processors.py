"""Where this process's own threads compute: one rule, and what it reads of the system.

One thread per physical core: a second one there shares its units and its memory's queue. No more than control groups
give time for: of more, all are stopped until the period ends. Cores on the nodes of the memory that is read come first.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_spac.errors import ConfigError
from vllm_spac.system.host_memory import control_groups
from vllm_spac.system.machine import cpus, cpus_named, shares

if TYPE_CHECKING:
    from torch import Tensor

_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_BINDINGS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")  # the environment variables of OpenMP
_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}  # the system call's number
_BIND = {"x86_64": 237, "aarch64": 235}  # mbind's
_PREFERRED = 1  # of its policies
_PCI = Path("/sys/bus/pci/devices")
_SAMPLE = 16  # pages of a tensor whose nodes are asked for
_NONE: Mapping[int, float] = MappingProxyType({})


class Processors(NamedTuple):
    """What the system says.

    Attributes:
        cores: cpu -> all of its physical core; a missing one is a core of its own.
    """

    cpus: frozenset[int]  # those that the processes of this engine may use
    cores: Mapping[int, frozenset[int]] = MappingProxyType({})
    nodes: Mapping[int, int] = MappingProxyType({})  # cpu -> its NUMA node; 0 for a missing one
    quota: float | None = None  # processors' worth of time that the control groups allow; None: no limit
    bound: frozenset[int] = frozenset()  # those that OpenMP's threads of this process are bound to; empty: they are not
    share: tuple[int, int] = (0, 1)  # number of this process, and how many share ``cpus`` and ``quota``


def places(
    facts: Processors, number: int | None = None, *, beside: bool = False, memory: Mapping[int, float] = _NONE
) -> tuple[int, ...]:
    """Returns a CPU for each thread.

    Args:
        number: of threads, where the user says it; None: one per core.
        beside: other threads of the process compute meanwhile. One core is theirs, and where OpenMP binds them, theirs
            are taken last; else threads take turns with OpenMP's, and are where those are.
        memory: NUMA node -> its part of the memory that is read.

    Raises:
        ConfigError: there are fewer CPUs than ``number``, or the control groups allow the time of fewer.
    """
    cores = sorted(_cores(facts), key=lambda core: -round(memory.get(facts.nodes.get(core[0], 0), 0.0), 1))
    first, second = [core[0] for core in cores], [cpu for core in cores for cpu in core[1:]]
    used = [cpu for cpu in first + second if cpu in facts.bound]
    if beside:
        used = [cpu for cpu in used if cpu in first] or first[:1]
        first = [cpu for cpu in first if cpu not in used] + used[::-1]
    elif used:
        first, second = used, [cpu for cpu in first + second if cpu not in used]
    time = len(first + second) if facts.quota is None else max(1, int(facts.quota / facts.share[1]))
    if number is None:
        number = max(1, min(len(first), time) - beside)
    if number > (most := min(len(first + second), time)):
        raise ConfigError(
            f"spac: {number} threads cannot compute experts: this process has {_have(facts, len(first + second))}; "
            f"export OMP_NUM_THREADS={most}"
        )
    return tuple((first + second)[:number])


def _cores(facts: Processors) -> list[list[int]]:
    """The physical cores of this process, each with its CPUs, those that OpenMP is bound to first."""
    every = {frozenset({cpu} | facts.cores.get(cpu, frozenset())) & facts.cpus for cpu in facts.cpus}
    cores = [sorted(core, key=lambda cpu: (cpu not in facts.bound, cpu)) for core in every]
    cores.sort(key=lambda core: (facts.nodes.get(core[0], 0), min(core)))
    (index, count), size = facts.share, len(cores)
    if count > 1 and facts.bound & facts.cpus:
        return [core for core in cores if core[0] in facts.bound]
    return cores[index * size // count : (index + 1) * size // count] or [cores[index % size]]


def described(facts: Processors, threads: Iterable[int]) -> str:
    """Returns a few words for the log: the CPUs of threads, and what keeps them few."""
    found = sorted(threads)
    begins = [cpu for cpu in found if cpu - 1 not in found]
    ends = [cpu for cpu in found if cpu + 1 not in found]
    runs = (str(a) if a == b else f"{a}-{b}" for a, b in zip(begins, ends, strict=True))
    limit = "" if facts.quota is None else f", of {_have(facts, len(facts.cpus))}"
    return f"CPU{'s' * (len(found) > 1)} {','.join(runs)}{limit}"


def _have(facts: Processors, count: int) -> str:
    shared = "" if facts.share[1] == 1 else f", shared by {facts.share[1]} processes"
    limit = "" if facts.quota is None else f", and its control groups allow the time of {facts.quota:g}{shared}"
    return f"{count} CPU{'s' * (count != 1)}{limit}"


# -- what is read --------------------------------------------------------------------------------------------------


def processors() -> Processors:
    """Reads what the system says of the calling thread's process.

    A thread that is bound to fewer CPUs than the engine began with was bound by OpenMP, whose variable is set then, or
    by vLLM, to the node of its GPU.
    """
    bound = frozenset(bound_cpus(os.environ))
    allowed = frozenset(cpus() if bound else os.sched_getaffinity(0))
    siblings = {cpu: cpus_named(_text(_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list")) for cpu in allowed}
    of_cpu = {cpu: node for node, of_node in nodes().items() for cpu in of_node}
    cores = {cpu: frozenset(core) for cpu, core in siblings.items()}
    return Processors(allowed, cores, of_cpu, quota(), bound & allowed, shares())


def nodes() -> dict[int, set[int]]:
    """Returns the CPUs of each NUMA node; empty where the system tells none."""
    paths = _NODES.glob("node[0-9]*/cpulist")
    return {int(path.parent.name.removeprefix("node")): cpus_named(_text(path)) for path in paths}


def asked(facts: Processors) -> int | None:
    """Returns the number of threads that the user gives OpenMP; None: vLLM has bound its threads, or nobody said it."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,8}", text) and not facts.bound else None


def binding(environment: Mapping[str, str]) -> str | None:
    """Returns the variable by which OpenMP pins the teams of all threads to the same cores, or None."""
    return next((name for name in _BINDINGS if environment.get(name)), None)


def bound_cpus(environment: Mapping[str, str]) -> set[int]:
    """Returns the CPUs that this variable names, as vLLM writes it for each OpenMP; none where it names no numbers."""
    if (name := binding(environment)) is None:
        return set()
    text = environment[name]
    if name == "KMP_AFFINITY":
        text = text.partition("proclist=[")[2].partition("]")[0]
    return cpus_named(re.sub(r"[{} ]+", ",", text))


def quota() -> float | None:
    """Returns the processors' worth of time of the tightest control group around this process; None: no limit."""
    found = []
    for group, second in control_groups("cpu"):
        if second:
            parts = _text(group / "cpu.max").split()
        else:
            parts = [_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")]
        if len(parts) == 2 and all(part.isdigit() and int(part) for part in parts):
            found.append(int(parts[0]) / int(parts[1]))
    return min(found, default=None)


@functools.cache
def gpu_node() -> int | None:
    """Returns the NUMA node of this process's GPU; None on a machine with one, or where the system does not say.

    Read once, when the process has chosen its GPU: each block of host memory asks.
    """
    if len(nodes()) < 2:
        return None
    import torch

    of: Any = torch.cuda.get_device_properties(torch.cuda.current_device())  # its stub lacks these
    address = f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"
    text = _text(_PCI / address / "numa_node")
    return int(text) if text.isdigit() else None  # -1: the system does not say


def prefer_node(memory: Tensor, node: int) -> bool:
    """Has pages of ``memory`` that nobody has written yet placed on a node while it has room; False if refused."""
    if (call := _BIND.get(platform.machine())) is None:
        return False
    start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    nbytes = ctypes.c_ulong(memory.data_ptr() + memory.nbytes - start)
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << node % 64
    words = ctypes.c_ulong(8 * ctypes.sizeof(mask))
    return ctypes.CDLL(None).syscall(call, ctypes.c_void_p(start), nbytes, _PREFERRED, mask, words, 0) == 0


def nodes_of(tensors: Iterable[Tensor]) -> dict[int, float]:
    """Returns NUMA node -> its part of some pages of these tensors on the CPU; empty where the system does not say."""
    pages: list[int] = []
    for tensor in tensors:
        step = max(mmap.PAGESIZE, tensor.nbytes // _SAMPLE)
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        pages += range(start, tensor.data_ptr() + tensor.nbytes, step)
    if not pages or (call := _MOVE_PAGES.get(platform.machine())) is None:
        return {}
    found = (ctypes.c_int * len(pages))(*([-1] * len(pages)))
    at = (ctypes.c_void_p * len(pages))(*pages)
    ctypes.CDLL(None).syscall(call, 0, ctypes.c_ulong(len(pages)), at, None, found, 0)  # where they are; moves none
    counts = Counter(node for node in found if node >= 0)
    return {node: count / counts.total() for node, count in counts.items()}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not on this system
        return ""
