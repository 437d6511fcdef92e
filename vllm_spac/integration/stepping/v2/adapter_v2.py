"""V2's model runner, vLLM's default on CUDA: its scheduler plans drafts, which stay on the device."""

from __future__ import annotations

from typing import Any

from vllm_spac.config.tree_shape import TreeShape
from vllm_spac.decisions.guard.guard import Guard
from vllm_spac.integration.hooks import patches
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

    def guard(self, most: int, trees: bool) -> Guard | None:
        return None if trees else Guard(most)  # how many nodes are drafted is not planned

    def plant(self, runner: Any, experts: Any, shape: TreeShape, scratch: Scratch) -> TreeDecodingV2:
        return TreeDecodingV2(runner, shape, scratch)
