"""Prepares a scaled machine: a core for the forward, one for loads and CPU experts, and rates relative to a layer."""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.common import is_toy, provenance
from benchmarks.scaled.machine import VARIABLE, ScaledMachine
from benchmarks.scaled.probe import Speeds
from benchmarks.scaled.proportions import Proportions
from benchmarks.serving.cases import Case, Settings
from benchmarks.serving.processes import LiveEngine
from benchmarks.serving.prompts import Prompts
from vllm_spac.errors import ConfigError
from vllm_spac.storage.checkpoint.headers import read_checkpoint

RESIDENT = Case("resident", {"slots": "100%"})
_ENGINE_BYTES = 1 << 30  # of an engine without its experts: vLLM, torch and the KV cache


@dataclass(frozen=True)
class Cores:
    """The two CPUs of a scaled machine: ``forward`` computes layers, ``other`` loads experts and computes some."""

    forward: int
    other: int

    @classmethod
    def here(cls) -> Self:
        """Returns the first two CPUs of this process; ``ConfigError`` if it has one only."""
        cpus = sorted(os.sched_getaffinity(0))
        if len(cpus) < 2:
            raise ConfigError("a scaled machine needs two CPUs, and this process may use one; see taskset")
        return cls(*cpus[:2])

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of its engines."""
        return {
            "VLLM_CPU_OMP_THREADS_BIND": str(self.forward),
            "OMP_NUM_THREADS": "1",  # else OpenMP's threads spin on one core: tokens take ten times as long
            "KMP_BLOCKTIME": "0",
            "NUMBA_NUM_THREADS": "1",  # of n-grams: numba sets OpenMP's threads to its own number
            "SPAC_CPUS": str(self.other),
        }


@dataclass(frozen=True)
class Resident:
    """The model of a scaled machine, and an engine with all experts resident.

    Attributes:
        expert_bytes, layers, top_k: of the model, in the engine's dtype.
    """

    expert_bytes: int
    layers: int
    top_k: int
    tpot: list[float]  # seconds per token of each prompt that counted

    @property
    def layer_seconds(self) -> float:
        """Median seconds of a layer, with its part of everything else in a step."""
        return statistics.median(self.tpot) / self.layers

    @classmethod
    def measure(cls, settings: Settings, ids: list[list[int]], warm: int) -> Self:
        """Serves the prompts ``ids``; the first ``warm`` do not count.

        Raises:
            EngineError: the engine failed.
        """
        with closing(LiveEngine(RESIDENT.job(settings), False, settings.timeout)) as engine:
            answers = [engine.turn(prompt, settings.output_tokens) for prompt in ids]
        facts = answers[-1]["choices"]
        tpot = [answer["tpot"][0] for answer in answers[warm:]]
        return cls(facts["expert_bytes"], facts["layers"], read_checkpoint(settings.model).top_k, tpot)


@dataclass(frozen=True)
class Scale:
    """A scaled machine and what it was derived from."""

    machine: ScaledMachine
    real: Proportions
    resident: Resident
    speeds: Speeds

    @classmethod
    def derive(cls, real: Proportions, settings: Settings, ids: list[list[int]], warm: int, cores: Cores) -> Self:
        """Measures a layer and the core of the loads; arguments as of ``Resident.measure``.

        Raises:
            EngineError: the engine failed.
            ConfigError: this machine is too slow for the scaled one, see ``Speeds.check``.
        """
        resident = Resident.measure(settings, ids, warm)
        nbytes = resident.expert_bytes
        speeds = Speeds.measure(nbytes, resident.top_k, settings.dtype, settings.environment, cores.other)
        machine = real.scaled(resident.layer_seconds, nbytes, cores.other)
        speeds.check(machine)
        return cls(machine, real, resident, speeds)

    @property
    def factor(self) -> float:
        """Seconds here per second of the real machine."""
        return self.machine.layer_seconds / self.real.layer_seconds

    def served(self, tpot: float) -> float:
        """Returns the bytes of experts that tokens of ``tpot`` seconds select, over those of link and host memory.

        With all experts resident it is what fast memory serves.
        """
        selected = self.resident.layers * self.resident.top_k * self.machine.expert_bytes / tpot
        return selected / (self.machine.link_bytes_per_second + self.machine.memory_bytes_per_second)

    def plain(self) -> dict:
        """Returns everything for a result."""
        return dataclasses.asdict(self) | {"machine": self.machine.model_dump(), "factor": self.factor}


@contextmanager
def on(machine: ScaledMachine, settings: Settings) -> Iterator[Settings]:
    """Yields ``settings`` for engines of ``machine``, whose file is there meanwhile."""
    with tempfile.TemporaryDirectory(prefix="spac-scaled-") as folder:
        path = Path(folder, "machine.json")
        path.write_text(machine.model_dump_json())
        environment = {**settings.environment, VARIABLE: str(path)}
        yield dataclasses.replace(settings, environment=environment, counters="benchmarks.scaled.watch:counters")


def engines_at_once(resident: Resident, total: int, share: float) -> int:
    """Returns how many engines with ``total`` experts stored, and ``share`` of them in slots, fit into free memory.

    One of them, whose experts are all resident, has them twice while it starts; the others need the rest of it then.
    """
    each = _ENGINE_BYTES + (1 + share) * total * resident.expert_bytes
    return int(psutil.virtual_memory().available * 0.8 // each)


def head(machine: str, asked: Prompts, settings: Settings) -> dict[str, Any]:
    """Returns the beginning of a result, whose rows follow; called before anything is measured."""
    return {
        "label": ("toy model, " if is_toy(settings.model) else "") + f"scaled machine ({machine})",
        "model": settings.model.name,
        "prompts": asked.describe(),
        "output_tokens": settings.output_tokens,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "environment": dict(settings.environment),
        "rows": [],
        "provenance": provenance(),
    }
