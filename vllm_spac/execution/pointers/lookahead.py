"""Reads experts of the next layer into slots while a layer computes. No layer waits for the host, also in a full graph.

While the kernel of layer l runs on the compute stream, the copy stream

1. scores the experts of layer l + 1 by a predictor on the device, from what the router of layer l read and chose,
2. gives slots to the first top-k of each row that have none (``Admission.ahead``), and copies them there.

The next layer starts when both streams have arrived. What a layer does while the other stream works cannot conflict: a
slot is taken from an expert that no layer up to l of this step uses and that l + 1 is not expected to use, so that no
launch in flight reads it; and between a layer's own admission and its end, nothing but this changes the table. A wrong
guess costs bytes, never a token: the true router decides in the next layer's own admission.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_spac.predictors.base import Seen, Signal

if TYPE_CHECKING:
    from vllm_spac.core import Step
    from vllm_spac.execution.pointers.admissions.base import Admission
    from vllm_spac.execution.pointers.streams import Event, Stream
    from vllm_spac.predictors._maps import Maps

MOST_ROWS = 256  # of a forward; the scores that follow from its tokens are kept in as many rows


class Lookahead:
    """Called by the thread that launches.

    Args:
        predictor: on the device, looking one layer ahead.
        admission: one that ``looks_ahead``.
        compute, copy: as in ``Parts``.
        rows: maximum number of rows of a forward.
    """

    def __init__(self, predictor: Maps, admission: Admission, compute: Stream, copy: Stream, rows: int) -> None:
        sizes, device = predictor.sizes, admission.parts.memory.device
        assert predictor.reach == 1 and sizes.experts == admission.parts.shape.experts
        self.rows = min(rows, MOST_ROWS)
        self._predictor, self._admission, self._compute, self._copy = predictor, admission, compute, copy
        self._last = sizes.layers - 1
        # Memory at fixed addresses, which a graph refers to. Of the step: what its scores are without the products.
        self._known = torch.zeros(self.rows, self._last, sizes.experts, device=device)
        self._named = torch.zeros(self.rows, sizes.top_k, dtype=torch.int32, device=device)
        self._live = torch.zeros(1, dtype=torch.int32, device=device)  # pairs that count
        self._nothing = torch.zeros_like(self._live)
        self._pairs: int | None = None  # in ``_live``; None before the first step: forwards warm up
        self._arrives: Event | None = None
        self._kept: tuple[Tensor, ...] = ()  # inputs that the copy stream reads, which must not be freed meanwhile
        self._by_token = Signal.TOKENS in predictor.needs
        if not self._by_token:
            self._know(None)

    def begin(self, step: Step) -> None:
        """Called after ``Admission.begin``; nothing is read ahead in steps with prompts, or while it does not pay."""
        ahead = not step.prompts and step.rows <= self.rows and self._admission.ahead_left > 0
        pairs = step.rows * self._named.shape[1] if ahead else 0
        if ahead and self._by_token:
            self._compute.submit(self._know, step.tokens)
        if pairs != self._pairs:
            self._compute.submit(self._live.fill_, pairs)
        self._pairs = pairs

    def compile(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Launches on the copy stream all that ``start`` may launch later, for no pair: nothing is named or moved.

        A capture must launch nothing for the first time: libraries load kernels and get their memory then, which a
        capture forbids, and they do it for each stream.
        """
        if self._last and len(x) <= self.rows:
            self._launch(min(layer, self._last - 1), x, ids, weights, self._nothing)
            self.join()

    def start(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, *, captured: bool) -> None:
        """Called between a layer's admission and its kernel; arguments as of ``PointerExecution.run``.

        Forwards before the first step do the same for no pair: vLLM runs one of each size before it captures it.

        Args:
            captured: whether launches are captured into a graph, whose replays may read ahead.
        """
        if layer < self._last and len(x) <= self.rows and (captured or self._pairs != 0):
            self._launch(layer, x, ids, weights, self._live)

    def _launch(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, live: Tensor) -> None:
        self._copy.wait(self._compute.record())
        self._copy.submit(self._look, layer, x, ids, weights, live)
        self._arrives, self._kept = self._copy.record(), (x, ids, weights)

    def join(self) -> None:
        """What is launched from now on runs after what was started. Called before a layer, and when a step ends."""
        if self._arrives is not None:
            self._compute.wait(self._arrives)
            self._arrives, self._kept = None, ()

    @torch.inference_mode()
    def _know(self, tokens: Tensor | None) -> None:
        if tokens is None:  # the same for all rows
            self._known.copy_(self._predictor.of_step(None).unflatten(1, self._known.shape[1:]))
        else:  # of V1's runner on the host, of V2's on the device
            there = tokens.to(self._known.device, non_blocking=True)
            self._known[: len(tokens)] = self._predictor.of_step(there).unflatten(1, self._known.shape[1:])

    @torch.inference_mode()
    def _look(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, live: Tensor) -> None:
        named = self._named[: len(x)]
        self.name(layer, x, ids, weights, named)
        self._admission.ahead(layer + 1, named, live)

    def name(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        """Writes the experts of layer ``layer + 1`` that are likeliest for each row into ``out``, int32 [rows, k]."""
        there = ids.clamp(0, self._known.shape[2] - 1)  # padding may have any
        features = self._predictor.features(Seen(layer, hidden=x, ids=there, weights=weights))
        scores = torch.addmm(self._known[: len(x), layer], features, self._predictor.matrix(layer))
        out.copy_(scores.topk(out.shape[1]).indices)
