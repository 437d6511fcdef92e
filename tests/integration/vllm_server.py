"""A `vllm serve` to test, as a user starts it.

Which requests share a step depends on when they arrive, and on the guard: hence float32, see ``parity/exactness.py``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import psutil
from openai import OpenAI

TARGET = Path(__file__).parents[2] / "benchmarks" / "toy" / "models" / "target"
PROMPTS = [f"def function_{i}(self, {'value, ' * (i % 5)}**kwargs):\n" for i in range(16)]
MAX_TOKENS = 24  # of an answer
COMMON = ["--max-model-len", "512", "--max-num-seqs", "16", "--enforce-eager", "--dtype", "float32"]
# What other tests set for the engines in their process; a user's server has its own threads, bound by vLLM.
OF_THE_TESTS = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_PLUGINS")
OF_THE_TESTS += ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")
PATIENCE = 600  # seconds until a server that hangs is told from a slow machine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A `vllm serve` in a process group of its own, its output in a file."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        common: Sequence[str] = COMMON,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.url, self.log = f"http://127.0.0.1:{free_port()}", folder / "server.log"
        command = ["vllm", "serve", str(TARGET), "--host", "127.0.0.1", "--port", self.url.rpartition(":")[2], *common]
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        for name in OF_THE_TESTS:
            environment.pop(name, None)
        environment |= variables
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*command, *flags], stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def wait(self) -> Server:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=10)
                return self
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-3000:])

    def get(self, path: str) -> str:
        return urllib.request.urlopen(self.url + path, timeout=PATIENCE).read().decode()

    def metrics_where(self, holds: Callable[[str], bool]) -> str:
        """``/metrics`` when it is so: it shows what was before where workers do not answer at once."""
        deadline = time.monotonic() + 60
        while not holds(metrics := self.get("/metrics")):
            assert time.monotonic() < deadline, metrics
            time.sleep(0.2)
        return metrics

    def complete(self, prompt: str) -> str:
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0)
        answer = client.completions.create(model=str(TARGET), prompt=prompt, max_tokens=MAX_TOKENS, temperature=0)
        return answer.choices[0].text

    def complete_all(self) -> list[str]:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(self.complete, PROMPTS))

    def stop(self) -> None:
        """Returns when its workers are gone too: they close their stores and traces after the API server has ended."""
        if self.process.poll() is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # what does not notice that the API server is gone
            return
        parent = psutil.Process(self.process.pid)
        processes = [parent, *parent.children(recursive=True)]
        os.killpg(self.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 60
        while any(map(_is_alive, processes)) and time.monotonic() < deadline:
            self.process.poll()
            time.sleep(0.1)
        if any(map(_is_alive, processes)):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
