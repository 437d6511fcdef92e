"""V2's model runner, vLLM's default on CUDA: its scheduler plans drafts, which stay on the device."""

from __future__ import annotations

from typing import Any

from vllm_spac.config.config import SpacConfig
from vllm_spac.config.tree_shape import TreeShape
from vllm_spac.decisions.guard.lengths import LengthChooser
from vllm_spac.integration.hooks import patches
from vllm_spac.integration.hooks.draft_cutting import DraftCutter
from vllm_spac.integration.hooks.drafter_forwards import DrafterForwards
from vllm_spac.integration.stepping.runner_adapter import RunnerAdapter
from vllm_spac.integration.stepping.v2 import runner_v2
from vllm_spac.integration.stepping.v2.tree_decoding_v2 import TreeDecodingV2
from vllm_spac.methods.trees.tensors import Scratch


class AdapterV2(RunnerAdapter):
    """As of ``RunnerAdapter``."""

    runner = patches.RUNNER_V2
    where = "v2"

    def install(self) -> None:
        runner_v2.install()

    def guard(self, most: int, config: SpacConfig) -> LengthChooser:
        return LengthChooser(most, (0, most) if config.tree_nodes else None)

    def plant(self, runner: Any, experts: Any, shape: TreeShape, scratch: Scratch) -> TreeDecodingV2:
        return TreeDecodingV2(runner, shape, scratch)

    def install_draft_hooks(self, runner: Any, experts: Any) -> None:
        chooser, guard = experts.serving.cuts, experts.serving.guard
        weighs = experts.config.parsed_budget.alpha is not None
        if chooser is not None or weighs:
            experts.cutter = DraftCutter(runner, chooser, experts.runtime, experts.trees, weighs)
        if isinstance(guard, LengthChooser) and not patches.is_off(f"{patches.SPECULATOR}.propose"):
            _follow(runner.speculator, experts, guard)


def _follow(drafter: Any, experts: Any, guard: LengthChooser) -> None:
    """Has a drafter run as often as the guard plans; last, around what else is around it."""
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    if isinstance(drafter, DraftModelSpeculator):
        runtime, loops = experts.runtime, isinstance(drafter, StandaloneARSpeculator)
        experts.forwards = DrafterForwards(drafter, lambda: guard.rests, lambda: not runtime.warms_up, loops)
