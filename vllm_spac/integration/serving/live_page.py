"""The live page at ``GET /spac/`` and its stream of server-sent events.

Workers are asked only while somebody looks: one task asks them once a second and passes their reports to all who do.
What vLLM itself counts about requests is read here, for ``GET /spac/stats`` too.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse
from vllm.v1.metrics.prometheus import get_prometheus_registry

from vllm_spac.recording.metrics import described

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

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


def read_requests() -> dict[str, float] | None:
    """Returns what vLLM has counted since its start, of all engines and API servers of this server together.

    Returns:
        ``running``, ``waiting``: requests now. ``tokens``: generated. ``first_token_seconds``, ``first_tokens``: sum
        and number of times to first token. ``token_seconds``, ``finished``: sum over finished requests of each one's
        own mean time per output token, and their number. None if vLLM counts nothing (``--disable-log-stats``).
    """
    found: dict[str, float] = {}
    for metric in get_prometheus_registry().collect():
        for sample in metric.samples:
            if (name := SAMPLES.get(sample.name)) is not None:
                found[name] = found.get(name, 0) + sample.value
    return found if found.keys() == set(SAMPLES.values()) else None


logger = logging.getLogger("vllm.spac")
SECONDS = 1.0  # between two questions
_FOLDER = Path(__file__).parent / "page"


class LiveFeed:
    """Passes the workers' reports to everybody who looks.

    Args:
        facts: sent with each report: the model, and what the page may change.
    """

    def __init__(self, client: EngineClient, facts: dict[str, Any]) -> None:
        self._client, self._facts = client, facts
        self._lookers: set[asyncio.Queue[str]] = set()
        self._asking: asyncio.Task | None = None

    async def events(self, ended: Callable[[], bool]) -> AsyncIterator[str]:
        """Yields server-sent events: ``report``, ``busy`` while the workers do not answer, ``failed`` as the last one.

        Args:
            ended: whether the server is about to stop, so that the stream must end.
        """
        news: asyncio.Queue[str] = asyncio.Queue(1)
        self._lookers.add(news)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        try:
            while not ended():
                try:
                    event = await asyncio.wait_for(news.get(), 2 * SECONDS)
                except TimeoutError:
                    event = _event("busy", {})
                yield event
                if event.startswith("event: failed"):
                    return
        finally:
            self._lookers.discard(news)

    async def _ask(self) -> None:
        """Asks the workers while somebody looks, then lets them forget it."""
        while self._lookers:
            try:
                while self._lookers:
                    self._send(_event("report", self._report(await self._client.collective_rpc("spac_watch"))))
                    await asyncio.sleep(SECONDS)
                await self._client.collective_rpc("spac_stop_watch")
            except Exception as error:  # of the engine, in any of its ways
                logger.error("spac: the live page ends, the workers failed: %s", error)
                self._send(_event("failed", {"reason": str(error) or type(error).__name__}))
                return

    def _report(self, workers: list[dict]) -> dict:
        shown = [worker | {"shown": described(worker["stats"])} for worker in workers]
        return self._facts | {"seconds": SECONDS, "at": time.monotonic(), "requests": read_requests(), "workers": shown}

    def _send(self, event: str) -> None:
        """Gives ``event`` to all; who has not taken the last one gets this one instead."""
        for news in self._lookers:
            if news.full():
                news.get_nowait()
            news.put_nowait(event)


def _event(name: str, content: dict) -> str:
    return f"event: {name}\ndata: {json.dumps(content)}\n\n"


def response(status: int) -> HTMLResponse:
    """Returns the page, which contains no data; with 401 it asks for the server's key."""
    text, policy = _page()
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return HTMLResponse(text, status, headers)


@cache
def _page() -> tuple[str, str]:
    """Returns the page in one file, and a policy under which a browser runs its script and loads nothing else."""
    text, style, script = (
        (_FOLDER / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")
    )
    text = text.replace("/* page.css */", style).replace("/* page.js */", script)
    hashes = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (style, script))
    style_hash, script_hash = (f"'sha256-{digest}'" for digest in hashes)
    rest = "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return text, f"default-src 'none'; style-src {style_hash}; script-src {script_hash}; {rest}"
