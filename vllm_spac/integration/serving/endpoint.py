"""HTTP endpoints: ``GET /spac/stats``, ``POST /spac/budget``, the live page, and ``vllm:spac_*`` in ``/metrics``.

Workers are queried only on a request: after each call vLLM's worker waits in a busy loop for a second before it goes
idle, so a worker that is queried every second would permanently occupy a core.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, StreamingResponse
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_spac import components
from vllm_spac.config.config import config_of
from vllm_spac.errors import ConfigError, brief, printable
from vllm_spac.integration.serving import live_page
from vllm_spac.integration.serving.live_page import LiveFeed
from vllm_spac.methods.moe_spec.settings import BudgetSettings
from vllm_spac.recording import metrics
from vllm_spac.system.untrusted import parse_json

if TYPE_CHECKING:
    from argparse import Namespace

    from starlette.datastructures import State
    from starlette.types import ASGIApp, Receive, Scope, Send
    from vllm.engine.protocol import EngineClient

logger = logging.getLogger("vllm.spac")
Family = CounterMetricFamily | GaugeMetricFamily
_MOST_BYTES = 1 << 16  # of a request's body, which is a few settings
_PATIENCE = 2.0  # seconds; workers respond between steps, and a long prompt may take longer
_COUNTERS = {
    "hits": "Experts that were in fast memory when a layer needed them.",
    "misses": "Experts that were not in fast memory when a layer needed them.",
    "loads": "Experts loaded into fast memory.",
    "host_loads": "Experts loaded into fast memory from host memory beside a disk.",
    "read_retries": "Reads of experts that failed and were tried again.",
    "stall_seconds": "Seconds that layers waited for experts.",
    "waves": "Waves in which MoE layers ran: more than one per forward where the slots were too few.",
    "prefetches": "Experts prefetched into fast memory.",
    "prefetch_hits": "Prefetched experts that were used before they were evicted.",
    "prefetch_late": "Prefetched experts that a layer had to wait for; also counted as used.",
    "prefetch_wasted": "Prefetched experts that were evicted unused.",
    "prefetch_harmful": "Experts loaded because prefetching one that was not used yet had evicted them.",
    "prefetch_failed": "Prefetches that failed; the expert is read again when a layer needs it.",
    "cpu_experts": "Experts computed on the CPU, where they are stored.",
    "cpu_rows": "Rows computed by experts on the CPU.",
    "cpu_late": "Experts for which the CPU was too late, so that the device computed them.",
    "cpu_stops": "Times that cpu_experts=auto stopped the CPU, because steps with it were not shorter.",
    "cpu_wait_seconds": "Seconds that layers waited for experts on the CPU.",
}
_BUDGET = {
    "rows": "Rows whose experts were limited by a budget or speculated, counted once per layer.",
    "dropped_weight": "Sum over those rows of the share of their selected experts' routing weights that was dropped.",
    "shortlists": "Shortlists made by budgets, one per layer and forward.",
    "experts": "Distinct experts that budgeted rows used, summed over all shortlists.",
    "emptied": "Rows whose experts were all cut, counted once per layer.",
    "unweighted": "Verified requests that voted uniformly, because the draft's probabilities were not known.",
}
_TREES = {
    "trees": "Draft trees that were verified.",
    "chains": "Drafts that were verified as chains, where draft trees are on.",
    "unknown": "Of these chains, those that the trees' drafter did not propose.",
    "nodes": "Draft tokens that were verified, where draft trees are on.",
}
_CUTS = {
    "drafts": "Draft tokens of steps whose drafts may be cut on the device.",
    "cut_drafts": "Draft tokens that were cut on the device: they ran no expert, and were not accepted.",
}
_PARTS = {"budget": ("budget", _BUDGET), "device_chooser": ("device", _CUTS), "trees": ("tree", _TREES)}
_EXPERT_WORKERS = {
    "calls": "Requests to expert workers whose answer counted.",
    "rows": "Rows of layers that expert workers computed.",
    "losses": "Requests to expert workers whose answer did not count: late, wrong, or of a worker that ended.",
    "rows_lost": "Rows of these requests, computed elsewhere.",
    "sent_bytes": "Bytes sent to expert workers with rows.",
    "received_bytes": "Bytes of the answers that counted.",
    "round_trip_seconds": "Seconds from sending rows to the answer, summed; a worker has up to two requests at once.",
    "readmissions": "Times that a lost expert worker returned.",
    "compute_seconds": "Seconds in which expert workers loaded and computed experts.",
    "stall_seconds": "Seconds that layers at expert workers waited for experts.",
    "hits": "Experts that were in an expert worker's memory when a layer needed them.",
    "misses": "Experts that were not.",
    "loads": "Experts that expert workers loaded on demand.",
    "loaded_bytes": "Bytes that expert workers loaded.",
    "hints": "Guesses about layers that expert workers received in time.",
    "prefetches": "Experts that expert workers loaded ahead of need.",
    "prefetch_hits": "Of these, those that were used before they were evicted.",
    "prefetch_wasted": "Of these, those that were evicted unused.",
}
_EXPERT_WORKER_GAUGES = {
    "present": "1 while an expert worker is asked for rows, 0 while it is lost.",
    "slots": "Slots of an expert worker.",
    "resident": "Experts in an expert worker's memory.",
    "slot_bytes": "Bytes of an expert worker's slots.",
    "memory_bytes": "Bytes of memory that an expert worker's process occupies.",
    "counts_age_seconds": "Seconds since an expert worker was asked for the counts that are shown.",
}
_GAUGES = {
    "slots": "Slots for experts in fast memory.",
    "resident": "Experts that are in fast memory now.",
    "host_experts": "Experts in host memory between fast memory and a disk.",
    "experts": "Routed experts of the model, all layers.",
    "slot_bytes": "Bytes of fast memory for experts.",
}


class WorkerCollector:
    """Exports the last counters of the workers as Prometheus metrics."""

    def __init__(self, engine_client: EngineClient) -> None:
        self.workers: list[dict] = []
        self._client = engine_client
        self._asked: asyncio.Task | None = None

    async def update(self) -> None:
        """Queries the workers; if they do not respond, logs it and keeps their last counters."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.ensure_future(_statistics(self._client))
        await asyncio.wait({self._asked}, timeout=_PATIENCE)
        if not self._asked.done():
            logger.warning("spac: /metrics shows earlier counters: the workers have been busy for %s s", _PATIENCE)
        elif error := self._asked.exception():
            logger.error("spac: /metrics is no longer updated, the workers failed: %s", error)
        else:
            self.workers = self._asked.result()

    def collect(self) -> Iterator[Family]:
        for name, text in _GAUGES.items():
            yield self._family(GaugeMetricFamily, name, text)
        for name, text in _COUNTERS.items():
            yield self._family(CounterMetricFamily, name, text)
        for part, (prefix, texts) in _PARTS.items():
            for name, text in texts.items() if self._have(part) else ():
                values = [worker[part][name] for worker in self._counting(part)]
                yield _metric(CounterMetricFamily, f"{prefix}_{name}", text, values)
        lossy = [float(worker["mode"] == "lossy") for worker in self._counting("mode")]
        yield _metric(
            GaugeMetricFamily, "lossy", "1 while a budget or speculated execution is in force, 0 in exact mode.", lossy
        )
        if self._have("guard"):
            lengths = [worker["guard"]["draft_length"] for worker in self._counting("guard")]
            yield _metric(GaugeMetricFamily, "draft_length", "Draft tokens per request that the guard allows.", lengths)
        if self._have("trees"):
            yield self._labelled("tree_accepted", "tokens", "Verified drafts, by their accepted tokens.")
        if self._have("expert_workers"):
            for name, text in _EXPERT_WORKERS.items():
                yield self._each(CounterMetricFamily, name, text)
            for name, text in _EXPERT_WORKER_GAUGES.items():
                yield self._each(GaugeMetricFamily, name, text)
        text = "1 for a recording (trace, timeline) that could not be written and stopped; the log has the reason."
        stopped = [dict.fromkeys(worker["stopped"], 1) for worker in self._counting("stopped")]
        yield _by_label(GaugeMetricFamily, "recording_stopped", "recording", text, stopped)
        if self._have("host_bytes"):
            text = "Bytes of host memory that holds experts, by whether its pages are pinned."
            held = [worker["host_bytes"] for worker in self._counting("host_bytes")]
            yield _by_label(GaugeMetricFamily, "host_bytes", "kind", text, held)
        yield self._labelled("bytes", "path", "Bytes of experts moved, by the store they came from.")
        yield self._labelled("steps", "kind", "Forwards of the target model, by kind.")

    def _have(self, part: str) -> bool:
        return all(part in worker for worker in self.workers)

    def _counting(self, name: str) -> list[dict]:
        """The statistics to export ``name`` of, so that the sum over workers is the engine's.

        What all ranks count, such as steps, is exported once, as that of the first worker.
        """
        if len(self.workers) < 2 or metrics.adds_up(name, self.workers[0]["divided"]):
            return self.workers
        return [metrics.total(self.workers)]

    def _family(self, family: type[Family], name: str, text: str) -> Family:
        return _metric(family, name, text, [worker[name] for worker in self._counting(name)])

    def _each(self, family: type[Family], name: str, text: str) -> Family:
        """A series per expert worker."""
        metric = family(f"vllm:spac_expert_worker_{name}", text, labels=["worker", "expert_worker"])
        for index, worker in enumerate(self._counting("expert_workers")):
            for called, counts in worker["expert_workers"].items():
                metric.add_metric([str(index), called], counts[name])
        return metric

    def _labelled(self, name: str, label: str, text: str) -> Family:
        counts = [worker[name] for worker in self._counting(name)]
        return _by_label(CounterMetricFamily, name, label, text, counts)


def _by_label(family: type[Family], name: str, label: str, text: str, workers: Sequence[Mapping[str, float]]) -> Family:
    """Counts of each worker by a label's value."""
    metric = family(f"vllm:spac_{name}", text, labels=["worker", label])
    for index, counts in enumerate(workers):
        for value, count in counts.items():
            metric.add_metric([str(index), value], count)
    return metric


def _metric(family: type[Family], name: str, text: str, values: list) -> Family:
    metric = family(f"vllm:spac_{name}", text, labels=["worker"])
    for index, value in enumerate(values):
        metric.add_metric([str(index)], value)
    return metric


async def _statistics(client: EngineClient) -> list[dict]:
    """Returns the statistics of each worker; what expert workers count is waited for here, not in the engine."""
    began = time.monotonic()
    while True:
        workers = await client.collective_rpc("spac_stats")
        if metrics.settled(workers, time.monotonic() - began):
            return workers
        await asyncio.sleep(metrics.POLL)


class RefreshedMetrics:
    """ASGI middleware: ``/metrics`` waits for the workers' counters; all other requests pass through."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].rstrip("/") == "/metrics":
            collector = getattr(scope["app"].state, "spac_collector", None)
            if collector is not None:
                await collector.update()
        await self._app(scope, receive, send)


class SpacEndpoint:
    """vLLM's ``EndpointPlugin``, which ``integration.plugin`` adds to a server whose engine uses spac."""

    name = "spac"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Adds the routes; called before the engine's client is known."""
        router = APIRouter(prefix="/spac", dependencies=[Depends(_authenticated), Depends(_by_own_name)])

        @router.get("/stats")
        async def stats(request: Request) -> dict:
            workers = await _statistics(_client(request))
            return {"workers": workers, "total": metrics.total(workers), "requests": live_page.read_requests()}

        @router.post("/budget", dependencies=_CONTROL)
        async def budget(request: Request) -> dict:
            """Changes the budget; the body is a ``BudgetSettings``, e.g. {"budget": 16}; {} restores exact mode.

            The answer has the settings of each worker and the mode that follows from them, in words.

            Keys and values computed under another budget are not reused: the prefix cache is emptied, and running
            requests are recomputed up to their current token.
            """
            client = _client(request)
            if not request.app.state.spac_control:
                raise HTTPException(403, "control is off on this server; start it with --spac-http control")
            settings = await _asked(request)
            answers = await client.collective_rpc("spac_try_budget", args=(settings.model_dump(),))
            if refusals := [answer["refused"] for answer in answers if "refused" in answer]:
                raise HTTPException(400, refusals[0])
            await _forget_prefixes(client)
            return {"mode": answers[0]["mode"], "workers": [answer["settings"] for answer in answers]}

        @router.get("/events")
        async def events(request: Request) -> StreamingResponse:
            """The live page's stream of server-sent events; workers are asked while somebody reads it."""
            _client(request)
            server = getattr(request.app.state, "server", None)
            stream = _feed(request).events(lambda: server is not None and server.should_exit)
            return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

        @app.get("/spac/", include_in_schema=False)
        async def page(request: Request) -> HTMLResponse:
            """The live page. It has no data of its own, so that without a key it can ask for it."""
            _client(request)
            _feed(request)
            return live_page.response(200 if _has_key(request) else 401)

        app.include_router(router)
        app.add_middleware(RefreshedMetrics)

    async def init_state(self, engine_client: EngineClient, state: State, args: Namespace) -> None:
        """Registers the workers' counters for ``/metrics``."""
        config = config_of(getattr(args, "additional_config", None))
        if engine_client is None or config is None:
            return
        state.spac_control = config.control
        state.spac_host = (getattr(args, "host", None) or "").lower()
        state.spac_rankings = {*components.serving("rankings"), config.parsed_budget.ranking}
        state.spac_client = engine_client
        if config.page or config.http is None:
            state.spac_page_here = not config.page
            facts = {"model": Path(args.model).name, "control": config.control}
            state.spac_feed = LiveFeed(engine_client, facts)
            if state.spac_page_here:
                logger.info("spac: GET /spac/ is open to this machine; --spac-http page opens it to others")
        state.spac_collector = WorkerCollector(engine_client)
        await state.spac_collector.update()
        REGISTRY.register(state.spac_collector)


def _authenticated(request: Request) -> None:
    """Requires an API key as vLLM's own middleware does under /v1; 401 without a valid key."""
    if not _has_key(request):
        challenge = {"WWW-Authenticate": "Bearer"}
        raise HTTPException(401, "this server needs its API key: Authorization: Bearer KEY", challenge)


def _has_key(request: Request) -> bool:
    """Whether a request has a key of this server, by vLLM's own comparison, or needs none."""
    for middleware in request.app.user_middleware:
        if middleware.cls is AuthenticationMiddleware:
            guard = AuthenticationMiddleware(request.app, **middleware.kwargs)
            if not guard.verify_token(request.headers):
                return False
    return True


def _needs_key(request: Request) -> bool:
    return any(middleware.cls is AuthenticationMiddleware for middleware in request.app.user_middleware)


def _is_address(host: str, *, loopback: bool = False) -> bool:
    try:
        address = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return False
    return address.is_loopback if loopback else True


def _by_own_name(request: Request) -> None:
    """Refuses a request to another name than this server's, where no key is needed; 403.

    A page of evil.example whose DNS name comes to point to this server has the same origin as what it asks here. A
    browser still sends that name, and a server is reached by its address, localhost, or its ``--host``.
    """
    if _needs_key(request):
        return
    try:
        host = (urlsplit(f"//{request.headers.get('host', '')}").hostname or "").lower()
    except ValueError:
        host = ""
    names = {"localhost", getattr(request.app.state, "spac_host", "")}
    if not host or not (_is_address(host) or host in names):
        raise HTTPException(
            403,
            printable(
                f"spac: this server does not know itself as {brief(host)}; ask it by its address, start it with "
                f"--host {brief(host)}, or with a key (--api-key)"
            ),
        )


def _near_or_known(request: Request) -> None:
    """Refuses a change from another machine where no key is needed; 403."""
    peer = "" if request.client is None else request.client.host
    if not _needs_key(request) and not _is_address(peer, loopback=True):
        raise HTTPException(
            403,
            printable(
                f"spac: {brief(peer)} is another machine, and without a key only this one may change something; "
                "start the server with --api-key"
            ),
        )


def _from_here(request: Request) -> None:
    """Refuses a request that the page of another site made in somebody's browser; 403.

    Browsers name the origin of the page in all requests but plain GETs; programs name none. CORS is no protection: by
    default vLLM lets all origins send what they like.
    """
    origin = request.headers.get("origin")
    if origin is None:
        return
    try:
        host = urlsplit(origin).netloc.lower()
    except ValueError:
        host = ""
    if not host or host != request.headers.get("host", "").lower():
        raise HTTPException(
            403,
            printable(
                f"spac: this request comes from a page of {brief(origin)}, and only this server's own page may change "
                "something; a proxy between them has to pass on the header Host"
            ),
        )


def _is_json(request: Request) -> None:
    """Requires JSON, as vLLM's own routes do: what a form sends, without asking anybody, is another type; 415."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(
            415,
            printable(
                f"spac: a budget is application/json, not {brief(kind)}; add -H 'Content-Type: application/json'"
            ),
        )


_CONTROL = [Depends(_near_or_known), Depends(_from_here), Depends(_is_json)]  # of each route that changes something


async def _forget_prefixes(client: EngineClient) -> None:
    """Empties the prefix cache after a change of budget; 500 if that fails, since the budget is already changed."""
    try:
        emptied = await client.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        reason = "vLLM could not reset it"
    except Exception as error:  # of the engine, in any of its ways; vLLM would report some as an invalid request
        logger.exception("spac: the prefix cache could not be emptied")
        emptied, reason = False, str(error)
    if not emptied:
        raise HTTPException(
            500,
            printable(
                "spac: the budget is changed, but the prefix cache still has keys and values of the earlier one "
                f"({reason}); send the budget again, and restart the server if that fails"
            ),
        )


async def _asked(request: Request) -> BudgetSettings:
    """Parses the budget in the body of a request; 413 for a body that is too large, 400 for an invalid one."""
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
    if settings.ranking not in known:  # a request must not be able to import a module by naming it
        names = ", ".join(sorted(known))
        raise HTTPException(400, printable(f"spac: ranking={brief(settings.ranking)}: this server has {names}"))
    return settings


def _client(request: Request) -> EngineClient:
    client = getattr(request.app.state, "spac_client", None)
    if client is None:
        raise HTTPException(404, "this server runs without spac; start it with --plugin spac")
    return client


def _feed(request: Request) -> LiveFeed:
    """Returns what the live page reads; 404 where it is off, 403 where it is for this machine and another asks."""
    state = request.app.state
    feed = getattr(state, "spac_feed", None)
    if feed is None:
        raise HTTPException(404, "the live page is off on this server; start it with --spac-http page")
    if getattr(state, "spac_page_here", False) and not _is_here(request):
        raise HTTPException(403, "the live page is open to this server's machine; start it with --spac-http page")
    return feed


def _is_here(request: Request) -> bool:
    """Whether a request comes from this machine, or reached a server that listens to this machine alone."""
    host, peer = getattr(request.app.state, "spac_host", ""), request.client.host if request.client else ""
    return host == "localhost" or _is_address(host, loopback=True) or _is_address(peer, loopback=True)
