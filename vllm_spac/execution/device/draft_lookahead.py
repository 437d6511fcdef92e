"""Reads ahead while drafts are made: the device gives slots to the experts that a predictor names of the drafts.

Runners launch a whole step and its drafts before the device has computed them. So what a predictor makes of a
draft model's choices is on the host when the next step is about to begin, too late to read anything. On the device it
is there after the drafter's first forward. While the drafter goes on, the copy stream

1. names the first k experts of each row that the drafter has read, in each layer,
2. gives the least valuable slots to those that have none, and copies them; the next step's layers get the others.

Earlier layers come first, and the number of reads until the next step is bounded. The step starts when both streams
have arrived, and so does any forward through the layers before it, such as those of a model that drafts for itself.
Hence no kernel is in flight that may read a slot which is given away. A wrong guess costs bytes, never a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_spac.cache.named import PredictedExperts
from vllm_spac.decisions.predictors.base import START, Predictor, PredictorInputs
from vllm_spac.execution.address_table import MAX_EXPERTS
from vllm_spac.execution.device.admission import Admission
from vllm_spac.execution.row_shares import localised_on_device

if TYPE_CHECKING:
    from vllm_spac.execution.exchange import Event, Stream

DRAFT_ROWS = 256  # of all requests that drafts are made of; beyond, nothing is read


class DraftLookahead:
    """Called by the thread that launches.

    Args:
        predictor: its tensors are on the device; it looks at the drafter.
        compute, copy: the stream that runs the model, and one for copies.
        k: experts that a row names in each layer.
        cutoff: number of the first layers that they are of; None: all.
        numbers: as of ``local_numbers``; None: this process holds all experts.
    """

    def __init__(
        self,
        predictor: Predictor,
        admission: Admission,
        compute: Stream,
        copy: Stream,
        k: int,
        cutoff: int | None,
        numbers: Tensor | None = None,
    ) -> None:
        shape, device = admission.shape, admission.memory.device
        self._predictor, self._admission, self._compute, self._copy = predictor, admission, compute, copy
        self._numbers, self._k, self._layers = numbers, k, len(shape.layers) if cutoff is None else cutoff
        self._of_model = shape.experts if numbers is None else len(numbers) - 1
        made: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._named = torch.full((DRAFT_ROWS, self._layers, k), -1, **made)
        self._live = torch.zeros(1, **made)  # pairs of a launch that count
        # Layers go together, as many as a launch takes: the first one, what is added to their ids, what is copied.
        together = max(1, MAX_EXPERTS // shape.experts)
        self._parts: list[tuple[int, Tensor, Tensor]] = []
        for first in range(0, self._layers, together):
            layers = min(together, self._layers - first)
            behind = torch.arange(layers, **made)[:, None] * shape.experts
            self._parts.append((first, behind, torch.zeros(1 + 2 * layers * shape.experts, **made)))
        self._arrives: Event | None = None
        self._kept: list[PredictorInputs] = []  # inputs that the copy stream reads, which must not be freed meanwhile
        self._drafted = False  # something was named since the last step

    def compile(self) -> None:
        """Launches on the copy stream all that ``draft`` may launch later, for no row."""
        self._copy.wait(self._compute.record())
        self._copy.submit(self._give, 0)
        self._arrives = self._copy.record()
        self.wait()

    def draft(self, read: Tensor) -> None:
        """As ``Execution.draft``."""
        if len(read) > DRAFT_ROWS or not self._layers or self._admission.ahead_left == 0:
            return
        inputs = PredictorInputs(START, draft_ids=read)
        self._copy.wait(self._compute.record())
        self._copy.submit(self._predict, inputs)
        self._arrives, self._drafted = self._copy.record(), True
        self._kept.append(inputs)

    def begin(self) -> None:
        """Called before a step."""
        self.wait()
        if self._drafted:
            self._admission.reports.send(None)
        self._drafted = False

    def wait(self) -> None:
        """What is launched from now on runs after what was started. Called before a layer, too."""
        if self._arrives is not None:
            self._compute.wait(self._arrives)
            self._arrives = None
            self._kept.clear()

    @torch.inference_mode()
    def _predict(self, inputs: PredictorInputs) -> None:
        rows = 0
        self._named.fill_(-1)
        for guess in self._predictor.guesses(inputs):
            named = PredictedExperts.of(guess, self._of_model, self._k)
            rows, layers = max(rows, len(named.ids)), min(named.ids.shape[1], self._layers - named.first)
            if layers > 0:
                there = slice(named.first, named.first + layers)
                self._named[: len(named.ids), there].copy_(named.ids[:, :layers])
        if rows:
            self._give(rows)

    def _give(self, rows: int) -> None:
        """Gives slots to what the first ``rows`` rows name."""
        for first, behind, copies in self._parts:
            ids = self._named[:, first : first + len(behind)]
            if self._numbers is not None:
                ids = localised_on_device(ids, self._numbers)
            ids = torch.where(ids >= 0, ids + behind, ids).flatten(1)
            self._live.fill_(rows * ids.shape[1])
            self._admission.admit_drafts(first, ids, self._live, copies)
