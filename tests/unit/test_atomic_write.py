"""A file is replaced as a whole or not at all, wherever the disk fails or the process ends."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_spac.system import atomic_write
from vllm_spac.system.atomic_write import check_replaceable, leftovers, partial_of, remove_leftovers, replacing


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "some.file.json"
    path.write_text("old")
    return path


def alone(path: Path) -> bool:
    """Whether nothing else is in the folder."""
    return list(path.parent.iterdir()) == [path]


def replace(path: Path, content: str = "new", **options: bool) -> None:
    with replacing(path, **options) as partial:
        partial.write_text(content)


@pytest.mark.parametrize("durable", [True, False])
def test_the_new_content_takes_the_place_of_the_old(target: Path, durable: bool) -> None:
    with replacing(target, durable=durable) as partial:
        partial.write_text("new")
        assert partial.parent == target.parent and str(os.getpid()) in partial.name
        assert target.read_text() == "old", "readers see the old file until the new one is complete"
    assert target.read_text() == "new" and alone(target)


def test_a_file_that_was_not_there(tmp_path: Path) -> None:
    replace(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "new" and alone(tmp_path / "a")


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), ValueError("no number")], ids=repr
)
def test_a_block_that_raises_leaves_the_old_file(target: Path, error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, replacing(target) as partial:
        partial.write_text("ha")
        raise error
    assert raised.value is error and target.read_text() == "old" and alone(target)


@pytest.mark.parametrize("call", ["fsync", "replace", "unlink"])
def test_a_disk_that_fails_leaves_the_old_file(target: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any step of the replacement fails; where even the removal does, the first error is the one that is seen."""
    first = OSError(errno.EIO, "the disk failed")

    def fail(*_args: object) -> None:
        raise first

    def fail_to_remove(*_args: object, **_options: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(atomic_write.os, "replace" if call == "unlink" else call, fail)
    if call == "unlink":
        monkeypatch.setattr(Path, "unlink", fail_to_remove)
    with pytest.raises(OSError) as raised:
        replace(target)
    assert raised.value is first and target.read_text() == "old"
    assert alone(target) or call == "unlink"


def test_content_reaches_the_disk_before_the_name_does(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def noting(name: str, call: Callable) -> Callable:
        return lambda *args: (order.append(name), call(*args))[1]

    for name in ("fsync", "replace"):
        monkeypatch.setattr(atomic_write.os, name, noting(name, getattr(os, name)))
    replace(target)
    replace(target, durable=False)
    assert order == ["fsync", "replace", "replace"]


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_killed_at_any_moment(target: Path, moment: str) -> None:
    """A process that ends without cleaning up: the old file is whole, and what it left is found and removed."""
    code = """
import os, sys
from pathlib import Path
from vllm_spac.system.atomic_write import replacing
target, moment = Path(sys.argv[1]), sys.argv[2]
if moment != "write":
    setattr(os, moment, lambda *args: os._exit(9))
with replacing(target) as partial:
    partial.write_text("new")
    if moment == "write":
        os._exit(9)
"""
    gone = subprocess.Popen([sys.executable, "-c", code, target, moment])
    assert gone.wait(60) == 9
    assert target.read_text() == "old"
    assert leftovers(target) == [partial_of(target, gone.pid)]
    remove_leftovers(target)
    assert alone(target)


def test_leftovers_are_those_of_this_file_and_of_processes_that_ended(target: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    kept = [
        partial_of(target),  # somebody is writing it
        partial_of(target.with_name("other"), gone.pid),
        partial_of(target.with_name("a" + target.name), gone.pid),
        target.with_name(f"{target.name}.x.partial"),
        target.with_name(f"{target.name}.{gone.pid}.txt"),
        target.with_name(f"someXfile.json.{gone.pid}.partial"),  # a dot is a dot
    ]
    for path in (*kept, partial_of(target, gone.pid)):
        path.touch()
    assert leftovers(target) == [partial_of(target, gone.pid)]
    remove_leftovers(target)
    assert sorted(target.parent.iterdir()) == sorted([target, *kept])


def test_whether_a_file_could_be_replaced(target: Path) -> None:
    check_replaceable(target)
    assert target.read_text() == "old" and alone(target)
    with pytest.raises(OSError):
        check_replaceable(target.parent / "no" / "a")
