"""The live page's stream: workers are asked only while somebody looks; what a worker reports of its experts."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="the routes are vLLM's plugin interface")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm_spac.cache.residency import Residency
from vllm_spac.components import build
from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.integration.serving import live_page
from vllm_spac.integration.serving.endpoint import SpacEndpoint
from vllm_spac.integration.serving.live_page import LiveFeed
from vllm_spac.integration.serving.live_view import EVICTED, HOST, LOADED, ON_CPU, SLOT, STORE, LiveView
from vllm_spac.integration.serving.worker_extension import SpacWorker
from vllm_spac.methods.moe_spec.control import BudgetControl, BudgetedLayer
from vllm_spac.methods.moe_spec.settings import RoutingRule
from vllm_spac.recording.timeline_file import TimelineFacts
from vllm_spac.recording.timeline_recorder import Kind, Timeline
from vllm_spac.runtime import Runtime


class Workers:
    """An engine client that counts what it is asked; ``gate`` holds answers back."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def collective_rpc(self, method: str, args: tuple = ()) -> list:
        self.asked.append(method)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return [{"stats": {"hits": len(self.asked), "misses": 0}}]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "SECONDS", 0.01)


async def until(holds) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.001)


def parsed(event: str) -> tuple[str, dict]:
    name, content = re.fullmatch(r"event: (\w+)\ndata: (.*)\n\n", event).groups()
    return name, json.loads(content)


async def reports(feed: LiveFeed, count: int, ended=lambda: False) -> list[tuple[str, dict]]:
    found, stream = [], feed.events(ended)
    async for event in stream:
        found.append(parsed(event))
        if len(found) == count:
            break
    await stream.aclose()
    return found


def test_workers_are_asked_only_while_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "read_requests", lambda: {"running": 2.0})

    async def look() -> None:
        workers = Workers()
        feed = LiveFeed(workers, {"model": "toy"})
        await asyncio.sleep(0.05)
        assert workers.asked == [], "nobody has looked yet"
        found, shown = await reports(feed, 3), {"hit rate": "100.0%", "hits": "1", "misses": "0"}
        assert [name for name, _ in found] == ["report"] * 3
        assert all(found[number][1].pop("at") < found[number + 1][1]["at"] for number in range(2))
        assert found[0][1] == {
            "model": "toy",
            "seconds": 0.01,
            "requests": {"running": 2.0},
            "workers": [{"stats": {"hits": 1, "misses": 0}, "shown": shown}],
        }
        await until(lambda: workers.asked[-1] == "spac_stop_watch")
        before = len(workers.asked)
        await asyncio.sleep(0.1)
        assert len(workers.asked) == before, "nobody looks any more"
        assert (await reports(feed, 1))[0][0] == "report", "and somebody may look again"

    asyncio.run(look())


def test_many_who_look_cost_no_more_questions_than_one() -> None:
    async def look() -> None:
        workers = Workers()
        feed = LiveFeed(workers, {})
        found = await asyncio.gather(*(reports(feed, 4) for _ in range(5)))
        assert len({json.dumps(each) for each in found}) == 1, "all see the same"
        assert workers.asked.count("spac_watch") < 8

    asyncio.run(look())


def test_somebody_who_comes_while_the_workers_forget_is_shown_something() -> None:
    async def look() -> None:
        workers = Workers()
        feed = LiveFeed(workers, {})
        await reports(feed, 1)
        await until(lambda: workers.asked[-1] == "spac_watch")
        workers.gate.clear()
        await until(lambda: workers.asked[-1] == "spac_stop_watch")  # and it does not answer yet
        late = asyncio.create_task(reports(feed, 2))
        await asyncio.sleep(0.005)
        workers.gate.set()
        assert {name for name, _ in await late} <= {"report", "busy"}
        await until(lambda: workers.asked.count("spac_watch") > 1)

    asyncio.run(look())


def test_busy_workers_and_a_dead_engine_are_told() -> None:
    async def look() -> None:
        workers = Workers()
        feed = LiveFeed(workers, {})
        workers.gate.clear()
        assert (await reports(feed, 2)) == [("busy", {})] * 2
        workers.error = RuntimeError("the engine is dead")
        workers.gate.set()
        found = await reports(feed, 100)
        assert found[-1] == ("failed", {"reason": "the engine is dead"}), "and the stream ends"
        assert {name for name, _ in found[:-1]} <= {"busy"}

    asyncio.run(look())


def test_a_reader_who_is_slow_gets_the_newest_report() -> None:
    async def look() -> None:
        workers = Workers()
        stream = LiveFeed(workers, {}).events(lambda: False)
        await anext(stream)
        await until(lambda: workers.asked.count("spac_watch") > 5)
        hits = parsed(await anext(stream))[1]["workers"][0]["stats"]["hits"]
        assert hits > 3
        await stream.aclose()

    asyncio.run(look())


def test_streams_end_when_the_server_stops() -> None:
    async def look() -> None:
        ending = []
        stream = LiveFeed(Workers(), {}).events(lambda: bool(ending))
        await anext(stream)
        ending.append(True)
        assert [event async for event in stream] == []

    asyncio.run(look())


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_loads_nothing_from_elsewhere() -> None:
    app = FastAPI()
    SpacEndpoint().attach_router(app)
    app.state.spac_client = app.state.spac_feed = object()
    answer = TestClient(app).get("/spac/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert TestClient(app).get("/spac").url.path == "/spac/"
    assert "page.js */" not in answer.text and "page.css */" not in answer.text
    assert re.findall(r"https?://|//cdn|@import|<link(?! rel=\"icon\" href=\"data:)|src=", answer.text) == []
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert len(answer.content) < 1 << 16


def test_a_page_that_was_not_asked_for_is_closed() -> None:
    app = FastAPI()
    SpacEndpoint().attach_router(app)
    app.state.spac_client = object()
    for path in ("/spac/", "/spac/events"):
        answer = TestClient(app, base_url="http://localhost").get(path)
        assert answer.status_code == 404 and "--spac-http page" in answer.json()["detail"]


ANY = {"127.0.0.1", "::1", "10.0.0.7", "fe80::1%eth0", "gone"}


@pytest.mark.parametrize(
    ("http", "host", "open_to"),
    [
        (None, None, {"127.0.0.1", "::1"}),
        (None, "0.0.0.0", {"127.0.0.1", "::1"}),
        (None, "127.0.0.1", ANY),
        (None, "localhost", ANY),
        ("page", None, ANY),
        ("control", None, set()),
    ],
)
def test_the_page_is_open_to_this_machine_and_by_the_knob_to_others(http, host, open_to, monkeypatch, caplog) -> None:
    monkeypatch.setattr("vllm_spac.integration.serving.endpoint.REGISTRY.register", lambda collector: None)
    app = FastAPI()
    SpacEndpoint().attach_router(app)
    args = SimpleNamespace(additional_config={"spac": {"http": http}}, model="toy", host=host)
    with caplog.at_level("INFO", "vllm.spac"):
        asyncio.run(SpacEndpoint().init_state(Workers(), app.state, args))
    assert ("GET /spac/ is open to this machine" in caplog.text) is (http is None)
    assert app.state.spac_control is (http == "control"), "what changes something is off until it is named"
    app.state.server = SimpleNamespace(should_exit=True)  # streams end at once
    for peer in sorted(ANY):
        client = TestClient(app, base_url="http://127.0.0.1:8000", client=(peer, 50_000))
        for path in ("/spac/", "/spac/events"):
            status = client.get(path).status_code
            assert status == (200 if peer in open_to else 404 if http == "control" else 403), (peer, path)


def test_a_page_for_this_machine_is_not_for_another_sites_name() -> None:
    """DNS rebinding: the browser that asks is on this machine."""
    app = FastAPI()
    SpacEndpoint().attach_router(app)
    app.state.spac_client = app.state.spac_feed = object()
    app.state.spac_page_here = True
    client = TestClient(app, base_url="http://evil.example:8000", client=("127.0.0.1", 50_000))
    assert client.get("/spac/events").status_code == 403


# -- what a worker reports --------------------------------------------------------------------------------------------

KEYS, SLOTS = 6, 3


class Execution:
    """Experts without tensors: the parts that the live view looks at."""

    def __init__(self, persistent: bool = True, rows: list[int] | None = None) -> None:
        self.shape = SimpleNamespace(total=KEYS, layers=("a", "b"), experts=3)
        self.residency = Residency(KEYS, SLOTS, build("policies", "lru"))
        self.store = SimpleNamespace(persistent=persistent)
        tier = SimpleNamespace(row_of=np.array([-1] * KEYS if rows is None else rows))
        self.host = None if rows is None else SimpleNamespace(tier=tier)
        self.queued, self.watching = 2, None

    def watch(self, timeline, first) -> None:
        self.watching = timeline

    def end_forward(self) -> None:
        pass

    def begin_step(self, step) -> None:
        pass

    def close(self) -> None:
        pass

    def load(self, *keys: int) -> None:
        placement = self.residency.prepare(keys)
        for key, _ in placement.loads:
            self.residency.finish_load(key)
        self.residency.release(keys)


def viewed(execution: Execution, saved=None) -> tuple[SimpleNamespace, LiveView]:
    layers = [BudgetedLayer(name, 3, 2, RoutingRule()) for name in execution.shape.layers]
    budget = BudgetControl(layers)
    runtime = Runtime([execution], budget, saved=saved)
    if saved is not None:
        runtime.watch(saved.timeline)
    experts = SimpleNamespace(
        runtime=runtime,
        serving=SimpleNamespace(
            runtime=runtime, budget=budget, timeline_facts=TimelineFacts("toy", "disk", ("a", "b"), (3, 3))
        ),
        stats=lambda: {"hits": 1, "misses": 1},
        vllm_config=SimpleNamespace(speculative_config=None),
    )
    return experts, LiveView(experts)


def codes(view: LiveView) -> list[int]:
    return list(base64.b64decode(view.report()["experts"]["codes"]))


def test_tiers_and_what_changed_since_the_last_report() -> None:
    execution = Execution(rows=[-1, -1, -1, 0, 1, -1])
    execution.load(0, 1, 3)
    _, view = viewed(execution)
    assert codes(view) == [SLOT, SLOT, STORE, SLOT, HOST, STORE], "a slot counts before host memory"
    execution.load(5)
    execution.residency.activity.computed[4] = True
    assert codes(view) == [STORE | EVICTED, SLOT, STORE, SLOT, HOST | ON_CPU, SLOT | LOADED]
    assert codes(view) == [STORE, SLOT, STORE, SLOT, HOST, SLOT]


def test_heat_grows_with_use_and_fades() -> None:
    execution = Execution()
    _, view = viewed(execution)
    for _ in range(5):
        execution.residency.observe(np.array([3, 0, -1, -1, -1, -1]))
    execution.residency.observe(np.array([0, 1, -1, -1, -1, -1]))
    heat = list(base64.b64decode(view.report()["experts"]["heat"]))
    assert heat[0] == 255 and 0 < heat[1] < 255 and heat[2:] == [0] * 4
    view.close()
    assert execution.residency.activity is None
    execution.residency.observe(np.zeros(KEYS))


def test_a_report_is_plain_and_small() -> None:
    execution = Execution()
    experts, view = viewed(execution)
    runtime = experts.runtime
    for kind, tokens in ((RowKind.PREFILL, [1]), (RowKind.DECODE, [1]), (RowKind.DECODE, [1])):
        runtime.begin_step(Step((RequestRows(0, 1, kind),)))
        runtime.end_forward()
        runtime.end_step(tokens)
    report = json.loads(json.dumps(view.report(), allow_nan=False))
    assert report["time"]["steps"] == report["time"]["tokens"] == 2
    assert report["time"]["parts"]["rest of the forward"] > 0
    assert report["queued"] == 2 and report["drafts"] is False and report["experts"]["layers"] == [3, 3]
    assert report["budget"]["least"] == 2 and report["budget"]["settings"]["when"] == "verify"


def test_looking_away_ends_all_recording() -> None:
    execution = Execution()
    experts, _ = viewed(execution)
    worker = SpacWorker()
    worker._spac_experts = lambda: experts
    worker.spac_stop_watch()  # nobody has looked
    for _ in range(2):
        worker.spac_watch()
        worker.spac_watch()
        assert execution.watching is experts.runtime.recorder.timeline is not None
        worker.spac_stop_watch()
        assert execution.watching is experts.runtime.recorder.timeline is execution.residency.activity is None


def test_a_timeline_that_the_user_wants_goes_on() -> None:
    execution, saved = Execution(), SimpleNamespace(timeline=Timeline(16), save=lambda: None)
    experts, view = viewed(execution, saved)
    assert execution.watching is saved.timeline
    saved.timeline.add(Kind.LAYER, 1)
    view.report()
    view.close()
    assert execution.watching is experts.runtime.recorder.timeline is saved.timeline


def test_a_page_looks_on_when_the_timeline_cannot_be_written() -> None:
    """The timeline stops; what the page shows of steps goes on, and ends with the page."""

    def fails() -> None:
        raise OSError("no room")

    execution, saved = Execution(), SimpleNamespace(timeline=Timeline(16), save=fails)
    experts, view = viewed(execution, saved)
    runtime = experts.runtime
    for _ in range(2):
        for _ in range(2):
            runtime.begin_step(Step((RequestRows(0, 1, RowKind.DECODE),)))
            runtime.end_forward()
            runtime.end_step([1])
        report = view.report()
    assert runtime.recordings.stopped and report["time"]["steps"] == 2
    assert runtime.recorder.timeline is not saved.timeline
    view.close()
    assert runtime.recorder.timeline is execution.watching is None
