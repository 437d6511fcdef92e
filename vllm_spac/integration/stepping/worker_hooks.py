"""Hooks of a worker's warm-up and shutdown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from vllm_spac.integration import patches
from vllm_spac.integration.stepping.runner_hooks import managed_experts


def install() -> None:
    """Wraps a worker's warm-up, to count nothing during it, and its shutdown, to finish traces and stop threads.

    V2 warms up with batches that look real. Exit hooks of the process would not do for the shutdown, because vLLM kills
    processes. A second call does nothing.
    """
    patches.wrap(f"{patches.WORKER}.compile_or_warm_up_model", _warming_up)
    patches.wrap(f"{patches.WORKER}.shutdown", _closing)


def _warming_up(warm_up: Callable):
    def warmed(self):
        experts = managed_experts(self.model_runner)
        with experts.runtime.warming_up() if experts is not None else contextlib.nullcontext():
            return warm_up(self)

    return warmed


def _closing(shutdown: Callable):
    def closed(self):
        runner = getattr(self, "model_runner", None)
        experts = managed_experts(runner) if runner is not None else None
        try:
            if experts is not None:
                experts.close()
        finally:
            shutdown(self)

    return closed
