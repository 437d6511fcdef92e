"""CPU affinity of the threads that read experts.

On a CPU machine vLLM binds its worker's threads to cores, and threads that the bound main thread starts inherit its
core: all reads would run on a core that computes. So the first process of an engine, which is not bound, records its
CPUs in an environment variable that its children inherit, and reading threads set their affinity to those CPUs.
"""

from __future__ import annotations

import logging
import os
import re

logger = logging.getLogger("vllm.spac")

VARIABLE = "SPAC_CPUS"
_share = (0, 1)  # number of this process, and of the processes that share the CPUs


def note() -> None:
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


def share(index: int, count: int) -> None:
    """Makes this process number ``index`` of ``count`` processes whose threads share the CPUs."""
    global _share
    _share = index, count


def part(found: set[int]) -> set[int]:
    """Returns the CPUs of ``found`` that are this process's share: neighbours; all if there are fewer than shares."""
    index, count = _share
    ordered, size = sorted(found), len(found)
    return set(ordered[index * size // count : (index + 1) * size // count]) or found


def unbind() -> None:
    """Lets the calling thread run on this process's part of ``cpus()``."""
    try:
        os.sched_setaffinity(0, part(cpus()))
    except OSError as error:
        here = sorted(os.sched_getaffinity(0))
        logger.warning("spac: a thread that reads experts stays on the CPUs %s: %s", here, error.strerror)
