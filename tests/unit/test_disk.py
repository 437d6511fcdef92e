"""A packed expert outlives the process that wrote it: whatever happened to its file since, a read returns exactly
what was packed, or fails with the remedy, and the next start packs the expert again.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from packed_experts import FINGERPRINT, blank, expert, packed
from safetensors import safe_open

from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import StoreError
from vllm_spac.storage import disk
from vllm_spac.storage.base import Slot
from vllm_spac.storage.disk import PAGE, DiskStore
from vllm_spac.system.files import partial_of
from vllm_spac.system.host_memory import gib

LAYERS = ("model.layers.3.mlp.experts", "model.layers.5.mlp.experts")
SPECS = {
    "w13_weight": TensorSpec((64, 33), torch.bfloat16),
    "w2_weight": TensorSpec((33, 32), torch.float32),
    "w2_bias": TensorSpec((7,), torch.bfloat16),
}
SHAPE = MoEShape(LAYERS, 3, 2, SPECS)
# Data that ends with its page: reading stops there for another reason than in a page that is cut off.
WHOLE_PAGES = MoEShape(
    LAYERS, 3, 2, {"w": TensorSpec((3, 1024), torch.float32), "v": TensorSpec((2048,), torch.bfloat16)}
)
OTHER = "b" * 32

each_shape = pytest.mark.parametrize("shape", [SHAPE, WHOLE_PAGES], ids=["odd", "whole pages"])


def assert_holds(store: DiskStore, *keys: int) -> None:
    """Exactly ``keys``, each with the right values."""
    assert [key for key in range(store.shape.total) if store.holds(key)] == sorted(keys)
    for key in keys:
        into = blank(store.shape)
        store.read(key, into)
        for name, tensor in expert(store.shape, key).items():
            assert torch.equal(into[name], tensor), (key, name)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@each_shape
def test_every_file_is_a_safetensors_file(shape: MoEShape, tmp_path: Path) -> None:
    store = packed(tmp_path, shape)
    assert len(files(tmp_path)) == shape.total
    for key in range(shape.total):
        layer, number = shape.split(key)
        with safe_open(store.path(key), "pt") as file:
            assert set(file.keys()) == set(shape.tensors)
            for name, tensor in expert(shape, key).items():
                assert file.get_tensor(name).dtype == tensor.dtype
                assert torch.equal(file.get_tensor(name), tensor)
            metadata = file.metadata()
        assert (metadata["fingerprint"], metadata["layer"], metadata["expert"]) == (
            FINGERPRINT,
            LAYERS[layer],
            str(number),
        )


@each_shape
def test_data_begins_at_the_second_page(shape: MoEShape, tmp_path: Path) -> None:
    store = packed(tmp_path, shape)
    raw = store.path(1).read_bytes()
    assert 8 + int.from_bytes(raw[:8], "little") == PAGE == 4096
    assert len(raw) == PAGE + shape.expert_bytes
    tensors = expert(shape, 1)
    parts = sorted(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
    assert all(part in raw[PAGE:] for part in parts)


def test_reads_build_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would intern its parts: half a million of them made a server grow by 15 MB whenever Python sized up."""
    store = packed(tmp_path, SHAPE)
    monkeypatch.setattr(Path, "__truediv__", None)
    for key in range(SHAPE.total):
        store.read(key, blank(SHAPE))


def test_whole_pages_are_read_straight_into_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into any slot; memory that does not begin on a page is filled through a buffer."""
    store, slots, copies = packed(tmp_path, WHOLE_PAGES), blank(WHOLE_PAGES, 3), []
    fill = Slot.fill
    monkeypatch.setattr(Slot, "fill", lambda *given: copies.append(given) or fill(*given))
    for slot, key in enumerate((4, 0, 5)):
        store.read(key, {name: tensor[slot] for name, tensor in slots.items()})
    assert not copies
    for name, tensor in slots.items():
        assert torch.equal(tensor, torch.stack([expert(WHOLE_PAGES, key)[name] for key in (4, 0, 5)]))
    shifted = {}
    for name, spec in WHOLE_PAGES.tensors.items():
        block = torch.empty(spec.nbytes + 2 * PAGE, dtype=torch.uint8)
        start = 64 - block.data_ptr() % PAGE
        shifted[name] = block[start % PAGE :][: spec.nbytes].view(spec.dtype).view(spec.shape)
    store.read(4, shifted)
    assert all(torch.equal(shifted[name], tensor) for name, tensor in expert(WHOLE_PAGES, 4).items())
    assert len(copies) == (2 if store.direct else 0)


def test_packing_that_was_stopped_goes_on(tmp_path: Path) -> None:
    first = DiskStore(SHAPE, FINGERPRINT, tmp_path)
    first.put(4, expert(SHAPE, 4))
    second = DiskStore(SHAPE, FINGERPRINT, tmp_path)
    assert_holds(second, 4)
    second.put(0, expert(SHAPE, 0))
    assert_holds(DiskStore(SHAPE, FINGERPRINT, tmp_path), 0, 4)


# -- damage ------------------------------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def resize(path: Path, change: int) -> None:
    os.truncate(path, path.stat().st_size + change)


DAMAGE: dict[str, Callable[[DiskStore, Path], None]] = {
    "emptied": lambda store, path: os.truncate(path, 0),
    "header only": lambda store, path: os.truncate(path, PAGE),
    "truncated by a byte": lambda store, path: resize(path, -1),
    "truncated by a page": lambda store, path: resize(path, -PAGE),
    "extended by a byte": lambda store, path: resize(path, 1),
    "extended by a page": lambda store, path: resize(path, PAGE),
    "extended by ten pages": lambda store, path: resize(path, 10 * PAGE),
    "bit flipped in the first byte of the data": lambda store, path: flip(path, PAGE),
    "bit flipped in the last byte of the data": lambda store, path: flip(path, -1),
    "bit flipped in the length of the header": lambda store, path: flip(path, 0),
    "bit flipped in the text of the header": lambda store, path: flip(path, path.read_bytes().index(b"xxh3") + 14),
    "bit flipped in the padding of the header": lambda store, path: flip(path, PAGE - 1),
    "zeroed": lambda store, path: path.write_bytes(bytes(PAGE + store.shape.expert_bytes)),
    "another expert": lambda store, path: shutil.copy(store.path(2), path),
    "the same expert of another layer": lambda store, path: shutil.copy(store.path(4), path),
    "another checkpoint": lambda store, path: shutil.copy(packed(path.parents[2], store.shape, OTHER).path(1), path),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@each_shape
def test_damaged_file_is_never_used(shape: MoEShape, damage: str, direct: bool, tmp_path: Path) -> None:
    store = packed(tmp_path, shape)
    store.direct = store.direct and direct
    path = store.path(1)
    DAMAGE[damage](store, path)

    with pytest.raises(StoreError, match="restart to pack it again.*or delete") as error:
        store.read(1, blank(shape))
    assert str(path) in str(error.value)
    assert f"expert 1 of {LAYERS[0]}" in str(error.value) and str(store.folder) in str(error.value)

    assert not path.exists() and path.with_suffix(".corrupt").exists(), "the damaged file was not set aside"
    with pytest.raises(StoreError):
        store.read(1, blank(shape))
    again = DiskStore(shape, FINGERPRINT, tmp_path)
    assert_holds(again, 0, 2, 3, 4, 5)
    again.put(1, expert(shape, 1))
    assert_holds(again, *range(shape.total))


@pytest.mark.parametrize("damage", ["emptied", "truncated by a byte", "extended by a byte", "extended by ten pages"])
def test_file_of_the_wrong_size_is_packed_again_at_once(damage: str, tmp_path: Path) -> None:
    DAMAGE[damage](store := packed(tmp_path, SHAPE), store.path(1))
    again = DiskStore(SHAPE, FINGERPRINT, tmp_path)
    assert_holds(again, 0, 2, 3, 4, 5)
    again.put(1, expert(SHAPE, 1))
    assert_holds(DiskStore(SHAPE, FINGERPRINT, tmp_path), *range(SHAPE.total))


# -- writing -----------------------------------------------------------------------------------------------------


def test_leftovers_of_killed_processes_are_harmless(tmp_path: Path) -> None:
    store = DiskStore(SHAPE, FINGERPRINT, tmp_path)
    store.put(0, expert(SHAPE, 0))
    for key, pid in ((0, 1), (1, 1), (1, os.getpid())):
        partial_of(store.path(key), pid).write_bytes(b"half an exp")
    store.path(2).with_suffix(".corrupt").write_bytes(bytes(PAGE + store.shape.expert_bytes))
    (store.folder / f".probe-{os.getpid()}").write_bytes(b"x")
    again = DiskStore(SHAPE, FINGERPRINT, tmp_path)
    assert_holds(again, 0)
    for key in (1, 2):
        again.put(key, expert(SHAPE, key))
    assert_holds(again, 0, 1, 2)
    again.remove_partial()
    assert_holds(again, 0, 1, 2)
    left = {path.name for path in store.folder.rglob("*") if path.is_file()}
    assert left == {store.path(key).name for key in (0, 1, 2)} | {store.path(2).with_suffix(".corrupt").name}


class Full(io.FileIO):
    """A file on a disk that is full after the header."""

    def write(self, data) -> int:
        if len(data) <= PAGE:
            return super().write(data)
        super().write(bytes(data[: len(data) // 2]))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "opener",
    [
        pytest.param(lambda path, mode: Full(path, mode), id="in the middle"),
        pytest.param(lambda path, mode: io.BufferedWriter(Full(path, mode), 1 << 20), id="when it is closed"),
    ],
)
def test_disk_that_gets_full_while_writing(opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(SHAPE, FINGERPRINT, tmp_path)
    store.put(0, expert(SHAPE, 0))
    with monkeypatch.context() as full:
        full.setattr(disk, "open", opener, raising=False)
        with pytest.raises(StoreError, match="No space left on device.*--spac-disk-dir") as error:
            store.put(1, expert(SHAPE, 1))
    assert str(store.path(1)) in str(error.value)
    assert files(tmp_path) == [store.path(0)]
    assert_holds(store, 0)
    assert_holds(DiskStore(SHAPE, FINGERPRINT, tmp_path), 0)


# -- room and folders --------------------------------------------------------------------------------------------


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how much room the disk seems to have."""
    usage = namedtuple("usage", "total used free")
    return lambda count: monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**50, 0, count))


@pytest.mark.parametrize("count", [0, 5000 * SHAPE.expert_bytes])
def test_no_room(count: int, tmp_path: Path, free: Callable[[int], None]) -> None:
    store = DiskStore(SHAPE, FINGERPRINT, tmp_path)
    free(count)
    with pytest.raises(StoreError, match="5000 experts.*--spac-disk-dir") as error:
        store.reserve(5000)
    needed = 5000 * (PAGE + store.shape.expert_bytes)
    assert f"{gib(needed)} for them and 256.0 MiB that stay free" in str(error.value)
    assert gib(needed + (256 << 20)) in str(error.value) and gib(count) in str(error.value)
    assert str(tmp_path) in str(error.value)
    store.reserve(0)
    free(2**40)
    store.reserve(5000)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES], ids=["read-only", "another user's"])
def test_a_complete_folder_that_cannot_be_written_to(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = packed(tmp_path, SHAPE)

    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    again = DiskStore(SHAPE, FINGERPRINT, tmp_path)
    assert again.direct == store.direct and "read-only" in again.describe()
    again.reserve(0)
    assert_holds(again, *range(SHAPE.total))
    assert list(again.verify(2)) == [None] * SHAPE.total
    raw = bytearray(store.path(1).read_bytes())
    raw[-1] ^= 1
    with open(store.path(1), "wb") as file:
        file.write(raw)
    for use in (lambda: again.read(1, blank(SHAPE)), lambda: list(again.verify(2))):
        with pytest.raises(StoreError, match="damaged and cannot be moved aside.*packed --repair"):
            use()
    store.path(1).unlink()
    with pytest.raises(StoreError, match=f"{os.strerror(code)}, and 1 of 6 experts are not packed there; name a writ"):
        DiskStore(SHAPE, FINGERPRINT, tmp_path)


# -- what an earlier run found -----------------------------------------------------------------------------------


def test_after_damage_all_files_are_checked_once(tmp_path: Path) -> None:
    store = packed(tmp_path, SHAPE)
    for key in (1, 3, 4):
        flip(store.path(key), -1)
    assert not store.suspect
    with pytest.raises(StoreError):
        store.read(3, blank(SHAPE))
    again = DiskStore(SHAPE, FINGERPRINT, tmp_path)
    assert again.suspect
    assert [problem is None for problem in again.verify(3)] == [True, False, True, False, True]
    assert_holds(again, 0, 2, 5)
    for key in (1, 3, 4):
        again.put(key, expert(SHAPE, key))
    assert_holds(again, *range(SHAPE.total))
    assert not DiskStore(SHAPE, FINGERPRINT, tmp_path).suspect


def test_a_disk_that_failed_is_checked_and_what_can_be_read_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = packed(tmp_path, SHAPE)

    def fail(*args) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", fail)
        with pytest.raises(StoreError, match="Input/output error"):
            store.read(1, blank(SHAPE))
    again = DiskStore(SHAPE, FINGERPRINT, tmp_path)
    assert again.suspect and list(again.verify(2)) == [None] * SHAPE.total
    assert_holds(again, *range(SHAPE.total))
    real = DiskStore._read_file

    def broken_sector(self, path, buffer):
        return fail() if path == store.path(2) else real(self, path, buffer)

    with monkeypatch.context() as broken:
        broken.setattr(DiskStore, "_read_file", broken_sector)
        assert [problem is None for problem in again.verify(2)] == [key != 2 for key in range(SHAPE.total)]
    again.put(2, expert(SHAPE, 2))  # somewhere else on the disk
    assert_holds(again, *range(SHAPE.total))


def test_experts_beside_missing_ones_are_suspect(tmp_path: Path) -> None:
    store = DiskStore(SHAPE, FINGERPRINT, tmp_path)
    assert not store.suspect
    store.put(0, expert(SHAPE, 0))
    assert DiskStore(SHAPE, FINGERPRINT, tmp_path).suspect
    for key in range(1, SHAPE.total):
        store.put(key, expert(SHAPE, key))
    assert not DiskStore(SHAPE, FINGERPRINT, tmp_path).suspect


def test_what_was_dropped_is_found_by_nobody(tmp_path: Path) -> None:
    store = packed(tmp_path, SHAPE)
    store.drop(2)
    assert_holds(store, 0, 1, 3, 4, 5)
    assert_holds(DiskStore(SHAPE, FINGERPRINT, tmp_path), 0, 1, 3, 4, 5)


# -- ways of reading ---------------------------------------------------------------------------------------------


def test_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path, flags: int, *args, **kwargs) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    store = packed(tmp_path, SHAPE)
    assert not store.direct
    assert "buffered I/O" in store.describe() and "no direct I/O" in store.describe()
    assert_holds(store, *range(SHAPE.total))
    assert files(tmp_path) == sorted(store.path(key) for key in range(SHAPE.total)), "the probe was left behind"


@pytest.fixture
def shm() -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@each_shape
def test_tmpfs(shape: MoEShape, shm: Path) -> None:
    """Without direct I/O before Linux 6.6, with it since: what is said must be what is done."""
    store = packed(shm, shape)
    assert ("buffered" in store.describe()) is not store.direct
    assert_holds(DiskStore(shape, FINGERPRINT, shm), *range(shape.total))


@each_shape
def test_read_that_returns_less_than_it_was_asked_for(
    shape: MoEShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems and FUSE may; a good file must not be set aside for it."""
    store = packed(tmp_path, shape)
    store.direct = False
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:1000]], offset))
    assert_holds(store, *range(shape.total))


def test_direct_read_that_returns_less_than_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pages at a time, as the kernel may when memory is fragmented."""
    store = packed(tmp_path, SHAPE)
    if not store.direct:
        pytest.skip("no direct I/O on this file system")
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:PAGE]], offset))
    assert_holds(store, *range(SHAPE.total))
