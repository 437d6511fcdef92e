"""How fast ``cpu_kernels.simd`` computes an expert: by a core, and at most by what its cores read together.

Measured with two threads on two cores at 2.6 GHz (``benchmarks/results/cpu_rates.json``, the instructions
``avx512_bf16``): with one row bf16 is read at the rate of memory there, and other formats as fast as a core decodes
them. Calculated: more cores decode as much more, until memory is the limit.
"""

from __future__ import annotations

from typing import NamedTuple

ROWS = 32  # of ``many``
PLAIN = "bf16"
READ = 0.87  # share of the rate of a plain read by as many threads, where memory is the limit: of ``PLAIN``, one row


class CoreRate(NamedTuple):
    """Bytes of experts per second and core: with one row, and with ``ROWS``."""

    one: float
    many: float


CORE_RATES: dict[str, CoreRate] = {
    PLAIN: CoreRate(13.9e9, 3.61e9),
    "int4": CoreRate(7.9e9, 0.871e9),
    "int4-zeros": CoreRate(6.43e9, 0.737e9),
    "int8": CoreRate(10.7e9, 1.08e9),
    "fp8-block": CoreRate(11.7e9, 1.45e9),
    "fp8-channel": CoreRate(11.7e9, 1.48e9),
    "mxfp4": CoreRate(7.04e9, 0.820e9),
    "nvfp4": CoreRate(6.51e9, 0.763e9),
}


def limited(kind: str, memory: float, cores: int) -> CoreRate:
    """Returns the rates of ``cores`` together, with one row and with ``ROWS``; ``memory`` is their plain read's."""
    this = CORE_RATES[kind]
    return CoreRate(*(min(READ * memory, cores * rate) for rate in this))
