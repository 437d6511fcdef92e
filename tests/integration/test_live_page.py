"""The live page in a real browser: it draws, follows the workers, asks for the key, and says when the server is gone.

Needs Chromium (Debian's ``chromium``) and ``playwright``, which no other test needs; without them it is skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live_reports import Imagined, Served, served
from vllm_server import PATIENCE, PROMPTS, Server

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
WIDTHS, SCHEMES = (390, 1600), ("light", "dark")
SECOND = 1000


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def look(browser) -> Iterator:
    """Opens an address; what the console and the script complained about is in ``page.problems``."""
    pages = []

    def open_page(url: str, width: int = 1600, scheme: str = "light"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        pages.append(page)
        page.set_default_timeout(60 * SECOND)
        page.problems = []
        page.on("console", lambda said: page.problems.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.goto(url)
        return page

    yield open_page
    for page in pages:
        page.close()


def wait_for(page, holds: Callable[[], bool]) -> None:
    """The page's own policy forbids what playwright evaluates in a loop."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, page.inner_text("body")
        page.wait_for_timeout(100)


def says(page, state: str) -> None:
    wait_for(page, lambda: re.fullmatch(state, page.inner_text("#state")) is not None)


def live(page) -> None:
    says(page, "live")


def pixels_of(page) -> list[int]:
    """How many pixels of the map are blue (slots), yellow (host memory), or drawn in another colour."""
    return page.evaluate("""() => {
        const map = document.getElementById("map"), found = [0, 0, 0];
        const pixels = map.getContext("2d").getImageData(0, 0, map.width, map.height).data;
        for (let at = 0; at < pixels.length; at += 4) {
            const [red, , blue, alpha] = pixels.slice(at, at + 4);
            if (alpha >= 20) found[blue > red + 60 ? 0 : red > blue + 60 ? 1 : 2] += 1;
        }
        return found;
    }""")


def counters_of(page) -> dict[str, str]:
    """The table of all counters."""
    cells = "(row) => [...row.cells].map((cell) => cell.textContent)"
    return dict(page.evaluate(f"[...document.querySelectorAll('#counters tr')].map({cells})"))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_draws_every_part_at_every_size(look, tmp_path: Path, width: int, scheme: str) -> None:
    with served(Imagined(), control=True) as server:
        page = look(server.url, width, scheme)
        live(page)
        wait_for(page, lambda: page.inner_text("#hit-now").endswith("%"))
        slots, host, others = pixels_of(page)
        assert min(slots, host, others) > 2000
        wait_for(page, lambda: page.inner_text("#speed") != "–")
        assert 0 < float(page.inner_text("#speed")) <= 120, (
            "120 with each report, of which two are a second apart or more"
        )
        text = " ".join(page.inner_text("body").split())
        for part in (
            "24 layers, 1,536 experts",
            "40.40 ms per token of all requests together, over the last 64 generating steps",
            "waiting for loads 9.00 ms · 22.3%",
            "queued or in flight",
            "3 running",
            "2 waiting",
            "250.00 ms time to first token",
            "25.00 ms per token of one request",
            "draft tokens per request",
            "none: exact",
            "host ahead",
        ):
            assert part in text, part
        drawn, wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert drawn <= wide, "nothing is cut off at the right"
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) < 200) is (scheme == "dark")
        page.screenshot(path=tmp_path / f"page_{width}_{scheme}.png", full_page=True)
        print("picture:", tmp_path / f"page_{width}_{scheme}.png")
        assert page.problems == []


def test_it_follows_the_workers(look) -> None:
    client = Imagined()
    with served(client) as server:
        page = look(server.url)
        live(page)
        before = counters_of(page)
        assert before["execution"] == "slots" and before["expert_bytes"] == "9.0 MiB", "as `vllm-spac stats` shows them"
        wait_for(page, lambda: counters_of(page)["misses"] != before["misses"])
        assert page.is_hidden("#control"), "the budget may not be changed here"
        flashes = int(page.get_attribute("#map", "data-painted"))
        wait_for(page, lambda: int(page.get_attribute("#map", "data-painted")) > flashes + 5)
        page.hover("#map", position={"x": 70, "y": 5})
        assert re.fullmatch(
            r"layer 0, expert \d+: (in a slot|in host memory|on disk).*, heat .*%", page.inner_text("#hover")
        )
        assert page.problems == []


def test_the_slider_sets_and_ends_a_budget(look) -> None:
    client = Imagined()
    with served(client, control=True) as server:
        page = look(server.url)
        live(page)
        assert page.inner_text("#asked") == "all (exact)"
        page.evaluate("const s = document.getElementById('slider'); s.value = 16; s.dispatchEvent(new Event('change'))")
        wait_for(page, lambda: page.inner_text("#mode") == "lossy")
        assert "lossy (budget 16)" in page.inner_text("#budget") and page.inner_text("#asked") == "16"
        sent = [args[0] for method, args in client.asked if method == "spac_try_budget"]
        assert sent[-1]["budget"] == 16 and sent[-1]["when"] == "verify" and sent[-1]["ranking"] == "router"
        page.evaluate("const s = document.getElementById('slider'); s.value = 64; s.dispatchEvent(new Event('change'))")
        wait_for(page, lambda: page.inner_text("#mode") == "exact")
        assert page.problems == []


def test_it_says_when_the_server_is_gone_and_comes_back(look) -> None:
    client = Imagined()
    with served(client) as server:
        page = look(server.url)
        live(page)
        assert page.problems == []
    says(page, r"connection lost, last update .*\d.*")
    assert page.evaluate("document.getElementById('main').classList.contains('stale')")
    again = Served(client, port=server.port)
    again.start()
    try:
        live(page)
        assert not page.evaluate("document.getElementById('main').classList.contains('stale')")
    finally:
        again.stop()
    assert all("ERR_" in problem or "net::" in problem for problem in page.problems), "no error of the script"


def test_it_says_when_the_engine_has_failed(look) -> None:
    client = Imagined()
    with served(client) as server:
        page = look(server.url)
        live(page)
        client.error = RuntimeError("the engine is dead")
        says(page, "the engine has failed: the engine is dead, last update .*")


def test_it_asks_for_the_key_and_keeps_it(look) -> None:
    with served(Imagined(), key="open sesame") as server:
        page = look(server.url)
        page.wait_for_selector("#ask:not([hidden])")
        assert page.is_hidden("#main") and "Imagined" not in page.content(), "nothing is shown without it"
        page.fill("#key", "wrong")
        page.click("#ask button")
        says(page, "the server refuses this key")
        page.fill("#key", "open sesame")
        page.click("#ask button")
        live(page)
        assert page.is_hidden("#ask")
        page.reload()
        live(page)


def test_nobody_is_asked_for_a_page_that_was_closed(look) -> None:
    client = Imagined()
    with served(client) as server:
        page = look(server.url)
        live(page)
        page.goto("about:blank")
        wait_for(page, lambda: client.asked[-1][0] == "spac_stop_watch")


@pytest.mark.full
@pytest.mark.timeout(3 * 600)
def test_a_real_server(look, tmp_path: Path) -> None:
    """The toy model under load: what the page shows is what the server counts; then the server is stopped."""
    flags = ["--plugin", "spac", "--spac-slots", "25%", "--spac-disk-dir", str(tmp_path), "--spac-http", "page"]
    server = Server(tmp_path, *flags)
    try:
        server.wait()
        page = look(f"{server.url}/spac/")
        live(page)
        assert page.inner_text("#shape") == "6 layers, 384 experts" and page.inner_text("#in-slot") == "96"
        server.complete_all()
        wait_for(page, lambda: "ms per token" in page.inner_text("#time-of"))
        assert page.inner_text("#ttft").endswith("ms") and page.inner_text("#tpot").endswith("ms")
        server.complete(PROMPTS[0])
        stats = json.loads(server.get("/spac/stats"))["workers"][0]
        wait_for(page, lambda: counters_of(page)["misses"] == f"{stats['misses']:,}")
        for width in WIDTHS:
            for scheme in SCHEMES:
                page.set_viewport_size({"width": width, "height": 900})
                page.emulate_media(color_scheme=scheme)
                page.wait_for_timeout(300)
                page.screenshot(path=tmp_path / f"toy_{width}_{scheme}.png", full_page=True)
        print("pictures:", tmp_path)
        assert page.problems == []
        server.stop()
        assert server.process.wait(PATIENCE) is not None, "an open page keeps no server alive"
        says(page, "connection lost.*|the engine has failed.*")
    finally:
        server.stop()
