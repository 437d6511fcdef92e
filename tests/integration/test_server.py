"""`vllm serve --plugin spac` as a user has it: OpenAI client, many requests at once, metrics, a dying worker."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from openai import OpenAI

TARGET = Path(__file__).parents[2] / "benchmarks" / "toy" / "models" / "target"
PROMPTS = [f"def function_{i}(self, {'value, ' * (i % 5)}**kwargs):\n" for i in range(16)]
COMMON = ["--max-model-len", "512", "--max-num-seqs", "16", "--enforce-eager"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A `vllm serve` in a process group of its own, its output in a file."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.url, self.log = f"http://127.0.0.1:{free_port()}", folder / "server.log"
        command = ["vllm", "serve", str(TARGET), "--host", "127.0.0.1", "--port", self.url.rpartition(":")[2], *COMMON]
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        environment.pop("VLLM_LOGGING_LEVEL", None)
        environment.pop("VLLM_PLUGINS", None)
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*command, *flags], stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def wait(self, seconds: float = 300) -> Server:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2)
                return self
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-3000:])

    def get(self, path: str) -> str:
        return urllib.request.urlopen(self.url + path, timeout=30).read().decode()

    def complete(self, prompt: str) -> str:
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=120, max_retries=0)
        answer = client.completions.create(model=str(TARGET), prompt=prompt, max_tokens=24, temperature=0)
        return answer.choices[0].text

    def complete_all(self) -> list[str]:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(self.complete, PROMPTS))

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> list[str]:
    """What stock vLLM says."""
    server = Server(tmp_path_factory.mktemp("stock"))
    try:
        # Long enough for oneDNN to ask for AMX tiles; a stock vLLM whose first forward is short dies of SIGILL there.
        assert server.wait().complete("x = 1\n" * 60)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            server.get("/spac/stats")
        return server.complete_all()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spac")
    ngram = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
    flags = ["--plugin", "spac", "--spac-slots", "25%", "--spac-disk-dir", str(folder), "--spac-control"]
    flags += ["--speculative-config", ngram]
    server = Server(folder, *flags)
    try:
        yield server.wait()
    finally:
        server.stop()


def test_sixteen_requests_at_once_get_stock_answers(server, answers):
    assert len(set(answers)) > 8
    assert server.complete_all() == answers


def test_the_log_says_what_was_chosen(server):
    lines = [line for line in server.log.read_text().splitlines() if "spac: mode=" in line]
    assert len(lines) == 1
    assert re.search(
        r"mode=exact, slots=96 of 384 experts \(25\.0%.*store=disk .*(direct|buffered).*policy=reuse", lines[0]
    )
    assert "Packing experts" in server.log.read_text()


def test_stats_and_metrics_agree(server):
    server.complete("import os\n")
    time.sleep(2.5)  # the workers are asked once a second
    stats, metrics = json.loads(server.get("/spac/stats"))["workers"][0], server.get("/metrics")
    for name in ("hits", "misses", "loads", "waves"):
        assert stats[name] > 0
        assert re.search(rf'^vllm:spac_{name}_total{{worker="0"}} {float(stats[name])}$', metrics, re.M), name
    assert re.search(r'^vllm:spac_steps_total\{kind="verify",worker="0"\} [1-9]', metrics, re.M)
    assert stats["bytes"]["disk"] == stats["loads"] * stats["expert_bytes"]
    assert stats["resident"] <= stats["slots"] == 96


def test_the_budget_changes_while_serving(server, answers):
    def change(body: str) -> dict:
        request = urllib.request.Request(f"{server.url}/spac/budget", body.encode(), method="POST")
        return json.loads(urllib.request.urlopen(request, timeout=30).read())

    assert change('{"budget": 8, "when": "decode"}')["workers"][0]["budget"] == 8
    assert server.complete_all() != answers
    time.sleep(2.5)
    metrics = server.get("/metrics")
    assert re.search(r'^vllm:spac_lossy{worker="0"} 1.0$', metrics, re.M)
    assert re.search(r'^vllm:spac_budget_dropped_mass_total{worker="0"} [1-9]', metrics, re.M)
    for body, text in (
        ('{"budget": 7}', "every token 8 experts"),
        ('{"budgets": 9}', "known: budget"),
        ("8", "mapping"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            change(body)
        assert refused.value.code == 400 and text in refused.value.read().decode()
    assert json.loads(server.get("/spac/stats"))["workers"][0]["mode"] == "lossy", "a refused change changes nothing"
    change("{}")
    assert server.complete_all() == answers
    assert "mode=lossy (budget 8" in server.log.read_text()


def test_a_dead_worker_takes_the_server_down(server):
    """Last: the server is gone afterwards."""
    workers = [p for p in psutil.Process(server.process.pid).children(recursive=True) if "Worker" in p.name()]
    if not workers:
        pid = re.search(r"VllmWorker-0 pid=(\d+)|\(Worker pid=(\d+)\)", server.log.read_text())
        workers = [psutil.Process(int(next(filter(None, pid.groups()))))]
    workers[0].kill()
    assert server.process.wait(60) != 0 or "died" in server.log.read_text()
    assert re.search(r"[Ww]orker.*(died|terminated|dead|exit)|EngineDeadError", server.log.read_text())
