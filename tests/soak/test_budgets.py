"""What was computed under a budget is not used once the budget is off."""

from __future__ import annotations

import threading

import exchange
import httpx
import pytest
import serving
from exchange import TEXT

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]  # servers start slowly on a busy machine

PROMPTS = [TEXT[40_000 + 1500 * i :][:1100] for i in range(8)]  # several blocks of the KV cache each
BUDGET = {"budget": 8, "when": "all", "coverage": "truncation", "ranking": "router"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = serving.offloaded(tmp_path_factory.mktemp("disk"))
    with serving.started(tmp_path_factory.mktemp("budgets"), "--spac-http", "control", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def expected(stock):
    return exchange.tokens(stock.url, PROMPTS)


def change(server, body: dict) -> None:
    assert httpx.post(f"{server.url}/spac/budget", json=body, timeout=60).status_code == 200


def test_prompts_that_were_cached_under_a_budget(server, expected):
    change(server, BUDGET)
    assert exchange.tokens(server.url, PROMPTS) != expected
    change(server, {})
    assert exchange.tokens(server.url, PROMPTS) == expected


def test_requests_that_were_running_under_a_budget(server, expected, stock):
    """Whatever they answer themselves, they leave no block of the KV cache to others."""
    fresh = [TEXT[60_000 + 1500 * i :][:700] for i in range(6)]
    answers = [exchange.greedy(prompt, 250) for prompt in fresh]
    change(server, BUDGET)
    with exchange.client(server.url) as http:
        threads = [threading.Thread(target=exchange.ask, args=(http, each)) for each in answers]
        for thread in threads:
            thread.start()
        serving.wait_until(lambda: server.gauge("num_requests_running") == len(fresh), 60, "they run", 0.01)
        change(server, {})
        for thread in threads:
            thread.join()
    assert exchange.tokens(server.url, fresh) == exchange.tokens(stock.url, fresh)
    serving.settle(server)
