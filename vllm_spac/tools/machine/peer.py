"""Measures the network to an expert worker, with the frames and sockets by which an engine sends it rows."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import zmq

from vllm_spac.errors import ConfigError, SpacError
from vllm_spac.methods.od_moe.places import ADDRESS, ClusterFile, Processes
from vllm_spac.methods.od_moe.wire import FrameKind, raw
from vllm_spac.methods.od_moe.worker_link import WorkerLink, facts
from vllm_spac.system.timing import median

LOOPBACK = "loopback"
SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)  # bytes of rows, each way
_HIDDEN = 2048  # of a row of 16 bits: 4 KiB
_JOIN, _ANSWER = 10.0, 30.0  # seconds


def round_trips(
    address: str,
    file: Path,
    folder: Path,
    seconds: float,
    tell: Callable[[str], object] = lambda text: None,
) -> dict[int, float]:
    """Returns, by the bytes of rows, the median seconds until a worker has sent them back.

    Args:
        address: ``tcp://host:port`` of a worker that serves no engine, or ``LOOPBACK``: a worker of this machine, which
            is started, and ended afterwards.
        file: of the worker's cluster, with its secret; not read for ``LOOPBACK``.
        folder: of packed experts; ``LOOPBACK`` packs none.
        seconds: approximate duration of each measurement.
        tell: called with the name of each of the ``SIZES`` before it is measured.

    Raises:
        ConfigError: the address or the file is none.
        SpacError: the worker cannot be reached, refuses, or sends back other bits.
    """
    context = zmq.Context()
    try:
        with _worker(address, file, folder) as (found, secret):
            link = WorkerLink(context, found, secret, facts(), secrets.token_hex(16))
            try:
                link.join(_JOIN)
                return dict(_measured(link, seconds, tell))
            finally:
                link.close()
    finally:
        context.destroy(linger=200)


@contextmanager
def _worker(address: str, file: Path, folder: Path) -> Iterator[tuple[str, bytes]]:
    if address != LOOPBACK:
        yield checked(address), bytes.fromhex(ClusterFile.read(file).secret)
        return
    places = Processes(1, ["--disk-dir", str(folder), "--memory", "0", "--threads", "1"])
    try:
        yield places.addresses()[0], places.secret
    finally:
        places.close()


def checked(address: str) -> str:
    """Returns the address of a worker, ``host:port`` or ``tcp://host:port``, with its protocol."""
    found = address if "://" in address else f"tcp://{address}"
    if not re.fullmatch(ADDRESS, found):
        raise ConfigError(f"--peer {address}: use {LOOPBACK}, or the address of a worker, as tcp://10.0.0.7:5555")
    return found


def _measured(link: WorkerLink, seconds: float, tell: Callable[[str], object]) -> Iterator[tuple[int, float]]:
    for nbytes in SIZES:
        tell(f"round trip of {nbytes:,} bytes")
        sent = torch.frombuffer(bytearray(secrets.token_bytes(nbytes)), dtype=torch.bfloat16).view(-1, _HIDDEN)
        if raw(_echo(link, sent)) != raw(sent):
            raise SpacError(f"spac: the worker at {link.address} sent back other bits than it was sent")
        yield nbytes, median(partial(_echo, link, sent), seconds)


def _echo(link: WorkerLink, sent: torch.Tensor) -> torch.Tensor:
    sizes = {"rows": len(sent), "hidden": sent.shape[1], "dtype": sent.dtype}
    frame = link.ask(FrameKind.ECHO, _ANSWER, raw(sent), **sizes)
    if (frame.header.kind, frame.header.rows) != (FrameKind.ROWS, len(sent)):
        raise SpacError(f"spac: the worker at {link.address} sent back something else")
    return frame.rows()
