"""``GET /spac/stats`` and ``vllm:spac_*`` in ``/metrics``, from the workers' counters."""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from vllm_spac.integration.plugin import config_of

logger = logging.getLogger("vllm.spac")
_POLL_SECONDS = 1.0
_COUNTERS = {
    "hits": "Experts that were in fast memory when a layer needed them.",
    "misses": "Experts that were not.",
    "loads": "Experts moved into fast memory.",
    "stall_seconds": "Seconds that layers waited for experts.",
    "waves": "Parts in which MoE layers ran.",
}
_GAUGES = {
    "slots": "Experts that fast memory holds.",
    "resident": "Experts that lie in fast memory now.",
    "experts": "Routed experts of the model, all layers.",
    "slot_bytes": "Bytes of fast memory for experts.",
}


class WorkerCollector:
    """Turns the last answer of the workers into Prometheus metrics."""

    def __init__(self) -> None:
        self.workers: list[dict] = []

    def collect(self):
        for name, text in _GAUGES.items():
            yield self._family(GaugeMetricFamily, name, text)
        for name, text in _COUNTERS.items():
            yield self._family(CounterMetricFamily, name, text)
        yield self._labelled("bytes", "path", "Bytes of experts moved, by the store they came from.")
        yield self._labelled("steps", "kind", "Forwards of the target model, by kind.")

    def _family(self, family, name: str, text: str):
        metric = family(f"vllm:spac_{name}", text, labels=["worker"])
        for index, worker in enumerate(self.workers):
            metric.add_metric([str(index)], worker[name])
        return metric

    def _labelled(self, name: str, label: str, text: str) -> CounterMetricFamily:
        metric = CounterMetricFamily(f"vllm:spac_{name}", text, labels=["worker", label])
        for index, worker in enumerate(self.workers):
            for value, count in worker[name].items():
                metric.add_metric([str(index), value], count)
        return metric


class SpacEndpoint:
    """vLLM's ``EndpointPlugin``; does nothing on a server that was started without spac."""

    name = "spac"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Called before the engine is known, so the route answers 404 where the plugin is off."""
        router = APIRouter()

        @router.get("/spac/stats")
        async def stats(request: Request) -> dict:
            client = getattr(request.app.state, "spac_client", None)
            if client is None:
                from fastapi import HTTPException

                raise HTTPException(404, "this server runs without spac; start it with --plugin spac")
            return {"workers": await client.collective_rpc("spac_stats")}

        app.include_router(router)

    async def init_state(self, engine_client, state, args) -> None:
        """Start to poll the workers for ``/metrics``."""
        if engine_client is None or config_of(getattr(args, "additional_config", None)) is None:
            return
        state.spac_client = engine_client
        collector = WorkerCollector()
        collector.workers = await engine_client.collective_rpc("spac_stats")
        REGISTRY.register(collector)
        state.spac_poll = asyncio.create_task(_poll(engine_client, collector))


async def _poll(engine_client, collector: WorkerCollector) -> None:
    while True:
        await asyncio.sleep(_POLL_SECONDS)
        try:
            collector.workers = await engine_client.collective_rpc("spac_stats")
        except Exception as error:
            logger.error("spac: /metrics stops following the workers: %s", error)
            return


def make() -> SpacEndpoint:
    """Entry point of ``vllm.endpoint_plugins``."""
    return SpacEndpoint()
