"""Workers as processes of this machine, which end with the engine that started them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import BinaryIO

from vllm_spac.distributed.places import Places
from vllm_spac.errors import SpacError

logger = logging.getLogger("vllm.spac")

MODULE = "vllm_spac.integration.worker_process"
_BINDINGS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")  # of the engine's threads, to its own cores
_START = 300.0  # seconds to import torch and vLLM on a busy machine
_END = 2.0  # seconds for a process whose pipe was closed
_PATIENCE = 3  # attempts to reach a process that lives and does not answer, before it is killed


class StartedWorker:
    """A process that runs one worker.

    Args:
        secret: of the cluster; passed through a pipe, not on the command line.
        arguments: of the worker's command line.
        log: receives what it logs, and it outlives this process; None: it logs as this process does, and ends when this
            object's pipe is closed.

    Raises:
        SpacError: it cannot be started.
    """

    def __init__(self, secret: bytes, arguments: Sequence[str], log: BinaryIO | None = None) -> None:
        detached = log is not None
        # -P: the working directory is not on the path of a module, so its folder triton_kernels is not imported.
        command = [sys.executable, "-P", "-m", MODULE, *arguments, *(() if detached else ("--tied",))]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={name: value for name, value in os.environ.items() if name not in _BINDINGS},
                start_new_session=detached,
            )
        except OSError as error:
            raise SpacError(f"spac: cannot start an expert worker: {error.strerror}") from error
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: ``address`` says so
            self.process.stdin.write(secret.hex().encode() + b"\n")
            self.process.stdin.flush()
        if detached:
            self.process.stdin.close()

    def address(self) -> str:
        """Waits until the worker serves; returns its address.

        Raises:
            SpacError: it ended, or says nothing in time.
        """
        assert self.process.stdout is not None
        end, line = time.monotonic() + _START, b""
        with contextlib.suppress(OSError, ValueError):  # ``kill`` closed the pipe meanwhile, in another thread
            while not line.endswith(b"\n") and (left := end - time.monotonic()) > 0:
                if select.select([self.process.stdout], [], [], left)[0]:
                    part = os.read(self.process.stdout.fileno(), 4096)
                    if not part:
                        break
                    line += part
        try:
            return str(json.loads(line)["address"])
        except (ValueError, KeyError, TypeError):
            self.kill()
            why = "it said nothing in time" if self.process.returncode is None else f"code {self.process.returncode}"
            raise SpacError(f"spac: an expert worker did not start ({why}); its messages are above") from None

    def release(self) -> None:
        """Closes the pipes of the process: it ends by itself, unless it is detached."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def kill(self) -> None:
        """Ends the process, after two seconds by force; does nothing if it has ended."""
        self.release()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Processes(Places):
    """Workers that this engine starts on its own machine.

    Args:
        count: number of workers.
        arguments: of each worker's command line.
    """

    def __init__(self, count: int, arguments: Sequence[str]) -> None:
        self.secret = secrets.token_bytes(32)
        self._count, self._arguments = count, list(arguments)
        self._started: list[StartedWorker] = []
        self._addresses: list[str] = []
        self._attempts = [0] * count
        self._closed = False

    def addresses(self) -> list[str]:
        if not self._started:
            self._started = [StartedWorker(self.secret, self._arguments) for _ in range(self._count)]
            try:
                self._addresses = [started.address() for started in self._started]
            except BaseException:
                self.close()
                raise
        return list(self._addresses)

    def again(self, worker: int) -> str:
        if self._closed:
            raise SpacError("spac: the engine ends")
        started = self._started[worker]
        if started.process.poll() is None:
            self._attempts[worker] += 1
            if self._attempts[worker] <= _PATIENCE:
                return self._addresses[worker]
            logger.warning("spac: worker-%d does not answer and is started again", worker)
            started.process.kill()
        started.kill()
        self._attempts[worker] = 0
        self._started[worker] = started = StartedWorker(self.secret, self._arguments)
        if self._closed:  # meanwhile, in another thread, which may have missed it
            started.kill()
        self._addresses[worker] = started.address()
        return self._addresses[worker]

    def pids(self) -> list[int]:
        """Returns the process of each worker."""
        return [started.process.pid for started in self._started]

    def describe(self) -> str:
        return f"{self._count} processes on this machine"

    def close(self) -> None:
        self._closed = True
        for started in list(self._started):
            started.release()
        for started in list(self._started):
            started.kill()
