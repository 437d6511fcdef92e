"""Counters that a worker keeps and everything else reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass
class Counters:
    """What happened since the start, or since ``reset``.

    Attributes:
        hits: distinct experts of a layer and forward that were in fast memory when they were needed.
        misses: those that were not.
        loads: experts moved into a slot (the misses; reads that fill the slots at the start do not count).
        bytes: bytes moved, by the store they came from.
        stall_seconds: time that layers waited for loads.
        waves: parts in which layers ran; one a layer and forward unless more experts are needed than there are slots.
        steps: forwards of the target model by kind: prefill, decode, verify, mixed.
    """

    hits: int = 0
    misses: int = 0
    loads: int = 0
    bytes: dict[str, int] = field(default_factory=dict)
    stall_seconds: float = 0.0
    waves: int = 0
    steps: dict[str, int] = field(default_factory=dict)

    def reset(self) -> None:
        """Start from zero, e.g. after warm-up."""
        self.__init__()

    def snapshot(self) -> dict:
        """A copy as plain data."""
        return asdict(self)
