"""``GET /spac/stats`` and ``vllm:spac_*`` in ``/metrics``, from the workers' counters.

Workers are asked when somebody looks and at no other time: after each call vLLM's worker waits in a busy loop for a
second before it goes idle, so one that is asked every second occupies a core for ever.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.requests import ClientDisconnect
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_spac import components
from vllm_spac.budget.settings import BudgetSettings
from vllm_spac.config import config_of
from vllm_spac.errors import ConfigError
from vllm_spac.system.printable import brief, printable
from vllm_spac.system.untrusted import parse_json

if TYPE_CHECKING:
    from argparse import Namespace

    from starlette.datastructures import State
    from starlette.types import ASGIApp, Receive, Scope, Send
    from vllm.engine.protocol import EngineClient

logger = logging.getLogger("vllm.spac")
Family = CounterMetricFamily | GaugeMetricFamily
_MOST_BYTES = 1 << 16  # of a request's body: budgets of a thousand layers
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
    "dropped_weight": "Sum over those rows of the share of their selected experts' routing weights that was dropped.",
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

    def __init__(self, engine_client: EngineClient) -> None:
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

    def collect(self) -> Iterator[Family]:
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

    def _family(self, family: type[Family], name: str, text: str) -> Family:
        return _metric(family, name, text, [worker[name] for worker in self.workers])

    def _labelled(self, name: str, label: str, text: str) -> CounterMetricFamily:
        metric = CounterMetricFamily(f"vllm:spac_{name}", text, labels=["worker", label])
        for index, worker in enumerate(self.workers):
            for value, count in worker[name].items():
                metric.add_metric([str(index), value], count)
        return metric


def _metric(family: type[Family], name: str, text: str, values: list) -> Family:
    metric = family(f"vllm:spac_{name}", text, labels=["worker"])
    for index, value in enumerate(values):
        metric.add_metric([str(index)], value)
    return metric


class RefreshedMetrics:
    """ASGI middleware: ``/metrics`` waits for the workers' counters; all other requests pass."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
        router = APIRouter(prefix="/spac", dependencies=[Depends(_authenticated)])

        @router.get("/stats")
        async def stats(request: Request) -> dict:
            return {"workers": await _client(request).collective_rpc("spac_stats")}

        @router.post("/budget")
        async def budget(request: Request) -> dict:
            """Change the budget; the body is a ``BudgetSettings``, e.g. {"budget": 16}, and {} is exact again.

            Keys and values that were computed under another budget are not used again: the prefix cache is emptied,
            and running requests are computed again up to where they are.
            """
            client = _client(request)
            if not request.app.state.spac_control:
                raise HTTPException(403, "this server takes no control; start it with --spac-control")
            settings = await _asked(request)
            answers = await client.collective_rpc("spac_try_budget", args=(settings.model_dump(),))
            if refusals := [answer["refused"] for answer in answers if "refused" in answer]:
                raise HTTPException(400, refusals[0])
            await client.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            return {"workers": [answer["settings"] for answer in answers]}

        app.include_router(router)
        app.add_middleware(RefreshedMetrics)

    async def init_state(self, engine_client: EngineClient, state: State, args: Namespace) -> None:
        """Let ``/metrics`` show the workers' counters."""
        config = config_of(getattr(args, "additional_config", None))
        if engine_client is None or config is None:
            return
        state.spac_control = config.control
        state.spac_rankings = {*components.names("budget.rankings"), config.budget_ranking}
        state.spac_client = engine_client
        state.spac_collector = WorkerCollector(engine_client)
        await state.spac_collector.refresh()
        REGISTRY.register(state.spac_collector)


def _authenticated(request: Request) -> None:
    """The keys that vLLM's own middleware asks for under /v1, and its comparison; 401 without one of them."""
    for middleware in request.app.user_middleware:
        if middleware.cls is AuthenticationMiddleware:
            guard = AuthenticationMiddleware(request.app, **middleware.kwargs)
            if not guard.verify_token(request.headers):
                challenge = {"WWW-Authenticate": "Bearer"}
                raise HTTPException(401, "this server wants its API key: Authorization: Bearer KEY", challenge)


async def _asked(request: Request) -> BudgetSettings:
    """The budget in the body of a request; 413 for a large body, 400 for one that is none."""
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BYTES:
                raise HTTPException(413, f"a budget has at most {_MOST_BYTES} bytes")
        settings = BudgetSettings.parse(parse_json(body.decode()))
        json.dumps(settings.model_dump(), ensure_ascii=False).encode()  # lone surrogates do not reach a worker
    except ClientDisconnect:
        raise HTTPException(400, "the request ended before its body") from None
    except ConfigError as error:
        raise HTTPException(400, str(error)) from None
    except ValueError as error:
        raise HTTPException(400, printable(f"spac: the body is not JSON: {error}")) from None
    known = request.app.state.spac_rankings
    if settings.ranking not in known:  # nothing is imported because a request names it
        names = ", ".join(sorted(known))
        raise HTTPException(400, printable(f"spac: ranking={brief(settings.ranking)}: this server has {names}"))
    return settings


def _client(request: Request) -> EngineClient:
    client = getattr(request.app.state, "spac_client", None)
    if client is None:
        raise HTTPException(404, "this server runs without spac; start it with --plugin spac")
    return client


def make() -> SpacEndpoint:
    """Entry point of ``vllm.endpoint_plugins``."""
    return SpacEndpoint()
