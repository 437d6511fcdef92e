"""The servers that are compared and attacked, and their externally observable state."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import vllm_server

# In float32 rounding by shape is far below any gap between the toy's best two tokens, so that batches may form freely.
FLAGS = ["--dtype", "float32", "--max-num-batched-tokens", "128"]
# Room for 16 of the longest requests: a KV cache of 1 GiB is touched page by page for hours, and so grows like a leak.
FLAGS += ["--block-size", "128", "--num-gpu-blocks-override", "80"]
FLAGS += ["--chat-template", "{% for message in messages %}{{ message.content }}\n{% endfor %}"]
_NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
NGRAM = ["--speculative-config", json.dumps(_NGRAM), "--no-async-scheduling"]  # the latter for guard=on
_EAGLE3 = {"method": "eagle3", "model": str(vllm_server.TARGET.parent / "eagle3"), "num_speculative_tokens": 4}
# V2's guard plans drafts in the scheduler, and so in the worker's process. vLLM's CPU platform has workers of their own
# unless this variable is 0; a server's engine core has its process all the same.
VARIABLES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" else {}
EAGLE3 = ["--speculative-config", json.dumps(_EAGLE3), "--no-async-scheduling", "--distributed-executor-backend", "uni"]
EXPERTS = 384
THREE_TIERS = ("--spac-host-memory", "6MiB")  # host memory for a third of the experts, beside their slots and the disk


def offloaded(disk_dir: Path) -> list[str]:
    """The flags of a server with a quarter of its experts in slots, the others packed in ``disk_dir``."""
    return ["--plugin", "spac", "--spac-slots", "25%", "--spac-store", "disk", "--spac-disk-dir", str(disk_dir)]


class Server(vllm_server.Server):
    """Each has its own log, so that several may share a folder."""

    _numbers = itertools.count()

    def __init__(self, folder: Path, *flags: str) -> None:
        logs = folder / f"server-{next(self._numbers)}"
        logs.mkdir(parents=True)
        super().__init__(logs, *flags, variables=VARIABLES)
        self.main = psutil.Process(self.process.pid)

    def processes(self) -> list[psutil.Process]:
        """All processes of this server that live, zombies left out."""
        alive = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):  # ends while it is looked at
                mine = os.getpgid(process.pid) == self.process.pid
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive

    def stats(self) -> dict:
        """Of the plugin's one worker."""
        return json.loads(self.get("/spac/stats"))["workers"][0]

    def gauge(self, name: str) -> float:
        """A value of vLLM's in ``/metrics``."""
        found = re.search(rf"^vllm:{name}{{[^}}]*}} (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found, f"/metrics has no vllm:{name}"
        return float(found[1])

    def wait_for_end(self, seconds: float = 120) -> None:
        """Until no process of the server is left."""
        wait_until(lambda: self.process.poll() is not None and not self.processes(), seconds, "the server ends")

    def wait_for_end_of_engine(self, seconds: float = 120) -> None:
        """Until neither engine core nor workers are left, which hold all that is the plugin's.

        For a server that is ended by SIGTERM while it loads. Its API server may stay: stock vLLM 0.32 (``MPClient``)
        then waits 600 s for an engine core that is gone, with or without a plugin.
        """

        def engine() -> list[psutil.Process]:
            return [each for each in self.processes() if _name(each).startswith("VLLM::")]

        wait_until(lambda: not engine(), seconds, "engine core and workers end")

    def messages(self) -> list[str]:
        """Lines of the log that have something of the plugin's to say, without vLLM's prefix."""
        return [line[line.index("spac: ") :] for line in self.log.read_text().splitlines() if "spac: " in line]


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:  # has just ended
        return ""


@contextlib.contextmanager
def started(folder: Path, *flags: str) -> Iterator[Server]:
    """A server that answers, and is gone when the block ends."""
    server = Server(folder, *FLAGS, *flags)
    try:
        server.wait()
        # Long enough for oneDNN to ask for AMX tiles; a stock vLLM whose first forward is short dies of SIGILL there.
        assert server.complete("x = 1\n" * 60)
        yield server
    finally:
        server.stop()


def wait_until(condition: Callable[[], bool], seconds: float, what: str, pause: float = 0.2) -> None:
    """Look every ``pause`` seconds until ``condition()`` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s until {what}"
        time.sleep(pause)


def idle(server: Server) -> None:
    """Wait until no request is left; then no block of the KV cache may be held for one."""
    counts = ("num_requests_running", "num_requests_waiting")
    wait_until(lambda: not any(map(server.gauge, counts)), 60, "the last request has left")
    assert server.gauge("kv_cache_usage_perc") == 0


def settle(server: Server) -> None:
    """As ``idle``, of a server with the plugin: no expert may be pinned either."""
    idle(server)
    assert server.stats()["pinned"] == 0


def packed(disk_dir: Path) -> list[Path]:
    """The files of packed experts."""
    return sorted(disk_dir.glob("*/layer-*/expert-*.safetensors"))


def freeze_while_packing(server: Server, disk_dir: Path, first: int = 8) -> None:
    """Stop all processes of ``server`` (SIGSTOP) when ``disk_dir`` has at least ``first`` experts, but not all."""

    def enough() -> bool:
        assert server.process.poll() is None, server.log.read_text()[-3000:]
        return len(packed(disk_dir)) >= first

    wait_until(enough, 300, "the server packs", pause=0.002)
    os.killpg(server.process.pid, signal.SIGSTOP)
    count = len(packed(disk_dir))
    assert first <= count < EXPERTS, f"{count} experts were packed before the server stopped: nothing was interrupted"


def kill(server: Server) -> None:
    """SIGKILL to all processes of a server at once, as the kernel does when memory is short or the power fails."""
    os.killpg(server.process.pid, signal.SIGKILL)
    server.wait_for_end()


def resources(server: Server) -> dict[str, dict[str, int]]:
    """Resident bytes, file descriptors and threads of each process of ``server``, by the name of the process."""
    found: dict[str, dict[str, int]] = {}
    for process in server.processes():
        with contextlib.suppress(psutil.Error):  # ends while it is looked at
            name = process.name().removeprefix("VLLM::")
            counts = found.setdefault(name, {"rss": 0, "fds": 0, "threads": 0})
            counts["rss"] += process.memory_info().rss
            counts["fds"] += process.num_fds()
            counts["threads"] += process.num_threads()
    return found


def total(found: dict[str, dict[str, int]]) -> dict[str, int]:
    """The sum over processes of what ``resources`` returns."""
    return {what: sum(counts[what] for counts in found.values()) for what in ("rss", "fds", "threads")}
