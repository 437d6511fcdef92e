"""Counters that a worker keeps and everything else reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass
class Counters:
    """What happened since the start, or since ``reset``.

    Attributes:
        hits: distinct experts of a layer and forward that were in fast memory when they were needed.
        misses: those that were not and had to be brought there, also those that were on their way.
        loads: experts moved into a slot on demand: misses that were not on their way, and an expert again that lost
            its slot between two waves of a forward. Reads that fill the slots at the start do not count.
        bytes: bytes moved, by the store they came from; what was read ahead of need under ``<store> ahead``, what
            kernels read where it lay under ``<store> streamed``.
        stall_seconds: time that layers waited for experts, read on demand or ahead.
        waves: parts in which layers ran; one a layer and forward unless more experts are needed than there are slots.
        steps: forwards of the target model by kind: prefill, decode, verify, mixed.
        prefetches: experts moved into a slot ahead of need.
        prefetch_hits: of them, those that were used before they lost their slot again.
        prefetch_late: of the hits, those that a layer had to wait for; they count as misses.
        prefetch_wasted: of the prefetches, those that lost their slot unused.
        prefetch_failed: reads ahead that failed; the expert is read again when it is needed.
        cpu_experts: distinct experts of a layer and forward that were computed on the CPU, from where they lie.
        cpu_rows: (row, expert) pairs that they computed.
        cpu_wait_seconds: time that layers waited for them when their part in fast memory was done.
    """

    hits: int = 0
    misses: int = 0
    loads: int = 0
    bytes: dict[str, int] = field(default_factory=dict)
    stall_seconds: float = 0.0
    waves: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    prefetches: int = 0
    prefetch_hits: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    prefetch_failed: int = 0
    cpu_experts: int = 0
    cpu_rows: int = 0
    cpu_wait_seconds: float = 0.0

    def moved(self, path: str, count: int) -> None:
        """``count`` bytes came from ``path``."""
        self.bytes[path] = self.bytes.get(path, 0) + count

    def reset(self) -> None:
        """Start from zero, e.g. after warm-up."""
        vars(self).update(vars(type(self)()))

    def snapshot(self) -> dict:
        """A copy as plain data."""
        return asdict(self)
