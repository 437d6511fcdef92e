"""Reads experts of the next layer into slots while a layer computes, as a predictor on the device names them.

While the kernel of layer l runs on the compute stream, the copy stream

1. scores the experts of layer l + 1, from what the router of layer l read and chose,
2. gives slots to the first top-k of each row that have none (``Admission.admit_ahead``), and copies them there; under a
   budget, to those that it would keep.

The next layer starts when both streams have arrived. What a layer does while the other stream works cannot conflict: a
slot is taken from an expert that no layer up to l of this step uses and that l + 1 is not expected to use, so that no
launch in flight reads it; and between a layer's own admission and its end, nothing but this changes the table. A wrong
guess costs bytes, never a token: the true router decides in the next layer's own admission.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_spac.core import Step
from vllm_spac.decisions.predictors.base import PredictorInputs
from vllm_spac.execution.device.admission import Admission
from vllm_spac.execution.exchange import Exchange

if TYPE_CHECKING:
    from vllm_spac.decisions.predictors._trained import Trained
    from vllm_spac.execution.exchange import Event, Stream

MOST_ROWS = 256  # of a forward; in a longer one nothing is read ahead in layers


class DeviceLookahead:
    """Called by the thread that launches.

    Args:
        predictor: on the device, looking one layer ahead.
        compute, copy: the stream that runs the model, and one for copies.
        rows: maximum number of rows of a forward.
        numbers: as of ``local_numbers``; None: this process holds all experts.
    """

    def __init__(
        self,
        predictor: Trained,
        admission: Admission,
        compute: Stream,
        copy: Stream,
        rows: int,
        numbers: Tensor | None = None,
    ) -> None:
        sizes, device = predictor.sizes, admission.memory.device
        of_model = admission.shape.experts if numbers is None else len(numbers) - 1
        assert predictor.reach == 1 and sizes.experts == of_model
        # Experts of the model, by the numbers of this process; None: the same.
        self._held = None if numbers is None else numbers[:-1].argsort(stable=True)[-admission.shape.experts :]
        self.rows = min(rows, MOST_ROWS)
        self._predictor, self._admission, self._compute, self._copy = predictor, admission, compute, copy
        self._last = sizes.layers - 1
        # Memory at fixed addresses, which a graph refers to.
        self._experts = torch.arange(admission.shape.experts, dtype=torch.int32, device=device)[None]
        self._named = torch.zeros(self._experts.shape, device=device)  # of these; 0: not
        # Of the step, written at once: what its rows count, 0 for one that names nothing, also as padding; and how
        # many of the names of each layer are read.
        self._step_words = torch.zeros(self.rows + sizes.layers, device=device)
        self._votes, self._limits = self._step_words[: self.rows, None], self._step_words[self.rows :]
        self._exchange = Exchange(device)
        self._exchange.reserve(0, self._step_words.nbytes)
        self._nobody = torch.zeros_like(self._votes)
        self._top_k = sizes.top_k
        self._step: tuple[list[float], list[int]] | None = None  # in ``_step_words``; None: forwards warm up
        self._arrives: Event | None = None
        self._kept: tuple[Tensor | None, ...] = ()  # what the copy stream reads, not to be freed meanwhile

    def begin(self, step: Step) -> None:
        """Called after ``Admission.begin``; nothing is read ahead in steps with prompts, or while it does not pay."""
        ahead = self._last and not step.prompts and step.rows <= self.rows and self._admission.ahead_left > 0
        votes = (step.generating_weights or [1.0] * step.rows) if ahead else []
        state = votes, self._admission.account.read_of(step.bounds)
        if state != self._step:
            words = torch.zeros(self._step_words.shape)
            words[: len(votes)], words[self.rows :] = (torch.tensor(each) for each in state)
            self._compute.submit(self._exchange.write, self._step_words, words)
        self._step = state

    def compile(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Launches on the copy stream all that ``start`` may launch later, for no row: nothing is named or moved.

        A capture must launch nothing for the first time: libraries load kernels and get their memory then, which a
        capture forbids, and they do it for each stream.
        """
        if self._last and len(x) <= self.rows:
            self._launch(min(layer, self._last - 1), x, ids, weights, self._nobody)
            self.wait()

    def start(
        self,
        layer: int,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        guess: Tensor | None = None,
        *,
        captured: bool,
    ) -> None:
        """Called between a layer's admission and its kernel; arguments as of ``PointerExecution.run``.

        Forwards before the first step do the same for no row: vLLM runs one of each size before it captures it.

        Args:
            captured: whether launches are captured into a graph, whose replays may read ahead.
        """
        if layer < self._last and len(x) <= self.rows and (captured or self._step is None or self._step[0]):
            self._launch(layer, x, ids, weights, self._votes, guess)

    def _launch(
        self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, votes: Tensor, guess: Tensor | None = None
    ) -> None:
        self._copy.wait(self._compute.record())
        self._copy.submit(self._predict, layer, x, ids, weights, votes[: len(x)], guess)
        self._arrives, self._kept = self._copy.record(), (x, ids, weights, guess)

    def wait(self) -> None:
        """What is launched from now on runs after what was started. Called before a layer, and when a step ends."""
        if self._arrives is not None:
            self._compute.wait(self._arrives)
            self._arrives, self._kept = None, ()

    @torch.inference_mode()
    def _predict(
        self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, votes: Tensor, guess: Tensor | None
    ) -> None:
        self.write_guess(layer, x, ids, weights, votes, self._named, guess)
        self._admission.admit_ahead(layer + 1, self._experts, self._named)

    def write_guess(
        self,
        layer: int,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        votes: Tensor,
        out: Tensor,
        guess: Tensor | None = None,
    ) -> None:
        """Writes 1 for the experts of layer ``layer + 1`` that are read if they have no slot into ``out``, else 0.

        Each row names its likeliest top-k, and none if its draft was cut. Those of this process are ranked by their
        weights, as predicted and summed over the rows, times the rows' votes, as a budget ranks what rows select. Their
        places are reported, and the first are read.

        Args:
            votes: float32 [rows, 1]; whatever a row with 0 holds, it names nothing.
            out: float32 [1, N], by the numbers of this process.
            guess: the predictor's scores, if they were computed already; as in ``Rows``.
        """
        if guess is None:
            there = ids.clamp(0, self._predictor.sizes.experts - 1)  # padding may have any
            guess = self._predictor.of_next(PredictorInputs(layer, hidden=x, ids=there, weights=weights))
        heard = torch.zeros_like(guess, dtype=torch.bool).scatter_(1, guess.topk(self._top_k).indices, True)
        heard &= (votes > 0) & (ids[:, :1] >= 0)
        own = torch.where(heard, guess.softmax(-1) * votes, 0).sum(0, dtype=torch.float64)
        named = heard.any(0)
        if self._held is not None:
            own, named = own[self._held], named[self._held]
        before = (own > own[:, None]).sum(1)
        self._admission.places[layer + 1].copy_(before.masked_fill_(~named, -1))
        out.copy_(named & (before < self._limits[layer + 1]))
