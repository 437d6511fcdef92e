"""``GET /spac/stats`` and ``vllm:spac_*`` in ``/metrics``, from the workers' counters.

Workers are asked when somebody looks and at no other time: after each call vLLM's worker waits in a busy loop for a
second before it goes idle, so one that is asked every second occupies a core for ever.
"""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter, FastAPI, HTTPException, Request
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from vllm_spac.budgeting import BudgetSettings
from vllm_spac.integration.plugin import config_of

logger = logging.getLogger("vllm.spac")
_PATIENCE = 2.0  # seconds; workers answer between steps, and a long prompt may take longer
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

    def __init__(self, engine_client) -> None:
        self.workers: list[dict] = []
        self._client = engine_client
        self._asked: asyncio.Task | None = None

    async def refresh(self) -> None:
        """Ask the workers; says so in the log where they do not answer and what they said before stays."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.ensure_future(self._client.collective_rpc("spac_stats"))
        await asyncio.wait({self._asked}, timeout=_PATIENCE)
        if not self._asked.done():
            logger.warning("spac: /metrics is older than this step: the workers are busy for %s s", _PATIENCE)
        elif error := self._asked.exception():
            logger.error("spac: /metrics no longer follows the workers: %s", error)
        else:
            self.workers = self._asked.result()

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


class RefreshedMetrics:
    """ASGI middleware: ``/metrics`` waits for the workers' counters; all other requests pass."""

    def __init__(self, app) -> None:
        self._app = app

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and scope["path"].rstrip("/") == "/metrics":
            collector = getattr(scope["app"].state, "spac_collector", None)
            if collector is not None:
                await collector.refresh()
        await self._app(scope, receive, send)


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
        app.add_middleware(RefreshedMetrics)

    async def init_state(self, engine_client, state, args) -> None:
        """Let ``/metrics`` show the workers' counters."""
        config = config_of(getattr(args, "additional_config", None))
        if engine_client is None or config is None:
            return
        state.spac_control = config.control
        state.spac_client = engine_client
        state.spac_collector = WorkerCollector(engine_client)
        await state.spac_collector.refresh()
        REGISTRY.register(state.spac_collector)


def _client(request: Request):
    client = getattr(request.app.state, "spac_client", None)
    if client is None:
        raise HTTPException(404, "this server runs without spac; start it with --plugin spac")
    return client


def make() -> SpacEndpoint:
    """Entry point of ``vllm.endpoint_plugins``."""
    return SpacEndpoint()
