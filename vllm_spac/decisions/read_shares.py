"""How fast ``cpu_kernels.simd`` computes an expert, relative to a plain read of its bytes by as many threads.

Measured with two threads on two cores, each of which reads 12 to 25 GB/s (``benchmarks/results/cpu_rates.json``, the
instructions ``avx512_bf16``). Calculated: cores that have less of the memory's rate each come nearer to it.
"""

from __future__ import annotations

from typing import NamedTuple

ROWS = 32  # of ``many``
PLAIN = "bf16"


class ReadShare(NamedTuple):
    """Shares of the rate of a plain read: with one row, and with ``ROWS``."""

    one: float
    many: float


SHARES: dict[str, ReadShare] = {
    PLAIN: ReadShare(0.80, 0.27),
    "int4": ReadShare(0.49, 0.053),
    "int4-zeros": ReadShare(0.49, 0.047),
    "int8": ReadShare(0.81, 0.082),
    "fp8-block": ReadShare(0.70, 0.067),
    "fp8-channel": ReadShare(0.86, 0.12),
    "mxfp4": ReadShare(0.55, 0.064),
    "nvfp4": ReadShare(0.50, 0.052),
}
