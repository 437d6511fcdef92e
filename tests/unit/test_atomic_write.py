"""A file is replaced as a whole or not at all, wherever the disk fails or the process ends."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_spac.system import files
from vllm_spac.system.files import check_replaceable, leftovers, partial_of, remove_leftovers, replacing


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
        assert partial_of(target).read_text() == "new" and str(os.getpid()) in partial_of(target).name
        assert target.read_text() == "old", "readers see the old file until the new one is complete"
    assert target.read_text() == "new" and alone(target)


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

    monkeypatch.setattr(files.os, "replace" if call == "unlink" else call, fail)
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
        monkeypatch.setattr(files.os, name, noting(name, getattr(os, name)))
    replace(target)
    replace(target, durable=False)
    assert order == ["fsync", "replace", "replace"]


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_killed_at_any_moment(target: Path, moment: str) -> None:
    """A process that ends without cleaning up: the old file is whole, and what it left is found and removed."""
    code = """
import os, sys
from pathlib import Path
from vllm_spac.system.files import replacing
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


# --- in a folder that others may write to ---------------------------------------------------------------------------


@pytest.fixture
def victim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("home") / "key"
    path.write_text("secret")
    return path


def plant(kind: str, path: Path, victim: Path) -> None:
    """Puts in the way of ``path`` what leads to ``victim``."""
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "link to nothing":
        path.symlink_to(victim.with_name("new"))
    elif kind == "hard link":
        os.link(victim, path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["link", "link to nothing", "hard link", "pipe", "folder"])
@pytest.mark.parametrize("write", [replace, lambda path: check_replaceable(path)], ids=["replace", "check"])
def test_what_was_put_in_the_way_is_neither_followed_nor_written(
    target: Path, victim: Path, kind: str, write: Callable
) -> None:
    plant(kind, partial_of(target), victim)
    before = partial_of(target).lstat().st_ino
    with pytest.raises(OSError, match="not made here; remove it"):
        write(target)
    assert victim.read_text() == "secret" and os.listdir(victim.parent) == ["key"]
    assert target.read_text() == "old" and partial_of(target).lstat().st_ino == before


@pytest.mark.parametrize("kind", ["link", "hard link", None])
@pytest.mark.parametrize("by_name", [False, True], ids=["opened", "by name"])
def test_a_partial_file_that_is_exchanged_while_it_is_written(
    target: Path, victim: Path, kind: str | None, by_name: bool
) -> None:
    """Between its creation and the rename anybody who may write to the folder can take its name; None: only that."""
    with pytest.raises(OSError), replacing(target, by_name=by_name) as partial:
        partial_of(target).unlink()
        if kind:
            plant(kind, partial_of(target), victim)
        if not by_name:  # with a name, the writer must not open it but replace it
            partial.write_text("new")
    assert victim.read_text() == "secret" and target.read_text() == "old"


def test_a_writer_that_makes_a_new_file_has_the_rights_that_were_asked_for(target: Path) -> None:
    for mode in (0o600, 0o640):
        with replacing(target, mode=mode, by_name=True) as partial:
            (other := partial.with_name(".other")).write_text("new")
            other.chmod(0o777)
            os.replace(other, partial)
        assert target.read_text() == "new" and alone(target) and target.stat().st_mode & 0o777 == mode


def test_a_link_that_has_the_name_is_replaced_and_not_followed(target: Path, victim: Path) -> None:
    target.unlink()
    target.symlink_to(victim)
    replace(target)
    assert victim.read_text() == "secret" and not target.is_symlink() and target.read_text() == "new"


def test_what_an_ended_process_of_the_same_number_left_does_not_block(target: Path) -> None:
    """In containers each process may have the number 1."""
    partial_of(target).write_text("ha")
    replace(target)
    assert target.read_text() == "new" and alone(target)


def test_others_may_not_write_what_is_written_whatever_the_umask(target: Path) -> None:
    before = os.umask(0)
    try:
        replace(target)
        assert target.stat().st_mode & 0o777 == 0o644
        os.umask(0o027)
        replace(target)
        assert target.stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)
