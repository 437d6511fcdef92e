"""The files that a running engine records: its routing trace and its timeline. Neither ends a step or a shutdown."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from vllm_spac.core import Step
from vllm_spac.errors import SpacError
from vllm_spac.recording.timeline_file import TimelineWriter
from vllm_spac.recording.trace_writer import TraceWriter

logger = logging.getLogger("vllm.spac")  # below "vllm", so that vLLM's handlers and levels apply
_SAVE_SECONDS = 5.0


class Recordings:
    """Records steps and saves them; whatever fails in one of them is logged once and ends that one.

    Args:
        clock: monotonic time in seconds.

    Attributes:
        trace, timeline: as given; None once stopped.
        stopped: why each one that has stopped did, by its name.
    """

    def __init__(self, trace: TraceWriter | None, timeline: TimelineWriter | None, clock: Callable[[], float]) -> None:
        self.trace, self.timeline = trace, timeline
        self.stopped: dict[str, str] = {}
        self._clock = clock
        self._chosen: list[tuple[int, Tensor, Tensor]] = []  # by the routers of the step, recorded after it
        self._save_at = -math.inf

    def begin_step(self, step: Step) -> None:
        """A forward for real requests begins."""
        self._chosen.clear()
        if self.trace is not None:
            with self._isolated("trace"):
                self.trace.begin_step(step)

    def observe_choice(self, layer: int, ids: Tensor, weights: Tensor) -> None:
        """Keeps the experts and weights that a layer is about to run, both [rows, top_k] without padding."""
        if self.trace is not None:
            with self._isolated("trace"):
                self._chosen.append((layer, ids.clone(), weights.clone()))  # the originals may be overwritten

    def end_step(self, tokens: Sequence[int] | None, paths: Sequence[Sequence[int]] | None) -> None:
        """Records the step that ends, with arguments as of ``Runtime.end_step``, and saves every few seconds."""
        if self.trace is not None:
            with self._isolated("trace"):
                self._write(self.trace)
                self.trace.end_step(tokens, paths)
        self._save_sometimes()

    def finish(self) -> None:
        """Saves both for the last time; nothing is recorded any more."""
        if self.trace is not None:
            with self._isolated("trace"):
                self.trace.finish()
        if self.timeline is not None:
            with self._isolated("timeline"):
                self.timeline.save()

    def _write(self, trace: TraceWriter) -> None:
        """Writes what the routers of a step chose, for all layers at once.

        Inside a layer each call into torch would add a microsecond per token, and on a GPU a copy would wait for the
        layer's kernels.
        """
        if self._chosen:
            layers, ids, weights = zip(*self._chosen, strict=True)
            self._chosen.clear()
            trace.observe(layers, torch.stack(ids).cpu().numpy(), torch.stack(weights).float().cpu().numpy())

    def _save_sometimes(self) -> None:
        """Saves every few seconds, so that a killed server loses little; takes at most 0.5 % of the time."""
        if self.trace is None and self.timeline is None:
            return
        start = self._clock()
        if start < self._save_at:
            return
        if self.trace is not None:
            with self._isolated("trace"):
                self.trace.save()
        if self.timeline is not None:
            with self._isolated("timeline"):
                self.timeline.save()
        done = self._clock()
        self._save_at = done + max(_SAVE_SECONDS, 200 * (done - start))

    @contextlib.contextmanager
    def _isolated(self, name: str) -> Iterator[None]:
        """Ends the recording ``name`` if the block raises, and says so; requests go on."""
        try:
            yield
        except Exception as error:
            self.stopped[name] = str(error) or repr(error)
            trace, self.trace = self.trace, None if name == "trace" else self.trace
            self.timeline = None if name == "timeline" else self.timeline
            self._chosen.clear()
            if name == "trace" and trace is not None:
                with contextlib.suppress(Exception):  # a full disk fails again; the first error was kept
                    trace.cancel()
            logger.warning(
                "spac: the %s (--spac-record) stopped and requests go on without it: %s; what was saved before stays, "
                "and a restart records anew",
                name,
                self.stopped[name],
                exc_info=None if isinstance(error, SpacError) else error,
            )
