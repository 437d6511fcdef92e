"""The OpenAI requests of ``online.py``: some sequentially, then all of them with limited concurrency."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from openai import AsyncOpenAI

from vllm_spac.tools.machine.server_stats import fetch

SERVED_NAME = "benchmark"
ALONE = 4  # prompts that are sent one after the other
_COUNTERS = ("hits", "misses", "stall_seconds")


@dataclass(frozen=True)
class Load:
    """The requests sent to every server."""

    prompts: list[list[int]]
    output_tokens: int
    concurrency: int
    seed: int
    timeout: float


@dataclass(frozen=True)
class Answer:
    """One streamed completion; times in seconds."""

    text: str
    tokens: int
    ttft: float
    tpot: float


async def ask(client: AsyncOpenAI, prompt: list[int], load: Load) -> Answer:
    """Stream one completion of exactly ``load.output_tokens`` tokens."""
    start = time.perf_counter()
    stream = await client.completions.create(
        model=SERVED_NAME,
        prompt=prompt,
        max_tokens=load.output_tokens,
        temperature=0,
        seed=load.seed,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    pieces, moments, tokens = [], [], 0
    async for chunk in stream:
        if chunk.choices:
            moments.append(time.perf_counter())
            pieces.append(chunk.choices[0].text)
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    if tokens != load.output_tokens:
        raise RuntimeError(f"asked for {load.output_tokens} tokens, got {tokens}")
    return Answer("".join(pieces), tokens, moments[0] - start, (moments[-1] - moments[0]) / (tokens - 1))


async def question(url: str, load: Load, with_plugin: bool) -> tuple[list[Answer], list[Answer], float, dict]:
    """Returns (answers one by one, answers at once, seconds of the latter, increments of the plugin's counters)."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=load.timeout) as client:
        alone = [await ask(client, prompt, load) for prompt in load.prompts[:ALONE]]
        gate = asyncio.Semaphore(load.concurrency)

        async def one(prompt: list[int]) -> Answer:
            async with gate:
                return await ask(client, prompt, load)

        before = counters(url) if with_plugin else {}
        start = time.perf_counter()
        together = await asyncio.gather(*(one(prompt) for prompt in load.prompts))
        seconds = time.perf_counter() - start
        after = counters(url) if with_plugin else {}
    return alone, together, seconds, {name: after[name] - before[name] for name in after}


def counters(url: str) -> dict[str, float]:
    """Returns the counters of a server with the plugin, summed over workers."""
    workers = fetch(url)["workers"]
    moved = sum(count for worker in workers for count in worker["bytes"].values())
    return {name: sum(worker[name] for worker in workers) for name in _COUNTERS} | {"bytes": moved}
