"""SP-MoE's cutoff layer: of how many layers experts are read while the drafter drafts. Pure: no clock, no threads.

The paper's cutoff layer is the largest L_c of which (1) all expected experts of the layers below it fit into fast
memory together, and (2) all their loads finish when the draft phase ends. A read that is late, or evicts what a layer
below needs, costs more than it saves: the time of a token over L_c is U-shaped.

The paper gets (2) from a profile of draft computation and link. Here the number of reads that a draft phase finishes is
learned from the phases before, whatever limits it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def cutoff(wanted: Sequence[int], missing: Sequence[int], slots: int, reads: int) -> int:
    """Returns L_c, the number of leading layers whose missing experts are worth reading before a step begins.

    Args:
        wanted: experts that are expected in each layer, in the order of execution.
        missing: how many of them have no slot; at most as many.
        reads: reads that can still finish before the step.
    """
    layers = 0
    for here, to_read in zip(wanted, missing, strict=True):
        slots, reads = slots - here, reads - to_read
        if slots < 0 or reads < 0:
            break
        layers += 1
    return layers


class DraftPhases:
    """Learns how many reads finish while a drafter drafts.

    If all reads of a phase finished, and there were as many as could be, the next phase may have one more; if some were
    late, as many as were in time. With a link that finishes C reads in each phase, C and C + 1 follow one another.

    Args:
        first: reads of the first phase.

    Attributes:
        reads: reads that the next phase may have.
    """

    def __init__(self, first: int) -> None:
        assert first >= 1
        self.reads = first
        self._asked: set[int] = set()

    @property
    def left(self) -> int:
        """Reads that the running phase may still have."""
        return max(0, self.reads - len(self._asked))

    def request(self, keys: Collection[int]) -> None:
        """The reads of ``keys`` are asked for in the running phase."""
        self._asked.update(keys)

    def end(self, unread: Collection[int]) -> None:
        """The phase is over, if there was one; the reads of the keys ``unread`` have not finished."""
        if self._asked:
            late = len(self._asked.intersection(unread))
            if late:
                self.reads = max(1, len(self._asked) - late)
            elif len(self._asked) >= self.reads:
                self.reads += 1
            self._asked.clear()
