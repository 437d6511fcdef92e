"""Workers that Ray places, watches and restarts. The only module that imports Ray.

An actor on each chosen machine starts the worker's process and says its address; rows travel over zmq. Through Ray go
the arguments, the secret and the address alone: a call of an actor takes about a millisecond, and a token has as many
as there are layers.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

from vllm_spac.distributed.places import Places
from vllm_spac.distributed.processes import StartedWorker
from vllm_spac.errors import ConfigError, SpacError
from vllm_spac.system.host_memory import available_host_bytes

_RESERVE = 1 << 30  # of a machine's memory, left to the rest of it
_OBJECTS = 100 << 20  # bytes of Ray's own store, of which next to nothing is used
_POLL = 0.5  # seconds
_START = 600.0  # seconds for Ray to find a place, and for the worker to import its kernels


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
        arguments: of the worker's command line.
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
        count: number of workers.
        arguments: of each worker's command line.
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
        end = time.monotonic() + _START
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
