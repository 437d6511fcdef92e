"""vLLM plugin that serves Mixture-of-Experts models larger than fast memory, on stock vLLM.

Importing this package loads neither torch nor vLLM; ``register`` is vLLM's plugin entry point.
"""

from __future__ import annotations

import time
from typing import Any

__version__ = "0.1.0"


def register() -> None:
    """Entry point of ``vllm.general_plugins``: cheap, idempotent, called in every vLLM process."""
    from vllm_spac.integration import plugin

    plugin.install()


def stats(llm: Any) -> dict:
    """Returns the counters of every worker of an offline ``vllm.LLM`` that runs with the plugin.

    Args:
        llm: a ``vllm.LLM`` made with ``additional_config={"spac": {...}}``.

    Returns:
        ``{"workers": [...], "total": {...}}`` in the shape of ``GET /spac/stats`` (``recording.metrics``). The
        total is the engine's: with several ranks, whose workers have a number ``rank``, it is not always their sum.

    Raises:
        vllm_spac.errors.SpacError: the engine was started without the plugin.
    """
    from vllm_spac.errors import SpacError

    given = llm.llm_engine.vllm_config.additional_config
    began = time.monotonic()
    workers = llm.collective_rpc("spac_stats") if isinstance(given, dict) and "spac" in given else None
    if not workers:
        raise SpacError('this LLM runs without spac; make it with LLM(..., additional_config={"spac": {}})')
    from vllm_spac.recording.metrics import POLL, settled, total

    while not settled(workers, time.monotonic() - began):
        time.sleep(POLL)
        workers = llm.collective_rpc("spac_stats")
    return {"workers": workers, "total": total(workers)}
