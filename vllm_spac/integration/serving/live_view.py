"""What a worker reports to the live page: each expert's tier and heat, where a token's time goes, and the counters."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from vllm_spac.cache.residency import NOWHERE, ExpertActivity, SlotState
from vllm_spac.execution.base import Execution
from vllm_spac.integration.loading.model_experts import ModelExperts
from vllm_spac.recording.timeline_recorder import Recording, Timeline, capacity_of
from vllm_spac.recording.token_time import TokenTime

STORE, HOST, SLOT = 0, 1, 2  # tiers: the lowest two bits of an expert's code
ON_CPU, LOADED, EVICTED = 4, 8, 16  # since the last report
_STEPS = 64  # that the time of a token is taken over


class LiveView:
    """Watches one worker's experts from its creation to ``close``; used between steps."""

    def __init__(self, experts: ModelExperts) -> None:
        assert experts.serving is not None
        self._experts, self._serving, self._runtime = experts, experts.serving, experts.serving.runtime
        self._watched()
        self._slots: dict[Execution, np.ndarray] = {}
        for execution in self._runtime.executions:
            execution.residency.activity = ExpertActivity(execution.shape.total)
            self._slots[execution] = execution.residency.slot_of.copy()

    def report(self) -> dict:
        """Returns the state now, as plain data.

        Returns:
            ``stats``: as ``GET /spac/stats``. ``experts``: ``layers``, the number of experts of each MoE layer;
            ``codes`` and ``heat``, base64 of uint8 [experts of all layers]: tier and what happened since the last
            report, and heat from 0 to 255. ``time``: of the last generating steps: ``steps``, ``tokens`` (null:
            unknown) and ``parts``, nanoseconds by name. ``queued``: reads ahead that are queued or in flight.
            ``budget``: the settings in force, and the smallest that could be, ``least``. ``drafts``: whether the engine
            speculates.
        """
        executions = self._runtime.executions
        codes = np.concatenate([self._codes(execution) for execution in executions])
        heats = [execution.residency.activity.heat for execution in executions if execution.residency.activity]
        heat = np.concatenate(heats)
        time = TokenTime.of(Recording.of(self._watched(), _STEPS))
        return {
            "stats": self._experts.stats(),
            "experts": {
                "layers": list(self._serving.timeline_facts.experts),
                "codes": _encoded(codes),
                "heat": _encoded(np.rint(255 * heat / max(1.0, float(heat.max())))),
            },
            "time": {"steps": time.steps, "tokens": time.tokens, "parts": time.parts},
            "queued": sum(execution.queued for execution in executions),
            "budget": self._budget(),
            "drafts": self._experts.vllm_config.speculative_config is not None,
        }

    def close(self) -> None:
        """Ends watching; a timeline that the user asked for goes on."""
        saved = self._runtime.recordings.timeline
        self._runtime.watch(None if saved is None else saved.timeline)
        for execution in self._runtime.executions:
            execution.residency.activity = None

    def _codes(self, execution: Execution) -> np.ndarray:
        residency, before = execution.residency, self._slots[execution]
        slots = residency.slot_of.copy()
        ready = slots != NOWHERE
        ready[ready] = residency.state[slots[ready]] == SlotState.READY
        slots[~ready] = NOWHERE
        codes = np.full(len(slots), STORE if execution.store.persistent else HOST, dtype=np.uint8)
        if execution.host is not None:
            codes[execution.host.tier.row_of != NOWHERE] = HOST
        codes[ready] = SLOT
        codes[ready & (slots != before)] |= LOADED  # also one that left and came back
        codes[~ready & (before != NOWHERE)] |= EVICTED
        if residency.activity is not None:
            codes[residency.activity.take_computed()] |= ON_CPU
        self._slots[execution] = slots
        return codes

    def _watched(self) -> Timeline:
        """Returns what the engine records its steps in; begins it where nobody does, or no longer does."""
        if self._runtime.recorder.timeline is None:
            self._runtime.watch(Timeline(capacity_of(_STEPS, len(self._serving.timeline_facts.layers))))
        assert self._runtime.recorder.timeline is not None
        return self._runtime.recorder.timeline

    def _budget(self) -> dict[str, Any]:
        control = self._serving.budget
        return {"settings": control.settings.model_dump(), "least": max(layer.top_k for layer in control.layers)}


def _encoded(values: np.ndarray) -> str:
    return base64.b64encode(values.astype(np.uint8).tobytes()).decode()
