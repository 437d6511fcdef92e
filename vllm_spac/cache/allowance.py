"""How many experts may be read ahead: a share of what layers need, and none while these reads do not pay. Pure.

Under a budget, whose names are ranked by the votes of all rows, also how far down this ranking: ``Depths``.

Counts stand for bytes: all experts of one loader have the same size. They decay, so that they are those of about the
last ``WINDOW`` steps. The log says once that reads ahead pause.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from vllm_spac.cache.residency import Placement
from vllm_spac.recording.metrics import Counters

WINDOW = 64  # steps
PAYS = 0.4  # share of the reads ahead that layers must use
LEAST = 32  # reads ahead of a window by which their use is judged
SETTLE = 8  # steps with reads ahead before that: the first of a run read what little is known
PAUSE = 1024  # steps without reads ahead, until they are tried again


class Allowance:
    """Limits reads ahead so that all reads together stay below (1 + ``extra``) times what layers need.

    They need what they load, what the CPU computes in place of a load, and what they find because of a read ahead, less
    what they miss only because a read ahead that was not used yet had evicted it: about what they would miss without
    reads ahead. A read ahead that no layer has used is extra, and so is a miss of what one evicted. Extra reads may be
    at most ``extra`` times the needed ones.

    Reads ahead pause for ``PAUSE`` steps when layers used less than ``PAYS`` of them.

    Args:
        extra: from 0 to 1.

    Attributes:
        paused: whether they pause.
    """

    def __init__(self, extra: float) -> None:
        assert extra >= 0, f"a share of {extra}"
        self._extra = extra
        self._loaded = self._read = self._used = self._harm = 0.0
        self._judged = 0.0  # reads before this step, which had a step's time to be used
        self._steps = 0  # in which something was read, since the start or a pause
        self._pause = 0

    @property
    def paused(self) -> bool:
        return self._pause > 0

    @property
    def left(self) -> int:
        """How many more reads ahead may begin."""
        needed = self._loaded + self._used - self._harm
        more = self._extra * needed - self._harm - 1  # that may be extra, beside one more
        return 0 if self._pause or more < 0 else max(0, int(more - (self._read - self._used) + 1))

    def add_misses(self, count: int, harm: int = 0) -> None:
        """Layers missed ``count`` experts, ``harm`` of them because reads ahead had evicted them."""
        self._loaded += count
        self._harm += harm

    def add_reads(self, count: int) -> None:
        """``count`` reads ahead were asked for; negative: so many were cancelled before they began."""
        self._read += count

    def add_uses(self, count: int) -> None:
        """Layers used ``count`` experts that were read ahead, for the first time each."""
        self._used += count

    def end_step(self) -> tuple[int, int] | None:
        """A step has ended. Returns (reads ahead used, reads ahead) of the window if a pause begins, else None."""
        keep = 1 - 1 / WINDOW
        self._loaded, self._harm = self._loaded * keep, self._harm * keep
        self._read, self._used = self._read * keep, self._used * keep
        self._steps += self._read > 0
        judged, self._judged = self._judged * keep, self._read
        if self._pause:
            self._pause -= 1
        elif self._steps >= SETTLE and judged >= LEAST and self._used < PAYS * judged:
            found = round(self._used), round(judged)
            self._pause, self._steps = PAUSE, 0
            self._read = self._used = self._judged = self._harm = 0.0
            return found
        return None


class Depths:
    """How many names of each layer are read ahead under a budget, the likeliest first.

    Counts by place in the ranking how many names without a slot their layer used, whether they were read or not, so
    that nothing is read to learn it. Reads go down to the last place above which at most ``extra`` names were not used
    for one that was, by half a standard error. Layers differ: each has its own depth, 0 until some names were used.

    Args:
        layers, experts: numbers of layers, and of experts per layer.
        extra: as of ``Allowance``.
    """

    _FADING = 1 - 1 / 256  # per step: places near the top seldom lack a slot

    def __init__(self, layers: int, experts: int, extra: float) -> None:
        self._named, self._used = np.zeros((layers, experts)), np.zeros((layers, experts))
        self._share = 1 / (1 + extra)
        self.depths = np.zeros(layers, dtype=np.int64)

    def end_step(self, places: np.ndarray, used: np.ndarray) -> None:
        """A step under a budget has ended.

        Args:
            places: int [keys], the place of each name that had no slot, from 0; -1: of all others.
            used: bool [keys], experts that their layer used.
        """
        keys = np.flatnonzero(places >= 0)
        if not len(keys):
            return
        experts = self._named.shape[1]
        at = keys // experts * experts + places[keys]
        for counts, found in ((self._named, at), (self._used, at[used[keys]])):
            counts *= self._FADING
            counts += np.bincount(found, minlength=counts.size).reshape(counts.shape)
        named, used_of = self._named.cumsum(1), self._used.cumsum(1)
        doubt = np.sqrt(self._share * (1 - self._share) * named) / 2  # the deepest of many that pay was lucky
        pays = (used_of >= self._share * named + doubt) & (named > 0)
        self.depths = np.where(pays.any(1), experts - pays[:, ::-1].argmax(1), 0)


logger = logging.getLogger("vllm.spac")


class PauseNotice:
    """Takes what ``Allowance.end_step`` returns; ``prefetch``: the predictor's name."""

    def __init__(self, prefetch: str) -> None:
        self._prefetch, self._warned = prefetch, False

    def report(self, judged: tuple[int, int] | None) -> None:
        """Logs the first pause."""
        if judged is None or self._warned:
            return
        self._warned = True
        logger.warning(
            "spac: prefetch=%s pauses: layers used %d of the last %d experts that it read ahead; it is tried again "
            "every %d steps, or use --spac-prefetch off",
            self._prefetch,
            *judged,
            PAUSE,
        )


class ReadAccount:
    """What became of a prefetcher's reads, in ``Counters``; limits those that a prediction asks for.

    Args:
        extra: as of ``Allowance``; None: nothing limits them.
        prefetch: the predictor's name.

    Attributes:
        unused: prefetched, READY and not used yet.
    """

    def __init__(self, counters: Counters, extra: float | None, prefetch: str) -> None:
        self._counters, self._pauses = counters, PauseNotice(prefetch)
        self._allowance = None if extra is None else Allowance(extra)
        self.unused: set[int] = set()
        self._guessed: set[int] = set()  # being read or read because of a prediction, and not used yet
        self._evicted_for: dict[int, int] = {}  # victim of such a read -> the key read

    def left(self, room: int) -> int:
        """How many of ``room`` further reads may be asked for because of a prediction."""
        return room if self._allowance is None else min(room, self._allowance.left)

    def add_placement(self, placement: Placement) -> None:
        """Records a placement: counts evicted unused prefetches."""
        if not self.unused:
            return
        wasted = self.unused.intersection(placement.victims)
        self.unused -= wasted
        self._guessed -= wasted
        self._counters.prefetch_wasted += len(wasted)

    def guess(self, placement: Placement) -> tuple[tuple[int, int], ...]:
        """Records a placement because of a prediction; returns its loads."""
        self.add_placement(placement)
        keys = [key for key, _ in placement.loads]
        self._guessed.update(keys)
        self._evicted_for.update(zip(placement.victims, keys[len(keys) - len(placement.victims) :], strict=True))
        if self._allowance is not None:
            self._allowance.add_reads(len(keys))
        return placement.loads

    def cancel(self, keys: Sequence[int]) -> None:
        """Records that the reads of ``keys`` never began."""
        if self._allowance is not None:
            self._allowance.add_reads(-len(self._guessed.intersection(keys)))
        self._guessed.difference_update(keys)

    def finish(self, read: Sequence[int], failed: Sequence[int]) -> None:
        """Records reads that have finished."""
        self.unused.update(read)
        self._guessed.difference_update(failed)
        self._counters.prefetch_failed += len(failed)
        self._counters.prefetches += len(read)

    def add_uses(self, keys: Sequence[int] | np.ndarray) -> None:
        """Records that a layer uses ``keys``, all READY."""
        if not self.unused:
            return
        used = self.unused.intersection(np.asarray(keys).tolist())
        self.unused -= used
        self._counters.prefetch_hits += len(used)
        if self._allowance is not None:
            self._allowance.add_uses(len(used & self._guessed))
        self._guessed -= used

    def add_demand(self, keys: Sequence[int]) -> None:
        """Records that a layer needs ``keys`` from the store, some because of a read ahead that nothing has used."""
        harm = sum(self._evicted_for.pop(key) in self._guessed for key in self._evicted_for.keys() & set(keys))
        self._counters.prefetch_harmful += harm
        if self._allowance is not None:
            self._allowance.add_misses(len(keys), harm)

    def end_step(self) -> None:
        """Judges by a window of steps how many reads were used."""
        self._evicted_for = {victim: key for victim, key in self._evicted_for.items() if key in self._guessed}
        if self._allowance is not None:
            self._pauses.report(self._allowance.end_step())
