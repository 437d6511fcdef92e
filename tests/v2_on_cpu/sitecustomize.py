"""Serves vLLM's V2 runner on a CPU, with Triton's interpreter in place of triton-cpu, which no index has.

vLLM's CPU platform has a V2 runner, and takes it where Triton brings a backend for CPUs. Python imports this module
when it starts, also in the processes that engines and tests start, if its folder is on ``PYTHONPATH``: it says that
there is such a backend. ``TRITON_INTERPRET=1`` has Triton interpret the runner's kernels. ``make test-v2`` sets both.

Two things that Triton 3.9 cannot interpret are done otherwise: masks that numpy makes integers of, and the kernel for
top-k and top-p, whose loops begin with numbers of Python.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from triton.backends import backends
from triton.runtime import interpreter

_SAMPLING = "vllm.v1.sample.ops.topk_topp_triton"

backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)

_load = interpreter.InterpreterBuilder.create_masked_load


def _loaded(self: Any, pointers: Any, mask: Any, *options: Any) -> Any:
    """As Triton's; the mask of ``block & scalar`` is an array of integers."""
    mask.data = mask.data.astype(bool)
    return _load(self, pointers, mask, *options)


interpreter.InterpreterBuilder.create_masked_load = _loaded


class _Sampling:
    """Has ``_SAMPLING``, once it is imported, sample by vLLM's own function for CPUs."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != _SAMPLING:
            return None
        sys.meta_path.remove(_Sampling)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            module.apply_top_k_top_p_triton = _sampled

        spec.loader.exec_module = executed
        return spec


def _sampled(logits: Any, k: Any, p: Any) -> Any:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    return apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)


sys.meta_path.insert(0, _Sampling)
