"""How fast the core of the loads and CPU experts is, measured in a process of its own.

``python probe.py EXPERT_BYTES TOP_K DTYPE`` prints a ``Speeds`` as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

from benchmarks.scaled.machine import ScaledMachine
from benchmarks.scaled.pacing import sleep
from vllm_spac.errors import ConfigError

SHARE = 0.7  # of a deadline, at most, that the work before it may take
OVERSHOOT = 0.1  # of a deadline, at most, by which a sleep may exceed it
_SECONDS = 1.0
_NAP = 1e-3
_CACHES = 256 << 20  # bytes of experts in rotation: more than caches hold


@dataclass(frozen=True)
class Speeds:
    """Median seconds on one core."""

    copy: float  # copying an expert between places in memory
    expert: float  # vLLM's kernel with one row and one expert
    fast: float  # the same, per expert, with as many experts as a token has
    overshoot: float  # by how much a sleep exceeds the time asked for

    @classmethod
    def measure(cls, expert_bytes: int, top_k: int, dtype: str, environment: Mapping[str, str], core: int) -> Self:
        """Measures in a process bound to ``core``, with the engine's ``environment``.

        Args:
            dtype: of torch; ``auto`` is bfloat16.

        Raises:
            ConfigError: the process failed; with the end of its output.
        """
        arguments = [str(expert_bytes), str(top_k), dtype.replace("auto", "bfloat16")]
        done = subprocess.run(
            ["taskset", "-c", str(core), sys.executable, __file__, *arguments],
            env=os.environ | dict(environment),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ConfigError(f"the core {core} could not be measured: {done.stderr[-1000:]}")
        return cls(**json.loads(done.stdout.splitlines()[-1]))

    def check(self, machine: ScaledMachine) -> None:
        """Raises ``ConfigError`` unless this core keeps the deadlines of ``machine`` with a margin."""
        paces = {"load": (self.copy, machine.load_seconds), "CPU expert": (self.expert, machine.cpu_seconds)}
        for name, (work, deadline) in paces.items():
            text = f"{machine.machine} scaled to this model: a {name} is to take {1e3 * deadline:.2f} ms"
            if work > SHARE * deadline:
                raise ConfigError(
                    f"{text} and already takes {1e3 * work:.2f} ms of work here; run nothing else on this machine, or "
                    "take smaller experts, of which vLLM's own work is a larger part (benchmarks/toy/inflate.py "
                    "--expert-bytes)"
                )
            if self.overshoot > OVERSHOOT * deadline:
                raise ConfigError(
                    f"{text}, and sleeps here are {1e3 * self.overshoot:.2f} ms too long; run nothing else on this "
                    "machine, or take larger experts (benchmarks/toy/inflate.py --expert-bytes)"
                )


def main(expert_bytes: int, top_k: int, dtype: str) -> Speeds:
    """Measures in this process, whose core and threads are set from outside."""
    import torch

    from vllm_spac.decisions.costs import ExpertSize
    from vllm_spac.system.timing import median
    from vllm_spac.tools.machine.measure import cpu_kernel

    kind = getattr(torch, dtype)
    size = ExpertSize.of(expert_bytes * 2 // kind.itemsize)
    count = max(2 * top_k, _CACHES // expert_bytes)
    kernel = cpu_kernel()
    if kernel is None:
        raise ConfigError("this vLLM was not built for the CPU")

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float32).div_(shape[-1] ** 0.5).to(kind)

    w13, w2 = normal(1, 2 * size.intermediate, size.hidden), normal(1, size.hidden, size.intermediate)
    run = kernel.prepare(w13.repeat(count, 1, 1), w2.repeat(count, 1, 1))
    x, turn = normal(1, size.hidden), iter(range(1 << 62))

    def compute(experts: int) -> None:
        first = next(turn) * experts
        ids = torch.tensor([[(first + index) % count for index in range(experts)]], dtype=torch.int32)
        run(x, torch.full((1, experts), 1 / experts), ids)

    source = torch.ones(count, expert_bytes, dtype=torch.uint8).numpy()
    target = source.copy()

    def copy() -> None:
        at = next(turn) % count
        target[at] = source[at]

    return Speeds(
        copy=median(copy, _SECONDS),
        expert=median(lambda: compute(1), _SECONDS),
        fast=median(lambda: compute(top_k), _SECONDS) / top_k,
        overshoot=median(lambda: sleep(_NAP), _SECONDS) - _NAP,
    )


if __name__ == "__main__":
    print(json.dumps(asdict(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))))
