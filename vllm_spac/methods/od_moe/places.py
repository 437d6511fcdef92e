"""Where the workers of an engine are: addresses, the secret, and who starts a worker again.

They are processes of this machine, which end with the engine; those of a cluster file; or those that Ray places,
watches and restarts. Nothing else imports Ray: an actor on each chosen machine starts the worker's process and says its
address, and rows travel over zmq, because a call of an actor takes about a millisecond and a token has as many as there
are layers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import secrets
import select
import stat
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_spac.errors import ConfigError, SpacError, brief
from vllm_spac.system.files import refusal
from vllm_spac.system.host_memory import available_host_bytes
from vllm_spac.system.untrusted import parse_json, read_text

CLUSTER_FILE = Path("~/.cache/vllm_spac/cluster.json")  # of vllm-spac cluster, unless another is named
ADDRESS = r"^tcp://[^\s/]{1,255}:[0-9]{1,5}$"


class Places(ABC):
    """The workers of one engine.

    Attributes:
        secret: what engines and workers prove to each other that they know.
    """

    secret: bytes

    @abstractmethod
    def addresses(self) -> list[str]:
        """Returns the address of each worker; those that this object starts are started now.

        Raises:
            SpacError: one cannot be started.
        """

    @abstractmethod
    def again(self, worker: int) -> str:
        """Returns the present address of a worker that was lost, started again if its process ended.

        Raises:
            SpacError: it cannot be started.
        """

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

    Args:
        count: number of workers to use; None: all.

    Raises:
        ConfigError: the file cannot be used, or has fewer workers.
    """

    def __init__(self, path: Path, count: int | None) -> None:
        self._path, self._count = path, count
        found = ClusterFile.read(path)
        self.secret = bytes.fromhex(found.secret)
        if not found.workers or (count is not None and len(found.workers) < count):
            raise ConfigError(
                f"spac: workers={count or 1} (--spac-workers), and {path} has {len(found.workers)} of them; start more "
                "with vllm-spac cluster start"
            )

    def addresses(self) -> list[str]:
        return [place.address for place in ClusterFile.read(self._path).workers[: self._count]]

    def again(self, worker: int) -> str:
        return self.addresses()[worker]

    def describe(self) -> str:
        machines = {re.sub(r"^tcp://(.*):\d+$", r"\1", address) for address in self.addresses()}
        return f"{len(self.addresses())} workers of {self._path} on {len(machines)} address(es)"


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
            ended = self.process.poll()
            self.kill()
            why = "it said nothing in time" if ended is None else f"code {ended}"
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


_RESERVE = 1 << 30  # of a machine's memory, left to the rest of it
_OBJECTS = 100 << 20  # bytes of Ray's own store, of which next to nothing is used
_POLL = 0.5  # seconds
_RAY_START = 600.0  # seconds for Ray to find a place, and for the worker to import its kernels


def check_installed() -> None:
    """Raises ``ConfigError`` if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "spac: executor=ray (--spac-executor) needs Ray: pip install 'vllm-spac[ray]'; or use --spac-executor "
            "processes"
        )


class WorkerHost:
    """The body of an actor: one worker's process on the actor's machine, which ends with it.

    Args:
        secret: of the cluster, hexadecimal.
        elsewhere: the engine is on another machine: listens on this one's address, and takes a share of its memory and
            cores.
        workers: number of workers, of which any number may be on one machine.
    """

    def __init__(self, secret: str, arguments: list[str], elsewhere: bool, workers: int) -> None:
        self._secret, self._arguments = bytes.fromhex(secret), list(arguments)
        if elsewhere:
            import ray

            memory = max(0, available_host_bytes() - _RESERVE) // workers
            threads = max(1, len(os.sched_getaffinity(0)) // workers)
            host = ray.util.get_node_ip_address()
            self._arguments += ["--bind", host, "--memory", str(memory), "--threads", str(threads)]
        self._started: StartedWorker | None = None
        self._address = ""

    def address(self) -> str:
        """Returns the address of the worker, which is started if it does not run."""
        if self._started is None or self._started.process.poll() is not None:
            self._started = StartedWorker(self._secret, self._arguments)
            self._address = self._started.address()
        return self._address


class RayWorkers(Places):
    """Workers in a Ray cluster: that at ``address``, or one that is started on this machine and ends with the engine.

    Args:
        address: of the cluster, as ``ray.init`` takes it; None: none runs yet.

    Raises:
        ConfigError: Ray is not installed, or the cluster cannot be reached.
    """

    def __init__(self, count: int, arguments: Sequence[str], address: str | None) -> None:
        check_installed()
        import ray

        self._ray: Any = ray
        self._count, self._at = count, address
        self._asking, self._closed = threading.Lock(), False
        self.secret = secrets.token_bytes(32)
        try:
            if address is None:
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
                ray.init(
                    num_cpus=count,
                    include_dashboard=False,
                    log_to_driver=False,
                    object_store_memory=_OBJECTS,
                    _node_ip_address="127.0.0.1",
                )
            else:
                ray.init(address=address, log_to_driver=False)
        except Exception as error:  # of Ray, in any of its ways
            raise ConfigError(f"spac: Ray cannot be used: {error}; check --spac-cluster, or drop it") from error
        # One core each, so that Ray spreads them; restarted by Ray wherever there is room.
        host = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=3, scheduling_strategy="SPREAD")(WorkerHost)
        given = self.secret.hex(), list(arguments), address is not None, count
        self._hosts: list[Any] = [host.remote(*given) for _ in range(count)]

    def addresses(self) -> list[str]:
        return self._said([host.address.remote() for host in self._hosts])

    def again(self, worker: int) -> str:
        return self._said([self._hosts[worker].address.remote()])[0]

    def describe(self) -> str:
        return f"{self._count} workers placed by Ray ({self._at or 'on this machine'})"

    def close(self) -> None:
        self._closed = True
        with self._asking:  # Ray ends the process of a thread that asks it while it ends
            for host in self._hosts:
                self._ray.kill(host)
            self._ray.shutdown()

    def _said(self, answers: list[Any]) -> list[str]:
        end = time.monotonic() + _RAY_START
        while time.monotonic() < end:
            with self._asking:
                if self._closed:
                    raise SpacError("spac: the engine ends")
                try:
                    return self._ray.get(answers, timeout=_POLL)
                except self._ray.exceptions.GetTimeoutError:
                    continue
                except self._ray.exceptions.RayError as error:
                    raise SpacError(f"spac: Ray could not start a worker: {error}") from error
        raise SpacError(
            f"spac: Ray found no place for {self._count} workers of one core each; use fewer (--spac-workers)"
        )
