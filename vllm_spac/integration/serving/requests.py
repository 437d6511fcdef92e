"""What vLLM itself counts about requests, for ``GET /spac/stats`` and the live page."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from vllm.v1.metrics.prometheus import get_prometheus_registry

# Sample of vLLM's own metrics -> name here. Histograms: the seconds of all requests, and their number.
SAMPLES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:generation_tokens_total": "tokens",
    "vllm:time_to_first_token_seconds_sum": "first_token_seconds",
    "vllm:time_to_first_token_seconds_count": "first_tokens",
    "vllm:request_time_per_output_token_seconds_sum": "token_seconds",
    "vllm:request_time_per_output_token_seconds_count": "finished",
}


def read(registry: CollectorRegistry | None = None) -> dict[str, float] | None:
    """Returns what vLLM has counted since its start, of all engines of this server together.

    Args:
        registry: vLLM's; None: that of this process, or of all API servers if there are several.

    Returns:
        ``running``, ``waiting``: requests now. ``tokens``: generated. ``first_token_seconds``, ``first_tokens``: sum
        and number of times to first token. ``token_seconds``, ``finished``: sum over finished requests of each one's
        own mean time per output token, and their number. None if vLLM counts nothing (``--disable-log-stats``).
    """
    found: dict[str, float] = {}
    for metric in (registry or get_prometheus_registry()).collect():
        for sample in metric.samples:
            if (name := SAMPLES.get(sample.name)) is not None:
                found[name] = found.get(name, 0) + sample.value
    return found if found.keys() == set(SAMPLES.values()) else None
