"""Servers killed while they pack or serve, alone and with two on one folder.

The next one serves stock's tokens; it is not kept from starting, and nothing half-written stays.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import exchange
import httpx
import pytest
import serving
from exchange import PROMPTS

from vllm_spac.system.files import partial_of

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]  # servers start slowly on a busy machine


@contextlib.contextmanager
def clients(url: str):
    """While inside, somebody is always asking; the server may go."""
    stop = threading.Event()

    def ask() -> None:
        with exchange.client(url) as http:
            while not stop.is_set():
                with contextlib.suppress(httpx.HTTPError):
                    exchange.ask(http, exchange.greedy(PROMPTS[5], 100))
                stop.wait(0.1)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def half_written(disk_dir):
    return [path for path in disk_dir.rglob("*") if path.suffix == ".partial" or path.name.startswith(".probe")]


def test_killed_while_packing_and_while_serving(starting, answers, tmp_path):
    disk = tmp_path / "disk"
    first = starting(disk)
    serving.freeze_while_packing(first, disk)
    serving.kill(first)
    done = serving.packed(disk)
    # What a kill in the middle of a write leaves, at each kill.
    torn = partial_of(done[0].with_name("expert-0063.safetensors"), first.process.pid)
    torn.write_bytes(done[0].read_bytes()[:7000])

    second = starting(disk)
    serving.freeze_while_packing(second, disk, len(done) + 8)
    for number in (signal.SIGTERM, signal.SIGCONT):  # to all of them
        os.killpg(second.process.pid, number)
    second.wait_for_end_of_engine()
    serving.kill(second)
    done = {path: path.stat().st_mtime_ns for path in done}

    third = starting(disk, *serving.THREE_TIERS).wait()
    assert exchange.tokens(third.url) == answers
    assert third.stats()["host_loads"] > 0, "nothing came from host memory"
    assert len(serving.packed(disk)) == serving.EXPERTS
    assert {path: path.stat().st_mtime_ns for path in done} == done, "what was packed was packed again"
    assert half_written(disk) == []
    with clients(third.url):
        serving.wait_until(lambda: third.gauge("num_requests_running") > 0, 60, "requests run")
        third.process.send_signal(signal.SIGKILL)  # the API server alone
        third.process.wait()

    # Stock vLLM 0.32's engine core and worker do not notice that their API server is gone, with or without a plugin.
    # What they hold of the folder keeps nobody out.
    fourth = starting(disk, *serving.THREE_TIERS).wait()
    assert exchange.tokens(fourth.url) == answers
    with contextlib.suppress(ProcessLookupError):  # they may have gone by now
        serving.kill(third)
    assert not any("Packing" in line for line in fourth.messages())
    with clients(fourth.url):
        serving.wait_until(lambda: fourth.gauge("num_requests_running") > 0, 60, "requests run")
        fourth.process.send_signal(signal.SIGTERM)
        # Stock vLLM 0.32's API server then waits for its clients, whose answers never come, with or without a plugin.
        fourth.wait_for_end_of_engine()
        serving.kill(fourth)
    assert half_written(disk) == []


def test_two_on_one_folder_and_one_is_killed_while_packing(starting, answers, tmp_path):
    disk = tmp_path / "disk"
    first = starting(disk)
    serving.freeze_while_packing(first, disk)
    second = starting(disk)
    serving.wait_until(lambda: any("to pack these experts" in line for line in second.messages()), 300, "it waits")
    assert len(serving.packed(disk)) < serving.EXPERTS
    serving.kill(first)
    second.wait()
    assert exchange.tokens(second.url) == answers
    assert len(serving.packed(disk)) == serving.EXPERTS

    third = starting(disk).wait()
    both: dict[str, list] = {}

    def ask(server) -> None:
        both[server.url] = [exchange.tokens(server.url) for _ in range(3)]

    threads = [threading.Thread(target=ask, args=(server,)) for server in (second, third)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(both.values()) == [[answers] * 3] * 2
    serving.kill(third)
    assert exchange.tokens(second.url) == answers
    assert half_written(disk) == []


def test_two_that_start_at_once(starting, answers, tmp_path):
    disk = tmp_path / "disk"
    for server in [starting(disk), starting(disk)]:
        assert exchange.tokens(server.wait().url) == answers
    assert len(serving.packed(disk)) == serving.EXPERTS
    assert half_written(disk) == []
