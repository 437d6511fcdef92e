"""Builds a model's MoE layers as managed ones while it is loaded, and refuses to change or save weights later.

vLLM would write new weights into parameters that are slots, or drop them, and continue with the experts that were
packed; and it would save the slots as if they were the experts. Methods that do either are refused before anything is
changed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_spac.errors import UnsupportedError
from vllm_spac.integration.hooks import model_host, patches
from vllm_spac.integration.hooks.model_host import experts_of
from vllm_spac.integration.layers.managed_experts import ManagedExperts
from vllm_spac.integration.loading.model_experts import ModelExperts
from vllm_spac.integration.loading.runner_choice import adapter_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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
        with model_host.building(experts):
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


_UPDATES = (
    "spac: {what} cannot change the weights of a running engine, whose experts were packed when it started; nothing "
    "was changed: restart it with the new checkpoint"
)
_SAVES = "spac: {what} would save what is in the slots and not the experts; save from an engine without --plugin spac"


def install(vllm_config: VllmConfig, model: Any) -> None:
    """Wraps the runner, the worker and the loaded ``model`` to refuse updates; a second call does nothing."""
    _refuse(adapter_of(vllm_config).runner, "reload_weights", lambda runner: runner, _UPDATES)
    for name in ("save_sharded_state", "save_tensorized_model"):
        _refuse(patches.WORKER, name, lambda worker: worker.model_runner, _SAVES)
    model.load_weights = _refused  # on this object only


def _refused(*args: Any, **kwargs: Any):
    raise UnsupportedError(_UPDATES.format(what="load_weights"))


def _refuse(owner: str, name: str, runner_of: Any, message: str) -> None:
    def refusing(method: Callable[..., Any]):
        def refused(self, *args: Any, **kwargs: Any):
            if experts_of(runner_of(self)) is not None:
                raise UnsupportedError(message.format(what=name))
            return method(self, *args, **kwargs)

        return refused

    patches.install(f"{owner}.{name}", refusing)
