"""Lets vLLM build layers of quantised experts on a CPU for our kernels, where it has none of its own.

vLLM builds a layer only with a kernel that supports it. Those for quantised experts on a CPU ask for AMX, and for
formats, activations and routing of their own. While a layer for our kernels is built, the class that vLLM would choose
with AMX supports whatever it is asked. It decides which parameters the layer has, those of the checkpoint, and is never
made, so that it never computes.

For NVFP4 there is no class for a CPU. Marlin's stands in, as on a GPU: it leaves rows in 16 bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from vllm_spac.integration.hooks import patches

_FOR_CPU = frozenset({"CPUExpertsFp8", "CPUExpertsInt8", "CPUExpertsInt4", "CPUExpertsMxfp4"})
_building = False


@contextlib.contextmanager
def built_for_ours(host: Any) -> Iterator[None]:
    """Context in which a layer of ``host``, a ``ModelExperts``, is built; on a CPU for our kernels, if they run it."""
    global _building
    _building = host.on_cpu and host.execution.repacks
    if _building:
        patches.install(patches.SUPPORTED, _answered)
    try:
        yield
    finally:
        _building = False


def _answered(is_supported: Callable[..., tuple[bool, str | None]]):
    from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static

    def answered(cls: type, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any):
        if _building and cls.__name__ in ({"MarlinExperts"} if weight_key == kNvfp4Static else _FOR_CPU):
            return True, None
        return is_supported(cls, moe_config, weight_key, activation_key, activation_format)

    return answered
