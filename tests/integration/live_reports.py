"""Reports of an imagined model for the live page, and a server that sends them without an engine."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

from vllm_spac.integration.serving import live_page
from vllm_spac.integration.serving.endpoint import SpacEndpoint
from vllm_spac.integration.serving.live_page import LiveFeed
from vllm_spac.integration.serving.live_view import EVICTED, HOST, LOADED, ON_CPU, SLOT, STORE
from vllm_spac.recording.metrics import Counters

PARTS = {
    "waiting for loads": 9_000_000,
    "waiting for CPU experts": 600_000,
    "experts": 14_000_000,
    "rest of the forward": 11_000_000,
    "policies and predictors": 700_000,
    "drafts": 3_000_000,
    "sampling and the rest of the step": 900_000,
    "between steps": 1_200_000,
}


class Imagined:
    """An engine client whose workers run a model of ``layers`` x ``experts`` experts, a quarter of them in slots."""

    def __init__(self, layers: int = 24, experts: int = 64, workers: int = 1) -> None:
        self.layers, self.experts, self.workers = layers, experts, workers
        self.rng = np.random.default_rng(0)
        self.heat = np.sort(self.rng.random((layers, experts)) ** 4)[:, ::-1]
        self.tier = np.where(
            np.arange(experts) < experts // 4, SLOT, np.where(np.arange(experts) < experts // 2, HOST, STORE)
        )
        self.tier = np.repeat(self.tier[None], layers, axis=0)
        self.counters = Counters(hits=1000, misses=200)
        self.asked: list[tuple[str, tuple]] = []
        self.error: Exception | None = None
        self.registry = CollectorRegistry()
        self.running, self.waiting, self.tokens = (
            kind(f"vllm:{name}", "as vLLM's", registry=self.registry)
            for kind, name in (
                (Gauge, "num_requests_running"),
                (Gauge, "num_requests_waiting"),
                (Counter, "generation_tokens"),
            )
        )
        self.first_token, self.per_token = (
            Histogram(f"vllm:{name}", "as vLLM's", registry=self.registry)
            for name in ("time_to_first_token_seconds", "request_time_per_output_token_seconds")
        )
        self.settings: dict[str, Any] = {"budget": None, "mass": None, "ranking": "router", "when": "verify"}

    async def reset_prefix_cache(self, **options: bool) -> bool:
        return True

    async def collective_rpc(self, method: str, args: tuple = ()) -> list:
        self.asked.append((method, args))
        if self.error is not None:
            raise self.error
        if method == "spac_try_budget":
            self.settings |= {"budget": None} | args[0]
            return [{"settings": self.settings}]
        if method == "spac_watch":
            return [self.report() for _ in range(self.workers)]
        return [None] * self.workers

    def report(self) -> dict:
        codes = self.tier.astype(np.uint8)
        for layer in self.rng.integers(0, self.layers, 6):
            gone = self.rng.choice(np.flatnonzero(self.tier[layer] == SLOT))
            come = self.rng.choice(np.flatnonzero(self.tier[layer] != SLOT))
            self.tier[layer, [gone, come]] = self.tier[layer, [come, gone]]
            codes[layer, gone], codes[layer, come] = self.tier[layer, gone] | EVICTED, SLOT | LOADED
            codes[layer, self.rng.choice(np.flatnonzero(self.tier[layer] == HOST))] |= ON_CPU
        counters = self.counters
        counters.hits += int(self.rng.integers(400, 600))
        counters.misses += int(self.rng.integers(60, 160))
        counters.prefetches, counters.prefetch_hits = counters.prefetches + 9, counters.prefetch_hits + 6
        counters.prefetch_late, counters.prefetch_wasted = counters.prefetch_late + 1, counters.prefetch_wasted + 2
        counters.cpu_experts += 6
        counters.count_bytes("disk", 90 << 20)
        counters.count_bytes("host", 240 << 20)
        counters.count_bytes("host ahead", 30 << 20)
        self.running.set(3)
        self.waiting.set(2)
        self.tokens.inc(120)
        self.first_token.observe(0.25)
        self.per_token.observe(0.025)
        lossy = self.settings["budget"] is not None
        none = {"rows": 0, "dropped_weight": 0.0, "shortlists": 0, "experts": 0, "emptied": 0, "unweighted": 0}
        some = {
            "rows": 9600,
            "dropped_weight": 130.0,
            "shortlists": 240,
            "experts": 3840,
            "emptied": 3,
            "unweighted": 0,
        }
        budget = {"setting": f"lossy (budget {self.settings['budget']})", **some, "dropped_share": 0.0135}
        return {
            "stats": {
                "mode": "lossy" if lossy else "exact",
                "store": "disk",
                "execution": "slots",
                "policy": "reuse",
                "layers": self.layers,
                "experts": self.layers * self.experts,
                "slots": self.layers * self.experts // 4,
                "resident": self.layers * self.experts // 4,
                "expert_bytes": 9 << 20,
                **counters.snapshot(),
                "guard": {"draft_length": 3, "steps": {"0": 12, "3": 345}, "speedup": 1.31, "tokens_per_step": 2.4},
                "budget": budget if lossy else {"setting": "exact", **none, "dropped_share": 0.0},
            },
            "experts": {
                "layers": [self.experts] * self.layers,
                "codes": base64.b64encode(codes.tobytes()).decode(),
                "heat": base64.b64encode((255 * self.heat).astype(np.uint8).tobytes()).decode(),
            },
            "time": {"steps": 64, "tokens": 154, "parts": {name: 154 * part for name, part in PARTS.items()}},
            "queued": 4,
            "budget": {"settings": dict(self.settings), "least": 8},
            "drafts": True,
        }


class Served:
    """The routes of the plugin on a port of this machine, in a thread."""

    def __init__(self, client: Imagined, control: bool = False, key: str | None = None, port: int = 0) -> None:
        self.client, app = client, FastAPI()
        SpacEndpoint().attach_router(app)
        names = ("allowed_origins", "allow_credentials", "allowed_methods", "allowed_headers", "middleware")
        args = SimpleNamespace(**dict.fromkeys(names, []), api_key=key and [key], enable_request_id_headers=False)
        init_entrypoints_middleware(args, app, ())
        app.state.spac_client, app.state.spac_control, app.state.spac_rankings = client, control, {"router"}
        app.state.spac_feed = self.feed = LiveFeed(client, {"model": "Imagined-30B-A3B", "control": control})
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(("127.0.0.1", port))
        self.port = self.socket.getsockname()[1]
        self.server = app.state.server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/spac/"

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()

    def start(self) -> None:
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)


@contextlib.contextmanager
def served(client: Imagined, **options: Any) -> Iterator[Served]:
    """A server that is gone when the block ends."""
    server = Served(client, **options)
    with patch.object(live_page, "get_prometheus_registry", lambda: client.registry):
        server.start()
        try:
            yield server
        finally:
            server.stop()
