"""What a managed layer needs of the model that it is a part of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from vllm_spac.config import SpacConfig
    from vllm_spac.execution.base import Execution
    from vllm_spac.runtime import Runtime


class LayerHost(Protocol):
    """All managed layers of one model, as each of them sees it.

    Attributes:
        execution: runs the layers.
        device: where the kernels run.
        runtime: None until the weights are loaded.
    """

    config: SpacConfig
    execution: type[Execution]
    device: torch.device
    on_cpu: bool
    runtime: Runtime | None

    def add(self, layer: Any) -> None:
        """``layer`` was built; it gets its number."""

    def arrived(self, count: int) -> None:
        """``count`` bytes were copied out of the checkpoint."""

    def is_stored(self, layer: Any) -> bool:
        """Whether all experts of ``layer`` were packed, now or in an earlier run."""

    def pack(self, layer: Any) -> None:
        """Move ``layer``, whose weights have all arrived, to the store; does nothing for a stored one."""


_building: LayerHost | None = None


@contextlib.contextmanager
def building(host: LayerHost) -> Iterator[None]:
    """While inside, layers that are built belong to ``host``."""
    global _building
    _building = host
    try:
        yield
    finally:
        _building = None


def current() -> LayerHost:
    """The model that is being built."""
    assert _building is not None, "a managed layer is built outside managed_load"
    return _building


def experts_of(model_runner: Any) -> Any:
    """The ``ModelExperts`` of a runner's target model; None if it has none."""
    return next((m.spac for m in model_runner.get_model().modules() if hasattr(m, "spac_kernel")), None)
