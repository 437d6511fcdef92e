"""What the plugin asks of a model runner of vLLM: the one interface over V1's and V2's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from vllm_spac.config.config import SpacConfig
from vllm_spac.config.tree_shape import TreeShape
from vllm_spac.decisions.guard.chooser import Chooser
from vllm_spac.decisions.guard.lengths import LengthChooser
from vllm_spac.integration.hooks.patches import Where
from vllm_spac.methods.trees.tensors import Scratch


class RunnerAdapter(ABC):
    """One of vLLM's model runners."""

    runner: ClassVar[str]  # ``module:Class`` of it
    where: ClassVar[Where]  # of the rows of ``patches`` that are its own

    @abstractmethod
    def install(self) -> None:
        """Wraps the methods of the runner and of what drafts for it; a second call does nothing."""

    @abstractmethod
    def guard(self, most: int, config: SpacConfig) -> LengthChooser | Chooser | None:
        """Builds what chooses the number of drafts; None if nothing on the host does.

        Args:
            most: drafts of a request.
            config: says whether they branch, and whether n-grams are looked up beside them.
        """

    @abstractmethod
    def plant(self, runner: Any, experts: Any, shape: TreeShape, scratch: Scratch) -> Any:
        """Sets the hooks of draft trees on objects of ``runner``, whose KV cache exists; ``experts``: its target's.

        Returns the trees, with their ``counters``.
        """

    @abstractmethod
    def install_draft_hooks(self, runner: Any, experts: Any) -> None:
        """Sets what cuts, weighs and leaves out drafts on objects of ``runner``; arguments as of ``plant``."""
