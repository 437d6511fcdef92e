"""The plugin's own work in a layer that misses, measured on the cores of a scaled machine in a process of its own.

``python host_probe.py CORE IO_THREADS SECONDS``, with the forward on CORE, prints its points as JSON. Its other threads
run on the CPUs that the environment variable ``SPAC_CPUS`` names, as an engine's do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from vllm_spac.errors import ConfigError

Points = dict[str, dict[int, float]]  # of ``vllm_spac.tools.machine.host_work``


def measure(core: int, io_threads: int, environment: Mapping[str, str], seconds: float = 2.0) -> Points:
    """Measures in a process with the engine's ``environment``.

    Args:
        core: CPU of the forward.
        io_threads: as in the engines.
        seconds: approximate duration of each measurement.

    Raises:
        ConfigError: the process failed; with the end of its output.
    """
    command = [sys.executable, __file__, str(core), str(io_threads), str(seconds)]
    done = subprocess.run(command, env=os.environ | dict(environment), capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"the plugin's own work could not be measured: {done.stderr[-1000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {what: {int(count): seconds for count, seconds in points.items()} for what, points in found.items()}


def main(core: int, io_threads: int, seconds: float) -> Points:
    """Measures in this process."""
    import torch

    from vllm_spac.tools.machine.host_work import measure_host_work

    os.sched_setaffinity(0, {core})
    return measure_host_work(torch.device("cpu"), io_threads, seconds)


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
