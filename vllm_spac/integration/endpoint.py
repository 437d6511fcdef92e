"""``GET /spac/stats`` and ``vllm:spac_*`` in ``/metrics``, from the workers' counters."""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter, FastAPI, HTTPException, Request
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from vllm_spac.budgeting import BudgetSettings
from vllm_spac.integration.plugin import config_of

logger = logging.getLogger("vllm.spac")
_POLL_SECONDS = 1.0
_COUNTERS = {
    "hits": "Experts that were in fast memory when a layer needed them.",
    "misses": "Experts that were not.",
    "loads": "Experts moved into fast memory.",
    "stall_seconds": "Seconds that layers waited for experts.",
    "waves": "Parts in which MoE layers ran.",
    "prefetches": "Experts moved into fast memory ahead of need.",
    "prefetch_hits": "Of them, those that were used before they lost their slot.",
    "prefetch_wasted": "Of them, those that lost their slot unused.",
    "cpu_experts": "Experts that were computed on the CPU, from where they lie.",
    "cpu_rows": "Rows that they computed.",
    "cpu_wait_seconds": "Seconds that layers waited for them.",
}
_BUDGET = {
    "rows": "Rows whose experts were bounded by a budget, once a layer.",
    "dropped_mass": "Sum over those rows of the share of their routing weights that was dropped.",
    "shortlists": "Shortlists made by budgets, one a layer and forward.",
    "experts": "Distinct experts that budgeted rows used, over all shortlists.",
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
        for name, text in _BUDGET.items():
            values = [worker["budget"][name] for worker in self.workers]
            yield _metric(CounterMetricFamily, f"budget_{name}", text, values)
        lossy = [float(worker["mode"] == "lossy") for worker in self.workers]
        yield _metric(GaugeMetricFamily, "lossy", "1 while a budget is in force, 0 in exact mode.", lossy)
        if all("guard" in worker for worker in self.workers):
            lengths = [worker["guard"]["draft_length"] for worker in self.workers]
            yield _metric(GaugeMetricFamily, "draft_length", "Draft tokens that the guard lets a step use.", lengths)
        yield self._labelled("bytes", "path", "Bytes of experts moved, by the store they came from.")
        yield self._labelled("steps", "kind", "Forwards of the target model, by kind.")

    def _family(self, family, name: str, text: str):
        return _metric(family, name, text, [worker[name] for worker in self.workers])

    def _labelled(self, name: str, label: str, text: str) -> CounterMetricFamily:
        metric = CounterMetricFamily(f"vllm:spac_{name}", text, labels=["worker", label])
        for index, worker in enumerate(self.workers):
            for value, count in worker[name].items():
                metric.add_metric([str(index), value], count)
        return metric


def _metric(family, name: str, text: str, values: list):
    metric = family(f"vllm:spac_{name}", text, labels=["worker"])
    for index, value in enumerate(values):
        metric.add_metric([str(index)], value)
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
            return {"workers": await _client(request).collective_rpc("spac_stats")}

        @router.post("/spac/budget")
        async def budget(request: Request) -> dict:
            """Change the budget; the body is a ``BudgetSettings``, e.g. {"budget": 16}, and {} is exact again."""
            client = _client(request)
            if not request.app.state.spac_control:
                raise HTTPException(403, "this server takes no control; start it with --spac-control")
            try:
                settings = BudgetSettings.parse(await request.json())
                return {"workers": await client.collective_rpc("spac_budget", args=(settings.model_dump(),))}
            except Exception as error:  # of the body, or of a worker, where its type is lost on the way
                raise HTTPException(400, str(error)) from None

        app.include_router(router)

    async def init_state(self, engine_client, state, args) -> None:
        """Start to poll the workers for ``/metrics``."""
        config = config_of(getattr(args, "additional_config", None))
        if engine_client is None or config is None:
            return
        state.spac_control = config.control
        state.spac_client = engine_client
        collector = WorkerCollector()
        collector.workers = await engine_client.collective_rpc("spac_stats")
        REGISTRY.register(collector)
        state.spac_poll = asyncio.create_task(_poll(engine_client, collector))


def _client(request: Request):
    client = getattr(request.app.state, "spac_client", None)
    if client is None:
        raise HTTPException(404, "this server runs without spac; start it with --plugin spac")
    return client


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
