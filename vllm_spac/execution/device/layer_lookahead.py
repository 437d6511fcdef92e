"""Reads experts of the next layer while no layer reads, as a predictor on the device names them.

While the kernel of layer l runs on the compute stream, the copy stream

1. scores the experts of layer l + 1, from what the router of layer l read and chose, and names those without a slot
   that are likeliest to be used, ``ENTRIES`` at most: the plan;
2. reads their weights, part by part, into memory of its own: during the kernel if layer l misses nothing, else after
   it. When layer l + 1 begins, it stops.

Layer l + 1 begins when the plan has arrived, and waits for no read. Its kernel takes the parts that are there and reads
the others itself (``Early``). Slots, offers and hits are as without: a wrong guess costs time in which the link idles.

There is memory for even and for odd layers. The plan for a layer first says that nothing is there of any layer of its
kind. Kernels that might read it have ended, for a layer of the other kind has begun since; and reads into it end before
the next plan, which is behind them on the copy stream. So none is written while it is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_spac.core import MoEShape, Step
from vllm_spac.decisions.predictors.base import PredictorInputs
from vllm_spac.execution.address_table import sizes
from vllm_spac.execution.device.admission import Admission
from vllm_spac.execution.exchange import Exchange
from vllm_spac.kernels.types import EARLY_ROWS, READERS, Early
from vllm_spac.recording.metrics import Counters

if TYPE_CHECKING:
    from vllm_spac.decisions.predictors._trained import Trained
    from vllm_spac.execution.address_table import Kernels
    from vllm_spac.execution.device.layer_launches import LayerRows
    from vllm_spac.execution.exchange import Event, Stream

MOST_ROWS = 256  # of a forward; in a longer one nothing is read ahead in layers
MEMORIES = 2  # for even and for odd layers
ENTRIES = 4  # experts of a layer that may be read ahead: in the time that the link idles, one or two are. Calculated.
_GONE = -(2**31)  # the sign of what was read and is no longer there
_WEIGHTS = ("w13_weight", "w2_weight")


def early_bytes(shape: MoEShape, entries: int) -> int:
    """Returns the bytes of the memory of ``EarlyParts`` that ``entries`` experts are read into at once."""
    return entries * sum(shape.tensors[name].nbytes for name in _WEIGHTS)


class EarlyParts:
    """Memory that experts are read into ahead of need, and what is there: of each plan, which names some experts.

    Args:
        kernels: the launches.
        entries: of a plan.
        plans: there are so many; plan p shares its memory with p + ``memories``, p + 2 ``memories``, ...

    Attributes:
        keys: int32 [plans, entries, up to a power of 2] on the device, as of ``Early``.
        of: what kernels read of each plan.
        turn: int32 [2] on the device, as of ``kernels.read_early``.
        interleaved: as of ``kernels.read_early``; set before anything is read.
    """

    def __init__(self, admission: Admission, kernels: Kernels, entries: int, plans: int, memories: int) -> None:
        shape, device, (d, ff) = admission.shape, admission.memory.device, sizes(admission.shape)
        padded = 1 << (entries - 1).bit_length()
        self._kernels, self._memories, self.interleaved = kernels, memories, False
        self._hosts = tuple(admission.memory.host_table[name] for name in _WEIGHTS)
        self.keys = torch.full((plans, padded), -1, dtype=torch.int32, device=device)
        rows, nbytes = (2 * ff, d), [shape.tensors[name].nbytes for name in _WEIGHTS]
        row = [size // count for size, count in zip(nbytes, rows, strict=True)]
        self._sizes = ff, d, row[0], row[1]
        self.memory = [torch.empty(memories, entries, size, dtype=torch.uint8, device=device) for size in nbytes]
        places = torch.zeros(2, memories, padded, dtype=torch.int64)
        for at, memory in enumerate(self.memory):
            places[at, :, :entries] = torch.tensor([[entry.data_ptr() for entry in each] for each in memory])
        places = places.to(device)
        counts = [-(-size // EARLY_ROWS) for size in (ff, d)]
        self._parts = [padded * count for count in counts]  # of W13 and of W2
        self._done = torch.zeros(plans, sum(self._parts), dtype=torch.int32, device=device)
        of_parts = [  # of which the last may have fewer rows
            min(EARLY_ROWS, size - EARLY_ROWS * part) * total // size
            for size, count, total in zip((ff, d), counts, nbytes, strict=True)
            for _ in range(padded)
            for part in range(count)
        ]
        self._bytes = torch.tensor(of_parts, device=device)
        self.of = [
            Early(keys, *(each.view(padded, -1) for each in done.split(self._parts)), *places[:, plan % memories])
            for plan, (keys, done) in enumerate(zip(self.keys, self._done, strict=True))
        ]
        self.turn = torch.full((2,), -1, dtype=torch.int32, device=device)
        self._tally = torch.zeros(3, dtype=torch.int64, device=device)

    def plan(self, plan: int, keys: Tensor) -> None:
        """Nothing is there of plans with the same memory; ``keys`` [n <= entries] may be read."""
        self._done[plan % self._memories :: self._memories].bitwise_or_(_GONE)
        self._done[plan].zero_()
        self.keys[plan, : len(keys)].copy_(keys)

    def read(self, plan: int, turn: int, *, after: bool, keys: Tensor | None = None) -> None:
        """Launches a read of ``keys``, by default all of a plan, before layer ``turn``; as ``kernels.read_early``."""
        early = self.of[plan] if keys is None else self.of[plan]._replace(keys=keys)
        sizes, interleaved = self._sizes, self.interleaved
        self._kernels.read_early(self.turn, turn, early, *self._hosts, sizes, after=after, interleaved=interleaved)

    @torch.inference_mode()
    def tally(self, counts: Tensor) -> None:
        """Counts what a step has read; ``counts``: int32 [keys], rows that selected each expert."""
        read = (self._done.bitwise_and(~_GONE) == READERS) * self._bytes
        nbytes = sum(each.view(*self.keys.shape, -1).sum(2) for each in read.split(self._parts, dim=1))
        used = (self.keys >= 0) & (counts[self.keys.clamp(min=0).long()] > 0)
        begun = nbytes > 0
        self._tally += torch.stack([begun.sum(), (begun & used).sum(), (nbytes * ~used).sum()])
        self._done.zero_()

    def count(self, counters: Counters, path: str) -> None:
        """Counts what was tallied, for which it waits."""
        read, used, wasted = self._tally.tolist()
        self._tally.zero_()
        counters.prefetches += read
        counters.prefetch_hits += used
        counters.prefetch_wasted += read - used
        counters.count_bytes(f"{path} ahead", wasted)


class DeviceLookahead:
    """Called by the thread that launches.

    Args:
        predictor: on the device, looking one layer ahead.
        kernels: the launches.
        compute, copy: the stream that runs the model, and one for copies.
        rows: maximum number of rows of a forward.
        numbers: as of ``local_numbers``; None: this process holds all experts.
    """

    def __init__(
        self,
        predictor: Trained,
        admission: Admission,
        kernels: Kernels,
        compute: Stream,
        copy: Stream,
        rows: int,
        numbers: Tensor | None = None,
    ) -> None:
        of, device = predictor.sizes, admission.memory.device
        of_model = admission.shape.experts if numbers is None else len(numbers) - 1
        assert predictor.reach == 1 and of.experts == of_model
        # Experts of the model, by the numbers of this process; None: the same.
        self._held = None if numbers is None else numbers[:-1].argsort(stable=True)[-admission.shape.experts :]
        self.rows = min(rows, MOST_ROWS)
        self._predictor, self._admission, self._compute, self._copy = predictor, admission, compute, copy
        self._last, self._top_k = of.layers - 1, of.top_k
        self.parts = EarlyParts(admission, kernels, ENTRIES, of.layers, MEMORIES)
        admission.turn = self.parts.turn
        # Memory at fixed addresses, which a graph refers to: what the rows of the step count, 0 for one that names
        # nothing, also as padding.
        self._votes = torch.zeros(self.rows, 1, device=device)
        self._exchange = Exchange(device)
        self._exchange.reserve(0, self._votes.nbytes)
        self._nobody = torch.zeros_like(self._votes)
        self._step: list[float] | None = None  # in ``_votes``; None: forwards warm up
        self._planned: Event | None = None
        self._read: Event | None = None
        self._started = False  # before the kernel of a layer
        self._kept: tuple[Tensor | None, ...] = ()  # what the copy stream reads, not to be freed meanwhile

    def begin(self, step: Step) -> None:
        """Called after ``Admission.begin``; nothing is read ahead in steps with prompts."""
        ahead = self._last and not step.prompts and step.rows <= self.rows
        votes = (step.generating_weights or [1.0] * step.rows) if ahead else []
        if votes != self._step:
            words = torch.zeros(self._votes.shape)
            words[: len(votes), 0] = torch.tensor(votes)
            self._compute.submit(self._exchange.write, self._votes, words)
        self._step = votes

    def compile(self, layer: int, rows: LayerRows) -> None:
        """Launches on the copy stream all that may be launched later, for no row: nothing is named or read.

        A capture must launch nothing for the first time: libraries load kernels and get their memory then, which a
        capture forbids, and they do it for each stream.
        """
        if self._last and len(rows.x) <= self.rows:
            layer = min(layer, self._last - 1)
            self._plan(layer, rows, self._nobody)
            self._launch(layer, after=True)
            self.finish()

    def start(self, layer: int, rows: LayerRows) -> None:
        """Called between a layer's admission and its kernel.

        Forwards before the first step do the same for no row: vLLM runs one of each size before it captures it.
        """
        fits = layer < self._last and len(rows.x) <= self.rows
        self._started = fits and (rows.captured or self._step is None or bool(self._step))
        if self._started:
            self._plan(layer, rows, self._votes)
            self._launch(layer, after=False)

    def start_after(self, layer: int) -> None:
        """Called after a layer's kernel was launched; behind the last one all reads end, as a capture has to."""
        if layer == self._last:
            self.finish()
        elif self._started:
            self._copy.wait(self._compute.record())
            self._launch(layer, after=True)

    def _plan(self, layer: int, rows: LayerRows, votes: Tensor) -> None:
        self._copy.wait(self._compute.record())
        self._copy.submit(self._name, layer, rows, votes[: len(rows.x)])
        self._planned = self._copy.record()
        self._kept = rows.x, rows.of_model, rows.weights, rows.guess

    def _launch(self, layer: int, *, after: bool) -> None:
        self._copy.submit(self._reads, layer + 1, after)
        self._read = self._copy.record()

    def _reads(self, layer: int, after: bool) -> None:
        self.parts.read(layer, layer, after=after)

    def wait(self) -> None:
        """Called before a layer: what is launched from now on knows what is read ahead for it."""
        event = self._planned
        if event is None:  # none was made since: of a layer that reads into the same memory, for one
            event, self._read = self._read, None
        if event is not None:
            self._compute.wait(event)
        self._planned, self._kept = None, ()

    def finish(self) -> None:
        """Called when a step ends: what is launched from now on runs after all reads."""
        self._planned = None
        self.wait()

    def tally(self) -> None:
        """Called after ``finish``, when a step's layers have counted their rows."""
        self._compute.submit(self.parts.tally, self._admission.counts)

    @torch.inference_mode()
    def _name(self, layer: int, rows: LayerRows, votes: Tensor) -> None:
        self.parts.plan(layer + 1, self.named(layer, rows.x, rows.of_model, rows.weights, votes, rows.guess))

    def named(
        self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, votes: Tensor, guess: Tensor | None = None
    ) -> Tensor:
        """Returns int64 [n], keys of experts of layer ``layer + 1`` without a slot, the likeliest first, -1 for none.

        Each row names its likeliest top-k, and none if its draft was cut. Those of this process are ranked by their
        weights, as predicted and summed over the rows, times the rows' votes, as a budget ranks what rows select.

        Args:
            votes: float32 [rows, 1]; whatever a row with 0 holds, it names nothing.
            guess: the predictor's scores, if they were computed already; as in ``Rows``.
        """
        if guess is None:
            there = ids.clamp(0, self._predictor.sizes.experts - 1)  # padding may have any
            guess = self._predictor.of_next(PredictorInputs(layer, hidden=x, ids=there, weights=weights))
        heard = torch.zeros_like(guess, dtype=torch.bool).scatter_(1, guess.topk(self._top_k).indices, True)
        heard &= (votes > 0) & (ids[:, :1] >= 0)
        own = torch.where(heard, guess.softmax(-1) * votes, 0).sum(0)
        if self._held is not None:
            own = own[self._held]
        most, likeliest = torch.where(self._admission.far(layer + 1)[: len(own)], own, 0).topk(min(ENTRIES, len(own)))
        return torch.where(most > 0, likeliest + (layer + 1) * len(own), -1)
