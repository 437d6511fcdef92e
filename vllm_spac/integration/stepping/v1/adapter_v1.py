"""V1's model runner, which vLLM's CPU build uses: drafts are on the host before a step is planned."""

from __future__ import annotations

from typing import Any

from vllm_spac.config.config import SpacConfig
from vllm_spac.config.tree_shape import TreeShape
from vllm_spac.decisions.guard.chooser import Chooser
from vllm_spac.decisions.guard.lookups import Lookups
from vllm_spac.integration.hooks import patches
from vllm_spac.integration.stepping.runner_adapter import RunnerAdapter
from vllm_spac.integration.stepping.v1 import draft_handover, draft_loading_v1, runner_v1, text_lookup_v1
from vllm_spac.integration.stepping.v1.tree_decoding_v1 import TreeDecoding
from vllm_spac.methods.trees.tensors import Scratch


class AdapterV1(RunnerAdapter):
    """As of ``RunnerAdapter``."""

    runner = patches.RUNNER_V1
    where = "v1"

    def install(self) -> None:
        runner_v1.install()
        draft_loading_v1.install()
        draft_handover.install_in_worker()

    def guard(self, most: int, config: SpacConfig) -> Chooser:
        if not config.uses_lookups or config.tree_nodes:
            return Chooser(most)
        text_lookup_v1.compile_search()
        return Chooser(most, Lookups())

    def plant(self, runner: Any, experts: Any, shape: TreeShape, scratch: Scratch) -> TreeDecoding:
        runtime = experts.runtime
        return TreeDecoding(runner, shape, scratch, lambda: runtime.drafts.chooser)

    def install_draft_hooks(self, runner: Any, experts: Any) -> None:
        """Does nothing: the host does, before it plans a step."""
