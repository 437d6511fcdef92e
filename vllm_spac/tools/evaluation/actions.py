"""Actions of ``vllm-spac quality`` and ``predictors`` in the worker, while the model processes texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_spac.errors import SpacError
from vllm_spac.integration.serving.worker_extension import SpacWorker
from vllm_spac.methods.moe_spec.calibration import CalibrationRecorder
from vllm_spac.methods.moe_spec.control import BudgetedLayer
from vllm_spac.tools.evaluation.collection import Collected, Collection
from vllm_spac.tools.evaluation.scoring import Scoring

if TYPE_CHECKING:
    from vllm_spac.integration.loading.model_experts import ModelExperts


class Calibrating:
    """A ``runtime.Listener`` that passes the routers' scores to a recorder."""

    def __init__(self, layers: Sequence[BudgetedLayer], recorder: CalibrationRecorder) -> None:
        self._layers = layers
        self.recorder = recorder

    def route(self, layer: int, hidden: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> None:
        self.recorder.observe(layer, self._layers[layer].rule.probs(logits), weights, ids)


class Evaluation:
    """The actions of ``EvaluatedWorker``: its public methods but ``call``; arguments and results are plain."""

    def __init__(self, experts: ModelExperts, model: torch.nn.Module) -> None:
        assert experts.serving is not None, "the model is loaded"
        self._experts, self._model = experts, model
        self._runtime, self._control = experts.serving.runtime, experts.serving.budget
        self._calibrating: Calibrating | None = None
        self._collection: Collection | None = None
        self._scoring = Scoring(model)

    def call(self, action: str, *arguments: Any) -> Any:
        """Runs one action by its name."""
        if action.startswith("_") or action == "call" or not callable(getattr(self, action, None)):
            raise SpacError(f"spac: there is no evaluation {action!r}")
        return getattr(self, action)(*arguments)

    def facts(self) -> dict:
        """Names and sizes of the model."""
        layers, executions = self._control.layers, self._runtime.executions
        return {
            "model": Path(self._experts.vllm_config.model_config.model).name,
            "fingerprint": self._experts.model_name(),
            "layers": [layer.name for layer in layers],
            "experts": max(layer.experts for layer in layers),
            "top_k": layers[0].top_k,
            "custom": any(layer.rule.custom for layer in layers),
            "expert_bytes": max(execution.shape.expert_bytes for execution in executions),
            "resident": all(execution.holds_all for execution in executions),
        }

    # -- calibration ---------------------------------------------------------------------------------------

    def calibrate(self, window: int, source: str, progress: str) -> int:
        """Starts recording, from the file ``progress`` if it exists; returns the number of texts already done."""
        facts = self.facts()
        known = {name: facts[name] for name in ("fingerprint", "model", "layers", "experts", "top_k")}
        recorder = CalibrationRecorder(**known, window=window, source=source)
        if Path(progress).exists():
            recorder.resume(progress)
        self._calibrating = Calibrating(self._control.layers, recorder)
        self._runtime.listeners.append(self._calibrating)
        return recorder.texts

    def calibrated_text(self) -> int:
        """Ends a text; returns the number of tokens so far."""
        self._listening.recorder.end_text()
        return self._listening.recorder.tokens

    def save_progress(self, path: str) -> None:
        """Writes the state from which a later run can resume."""
        self._listening.recorder.save_progress(path)

    def save_calibration(self, path: str) -> int:
        """Writes the calibration and stops recording; returns its number of tokens."""
        found = self._listening.recorder.result()
        found.save(path)
        self._runtime.listeners.remove(self._listening)
        self._calibrating = None
        return found.tokens

    # -- scores --------------------------------------------------------------------------------------------

    def score(self, reference: bool) -> None:
        """Starts scoring the following texts, against themselves if they are the ``reference``."""
        self._control.counters.reset()
        self._scoring.begin(reference)

    def scored_text(self, ids: list[int]) -> None:
        """Ends the text ``ids``, which the model has processed."""
        self._scoring.end_text(ids)

    def scores(self) -> dict:
        """Ends scoring; returns the scores and the budget's counters."""
        return self._scoring.end() | {"budget": self._control.counters.snapshot()}

    # -- samples for predictors ----------------------------------------------------------------------------

    def collect(self, rows: int) -> None:
        """Starts to keep what routers read and choose, of at most ``rows`` rows; see ``Collection``."""
        config = self._experts.vllm_config
        self._collection = Collection(config, self._control.layers, _managed(self._model), rows)
        self._runtime.listeners.append(self._collection)

    def collected_text(self, ids: list[int], outputs: bool) -> int:
        """Ends the text ``ids``; returns the number of rows so far.

        Args:
            outputs: whether the experts' outputs for this text count towards their means.
        """
        assert self._collection is not None, "collect comes first"
        return self._collection.end_text(ids, outputs)

    def collected(self) -> Collected:
        """Ends the collection. Its result is not plain: the engine is in the process that asks."""
        assert self._collection is not None, "collect comes first"
        self._runtime.listeners.remove(self._collection)
        found, self._collection = self._collection.result(), None
        return found

    @property
    def _listening(self) -> Calibrating:
        assert self._calibrating is not None, "calibrate comes first"
        return self._calibrating


def _managed(model: torch.nn.Module) -> list:
    """The managed layers, in the order of execution."""
    return sorted((m for m in model.modules() if hasattr(m, "spac_number")), key=lambda layer: layer.spac_number)


class EvaluatedWorker(SpacWorker):
    """Mixin of vLLM's worker in engines of ``tools.evaluation.engine``."""

    def spac_evaluate(self, action: str, *arguments: Any) -> Any:
        """Runs one action of ``Evaluation``, for ``vllm-spac quality``."""
        self._spac_experts().runtime.require_host("an evaluation")
        if not hasattr(self, "_spac_evaluation"):
            self._spac_evaluation = Evaluation(self._spac_experts(), self.model_runner.get_model())
        return self._spac_evaluation.call(action, *arguments)
