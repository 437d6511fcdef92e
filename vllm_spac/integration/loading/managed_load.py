"""Builds a model's MoE layers as managed ones while it is loaded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

from vllm_spac.errors import UnsupportedError
from vllm_spac.integration.layers import host
from vllm_spac.integration.layers.managed_experts import ManagedExperts
from vllm_spac.integration.loading.model_experts import ModelExperts

_Experts = TypeVar("_Experts", bound=ModelExperts)
# Imported only with a model that it serves, because that takes seconds.
_TRANSFORMERS_BACKEND = "vllm.model_executor.models.transformers.moe"


@contextlib.contextmanager
def managed_load(build: Callable[[], _Experts]) -> Iterator[_Experts]:
    """Context in which MoE layers are built as ``ManagedExperts`` of what ``build`` returns.

    The module of the model has been imported.
    """
    from vllm.model_executor.custom_op import op_registry_oot

    classes = _managed_classes()
    if taken := set(classes) & set(op_registry_oot):
        raise UnsupportedError(
            f"spac: another plugin replaces vLLM's {', '.join(sorted(taken))}; load only one of them"
        )
    experts = build()
    op_registry_oot.update(classes)
    try:
        with host.building(experts):
            yield experts
    except BaseException:
        experts.close()
        raise
    finally:
        for name in classes:
            del op_registry_oot[name]


def _managed_classes() -> dict[str, type]:
    """Returns the managed class of vLLM's layer and of each subclass that its models build, by name."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

    layers = [RoutedExperts, GptOssRoutedExperts]
    if (backend := sys.modules.get(_TRANSFORMERS_BACKEND)) is not None:
        layers.append(backend.TransformersRoutedExperts)
    return {cls.__name__: type(f"Managed{cls.__name__}", (ManagedExperts, cls), {}) for cls in layers}
