"""Reads ahead while drafts are made: experts that a predictor names of the drafts, until the next step begins.

Runners launch a whole step and its drafts before the device has computed them. So what a predictor makes of a
draft model's choices is on the host when the next step is about to begin, too late to read anything. On the device it
is there after the drafter's first forward. While the drafter goes on, the copy stream

1. names the first k experts of each row that the drafter has read, in each layer: the plan, to which each forward adds;
2. reads those that have no slot into memory of its own, earlier layers first, part by part.

The next step waits for the plan, and for no read: these stop when it begins, as they do for any forward through the
layers before it, such as those of a model that drafts for itself. The step's kernels take the parts that are there
(``Early``). Slots, offers and hits are as without; a wrong guess costs time in which the link idles.

The first forward after a step forgets the plan before, whose memory no kernel reads any more: they are all behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_spac.cache.named import PredictedExperts
from vllm_spac.decisions.predictors.base import START, Predictor, PredictorInputs
from vllm_spac.execution.device.admission import Admission
from vllm_spac.execution.device.layer_lookahead import EarlyParts
from vllm_spac.execution.row_shares import localised_on_device

if TYPE_CHECKING:
    from vllm_spac.execution.address_table import Kernels
    from vllm_spac.execution.exchange import Event, Stream

DRAFT_ROWS = 256  # of all requests that drafts are made of; beyond, nothing is read
_DRAFTING, _SERVING = -2, -1  # the turn, where no layer has it


class DraftLookahead:
    """Called by the thread that launches.

    Args:
        predictor: its tensors are on the device; it looks at the drafter.
        kernels: the launches.
        compute, copy: the stream that runs the model, and one for copies.
        k: experts that a row names in each layer.
        cutoff: number of the first layers that they are of; None: all.
        most: experts that are read until the next step.
        numbers: as of ``local_numbers``; None: this process holds all experts.
    """

    def __init__(
        self,
        predictor: Predictor,
        admission: Admission,
        kernels: Kernels,
        compute: Stream,
        copy: Stream,
        k: int,
        cutoff: int | None,
        most: int,
        numbers: Tensor | None = None,
    ) -> None:
        shape, device = admission.shape, admission.memory.device
        self._predictor, self._admission, self._compute, self._copy = predictor, admission, compute, copy
        self._numbers, self._k, self._layers = numbers, k, len(shape.layers) if cutoff is None else cutoff
        self._of_model = shape.experts if numbers is None else len(numbers) - 1
        self.parts, self._most = EarlyParts(admission, kernels, most, 1, 1), most
        made: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self._every, self._taken = torch.arange(shape.total, **made), torch.zeros((), **made)
        self._named = torch.zeros(shape.total + 1, dtype=torch.bool, device=device)  # the last one: of no expert
        self._new = torch.full((self.parts.keys.shape[1] + 1,), -1, dtype=torch.int32, device=device)  # read now
        self._planned: Event | None = None
        self._read: Event | None = None
        self._kept: list[PredictorInputs] = []  # inputs that the copy stream reads, which must not be freed meanwhile
        self._drafted = False  # something was named since the last step

    def compile(self) -> None:
        """Launches on the copy stream all that ``draft`` may launch later, for no row."""
        self._launch(None)
        self.finish()

    def draft(self, read: Tensor) -> None:
        """As ``Execution.draft``."""
        if len(read) > DRAFT_ROWS or not self._layers:
            return
        inputs = PredictorInputs(START, draft_ids=read)
        self._kept.append(inputs)
        self._launch(inputs)
        self._drafted = True

    def _launch(self, inputs: PredictorInputs | None) -> None:
        self._compute.submit(self.parts.turn.fill_, _DRAFTING)
        self._copy.wait(self._compute.record())
        self._copy.submit(self._plan, inputs, not self._drafted)
        self._planned = self._copy.record()
        self._copy.submit(self._read_new)
        self._read = self._copy.record()

    def begin(self) -> None:
        """Called before a step."""
        self.wait()
        self._drafted = False

    def wait(self) -> None:
        """Called before a layer, too: reads stop, and what is launched from now on knows what was read ahead."""
        if self._planned is None:
            return
        self._compute.submit(self.parts.turn.fill_, _SERVING)  # before a wait for a plan that is behind reads
        self._compute.wait(self._planned)
        self._planned = None
        self._kept.clear()

    def finish(self) -> None:
        """Called when a step ends: what is launched from now on runs after all reads."""
        self.wait()
        if self._read is not None:
            self._compute.wait(self._read)
        self._read = None

    def tally(self) -> None:
        """Called after ``finish``, when a step's layers have counted their rows."""
        self._compute.submit(self.parts.tally, self._admission.counts)

    def _read_new(self) -> None:
        self.parts.read(0, _DRAFTING + 1, after=False, keys=self._new[:-1])

    @torch.inference_mode()
    def _plan(self, inputs: PredictorInputs | None, first: bool) -> None:
        """Adds what ``inputs`` name to what is read; ``first``: of these drafts."""
        if first:
            self.parts.plan(0, self._new.fill_(-1)[:-1])
            self._taken.zero_()
        experts = self._admission.shape.experts
        self._named.zero_()
        for guess in () if inputs is None else self._predictor.guesses(inputs):
            named = PredictedExperts.of(guess, self._of_model, self._k)
            ids = named.ids[:, : max(0, self._layers - named.first)]
            if self._numbers is not None:
                ids = localised_on_device(ids, self._numbers)
            keys = ids + experts * torch.arange(named.first, named.first + ids.shape[1], device=ids.device)[:, None]
            self._named.index_fill_(0, torch.where(ids >= 0, keys, -1).flatten().long() % len(self._named), True)
        keys = self.parts.keys[0]
        self._named.index_fill_(0, keys.long() % len(self._named), False)
        wanted = self._named[:-1] & self._admission.far(0)
        place = self._taken + wanted.cumsum(0) - 1
        wanted &= place < self._most
        self._new.fill_(-1).scatter_(0, torch.where(wanted, place, len(keys)), self._every.int())
        keys.copy_(torch.where(self._new[:-1] >= 0, self._new[:-1], keys))
        self._taken += wanted.sum()
