"""What the device reads ahead of need: by a predictor that is asked in layers, or while drafts are made, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor

from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.config.types import PREFETCHING
from vllm_spac.core import MoEShape, Step
from vllm_spac.decisions.predictors.base import DRAFTING, Predictor, Signal
from vllm_spac.execution.base import ExecutionContext
from vllm_spac.execution.device.admission import Admission
from vllm_spac.execution.device.draft_lookahead import DraftLookahead
from vllm_spac.execution.device.layer_launches import LayerRows
from vllm_spac.execution.device.layer_lookahead import ENTRIES, MEMORIES, DeviceLookahead, early_bytes
from vllm_spac.execution.exchange import Stream
from vllm_spac.kernels.types import Early
from vllm_spac.recording.metrics import Counters

if TYPE_CHECKING:
    from vllm_spac.decisions.predictors._trained import Trained
    from vllm_spac.execution.address_table import Kernels


class ReadsAhead:
    """Called by the thread that launches.

    Args:
        kernels: the launches.
        compute, copy: the stream that runs the model, and one for copies.
        numbers: as of ``local_numbers``; None: this process holds all experts.

    Attributes:
        layers, drafts: what asks the predictor in layers, or while drafts are made; at most one is there.
        signals: as in ``Execution``.
        early: as of ``LayerLaunches``.
    """

    def __init__(
        self,
        context: ExecutionContext,
        admission: Admission,
        kernels: Kernels,
        compute: Stream,
        copy: Stream,
        numbers: Tensor | None,
    ) -> None:
        self.layers: DeviceLookahead | None = None
        self.drafts: DraftLookahead | None = None
        self.signals: frozenset[Signal] = frozenset()
        self.early: list[tuple[int, Early]] | None = None
        self._path = context.path
        shape, ahead = context.shape, context.ahead
        if ahead.prefetch == "off" or context.slots == shape.total:
            return
        predictor: Predictor = ahead.build(shape.total)
        launched = admission, kernels, compute, copy
        if predictor.on_device:
            self.layers = DeviceLookahead(cast("Trained", predictor), *launched, context.rows, numbers)
            plans = self.layers.parts.of
        else:
            assert predictor.needs & DRAFTING, "refused by the rules"
            k = ahead.k or shape.top_k
            self.drafts = DraftLookahead(predictor, *launched, k, ahead.cutoff, _most(ahead), numbers)
            plans = self.drafts.parts.of * len(shape.layers)
            self.signals = predictor.needs
        self.early = [(layer * shape.experts, plan) for layer, plan in enumerate(plans)]

    def end_drafts(self) -> None:
        """Called before a step."""
        if self.drafts is not None:
            self.drafts.begin()

    def begin(self, step: Step) -> None:
        """Called after ``Admission.begin``."""
        if self.layers is not None:
            self.layers.begin(step)

    @property
    def _asked(self) -> DeviceLookahead | DraftLookahead | None:
        return self.layers or self.drafts

    def wait(self) -> None:
        """Called before a layer: what is launched from now on runs after what was planned for it."""
        if self._asked is not None:
            self._asked.wait()

    def finish(self) -> None:
        """Called when a step ends: what is launched from now on runs after all that was started."""
        if self._asked is not None:
            self._asked.finish()

    def tally(self) -> None:
        """Called after a step's layers: counts what was read for them."""
        if self._asked is not None:
            self._asked.tally()

    def count(self, counters: Counters) -> None:
        """Counts what steps have read ahead, for which it waits."""
        if self._asked is not None:
            self._asked.parts.count(counters, self._path)

    def start(self, layer: int, rows: LayerRows) -> None:
        """Called between a layer's admission and its kernel."""
        if self.layers is not None:
            self.layers.start(layer, rows)

    def start_after(self, layer: int) -> None:
        """Called after a layer's kernel."""
        if self.layers is not None:
            self.layers.start_after(layer)

    def prepare(self, activation: str) -> None:
        """Called before the first layer with this activation: launches all that drafts may launch later, for no row."""
        if self._asked is not None:
            self._asked.parts.interleaved = activation == "swigluoai"
        if self.drafts is not None:
            self.drafts.compile()

    def compile(self, layer: int, rows: LayerRows) -> None:
        """Launches all that may be launched later, for no row."""
        if self.layers is not None:
            self.layers.compile(layer, rows)


def ahead_bytes(shape: MoEShape, ahead: PrefetchSettings) -> int:
    """As ``Execution.ahead_bytes``."""
    if ahead.prefetch == "off":
        return 0
    return early_bytes(shape, ENTRIES * MEMORIES if ahead.build(shape.total).on_device else _most(ahead))


def _most(ahead: PrefetchSettings) -> int:
    """Returns how many experts may be read while drafts are made: at most the default of ``depth``."""
    return min(ahead.depth, PREFETCHING["depth"].default)
