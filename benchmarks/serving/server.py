"""Runs ``vllm serve`` for the duration of a ``with`` block."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

_LOG_LINES = 15
_STOP_SECONDS = 30


class ServerError(RuntimeError):
    """The server did not start; the message is the reason."""


@contextlib.contextmanager
def serve(model: Path, arguments: list[str], log: Path, timeout: float) -> Iterator[str]:
    """Serves ``model`` during the block; yields the URL.

    Args:
        arguments: flags for ``vllm serve``; without ``--plugin`` no line of the plugin is loaded.
        log: file for the server's output.
        timeout: seconds that its start may take.

    Raises:
        ServerError: it ended, or does not answer in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1"} | ({} if "--plugin" in arguments else {"VLLM_PLUGINS": ""})
    vllm = Path(sys.executable).with_name("vllm")
    command = [str(vllm), "serve", str(model), "--host", "127.0.0.1", "--port", str(port), *arguments]
    with open(log, "w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, f"{url}/health", log, timeout)
        yield url
    finally:
        _stop(process)


def _wait(process: subprocess.Popen, address: str, log: Path, timeout: float) -> None:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if process.poll() is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
            raise ServerError(f"vllm serve ended with {process.returncode}:\n{tail}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):  # not yet
            if urllib.request.urlopen(address, timeout=5).status == 200:
                return
        time.sleep(0.5)
    raise ServerError(f"vllm serve does not answer after {timeout:.0f} s; its log:\n{log.read_text()[-2000:]}")


def _stop(process: subprocess.Popen) -> None:
    """Sends SIGINT first, then kills what is left of the server's process group."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):  # all of them have gone, as they should
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
