"""How long loads, CPU experts and drafts of a real machine take, relative to one of its layers.

Calculated from a packaged profile for Qwen3-30B-A3B at batch size 1, from what its link and memory attain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from benchmarks.scaled.machine import ScaledMachine
from vllm_spac.decisions import costs
from vllm_spac.decisions.core_rates import PLAIN
from vllm_spac.decisions.costs import Costs
from vllm_spac.errors import ConfigError

LAYERS, TOP_K = 48, 8  # of Qwen3-30B-A3B
EXPERT_PARAMETERS = 3 * 2048 * 768
_KINDS = {"": (16, PLAIN), "-int4": (4, "int4")}  # bits of a weight, and what CPU kernels call it


@dataclass(frozen=True)
class Proportions:
    """Seconds of a machine in units of its ``layer_seconds``.

    Attributes:
        layer_seconds: seconds of a layer whose experts are all in fast memory: ``TOP_K`` experts, and its part of what
            a step takes outside of experts. The latter is the profile's, also with experts of 4 bits, because attention
            is rarely quantised.
        load, cpu: an expert over the link, and on the CPU, at the share of memory's rate that was measured.
        draft: a draft token; ``drafter``: of which model, as the profile has it.
    """

    name: str  # profile, followed by ``-int4`` for experts of 4 bits
    expert_bytes: int  # bytes of an expert there
    layer_seconds: float
    load: float
    cpu: float
    memory: float  # an expert that the link or the CPU reads, while both do
    draft: float
    drafter: str = ""

    @classmethod
    def of(cls, name: str) -> Self:
        """Returns the proportions of the machine ``name``; ``ConfigError``: there is no such machine."""
        if name not in names():
            raise ConfigError(f"no machine is called {name!r}; use one of {', '.join(names())}")
        profile, suffix = (name.removesuffix("-int4"), "-int4") if name.endswith("-int4") else (name, "")
        bits, kind = _KINDS[suffix]
        known, nbytes = Costs.read(profile).as_attained().with_experts(kind), EXPERT_PARAMETERS * bits // 8
        rates = known.rates(nbytes)
        layer = TOP_K * rates.fast + known.other / LAYERS
        of_draft = [text.removeprefix("draft: ") for text in known.provenance.assumes if text.startswith("draft: ")]
        load, cpu, memory, draft = (seconds / layer for seconds in (rates.stream, rates.cpu, rates.memory, rates.draft))
        return cls(name, nbytes, layer, load, cpu, memory, draft, "; ".join(of_draft))

    def scaled(self, layer_seconds: float, expert_bytes: int, core: int) -> ScaledMachine:
        """Returns the machine with these proportions whose layer takes ``layer_seconds``.

        Args:
            expert_bytes: bytes of an expert here.
            core: CPU of loads and CPU experts.
        """
        return ScaledMachine(
            machine=self.name,
            expert_bytes=expert_bytes,
            layer_seconds=layer_seconds,
            load_seconds=self.load * layer_seconds,
            cpu_seconds=self.cpu * layer_seconds,
            memory_seconds=self.memory * layer_seconds,
            core=core,
        )


def names() -> list[str]:
    """Returns the names of the machines: every packaged profile, with experts of 16 and of 4 bits."""
    return [name + suffix for name in costs.names() for suffix in _KINDS]
