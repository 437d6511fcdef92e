"""The routes, without a server: what they refuse, and when they call the workers."""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="the routes are vLLM's plugin interface")

from effort import examples
from fastapi import FastAPI, testclient
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

from vllm_spac.integration.serving import endpoint
from vllm_spac.integration.serving.endpoint import SpacEndpoint, WorkerCollector
from vllm_spac.integration.serving.live_page import LiveFeed
from vllm_spac.integration.serving.worker_extension import SpacWorker
from vllm_spac.methods.moe_spec.control import BudgetControl, BudgetedLayer
from vllm_spac.methods.moe_spec.settings import BudgetSettings, RoutingRule

KEYS = st.sampled_from([*BudgetSettings.model_fields, "layers.0"]) | st.text(max_size=5)
VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["router", "selected", "truncation", "substitution", "verify", "decode", "all"])
)


class TestClient(testclient.TestClient):
    """On this machine, which asks the server by its address."""

    __test__ = False

    def __init__(self, app: FastAPI, host: str = "127.0.0.1:8000", peer: str = "127.0.0.1") -> None:
        super().__init__(app, base_url=f"http://{host}", client=(peer, 50_000))


AS_JSON = {"Content-Type": "application/json"}


class Engine:
    """Answers as an engine client does, but has no worker that could be looked at."""

    resets: tuple[dict, ...] = ()

    async def reset_prefix_cache(self, **options: bool) -> bool:
        self.resets += (options,)
        return True

    async def collective_rpc(self, method: str, args: tuple = ()) -> list:
        if method == "spac_watch":
            raise RuntimeError("nobody is there")
        return [{"settings": {"asked": method, "args": list(args)}, "mode": "exact"}]


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    SpacEndpoint().attach_router(app)
    return app


def test_routes_answer_404_without_the_plugin(app: FastAPI) -> None:
    client = TestClient(app)
    asked = [client.get(path) for path in ("/spac/stats", "/spac/", "/spac/events")]
    for response in (*asked, client.post("/spac/budget", json={})):
        assert response.status_code == 404 and "--plugin spac" in response.json()["detail"]


def test_control_is_closed_unless_it_was_opened(app: FastAPI) -> None:
    app.state.spac_client, app.state.spac_control, app.state.spac_rankings = Engine(), False, {"selected"}
    response = TestClient(app).post("/spac/budget", json={"budget": 4})
    assert response.status_code == 403 and "--spac-http control" in response.json()["detail"]
    app.state.spac_control = True
    response = TestClient(app).post("/spac/budget", json={"budget": 4})
    assert response.status_code == 200
    assert response.json()["workers"][0]["asked"] == "spac_try_budget" and response.json()["mode"] == "exact"
    assert TestClient(app).post("/spac/budget", content=b"{", headers=AS_JSON).status_code == 400


def test_a_change_of_budget_empties_the_prefix_cache(app: FastAPI) -> None:
    """Also of requests that run; a change that is refused does not."""
    app.state.spac_client, app.state.spac_control, app.state.spac_rankings = engine, *_ = Engine(), True, {"selected"}
    assert TestClient(app).post("/spac/budget", json={"budget": 4}).status_code == 200
    assert engine.resets == ({"reset_running_requests": True, "reset_connector": True},)
    assert TestClient(app).post("/spac/budget", json={"budgets": 4}).status_code == 400
    assert len(engine.resets) == 1


class Stuck(Engine):
    """Changes the budget and cannot empty its prefix cache."""

    def __init__(self, answer: bool | Exception) -> None:
        self.answer = answer

    async def reset_prefix_cache(self, **options: bool) -> bool:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", [False, RuntimeError("remote keys"), ValueError("remote keys")])
def test_a_prefix_cache_that_cannot_be_emptied_is_a_failure_of_the_server(app: FastAPI, answer) -> None:
    """Not of the request: the budget is in force by then."""
    app.state.spac_client, app.state.spac_control, app.state.spac_rankings = Stuck(answer), True, {"selected"}
    response = TestClient(app).post("/spac/budget", json={"budget": 4})
    said = response.json()["detail"]
    assert response.status_code == 500 and "the budget is changed" in said
    assert ("remote keys" in said) is isinstance(answer, Exception)


NAMES = {
    "evil.example:8000": 403,
    "evil.example": 403,
    "": 403,
    "localhost:8000": 200,
    "[::1]:8000": 200,
    "10.0.0.7": 200,
}


@pytest.mark.parametrize(("host", "status"), NAMES.items())
def test_a_page_whose_name_comes_to_point_here_has_the_origin_and_not_the_name(app: FastAPI, host, status) -> None:
    """DNS rebinding: to a browser, the page and this server are one site."""
    app.state.spac_client, app.state.spac_control, app.state.spac_rankings = Engine(), True, {"selected"}
    client, headers = TestClient(app), {"Host": host, "Origin": f"http://{host}"}
    assert client.get("/spac/stats", headers=headers).status_code in (status, 500)
    assert client.post("/spac/budget", json={"budget": 4}, headers=headers).status_code == status
    app.state.spac_host = "evil.example"
    assert client.post("/spac/budget", json={"budget": 4}, headers=headers).status_code == (200 if host else 403)


def test_without_a_key_only_this_machine_changes_something(app: FastAPI) -> None:
    app.state.spac_client, app.state.spac_control, app.state.spac_rankings = Engine(), True, {"selected"}
    response = TestClient(app, peer="10.0.0.9").post("/spac/budget", json={"budget": 4})
    assert response.status_code == 403 and "--api-key" in response.json()["detail"]


# --- who may ask ------------------------------------------------------------------------------------------------------

ROUTES = [("GET", "/spac/stats"), ("POST", "/spac/budget"), ("GET", "/spac/events"), ("GET", "/spac/")]


def guarded(monkeypatch, flag: list[str] | None, variable: str | None) -> TestClient:
    """A server with vLLM's own middleware, built in vLLM's order."""
    app = FastAPI()
    SpacEndpoint().attach_router(app)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_API_KEY", variable)
    cors = {"allowed_origins": ["*"], "allowed_methods": ["*"], "allowed_headers": ["*"], "allow_credentials": False}
    args = SimpleNamespace(**cors, middleware=[], api_key=flag, enable_request_id_headers=False)
    init_entrypoints_middleware(args, app, ())
    app.get("/v1/models")(lambda: {})
    app.state.spac_client, app.state.spac_control, app.state.spac_rankings = Engine(), True, {"selected"}
    app.state.spac_feed = LiveFeed(Engine(), {})
    return TestClient(app)


@pytest.mark.parametrize(
    ("flag", "variable", "valid"),
    [
        (["one"], None, ["one"]),
        (["one", "two"], None, ["one", "two"]),
        (None, "three", ["three"]),
        (["one"], "three", ["one"]),
        (["", "one"], None, ["one"]),
    ],
    ids=str,
)
def test_a_key_covers_all_our_routes_as_it_covers_vllms(monkeypatch, flag, variable, valid) -> None:
    client = guarded(monkeypatch, flag, variable)
    headers = ["", "Bearer", "Bearer ", "Bearer wrong", "Basic one", "one", "Bearer onetwo", "Bearer one two"]
    headers += [f"{scheme} {key}" for key in ("one", "two", "three") for scheme in ("Bearer", "bearer")]
    for header in headers:
        expected = 200 if header.lower() in [f"bearer {key}" for key in valid] else 401
        for method, path in [*ROUTES, ("GET", "/v1/models")]:
            answer = client.request(method, path, json={}, headers={"Authorization": header})
            assert answer.status_code == expected, (header, path)
    for method, path in ROUTES:
        refusal = client.request(method, path, content=b"x" * 10**6)
        assert refusal.status_code == 401 and "API key" in refusal.text


def test_each_of_our_routes_is_guarded(app: FastAPI) -> None:
    ours = [route for route in app.routes if getattr(route, "path", "").startswith("/spac")]
    assert {(method, route.path) for route in ours for method in route.methods} == set(ROUTES)
    guarded = [route for route in ours if route.path != "/spac/"]  # which has no data, and asks for the key
    assert all(endpoint._authenticated in [d.call for d in route.dependant.dependencies] for route in guarded)


# --- from where -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        (None, "box:8000", 200),  # programs
        ("http://box:8000", "box:8000", 200),
        ("https://Box", "box", 200),  # a proxy that ends TLS
        ("http://[::1]:8000", "[::1]:8000", 200),
        ("http://evil.test", "box:8000", 403),
        ("http://box:9000", "box:8000", 403),
        ("http://box", "box:8000", 403),
        ("http://box:8000.evil.test", "box:8000", 403),
        ("http://evil.test/box:8000", "box:8000", 403),
        ("http://[", "box:8000", 403),
        ("null", "box:8000", 403),
        ("null", "", 403),
        ("", "box:8000", 403),
        ("file://", "", 403),
        ("http://\x1b[31m", "box:8000", 403),
    ],
)
def test_only_the_servers_own_page_may_change_something(monkeypatch, origin, host, status) -> None:
    """With vLLM's default CORS, which lets any site send JSON."""
    client = guarded(monkeypatch, None, None)
    client.app.state.spac_host = "box"
    headers = {"Host": host} | ({} if origin is None else {"Origin": origin})
    answer = client.post("/spac/budget", json={"budget": 4}, headers=headers)
    assert answer.status_code == status
    if status == 403 and host:
        said = answer.json()["detail"]
        assert "only this server's own page" in said and "Host" in said and said.isprintable()
    if host:
        assert client.get("/spac/stats", headers=headers).status_code == 200, "reading is as vLLM's own routes have it"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        (None, 415),
        ("", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("text/plain; application/json", 415),
        ("application/jsonp", 415),
    ],
)
def test_only_json_changes_something(monkeypatch, kind, status) -> None:
    """What a form, or a page that asks nobody first, may send is one of the others."""
    client = guarded(monkeypatch, None, None)
    headers = {} if kind is None else {"Content-Type": kind}
    answer = client.post("/spac/budget", content=b'{"budget": 4}', headers=headers)
    assert answer.status_code == status
    assert status == 200 or "-H 'Content-Type: application/json'" in answer.json()["detail"]


def test_every_route_that_changes_something_is_for_this_servers_page_alone(app: FastAPI) -> None:
    changing = [route for route in app.routes if set(getattr(route, "methods", None) or ()) - {"GET", "HEAD"}]
    ours = [route for route in changing if route.path.startswith("/spac")]
    assert len(ours) == 1
    for route in ours:
        assert {endpoint._from_here, endpoint._is_json} <= {d.call for d in route.dependant.dependencies}


# --- what they may send -----------------------------------------------------------------------------------------------

LAYER = BudgetedLayer("layers.0", 16, 4, RoutingRule())


class Worker(SpacWorker):
    """One with a budget and no model."""

    def __init__(self) -> None:
        budget = BudgetControl([LAYER])
        self.runtime = SimpleNamespace(budget=budget, rerouter=SimpleNamespace(update_budget=budget.update))

    def _spac_experts(self):
        return SimpleNamespace(runtime=self.runtime)


class Served:
    """An engine client whose worker raises nothing: what it raises, vLLM logs with a traceback."""

    def __init__(self) -> None:
        self.worker = Worker()

    async def reset_prefix_cache(self, **options: bool) -> bool:
        return True

    async def collective_rpc(self, method: str, args: tuple = ()) -> list:
        encoded = json.dumps([method, *args], ensure_ascii=False).encode()
        method, *args = json.loads(encoded)
        return [getattr(self.worker, method)(*args)]


@pytest.fixture(scope="module")
def open_server() -> TestClient:
    app = FastAPI()
    SpacEndpoint().attach_router(app)
    app.state.spac_client, app.state.spac_control = Served(), True
    app.state.spac_rankings = {"selected", "outside_ranking:Ours"}
    return TestClient(app)


def refusal(server: TestClient, body: bytes) -> tuple[int, str]:
    before = server.app.state.spac_client.worker.runtime.budget.settings
    answer = server.post("/spac/budget", content=body, headers=AS_JSON)
    assert server.app.state.spac_client.worker.runtime.budget.settings is before, "a refused change changes nothing"
    return answer.status_code, answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b'{"budget": 8, "ranking": "\xff"}', "not JSON"),
        (b"{}\0", "not JSON"),
        (b"[" * 60000, "nested too deeply"),
        (b'{"budget": ' * 5000, "nested too deeply"),
        (b'{"mass": NaN}', "NaN"),
        (b'{"mass": -Infinity}', "Infinity"),
        (b'{"mass": 1e999}', "mass: Input should be a finite number"),
        (b'{"mass": 2}', "above 0 and at most 1"),
        (b'{"mass": 0}', "above 0 and at most 1"),
        (b'{"budget": 7.5}', "budget"),
        (b'{"budget": true}', "use a number"),
        (b'{"budget": "many"}', "budget"),
        (b'{"budget": -1}', "greater than or equal to 0"),
        (b'{"budget": 0}', "budget"),
        (b'{"budget": 3}', "every token 4 experts"),
        (b'{"budget": 17}', "16 experts"),
        (b'{"budget": 1' + b"0" * 30 + b"}", "less than or equal to 1048576"),
        (b'{"budget": 1' + b"0" * 5000 + b"}", "not JSON"),
        (b'{"budget": 8, "mass": 0.5}', "use one of them"),
        (b'{"budget": 8, "votes": "all"}', "'uniform' or 'path'"),
        (b'{"budget": 8, "votes": "path", "votes_alpha": 2}', "votes_alpha: Input should be less than or equal to 1"),
        (b'{"budget": 8, "votes_alpha": 0.1}', "give votes=path as well"),
        (b'{"budget": 8, "best": true}', "best: Extra inputs are not permitted"),
        (b'{"budget": {"layers.0": 8}}', "budget: Input should be a valid integer"),
        (b"{" + b",".join(b'"%d": "x"' % i for i in range(3000)) + b"}", "and 2997 more"),
        (b'{"window": -1}', "window"),
        (b'{"window": 1e30}', "window"),
        (b'{"when": "never"}', "when"),
        (b'{"' + b"k" * 60000 + b'": 1}', "characters"),
        (b'{"\\u001b[31m\\n": 1}', "\\x1b[31m\\n"),
        (b'{"budget": 8, "ranking": "\\ud800"}', "not JSON"),
        (b'{"budget": 8, "ranking": "nosuch"}', "this server has outside_ranking:Ours, selected"),
        (b'{"budget": 8, "ranking": ["router"]}', "ranking"),
        (b"8", "mapping"),
        (b"null", "mapping"),
        (b"[]", "mapping"),
        (b'[["budget", 8]]', "mapping"),
        (b'"' + b"x" * 60000 + b'"', "mapping"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_no_budget_is_refused_in_one_line(open_server, body, named) -> None:
    status, detail = refusal(open_server, body)
    assert status == 400 and named in detail
    assert detail.isprintable() and len(detail) < 1000


def test_a_large_body_is_refused_before_it_is_read(open_server) -> None:
    sent = 0

    def parts():
        nonlocal sent
        for _ in range(100):
            sent += 1 << 16
            yield b" " * (1 << 16)

    for body in (b"{}" + b" " * (1 << 16), parts()):
        assert refusal(open_server, body)[0] == 413


def test_a_request_imports_nothing(open_server, tmp_path, monkeypatch) -> None:
    (tmp_path / "outside_ranking.py").write_text("import sys\nsys.spac_was_imported = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    status, detail = refusal(open_server, b'{"budget": 8, "ranking": "outside_ranking:Theirs"}')
    assert status == 400 and "this server has" in detail
    assert not hasattr(sys, "spac_was_imported") and "outside_ranking" not in sys.modules


@given(st.binary(max_size=64) | st.recursive(VALUES, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner)))
@settings(max_examples=examples(200), deadline=None)
def test_any_body_is_a_budget_or_one_line(open_server, body) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = open_server.post("/spac/budget", content=content, headers=AS_JSON)
    if answer.status_code != 200:
        assert answer.status_code == 400 and answer.json()["detail"].isprintable()
    open_server.app.state.spac_client.worker.spac_budget({})


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


@pytest.mark.parametrize("path", ["/metrics", "/spac/stats"])
def test_what_expert_workers_count_is_waited_for_here_and_not_in_the_engine(app, scraped, path: str) -> None:
    """Which is asked again until they have answered it."""
    engine, _, _ = scraped
    ages = [9.0, 8.0, 0.0, 7.0]

    async def call(method: str, args: tuple = ()) -> list:
        return [{"expert_workers": {"worker-0": {"present": 1, "counts_age_seconds": ages.pop(0)}}}]

    engine.collective_rpc, app.state.spac_client = call, engine
    found = TestClient(app).get(path).json()
    workers = found["workers"] if path == "/spac/stats" else found
    assert workers[0]["expert_workers"]["worker-0"]["counts_age_seconds"] == 0.0 and ages == [7.0]


@pytest.mark.parametrize(
    ("answer", "says"), [(None, "the workers have been busy"), (RuntimeError("a dead engine"), "a dead engine")]
)
def test_workers_that_do_not_answer(scraped, answer, says, monkeypatch, caplog) -> None:
    engine, _, scrape = scraped
    scrape()
    engine.answer = answer
    monkeypatch.setattr(endpoint, "_PATIENCE", 0.01)
    with caplog.at_level("WARNING", "vllm.spac"):
        assert scrape() == [{"hits": 1}], "what they said before stays"
    assert says in caplog.text


@pytest.mark.parametrize(("divided", "hits", "loads"), [("tensors", [5], [9, 9]), ("experts", [3, 5], [9, 9])])
def test_the_sum_over_workers_is_the_engine_s(divided: str, hits: list[int], loads: list[int]) -> None:
    """Two ranks: what both count alike is exported once, with the label of the first."""
    collector = WorkerCollector(Busy(None))
    facts = dict.fromkeys([*endpoint._GAUGES, *endpoint._COUNTERS], 1) | {"divided": divided, "mode": "exact"}
    facts |= {"budget": dict.fromkeys(endpoint._BUDGET, 2), "steps": {"decode": 7}, "stopped": {"trace": "no room"}}
    collector.workers = [facts | {"hits": 3, "bytes": {"disk": 9}}, facts | {"hits": 5, "bytes": {"disk": 9}}]
    found = {family.name: {s.labels["worker"]: s.value for s in family.samples} for family in collector.collect()}
    assert found["vllm:spac_hits"] == {str(n): value for n, value in enumerate(hits)}
    assert found["vllm:spac_bytes"] == {str(n): value for n, value in enumerate(loads)}
    assert found["vllm:spac_steps"] == {"0": 7} and found["vllm:spac_budget_rows"] == {"0": 2}
    assert found["vllm:spac_slot_bytes"] == {"0": 1, "1": 1} and found["vllm:spac_lossy"] == {"0": 0}
    assert found["vllm:spac_recording_stopped"] == {"0": 1}, "only the first rank records"


def test_a_question_is_not_repeated_while_it_is_open(monkeypatch) -> None:
    monkeypatch.setattr(endpoint, "_PATIENCE", 0.01)
    engine = Busy(None)

    async def ask_twice() -> None:
        collector = WorkerCollector(engine)
        await collector.update()
        await collector.update()

    asyncio.run(ask_twice())
    assert engine.asked == 1


def test_a_server_without_the_plugin_is_asked_nothing(app: FastAPI) -> None:
    state = SimpleNamespace()
    asyncio.run(SpacEndpoint().init_state(Busy(RuntimeError("asked")), state, SimpleNamespace(additional_config=None)))
    assert not vars(state)
    assert TestClient(app).get("/metrics").status_code == 404
