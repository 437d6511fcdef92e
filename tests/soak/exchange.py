"""Requests, and the parts of their answers that must be equal from two servers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from vllm_server import TARGET

TEXT = Path(argparse.__file__).read_text()  # the toy model was trained on code
# Of 1 to about 300 tokens; each fourth one starts as the one before it.
PROMPTS = [TEXT[1000 * (i - (i % 4 == 3)) :][: 8 + 37 * i] for i in range(24)]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_TIMEOUT = 300
_VARYING = ("id", "created", "system_fingerprint")


@dataclass(frozen=True)
class Request:
    """A request to an OpenAI endpoint.

    Attributes:
        body: fields beside the model, temperature 0 unless it says otherwise.
        path: the endpoint.
    """

    body: dict = field(default_factory=dict)
    path: str = COMPLETIONS

    @property
    def json(self) -> dict:
        return {"model": str(TARGET), "temperature": 0, "max_tokens": 16, **self.body}

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))


def complete(prompt: str | Sequence, **body) -> Request:
    return Request({"prompt": prompt, "return_token_ids": True, **body})


def chat(*contents: str, **body) -> Request:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return Request({"messages": messages, "return_token_ids": True, **body}, CHAT)


def client(url: str) -> httpx.Client:
    """Without connections that are kept: each request has its own, as from users of their own."""
    return httpx.Client(base_url=url, timeout=_TIMEOUT, limits=httpx.Limits(max_keepalive_connections=0))


def ask(http: httpx.Client, request: Request) -> dict:
    """The status and what the answer says, a stream put together; without what differs from one answer to the next.

    Raises:
        httpx.HTTPError: the server has gone.
    """
    if request.streams:
        return _assembled(http, request)
    answer = http.post(request.path, json=request.json)
    try:
        said = answer.json()
    except json.JSONDecodeError:
        said = {"text": answer.text}
    return {"status": answer.status_code, **{key: said[key] for key in said if key not in _VARYING}}


def events(response: httpx.Response) -> Iterator[dict]:
    """The chunks of a stream of server-sent events."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _assembled(http: httpx.Client, request: Request) -> dict:
    """How a stream is cut into chunks depends on time; text, tokens and reasons do not."""
    choices: dict[int, dict] = {}
    usage = None
    with http.stream("POST", request.path, json=request.json) as response:
        if response.status_code != 200:
            return {"status": response.status_code, **json.loads(response.read())}
        for chunk in events(response):
            assert "error" not in chunk, chunk
            usage = chunk.get("usage") or usage
            for part in chunk["choices"]:
                choice = choices.setdefault(part["index"], {"text": "", "token_ids": [], "finish_reason": None})
                choice["text"] += (part["text"] if "text" in part else part["delta"].get("content")) or ""
                choice["token_ids"] += part.get("token_ids") or []
                choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
    return {"status": 200, "choices": [choices[index] for index in sorted(choices)], "usage": usage}


def greedy(prompt: str, count: int = 24) -> Request:
    return complete(prompt, max_tokens=count, ignore_eos=True)


def tokens(url: str, prompts: Sequence[str] = PROMPTS) -> list[list[int]]:
    """Greedy tokens for ``prompts``, all asked at once."""

    def one(prompt: str) -> list[int]:
        answer = ask(http, greedy(prompt))
        assert answer["status"] == 200, answer
        return answer["choices"][0]["token_ids"]

    with client(url) as http, ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))
