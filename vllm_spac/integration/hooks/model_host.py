"""The interface of a managed layer to the model that it is a part of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_building: Any = None


@contextlib.contextmanager
def building(host: Any) -> Iterator[None]:
    """Context in which layers that are built belong to ``host``, the model's ``ModelExperts``."""
    global _building
    _building = host
    try:
        yield
    finally:
        _building = None


def current() -> Any:
    """The ``ModelExperts`` of the model that is being built."""
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
