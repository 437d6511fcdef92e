"""Measures a running server's speed with requests of its own, to compare it with what was calculated."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

from vllm_spac.errors import SpacError
from vllm_spac.tools.machine.server_stats import fetch
from vllm_spac.tools.planning.planned_machine import Store
from vllm_spac.tools.planning.planned_memory import Choice

TOKENS, ROUNDS = 96, 3
_TIMEOUT = 600.0  # seconds of an answer
_QUESTIONS = (
    "How does a bicycle stay upright while it moves?",
    "Write a short story about a lighthouse keeper and a lost dog.",
    "Explain the difference between a process and a thread.",
    "What should a beginner know before planting tomatoes?",
    "Describe how a bill becomes a law, step by step.",
    "Why is the sky blue at noon and red in the evening?",
    "Write a function in Python that finds the longest word of a text.",
    "What were the causes of the French Revolution?",
)


@dataclass(frozen=True)
class ServerSpeed:
    """What was measured, and how the server serves.

    Attributes:
        tokens_per_second: of all requests together while they decode, the median of ``ROUNDS`` rounds.
        first_token: seconds to a request's first token, the median.
        percent: of the experts that have a slot.
        execution, store, cpu: as the knobs; ``cpu``: whether the CPU computes experts.
    """

    tokens_per_second: float
    first_token: float
    requests: int
    percent: int
    execution: str
    store: str
    cpu: bool

    @property
    def choice(self) -> Choice:
        """This way to serve, as plans have it; with a disk, without the host memory that may be before it."""
        store = "none" if self.percent == 100 else self.store
        return Choice(self.percent, cast(Store, store), cpu=self.cpu)


def measure(url: str, api_key: str | None, requests: int) -> ServerSpeed:
    """Sends ``requests`` greedy requests of ``TOKENS`` tokens at once, ``ROUNDS`` times after a round that warms up.

    Args:
        url: of a server with the plugin, e.g. ``http://localhost:8000``.

    Raises:
        SpacError: there is no such server, or it answers no request.
    """
    from openai import DefaultHttpxClient, OpenAI, OpenAIError

    worker = fetch(url, api_key)["workers"][0]
    try:
        with (
            DefaultHttpxClient(trust_env=False) as plain,
            OpenAI(
                base_url=f"{url}/v1", api_key=api_key or "none", max_retries=0, timeout=_TIMEOUT, http_client=plain
            ) as client,
        ):
            model = client.models.list().data[0].id
            rounds = [_round(client, model, requests, number) for number in range(1 + ROUNDS)][1:]
    except (OpenAIError, IndexError) as error:
        raise SpacError(f"{url} answers no completion: {error}; look at the log of that server") from error
    speeds = [sum(speed for speed, _ in answers) for answers in rounds]
    first = [seconds for answers in rounds for _, seconds in answers]
    return _described(worker, statistics.median(speeds), statistics.median(first), requests)


def _described(worker: Mapping[str, Any], speed: float, first: float, requests: int) -> ServerSpeed:
    try:
        share = worker["slots"] / worker["experts"]
        kinds = str(worker["execution"]), str(worker["store"])
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise SpacError(f"the server does not say how it serves ({error!r}); is its plugin of this version?") from error
    return ServerSpeed(speed, first, requests, max(1, round(100 * share)), *kinds, cpu=bool(worker.get("cpu_experts")))


def _round(client: Any, model: str, requests: int, number: int) -> list[tuple[float, float]]:
    """Returns (tokens per second, seconds to the first token) of each request; prompts differ between rounds."""
    prompts = [f"{_QUESTIONS[(number + n) % len(_QUESTIONS)]} ({number}.{n})" for n in range(requests)]
    with ThreadPoolExecutor(requests) as pool:
        return list(pool.map(lambda prompt: _answer(client, model, prompt), prompts))


def _answer(client: Any, model: str, prompt: str) -> tuple[float, float]:
    begin, times, tokens = time.perf_counter(), [], 0
    options = {"temperature": 0.0, "max_tokens": TOKENS, "stream_options": {"include_usage": True}}
    more = {"ignore_eos": True}
    for event in client.completions.create(model=model, prompt=prompt, stream=True, extra_body=more, **options):
        if event.choices:
            times.append(time.perf_counter())
        if event.usage is not None:
            tokens = event.usage.completion_tokens
    if len(times) < 2 or tokens < 2:
        raise SpacError(f"the server answered {tokens} tokens at once; --verify needs them as they come")
    return (tokens - 1) / (times[-1] - times[0]), times[0] - begin
