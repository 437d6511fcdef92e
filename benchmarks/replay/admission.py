"""A model of admission of experts into slots on the device, as in ``flashlib.kernels.slot_cache`` 0.4.0.

``lru_ensure`` runs once per layer: it returns where each routed expert is and which must be copied in before the layer
computes; exact LRU, no host, fixed shapes, hence legal in CUDA graphs. ``tests/kernels/test_admission.py`` compares the
model with the kernel where flashlib is installed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_spac.cache.residency import NOWHERE
from vllm_spac.decisions.costs import Costs
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.traces.replayed import Outcome, Part, Replay

# Microseconds on an H100 in a graph, from flashlib's own cost model (measured by its authors): for K ids beyond 8;
# and for the search for victims by number of slots, (once, per missing id). Without a miss a call takes _NO_MISS.
_IDS = {8: 0.0, 16: 0.05, 32: 0.02, 64: 1.25, 128: 4.17, 256: 55.3, 512: 195.7}
_SEARCH = {512: (1.6, 0.56), 1024: (1.8, 0.63), 2048: (2.0, 0.70), 4096: (2.9, 0.89), 8192: (3.0, 1.26)}
_NO_MISS = 1.33


class DeviceLRU:
    """Exact LRU assignment of ids to slots.

    Args:
        ids, slots: their numbers.
    """

    def __init__(self, ids: int, slots: int) -> None:
        self.slot_of = np.full(ids, NOWHERE, dtype=np.int32)
        self.id_of = np.full(slots, NOWHERE, dtype=np.int32)
        self.used = np.zeros(slots, dtype=np.int64)
        self.clock = 0

    def ensure(self, query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gives each id of ``query`` (int, duplicates allowed) a slot; returns the missing ids and their slots.

        The missing ids, ascending, take the least recently used slots (ties: the lowest) among those that this call
        does not use. Raises ``LookupError`` and changes nothing if there are more ids than slots.
        """
        ids = np.unique(query)
        if len(ids) > len(self.id_of):
            raise LookupError(f"{len(ids)} ids for {len(self.id_of)} slots")
        self.clock += 1
        slots = self.slot_of[ids]
        self.used[slots[slots != NOWHERE]] = self.clock
        missing = ids[slots == NOWHERE]
        victims = np.argsort(self.used, kind="stable")[: len(missing)]
        gone = self.id_of[victims]
        self.slot_of[gone[gone != NOWHERE]] = NOWHERE
        self.id_of[victims], self.slot_of[missing], self.used[victims] = missing, victims, self.clock
        return missing, victims


def seconds(ids: int, slots: int, missing: int) -> float:
    """Returns the seconds of a call on an H100 with ``ids`` ids, duplicates counted; inf beyond the measurements."""
    beyond = next((cost for limit, cost in _IDS.items() if ids <= limit), np.inf)
    once, each = next((cost for limit, cost in _SEARCH.items() if slots <= limit), (np.inf, np.inf))
    return 1e-6 * (beyond + (once + each * missing if missing else _NO_MISS))


class AdmissionReplay(Replay[list[Part]]):
    """Simulates layers that admit the experts they need, copy and compute them. Copies overlap with hits.

    A layer that needs more experts than there are slots cannot be admitted: it reads all of them over the bus and
    leaves the slots as they are; ``impossible`` counts these. The length of a query is fixed in a graph: the number of
    selected ids, duplicates counted, or the experts of a layer (distinct ids, padded with one of them) if fewer.
    """

    def __init__(self, trace: Trace, costs: Costs, nbytes: int, outcome: Outcome) -> None:
        super().__init__(trace, costs, nbytes, outcome)
        self.slots = DeviceLRU(trace.facts.total, outcome.slots)
        self.impossible = 0
        self.admission_seconds = 0.0

    def fill(self, keys: Sequence[int]) -> None:
        self.slots.ensure(np.array(keys))

    def begin_step(self, step: int, drafting: float, layers: int) -> None:
        """Nothing is decided between steps."""

    def end_step(self) -> None:
        """Nothing is learned."""

    def layer(self, layer: int, work: list[Part]) -> None:
        outcome, (part,) = self.outcome, work
        try:
            missing, _ = self.slots.ensure(np.array(part.keys))
        except LookupError:
            self.impossible += 1
            missing = np.array(part.keys)
            outcome.streamed_bytes += len(missing) * self.nbytes
        else:
            took = seconds(min(sum(part.rows), self.trace.facts.experts), outcome.slots, len(missing))
            self.admission_seconds += took
            outcome.seconds += took
            outcome.loads += len(missing)
            outcome.bytes += len(missing) * self.nbytes
        late = set(missing.tolist())
        computed = sum(self.fast[rows] for key, rows in zip(part.keys, part.rows, strict=True) if key not in late)
        waiting = sum(self.fast[rows] for key, rows in zip(part.keys, part.rows, strict=True) if key in late)
        copied = self.costs.loading(len(late), self.nbytes)
        outcome.parts += 1
        outcome.hits += len(part.keys) - len(late)
        outcome.misses += len(late)
        outcome.seconds += max(copied, computed) + waiting
        outcome.stall_seconds += max(copied - computed, 0.0)
        outcome.bound_seconds += self.costs.bound(self.nbytes, len(part.keys) - len(late), len(late), 0)
