"""A read of an expert that fails for a moment is tried again, on every way to a slot; a lasting failure is an error."""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import torch
from packed_experts import blank, expert, packed

from vllm_spac.cache.host_tier import HostTier
from vllm_spac.cache.transfers import HostRows, Transfers
from vllm_spac.components import build
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import StoreError
from vllm_spac.storage import disk
from vllm_spac.storage.checkpoint.packed_folder import MARK
from vllm_spac.storage.disk import DiskStore
from vllm_spac.system.host_blocks import HostBlock

SHAPE = MoEShape(
    ("layer",), 8, 2, {"w": TensorSpec((3, 1024), torch.float32), "v": TensorSpec((2048,), torch.bfloat16)}
)
PAUSES = disk.PAUSES
TRIES = 1 + len(PAUSES)


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were slept, in place of sleeping."""
    slept: list[float] = []
    monkeypatch.setattr(disk, "PAUSES", PAUSES)
    monkeypatch.setattr(disk.time, "sleep", slept.append)
    return slept


class Unsteady:
    """Fails the first reads of each file: by an error, or by data that were damaged on their way."""

    def __init__(self, how: str, fails: int, patch: pytest.MonkeyPatch) -> None:
        self.reads: Counter[int] = Counter()
        real = DiskStore._read_file

        def read(store: DiskStore, path: Path, parts) -> int:
            key = int(path.stem.removeprefix("expert-"))
            self.reads[key] += 1
            if self.reads[key] <= fails and how == "error":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            size = real(store, path, parts)
            if self.reads[key] <= fails and how == "bit":
                parts[1 if len(parts) > 1 else 0][5000] ^= 1
            return size - 4096 if self.reads[key] <= fails and how == "short" else size

        patch.setattr(DiskStore, "_read_file", read)


each_way = pytest.mark.parametrize("how", ["error", "bit", "short"])


@each_way
@pytest.mark.parametrize("fails", range(TRIES + 1))
def test_tries_are_bounded_and_counted(how: str, fails: int, tmp_path: Path, monkeypatch, slept, caplog) -> None:
    store, into = packed(tmp_path, SHAPE), blank(SHAPE)
    disk = Unsteady(how, fails, monkeypatch)
    with caplog.at_level(logging.WARNING, "vllm.spac"):
        if fails < TRIES:
            store.read(3, into)
            assert all(torch.equal(into[name], tensor) for name, tensor in expert(SHAPE, 3).items())
        else:
            with pytest.raises(StoreError, match=f"tried {TRIES} times.*restart"):
                store.read(3, into)
    retries = min(fails, TRIES - 1)
    assert disk.reads[3] == 1 + retries and store.retries == retries
    assert slept == list(PAUSES[:retries])
    assert len(caplog.records) == (retries > 0) and (not retries or str(store.path(3)) in caplog.text)
    assert (store.folder / MARK).exists() is (fails >= TRIES), "a start checks all files after a failure only"
    assert store.path(3).exists() is (fails < TRIES or how == "error")


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES])
def test_what_would_fail_again_is_not_tried(code: int, tmp_path: Path, monkeypatch, slept) -> None:
    store = packed(tmp_path, SHAPE)
    calls: list[int] = []

    def refuse(*_: object) -> int:
        calls.append(1)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(DiskStore, "_read_file", refuse)
    with pytest.raises(StoreError, match="cannot read"):
        store.read(1, blank(SHAPE))
    assert len(calls) == 1 and not slept and store.retries == 0


def test_a_start_that_checks_all_files_keeps_what_can_be_read_the_second_time(tmp_path: Path, monkeypatch) -> None:
    store = packed(tmp_path, SHAPE)
    Unsteady("bit", 1, monkeypatch)
    assert list(store.verify(2)) == [None] * SHAPE.total and store.retries == SHAPE.total


# -- each way to a slot --------------------------------------------------------------------------------------------


def on_demand(transfers: Transfers) -> None:
    assert transfers.load([(0, 3), (5, 1), (2, 2)], None) == {}


def ahead(transfers: Transfers) -> None:
    transfers.ahead.fetch([(0, 3), (5, 1), (2, 2)])
    transfers.ahead._begin()
    while not all(ticket.done.done() for ticket in transfers.ahead._tickets.values()):
        pass
    assert not any(isinstance(result, BaseException) for result in transfers.ahead.take_finished().values())


def rows() -> HostRows:
    """Host memory for four experts."""
    return HostRows(HostTier(SHAPE.total, 4, 4, build("policies", "lru")), HostBlock(SHAPE.tensors, 4, pin=False))


@each_way
@pytest.mark.parametrize("way", [on_demand, ahead])
@pytest.mark.parametrize("host", [False, True], ids=["two tiers", "three tiers"])
def test_threads(how: str, way, host: bool, tmp_path: Path, monkeypatch) -> None:
    store, slots = packed(tmp_path, SHAPE), blank(SHAPE, 4)
    Unsteady(how, TRIES - 1, monkeypatch)
    with closing(Transfers(store, slots, 2, "disk", rows=rows() if host else None)) as transfers:
        if host:
            assert sum(transfers.fill_host([0, 6])) == 2
        way(transfers)
    for key, slot in ((0, 3), (5, 1), (2, 2)):
        assert all(torch.equal(slots[name][slot], tensor) for name, tensor in expert(SHAPE, key).items())
    assert store.retries == (TRIES - 1) * (4 if host else 3)
