"""Counters of a worker, read by the statistics endpoints, tests and benchmarks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass
class Counters:
    """Counts since the start of the worker or the last ``reset``.

    Attributes:
        hits: distinct experts per layer and forward that were in fast memory when they were needed.
        misses: distinct experts per layer and forward that were needed and were not, or whose load was in flight.
        loads: experts moved into a slot on demand: misses whose load was not in flight, including reloads of experts
            evicted between two waves of the same forward. Reads that fill the slots at the start do not count.
        host_loads: loads that host memory beside the store served (``--spac-host-memory``).
        bytes: bytes moved, by the store they came from. Prefetched bytes are counted under ``<store> ahead``, bytes
            that kernels read directly from the store's memory under ``<store> streamed``.
        stall_seconds: time that layers waited for experts, read on demand or prefetched.
        waves: parts in which layers ran; one per layer and forward unless more experts are needed than there are slots.
        steps: forwards of the target model by kind: prefill, decode, verify, mixed.
        prefetches: experts moved into a slot ahead of need: predicted, or because the CPU has just computed them.
        prefetch_hits: prefetches that were used before they were evicted.
        prefetch_late: prefetch hits that a layer had to wait for; they count as misses.
        prefetch_wasted: prefetches that were evicted unused.
        prefetch_harmful: experts that a layer had to load because a prefetch, unused until then, had evicted them.
        prefetch_failed: prefetch reads that failed; the expert is read again when it is needed.
        cpu_experts: distinct experts per layer and forward that were computed on the CPU, from the store's memory.
        cpu_rows: (row, expert) pairs computed on the CPU.
        cpu_wait_seconds: time that layers waited for the CPU after their part in fast memory was done.
    """

    hits: int = 0
    misses: int = 0
    loads: int = 0
    host_loads: int = 0
    bytes: dict[str, int] = field(default_factory=dict)
    stall_seconds: float = 0.0
    waves: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    prefetches: int = 0
    prefetch_hits: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    prefetch_harmful: int = 0
    prefetch_failed: int = 0
    cpu_experts: int = 0
    cpu_rows: int = 0
    cpu_wait_seconds: float = 0.0

    def moved(self, path: str, count: int) -> None:
        """Adds ``count`` bytes read from ``path``."""
        self.bytes[path] = self.bytes.get(path, 0) + count

    def reset(self) -> None:
        """Sets all counters to zero, e.g. after warm-up."""
        vars(self).update(vars(type(self)()))

    def snapshot(self) -> dict:
        """A copy as plain data."""
        return asdict(self)
