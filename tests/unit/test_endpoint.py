"""The routes, without a server: what they refuse, and when they ask the workers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="the routes are vLLM's plugin interface")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm_spac.integration import endpoint
from vllm_spac.integration.endpoint import SpacEndpoint, WorkerCollector


class Engine:
    """Answers as an engine client does."""

    async def collective_rpc(self, method: str, args: tuple = ()) -> list:
        return [{"asked": method, "args": list(args)}]


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    SpacEndpoint().attach_router(app)
    return app


def test_routes_answer_404_without_the_plugin(app: FastAPI) -> None:
    client = TestClient(app)
    for response in (client.get("/spac/stats"), client.post("/spac/budget", json={})):
        assert response.status_code == 404 and "--plugin spac" in response.json()["detail"]


def test_control_is_closed_unless_it_was_opened(app: FastAPI) -> None:
    app.state.spac_client, app.state.spac_control = Engine(), False
    response = TestClient(app).post("/spac/budget", json={"budget": 4})
    assert response.status_code == 403 and "--spac-control" in response.json()["detail"]
    app.state.spac_control = True
    response = TestClient(app).post("/spac/budget", json={"budget": 4})
    assert response.status_code == 200
    assert response.json()["workers"][0]["asked"] == "spac_budget"
    assert TestClient(app).post("/spac/budget", content=b"{").status_code == 400


class Busy(Engine):
    """Counts what it is asked; ``answer`` is a value, an error, or None for an answer that does not come."""

    def __init__(self, answer) -> None:
        self.answer, self.asked = answer, 0

    async def collective_rpc(self, method: str, args: tuple = ()) -> list:
        self.asked += 1
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer]


@pytest.fixture
def scraped(app: FastAPI):
    """(engine, collector, what a scrape of ``/metrics`` shows)."""
    engine = Busy({"hits": 1})
    collector = app.state.spac_collector = WorkerCollector(engine)

    @app.get("/metrics")
    async def metrics() -> list:
        return collector.workers

    return engine, collector, lambda: TestClient(app).get("/metrics").json()


def test_workers_are_asked_by_a_scrape_and_not_in_between(app, scraped) -> None:
    engine, _, scrape = scraped
    for hits in (1, 2):
        engine.answer = {"hits": hits}
        assert scrape() == [{"hits": hits}] and engine.asked == hits
        TestClient(app).get("/health")
    assert engine.asked == 2


@pytest.mark.parametrize(
    ("answer", "says"), [(None, "the workers are busy"), (RuntimeError("a dead engine"), "a dead engine")]
)
def test_workers_that_do_not_answer(scraped, answer, says, monkeypatch, caplog) -> None:
    engine, _, scrape = scraped
    scrape()
    engine.answer = answer
    monkeypatch.setattr(endpoint, "_PATIENCE", 0.01)
    with caplog.at_level("WARNING", "vllm.spac"):
        assert scrape() == [{"hits": 1}], "what they said before stays"
    assert says in caplog.text


def test_a_question_is_not_repeated_while_it_is_open(monkeypatch) -> None:
    monkeypatch.setattr(endpoint, "_PATIENCE", 0.01)
    engine = Busy(None)

    async def ask_twice() -> None:
        collector = WorkerCollector(engine)
        await collector.refresh()
        await collector.refresh()

    asyncio.run(ask_twice())
    assert engine.asked == 1


def test_a_server_without_the_plugin_is_asked_nothing(app: FastAPI) -> None:
    state = SimpleNamespace()
    asyncio.run(SpacEndpoint().init_state(Busy(RuntimeError("asked")), state, SimpleNamespace(additional_config=None)))
    assert not vars(state)
    assert TestClient(app).get("/metrics").status_code == 404
