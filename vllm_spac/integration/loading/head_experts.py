"""The experts of an MTP head: slots of their own, as ``--spac-slots`` says, instead of memory for all of them.

A head is a further layer of the checkpoint that vLLM loads as a draft model. Its layers run while drafts are made,
between the model's steps, so that they have executions and counters of their own. What decides about the model's
experts (budgets, guesses, CPU experts) does not know them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_spac.config.rules import plane
from vllm_spac.config.types import SlotCount
from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.execution.base import Execution, LayerKernel, Rows
from vllm_spac.integration.hooks import model_host
from vllm_spac.integration.loading import description
from vllm_spac.integration.loading.model_experts import ModelExperts
from vllm_spac.runtime import Runtime

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_spac.config.config import SpacConfig

logger = logging.getLogger("vllm.spac")


def target_of(draft: ModelConfig) -> ModelExperts | None:
    """Returns the experts of the model whose MTP head ``draft`` is, if its experts are to have slots; else None."""
    target = model_host.drafted_for()
    if target is None or target.vllm_config.speculative_config.method != "mtp":
        return None
    if all(execution.holds_all for execution in target.runtime.executions):
        return None  # as the model's
    if (why := kept_whole(target.config, target.vllm_config, draft, target.on_cpu, target.ranks.size)) is not None:
        logger.info("spac: the experts of the MTP head, if it has any, stay in memory as a whole: %s", why)
        return None
    return target


def kept_whole(config: SpacConfig, vllm_config: VllmConfig, draft: ModelConfig, on_cpu: bool, ranks: int) -> str | None:
    """Returns why a head's experts have no slots of their own; None if they have."""
    graphs = getattr(vllm_config.compilation_config.cudagraph_mode, "name", "NONE")
    reasons = {
        "it is in another checkpoint than the model": draft.model != vllm_config.model_config.model,
        "slots=auto (--spac-slots) counts them so; set it to share them": config.parsed_slots == SlotCount(),
        f"CUDA graphs ({graphs}) would hold its layers": not on_cpu and graphs != "NONE",
        "there are several ranks": ranks > 1,
        plane(config): config.execution_name != "slots",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class HeadExperts(ModelExperts):
    """All managed layers of an MTP head."""

    def __init__(self, target: ModelExperts) -> None:
        config = target.config
        off = {"prefetch": "off", "cpu_experts": "off"}
        config = config.model_copy(update=off | {"host_memory": None, "speculate": "off"})
        super().__init__(config, target.vllm_config)
        self.target = target
        if "checkpoint" in vars(target.packing):
            self.packing.checkpoint = target.packing.checkpoint
        self._runtime: Runtime | None = None

    @property
    def runtime(self) -> Runtime | None:
        """Runs the head's forwards; None until its weights are loaded."""
        return self._runtime

    def prepare(self, model: torch.nn.Module) -> None:
        shapes = self._shapes()
        self.packing.plan(self._layers, shapes)
        for shape in shapes:
            whole = shape.total * shape.expert_bytes  # which memory was reserved for
            self.packing.open(shape, self.execution.divide(self.config.parsed_slots, shape, whole), 0)
        self.packing.begin()

    def finish(self) -> None:
        executions = self.packing.finish()
        assert self.target.runtime is not None
        self._runtime = _HeadRuntime(executions, self.target.runtime)
        for execution in executions:
            logger.info("spac: MTP head: %s, policy=%s", description.describe(execution), self.config.policy)
        self.target.head = self

    def stats(self) -> dict[str, Any]:
        """Returns slots and counters, as ``ModelExperts.stats`` has them of the model."""
        assert self.runtime is not None
        return description.counts(self.runtime.executions)


class _HeadRuntime(Runtime):
    """What a head's layers call: each forward of the head is a step of its executions.

    Args:
        target: of the model; a forward of the head between the beginning and the end of its step is a real one.
    """

    def __init__(self, executions: Sequence[Execution], target: Runtime) -> None:
        super().__init__(executions, target.budget)
        self._target = target

    def forward(
        self, execution: Execution, layer: int, x: Tensor, weights: Tensor, ids: Tensor, kernel: LayerKernel
    ) -> Tensor:
        real = self._target.in_step
        rows = Rows(len(x), as_routed=real)
        if not real:
            return execution.forward(layer, x, weights, ids, kernel, rows)
        execution.begin_step(Step((RequestRows(0, len(x), RowKind.DECODE),)))
        try:
            return execution.forward(layer, x, weights, ids, kernel, rows)
        finally:
            execution.end_forward()
