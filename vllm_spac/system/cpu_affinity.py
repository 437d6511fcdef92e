"""Which CPUs the threads that read experts may use.

On a CPU machine vLLM binds its worker's threads to cores, and what the bound main thread starts inherits its core: all
reads would run on the one that computes. So the first process of an engine, which nobody has bound, notes its CPUs, in
the environment for those that it starts, and threads that read go back to them.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("vllm.spac")

VARIABLE = "SPAC_CPUS"


def note() -> None:
    """The CPUs of this process are those of the engine, unless an earlier process has noted its own."""
    os.environ.setdefault(VARIABLE, ",".join(map(str, sorted(os.sched_getaffinity(0)))))


def cpus() -> set[int]:
    """What was noted; else the CPUs of the calling thread."""
    noted = os.environ.get(VARIABLE)
    return {int(cpu) for cpu in noted.split(",")} if noted else os.sched_getaffinity(0)


def unbind() -> None:
    """Let the calling thread run on all of ``cpus``."""
    try:
        os.sched_setaffinity(0, cpus())
    except OSError as error:
        here = sorted(os.sched_getaffinity(0))
        logger.warning("spac: a thread that reads experts stays on the CPUs %s: %s", here, error.strerror)
