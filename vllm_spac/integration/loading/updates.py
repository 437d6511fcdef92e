"""Refuses to change or save the weights of a running engine.

vLLM would write new weights into parameters that are slots, or drop them, and continue with the experts that were
packed; and it would save the slots as if they were the experts. Methods that do either are refused before anything is
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_spac.errors import UnsupportedError
from vllm_spac.integration import patches
from vllm_spac.integration.layers.host import experts_of
from vllm_spac.integration.stepping import drafts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_UPDATES = (
    "spac: {what} cannot change the weights of a running engine, whose experts were packed when it started; nothing "
    "was changed: restart it with the new checkpoint"
)
_SAVES = "spac: {what} would save what is in the slots and not the experts; save from an engine without --plugin spac"


def install(vllm_config: VllmConfig, model: Any) -> None:
    """Wraps the runner, the worker and the loaded ``model`` to refuse updates; a second call does nothing."""
    runner = patches.RUNNER_V2 if drafts.plans_drafts(vllm_config) else patches.RUNNER_V1
    _refuse(runner, "reload_weights", lambda runner: runner, _UPDATES)
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

    patches.wrap(f"{owner}.{name}", refusing)
