"""The routes, without a server: what they refuse."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="the routes are vLLM's plugin interface")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm_spac.integration.endpoint import SpacEndpoint


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
