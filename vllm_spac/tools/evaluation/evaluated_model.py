"""The model of an engine in this process, as ``vllm-spac quality`` and ``predictors`` observe it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_spac.integration.hooks.model_host import experts_of
from vllm_spac.methods.moe_spec.settings import BudgetSettings
from vllm_spac.tools.evaluation import engine
from vllm_spac.tools.evaluation.collection import Collected, Collection
from vllm_spac.tools.evaluation.scoring import Scoring


class EvaluatedModel:
    """Listens to the layers of a model, scores its texts, and sets its budget; ``llm`` is that of ``engine.engine``."""

    def __init__(self, llm: Any) -> None:
        [runner] = llm.collective_rpc(lambda worker: worker.model_runner)
        self._llm, self._experts, self._model = llm, experts_of(runner), runner.get_model()
        self._runtime, self._layers = self._experts.runtime, self._experts.runtime.budget.layers
        self.scoring, self.counters = Scoring(self._model), self._runtime.budget.counters

    def facts(self) -> dict:
        """Names and sizes of the model."""
        layers, executions = self._layers, self._runtime.executions
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

    @contextmanager
    def under(self, budget: dict) -> Iterator[None]:
        """Context in which this budget is in force, as ``BudgetSettings.parse`` takes it; raises what refuses it."""
        self._runtime.rerouter.update_budget(BudgetSettings.parse(budget))
        try:
            yield
        finally:
            self._runtime.rerouter.update_budget(BudgetSettings())

    def collect(self, texts: Sequence[Sequence[int]], fitted: int, step: Callable[[int], object]) -> Collected:
        """Runs the model on texts and returns what its routers read and chose.

        Args:
            fitted: number of texts, the first ones, whose experts' outputs are averaged.
            step: called with the number of rows after each text.
        """
        managed = (module for module in self._model.modules() if hasattr(module, "spac_number"))
        modules = sorted(managed, key=lambda layer: layer.spac_number)
        collection = Collection(self._experts.vllm_config, self._layers, modules, sum(map(len, texts)))
        with self._listened_by(collection):
            for number, ids in enumerate(texts):
                engine.read(self._llm, ids)
                step(collection.end_text(len(ids), number < fitted))
        return collection.result()

    @contextmanager
    def _listened_by(self, listener: Any) -> Iterator[None]:
        self._runtime.rerouter.listeners.append(listener)
        try:
            yield
        finally:
            self._runtime.rerouter.listeners.remove(listener)
