"""What every engine needs of vLLM is imported here, once per process, and then left alone by the garbage collector.

vLLM collects garbage nine times per engine, and would visit all objects of these imports each time.
"""

from __future__ import annotations

import functools
import gc
import importlib

from vllm.platforms import current_platform

NEEDED = (
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm_spac.integration.loading.assembly",
    "vllm_spac.integration.plugin",
)

for name in NEEDED:
    importlib.import_module(name)
if current_platform.is_cpu():
    import vllm.v1.worker.cpu_worker  # noqa: F401

    # vLLM registers the same kernels again for each engine, which visits every attribute of every module.
    register = functools.cache(current_platform.register_triton_kernel_overrides)
    type(current_platform).register_triton_kernel_overrides = staticmethod(register)
    register()

gc.collect()
gc.freeze()
gc.freeze = gc.unfreeze = lambda: None  # vLLM freezes each engine, and with an engine it would unfreeze the imports
