"""`vllm serve --api-key` with the plugin: which requests may read and change, and what attacks leave in its log."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_spac.cli.main import app
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.traces.synthetic import synthetic_trace

sys.path.insert(0, str(Path(__file__).parent))

from test_server import Server  # noqa: E402

KEY = "secret-of-the-test"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "traces").mkdir()
    trace = folder / "traces" / "run.trace"
    synthetic_trace(layers=2, experts=8, top_k=2, steps=3).save(trace)
    flags = ["--plugin", "spac", "--spac-slots", "25%", "--spac-disk-dir", str(folder), "--spac-http", "control"]
    flags += ["--spac-record", f"trace={trace}", "--api-key", "another", KEY]
    server = Server(folder, *flags)
    server.trace = trace
    try:
        yield server.wait()
    finally:
        server.stop()


def ask(server: Server, method: str, path: str, key: str | None, body: bytes | None = None) -> tuple[int, str]:
    request = urllib.request.Request(server.url + path, body, method=method)
    if body is not None:
        request.add_header("Content-Type", "application/json")
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_key_covers_our_routes(server):
    paths = ["/spac/stats", "/spac/stats/", "//spac/stats", "/spac/../spac/stats", "/SPAC/stats", "/spac%2fstats"]
    for key in (None, "", "wrong", KEY.upper(), KEY[:-1]):
        for path in paths:
            assert ask(server, "GET", path, key)[0] in (401, 404), path
        assert ask(server, "GET", "/spac/stats", key)[0] == 401
        assert ask(server, "POST", "/spac/budget", key, b'{"budget": 8, "when": "all"}')[0] == 401
        assert ask(server, "GET", "/v1/models", key)[0] == 401, "as vLLM's own"
    for key in (KEY, "another"):
        status, body = ask(server, "GET", "/spac/stats", key)
        assert status == 200 and json.loads(body)["workers"][0]["mode"] == "exact"
    assert ask(server, "GET", "/metrics", None)[0] == 200, "as vLLM has it"


@pytest.mark.parametrize(
    ("variables", "flags", "code", "said"),
    [
        ({}, ["--api-key", KEY], 0, "experts in fast memory"),
        ({"VLLM_API_KEY": KEY}, [], 0, "experts in fast memory"),
        ({"OPENAI_API_KEY": KEY}, [], 1, "wants a key; name its own with --api-key or VLLM_API_KEY"),
        ({"VLLM_API_KEY": "wrong"}, ["--api-key", KEY], 0, "experts in fast memory"),
        ({}, [], 1, "wants a key; name its own with --api-key or VLLM_API_KEY"),
        ({"VLLM_API_KEY": "wrong"}, [], 1, "refuses this key"),
    ],
    ids=str,
)
def test_the_command_passes_a_key(server, monkeypatch, variables, flags, code, said):
    for name in ("VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    shown = CliRunner().invoke(app, ["stats", server.url, *flags], env=variables)
    assert shown.exit_code == code and said in " ".join(shown.output.split())
    assert KEY not in shown.output


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"budget": 8, "ranking": "this:that"}', 400, "this server has"),
        (b'{"budget": 7}', 400, "every token 8 experts"),
        (b'{"x\\u001b[2J": 8}', 400, "Extra inputs"),
        (b'{"mass": NaN}', 400, "NaN"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[" * 60000, 400, "nested too deeply"),
        (b" " * 10**6, 413, "65536 bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_refused_is_one_line(server, body, status, said):
    found, text = ask(server, "POST", "/spac/budget", KEY, body)
    assert found == status and said in text and "\n" not in json.loads(text)["error"]["message"]


def test_nothing_of_it_is_in_the_log(server):
    """Of the server and its worker; and nothing has changed."""
    log = server.log.read_text()
    assert "Traceback" not in log and "mode=lossy" not in log and KEY not in log.replace(f"'{KEY}'", "")
    assert json.loads(ask(server, "GET", "/spac/stats", KEY)[1])["workers"][0]["mode"] == "exact"


def test_the_trace_of_another_run_is_replaced_with_a_warning(server):
    """Last: the server is gone afterwards."""
    assert "the trace of this engine replaces it" in server.log.read_text()
    body = json.dumps({"model": ask_model(server), "prompt": "x = 1", "max_tokens": 8}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, method="POST")
    request.add_header("Authorization", f"Bearer {KEY}")
    request.add_header("Content-Type", "application/json")
    urllib.request.urlopen(request, timeout=120).read()
    server.stop()
    assert Trace.load(server.trace).facts.experts == 64


def ask_model(server: Server) -> str:
    return json.loads(ask(server, "GET", "/v1/models", KEY)[1])["data"][0]["id"]
