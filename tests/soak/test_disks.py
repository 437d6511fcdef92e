"""Disks that are full, become full, or may only be read."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from pathlib import Path

import exchange
import pytest
import serving

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]  # servers start slowly on a busy machine

ROOM = 512 << 20  # what packing needs and what the store leaves free, and more
MS_RDONLY, MS_REMOUNT = 1, 32
_libc = ctypes.CDLL(None, use_errno=True)


class Disk:
    """A file system of its own in memory, whose size may change while it is used."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder

    def mount(self, size: int, flags: int = 0) -> None:
        if _libc.mount(b"tmpfs", bytes(self.folder), b"tmpfs", ctypes.c_ulong(flags), f"size={size}".encode()):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def fill_up(self) -> None:
        """From now on there is no room."""
        stat = os.statvfs(self.folder)
        self.mount((stat.f_blocks - stat.f_bfree) * stat.f_frsize, MS_REMOUNT)

    def unmount(self) -> None:
        if _libc.umount2(bytes(self.folder), 2):  # once nobody uses it
            raise OSError(ctypes.get_errno(), f"cannot unmount {self.folder}")


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    disk = Disk(tmp_path_factory.mktemp("mounted") / "disk")
    try:
        disk.mount(ROOM)
    except PermissionError as error:
        pytest.skip(f"mounting a file system needs root: {error}")
    yield disk
    disk.unmount()


def refused(server) -> str:
    """What the server, which must end, had to say."""
    assert server.process.wait(300) != 0
    server.wait_for_end()
    return "\n".join(server.messages())


def test_full_while_packing_then_read_only(starting, disk, answers):
    server = starting(disk.folder)
    serving.freeze_while_packing(server, disk.folder)
    disk.fill_up()
    os.killpg(server.process.pid, signal.SIGCONT)
    text = refused(server)
    assert re.search(r"spac: cannot write \S+expert-\d+\.safetensors: No space left on device; .*--spac-disk-dir", text)
    assert list(disk.folder.rglob("*.partial")) == []
    done = len(serving.packed(disk.folder))
    assert 0 < done < serving.EXPERTS

    disk.mount(ROOM, MS_REMOUNT)
    again = starting(disk.folder, *serving.THREE_TIERS).wait()
    assert exchange.tokens(again.url) == answers
    assert again.stats()["host_loads"] > 0, "nothing came from host memory"
    assert len(serving.packed(disk.folder)) == serving.EXPERTS
    again.stop()
    again.wait_for_end()


def test_read_only(starting, disk, answers):
    """The folder that the test before this one has packed."""
    assert len(serving.packed(disk.folder)) == serving.EXPERTS
    disk.mount(ROOM, MS_REMOUNT | MS_RDONLY)
    try:
        assert exchange.tokens(starting(disk.folder).wait().url) == answers
    finally:
        disk.mount(ROOM, MS_REMOUNT)
