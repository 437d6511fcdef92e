"""The interface of a managed layer to the model that it is a part of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from vllm_spac.config.config import SpacConfig
    from vllm_spac.execution.base import Execution
    from vllm_spac.runtime import Runtime


class LayerHost(Protocol):
    """The owner of all managed layers of one model."""

    config: SpacConfig
    execution: type[Execution]
    device: torch.device
    on_cpu: bool

    @property
    def runtime(self) -> Runtime | None:
        """Runs the model's steps; None until the weights are loaded."""

    def add(self, layer: Any) -> None:
        """Registers ``layer``, which was just built, and gives it its number."""

    def arrived(self, count: int) -> None:
        """Counts ``count`` bytes copied from the checkpoint."""

    def is_stored(self, layer: Any) -> bool:
        """Whether all experts of ``layer`` were packed, now or in an earlier run."""

    def pack(self, layer: Any) -> None:
        """Moves ``layer``, whose weights have all arrived, to the store; does nothing for a stored one."""


_building: LayerHost | None = None


@contextlib.contextmanager
def building(host: LayerHost) -> Iterator[None]:
    """Context in which layers that are built belong to ``host``."""
    global _building
    _building = host
    try:
        yield
    finally:
        _building = None


def current() -> LayerHost:
    """The host of the model that is being built."""
    assert _building is not None, "a managed layer is built outside managed_load"
    return _building


_target: Any = None


@contextlib.contextmanager
def drafting_for(target: Any) -> Iterator[None]:
    """Context in which a draft model is loaded for a model; ``target``: its ``ModelExperts``, or None."""
    global _target
    _target = target
    try:
        yield
    finally:
        _target = None


def drafted_for() -> Any:
    """The ``ModelExperts`` of the model whose draft model is being loaded; None if it has none."""
    return _target


def experts_of(model_runner: Any) -> Any:
    """The ``ModelExperts`` of a runner's target model; None if it has none."""
    return experts_in(model_runner.get_model())


def experts_in(model: torch.nn.Module) -> Any:
    """The ``ModelExperts`` of a model; None if it has none."""
    return next((module.spac for module in model.modules() if hasattr(module, "spac_kernel")), None)
