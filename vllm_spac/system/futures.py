"""Helpers for futures whose jobs may fail or be cancelled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from vllm_spac.errors import StoreError

T = TypeVar("T")


def finish(jobs: Iterable[Future]) -> None:
    """Waits until all have finished. ``concurrent.futures.wait`` would wait for a cancelled one forever."""
    for job in jobs:
        with contextlib.suppress(CancelledError):
            job.exception()


def outcome(job: Future[T]) -> T | BaseException:
    """Returns the result of ``job``, or the error if it failed or was cancelled."""
    return given_up() if job.cancelled() else job.exception() or job.result()


def given_up() -> StoreError:
    """Returns the error of a read that never began."""
    return StoreError("spac: no expert is read any more, the engine is shutting down; start it again")
