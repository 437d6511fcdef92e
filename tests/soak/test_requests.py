"""Each kind of request to stock vLLM and to a server with a quarter of its experts in slots: the same answers.

Both get the same requests in the same order, one by one, so that batches and the contents of prefix caches are equal;
then a round of all at once.
"""

from __future__ import annotations

import urllib.error
from concurrent.futures import ThreadPoolExecutor

import exchange
import pytest
import serving
from exchange import PROMPTS, TEXT, Request, ask, chat, complete

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]  # servers start slowly on a busy machine

START = "def add_argument(self, *args, **kwargs):\n"
SEEDED = {"temperature": 0.8, "seed": 7}
SCHEMA = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}
PREFIX = TEXT[9000:9900]  # several blocks of the KV cache

KINDS = {
    "greedy completion": [complete(prompt, max_tokens=32) for prompt in PROMPTS[::3]],
    "chat": [chat("import os", "import sys", "def main():"), chat(START, max_tokens=40)],
    "streamed completion": [complete(START, stream=True, stream_options={"include_usage": True})],
    "streamed chat": [chat(START, stream=True, stream_options={"include_usage": True})],
    "several choices": [complete(START, n=3, **SEEDED), chat(START, n=2, **SEEDED)],
    "several streamed choices": [complete(START, n=3, stream=True, **SEEDED)],
    "seeded sampling": [complete(START, **SEEDED), complete(START, **SEEDED | {"seed": 8, "temperature": 1.3})],
    "top-p, top-k, min-p": [
        complete(START, **SEEDED, **knob) for knob in ({"top_p": 0.7}, {"top_k": 9}, {"min_p": 0.1})
    ],
    "logprobs": [complete(START, logprobs=5), chat(START, logprobs=True, top_logprobs=3)],
    "logprobs of prompts": [complete(TEXT[5000:5600], prompt_logprobs=3, max_tokens=2)],
    "echo": [complete(START, echo=True), complete(START, echo=True, logprobs=1, max_tokens=2)],
    "stop strings": [complete(START, stop=["self", "\n\n"], max_tokens=64)]
    + [complete(START, stop=["self"], include_stop_str_in_output=True, max_tokens=64)],
    "stop tokens": [complete(START, stop_token_ids=list(range(200, 400)), max_tokens=64)],
    "one token": [complete(prompt, max_tokens=1) for prompt in PROMPTS[:4]],
    "several chunks of a prompt": [complete(TEXT[20000:21200], max_tokens=8)],
    "as long as can be": [complete([5 + i % 900 for i in range(504)], max_tokens=8)],
    "a prompt of one token": [complete([77], max_tokens=8)],
    "repeated prefixes": [complete(PREFIX + tail) for tail in ("", "", "\nclass", "\n    def", "")],
    "several prompts": [complete(PROMPTS[2:6]), complete([[9, 8, 7], [6, 5] * 40])],
    "at least so many tokens": [complete(START, min_tokens=20, max_tokens=30, stop_token_ids=list(range(200, 400)))],
    "logit bias": [complete(START, logit_bias={"40": 6, "50": -100, "332": -100})],
    "penalties": [complete(START, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4)],
    "allowed and bad words": [complete(START, allowed_token_ids=[30, 31, 32, 33]), complete(START, bad_words=["self"])],
    "beam search": [Request({"prompt": START, "use_beam_search": True, "n": 3})],
    "structured output": [
        complete(START, structured_outputs={"regex": "[0-9a-f]{6}"}),
        complete(START, structured_outputs={"choice": ["yes", "no", "perhaps"]}),
        chat(START, response_format={"type": "json_schema", "json_schema": {"name": "size", "schema": SCHEMA}}),
    ],
    "what is refused": [
        complete(""),
        complete([]),
        complete([5] * 600),
        complete([999999]),
        complete(START, max_tokens=-1),
        complete(START, temperature=-1),
        complete(START, n=0),
        complete(START, logprobs=1000),
        complete(START, structured_outputs={"regex": "("}),
        complete(START, stream_options={"include_usage": True}),
        complete(START, model="another"),
        chat(),
        Request({"input": START}, "/v1/embeddings"),
        Request({}, "/v1/nothing"),
    ],
}
# What stock's own answer depends on the number of drafts for, which the guard changes: how many numbers a generator has
# given; and vLLM keeps stop tokens from the token behind accepted drafts though ``min_tokens`` were reached among them.
BY_DRAFTS = {"several choices", "several streamed choices", "seeded sampling", "top-p, top-k, min-p"}
BY_DRAFTS |= {"at least so many tokens"}
# A row's share of a GEMM of another shape may be rounded otherwise, and the guard changes the shape of verify steps.
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def plain(stock, tmp_path_factory):
    """(stock, ours) without speculation."""
    with serving.started(tmp_path_factory.mktemp("plain"), *serving.offloaded(tmp_path_factory.mktemp("disk"))) as ours:
        yield stock, ours


@pytest.fixture(scope="module")
def speculating(tmp_path_factory):
    """(stock, ours), both with ngram drafts, ours with a guard that shortens them."""
    stocks, logs, disk = (tmp_path_factory.mktemp(name) for name in ("stock-ngram", "ngram", "disk-ngram"))
    spac = serving.started(logs, *serving.NGRAM, *serving.offloaded(disk))
    with serving.started(stocks, *serving.NGRAM) as stock, spac as ours:
        yield stock, ours


def same(pair, requests: list[Request]) -> list[dict]:
    """Ask both; returns stock's answers, which ours have to be."""
    said = []
    for request in requests:
        expected, found = (_ask(server, request) for server in pair)
        assert found == _close(expected), request.json
        said.append(expected)
    return said


def _ask(server, request: Request) -> dict:
    with exchange.client(server.url) as http:
        return ask(http, request)


def _close(value):
    """``value`` with each number that was calculated replaced by one that equals all within ``ROUNDING``."""
    if isinstance(value, dict):
        return {key: _close(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_close(item) for item in value]
    return pytest.approx(value, abs=ROUNDING) if isinstance(value, float) else value


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind(kind, plain):
    said = same(plain, KINDS[kind])
    for answer in said:
        assert (answer["status"] >= 400) == (kind == "what is refused"), answer


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in BY_DRAFTS])
def test_each_kind_with_drafts(kind, speculating):
    same(speculating, KINDS[kind])


def test_stock_has_none_of_our_routes(plain):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        plain[0].get("/spac/stats")


@pytest.mark.parametrize("servers", ["plain", "speculating"])
def test_all_at_once(servers, request):
    pair = request.getfixturevalue(servers)
    requests = [r for kind, requests in KINDS.items() if kind not in BY_DRAFTS for r in requests]
    rounds = []
    for server in pair:
        with exchange.client(server.url) as http, ThreadPoolExecutor(len(requests)) as pool:
            rounds.append(list(pool.map(lambda each, http=http: ask(http, each), requests * 2)))
    stock, ours = rounds
    for request_, expected, found in zip(requests * 2, stock, ours, strict=True):
        assert found == _close(expected), request_.json
    stats = pair[1].stats()
    assert stats["misses"] > stats["slots"], "nothing lost its slot, so nothing was compared"
    if servers == "speculating":
        assert stats["steps"]["verify"] > 0 and len(stats["guard"]["steps"]) > 1
