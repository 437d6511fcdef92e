"""What the device reads ahead of need: by a predictor that is asked in layers, or while drafts are made, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor

from vllm_spac.core import Step
from vllm_spac.decisions.predictors.base import DRAFTING, Predictor, Signal
from vllm_spac.execution.base import ExecutionContext
from vllm_spac.execution.device.admission import Admission
from vllm_spac.execution.device.draft_lookahead import DraftLookahead
from vllm_spac.execution.device.layer_launches import LayerRows
from vllm_spac.execution.device.layer_lookahead import DeviceLookahead
from vllm_spac.execution.exchange import Stream

if TYPE_CHECKING:
    from vllm_spac.decisions.predictors._trained import Trained


class ReadsAhead:
    """Called by the thread that launches.

    Args:
        compute, copy: the stream that runs the model, and one for copies.
        numbers: as of ``local_numbers``; None: this process holds all experts.

    Attributes:
        layers, drafts: what asks the predictor in layers, or while drafts are made; at most one is there.
        signals: as in ``Execution``.
    """

    def __init__(
        self, context: ExecutionContext, admission: Admission, compute: Stream, copy: Stream, numbers: Tensor | None
    ) -> None:
        self.layers: DeviceLookahead | None = None
        self.drafts: DraftLookahead | None = None
        self.signals: frozenset[Signal] = frozenset()
        shape, ahead = context.shape, context.ahead
        if ahead.prefetch == "off" or context.slots == shape.total:
            return
        extra, shared = 1.0 if ahead.extra is None else ahead.extra, (admission, compute, copy)
        predictor: Predictor = ahead.build(shape.total)
        if predictor.on_device:
            admission.read_ahead(extra, ahead.prefetch)
            self.layers = DeviceLookahead(cast("Trained", predictor), *shared, context.rows, numbers)
        else:
            assert predictor.needs & DRAFTING, "refused by the rules"
            admission.read_between(extra, ahead.prefetch, ahead.depth)
            self.drafts = DraftLookahead(predictor, *shared, ahead.k or shape.top_k, ahead.cutoff, numbers)
            self.signals = predictor.needs

    def end_drafts(self) -> None:
        """Called before a step."""
        if self.drafts is not None:
            self.drafts.begin()

    def begin(self, step: Step) -> None:
        """Called after ``Admission.begin``."""
        if self.layers is not None:
            self.layers.begin(step)

    def wait(self) -> None:
        """What is launched from now on runs after what was started. Called before a layer, and when a step ends."""
        for each in (self.drafts, self.layers):
            if each is not None:
                each.wait()

    def start(self, layer: int, rows: LayerRows) -> None:
        """Called between a layer's admission and its kernel."""
        if self.layers is not None:
            self.layers.start(layer, rows.x, rows.of_model, rows.weights, rows.guess, captured=rows.captured)

    def compile(self, layer: int, rows: LayerRows) -> None:
        """Launches all that may be launched later, for no row."""
        if self.layers is not None:
            self.layers.compile(layer, rows.x, rows.ids, rows.weights)
