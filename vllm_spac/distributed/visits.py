"""Asks workers what they count, beside the engines that they serve."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq

from vllm_spac.distributed.link import Link
from vllm_spac.distributed.wire import Kind
from vllm_spac.errors import SpacError

_AT_ONCE = 16


def counts(addresses: Sequence[str], secret: bytes, seconds: float = 3.0) -> list[dict[str, Any] | str]:
    """Returns what each worker counts, see ``Worker``, or why it did not say.

    Args:
        addresses: of the workers, ``tcp://host:port``.
        secret: of their cluster.
        seconds: to wait for each; one that computes or fills its slots answers afterwards.
    """
    context = zmq.Context()

    def ask(address: str) -> dict[str, Any] | str:
        link = Link(context, address, secret)
        try:
            link.visit(seconds)
            return link.ask(Kind.STATS, seconds).text()
        except SpacError as error:
            return str(error).removeprefix("spac: ")
        finally:
            link.close()

    try:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="spac-visit") as pool:
            return list(pool.map(ask, addresses))
    finally:
        context.destroy(linger=200)
