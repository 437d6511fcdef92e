"""Where the workers of an engine are: addresses, the secret, and who starts a worker again.

They are processes of this machine, which end with the engine, or those of a cluster's file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import select
import stat
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_spac.errors import ConfigError, SpacError, brief
from vllm_spac.system.files import refusal
from vllm_spac.system.untrusted import parse_json, read_text

logger = logging.getLogger("vllm.spac")

ADDRESS = r"^tcp://[^\s/]{1,255}:[0-9]{1,5}$"
MODULE = "vllm_spac.integration.worker_process"
_BINDINGS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")  # of the engine's threads, to its own cores
_START = 300.0  # seconds to import torch and vLLM on a busy machine
_END = 2.0  # seconds for a process whose pipe was closed
_PATIENCE = 3  # attempts to reach a process that lives and does not answer, before it is killed


class Places(ABC):
    """The workers of one engine."""

    secret: bytes  # what engines and workers prove to each other that they know

    @abstractmethod
    def addresses(self) -> list[str]:
        """Returns the address of each worker; those that this object starts are started now, or ``SpacError``."""

    @abstractmethod
    def again(self, worker: int) -> str:
        """Returns the address of a worker that was lost, started again if its process ended, or ``SpacError``."""

    @abstractmethod
    def describe(self) -> str:
        """Returns a few words for the start-up line."""

    def close(self) -> None:
        """Ends what this object started."""


class Place(BaseModel):
    """A worker in a cluster's file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = Field(pattern=ADDRESS)
    pid: int = Field(ge=1)
    machine: str


class ClusterFile(BaseModel):
    """What ``vllm-spac cluster start`` writes: the workers that run, and their secret."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    secret: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    workers: tuple[Place, ...] = Field(max_length=1024)

    @classmethod
    def read(cls, path: Path) -> ClusterFile:
        """Reads and validates a file of this user or root that its owner alone can read; else ``ConfigError``."""
        try:
            if path.exists() and (problem := refusal(path)):
                raise ConfigError(f"spac: {problem}, or name another file")
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise ConfigError(f"spac: {path} has the workers' secret and others can read it; run chmod 600 {path}")
            return cls.model_validate(parse_json(read_text(path)))
        except FileNotFoundError:
            raise ConfigError(f"spac: there is no cluster in {path}; run vllm-spac cluster start") from None
        except OSError as error:
            raise ConfigError(f"spac: cannot read {path}: {error.strerror}") from None
        except (ValueError, ValidationError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"spac: {path} is no file of vllm-spac cluster: {brief(str(error))}") from None

    def text(self) -> str:
        """Returns the content of the file."""
        return json.dumps(self.model_dump(mode="json"), indent=1) + "\n"


class RunningWorkers(Places):
    """Workers that run already, from a cluster's file, which is read again when one is lost.

    ``count`` are used, None: all; ``ConfigError`` if the file cannot be used, or has fewer.
    """

    def __init__(self, path: Path, count: int | None) -> None:
        self._path, self._count = path, count
        cluster = ClusterFile.read(path)
        self.secret = bytes.fromhex(cluster.secret)
        if not cluster.workers or (count is not None and len(cluster.workers) < count):
            raise ConfigError(
                f"spac: {count or 1} workers (--spac-executor) are asked for, and {path} has {len(cluster.workers)} of "
                "them; start more with vllm-spac cluster start"
            )

    def addresses(self) -> list[str]:
        return [place.address for place in ClusterFile.read(self._path).workers[: self._count]]

    def again(self, worker: int) -> str:
        return self.addresses()[worker]

    def describe(self) -> str:
        machines = {re.sub(r"^tcp://(.*):\d+$", r"\1", address) for address in self.addresses()}
        return f"{len(self.addresses())} workers of {self._path} on {len(machines)} address(es)"


class StartedWorker:
    """A process that runs one worker.

    Args:
        secret: of the cluster; passed through a pipe, not on the command line.
        log: receives what it logs, and it outlives this process; None: it logs as this process does, and ends when this
            object's pipe is closed.
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
                env={n: value for n, value in os.environ.items() if n not in _BINDINGS} | {"CUDA_VISIBLE_DEVICES": ""},
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
        """Waits until the worker serves; returns its address. ``SpacError`` if it ended, or says nothing in time."""
        assert self.process.stdout is not None
        end, line = time.monotonic() + _START, b""
        with contextlib.suppress(OSError, ValueError):  # ``stop`` closed the pipe meanwhile, in another thread
            while not line.endswith(b"\n") and (left := end - time.monotonic()) > 0:
                if select.select([self.process.stdout], [], [], left)[0]:
                    part = os.read(self.process.stdout.fileno(), 4096)
                    if not part:
                        break
                    line += part
        try:
            return str(json.loads(line)["address"])
        except (ValueError, KeyError, TypeError):
            ended = self.process.poll()
            self.stop()
            why = "it said nothing in time" if ended is None else f"code {ended}"
            raise SpacError(f"spac: an expert worker did not start ({why}); its messages are above") from None

    def release(self) -> None:
        """Closes the pipes of the process: it ends by itself, unless it is detached."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def stop(self) -> None:
        """Ends the process, after two seconds by force; does nothing if it has ended."""
        self.release()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Processes(Places):
    """Workers that this engine starts on its own machine."""

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
        started.stop()
        self._attempts[worker] = 0
        self._started[worker] = started = StartedWorker(self.secret, self._arguments)
        if self._closed:  # meanwhile, in another thread, which may have missed it
            started.stop()
        self._addresses[worker] = started.address()
        return self._addresses[worker]

    def describe(self) -> str:
        return f"{self._count} processes on this machine"

    def close(self) -> None:
        self._closed = True
        for started in list(self._started):
            started.release()
        for started in list(self._started):
            started.stop()
