"""What another user has made or may write is not used, and what this user makes is nobody else's."""

from __future__ import annotations

import fcntl
import os
import pwd
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packed_experts import FINGERPRINT, packed

from vllm_spac.config.config import SpacConfig
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.decisions.predictor_file import PredictorFile
from vllm_spac.errors import ConfigError, SpacError, StoreError
from vllm_spac.integration.loading.store_lock import StoreLock
from vllm_spac.methods.od_moe.places import ClusterFile
from vllm_spac.storage.checkpoint.packed_folder import remove
from vllm_spac.storage.disk import DiskStore
from vllm_spac.system import files
from vllm_spac.system.files import LockFile, prepare_folder

SHAPE = MoEShape(("layers.0", "layers.1"), 3, 2, {"w": TensorSpec((64,), torch.float32)})
OTHER = 65534 if os.geteuid() != 65534 else 65533
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture(params=[0o000, 0o022, 0o077], ids="umask {:03o}".format)
def any_umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def rights(path: Path) -> int:
    return path.lstat().st_mode & 0o7777


# --- who may write ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o666, 0o646, 0o602])
@pytest.mark.parametrize("what", ["file", "folder", "its folder"])
def test_what_every_user_may_write_is_refused_until_the_command_was_run(tmp_path: Path, mode: int, what: str) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    (file := folder / "file").touch()
    changed, asked = {"file": (file, file), "folder": (folder, folder), "its folder": (folder, file)}[what]
    changed.chmod(mode | (0o111 if changed is folder else 0))
    said = files.refusal(asked)
    assert said is not None and said.startswith(
        f"{changed} of {pwd.getpwuid(os.geteuid()).pw_name} (uid {os.geteuid()})"
    )
    assert "every user" in said
    subprocess.run(["sh", "-c", said.split("`")[1]], check=True)
    assert files.refusal(asked) is None


@as_root
@pytest.mark.parametrize("what", ["file", "folder", "its folder"])
def test_what_belongs_to_another_is_refused_until_the_command_was_run(tmp_path: Path, what: str) -> None:
    (folder := tmp_path / "f").mkdir()
    (file := folder / "file").touch()
    changed, asked = {"file": (file, file), "folder": (folder, folder), "its folder": (folder, file)}[what]
    os.chown(changed, OTHER, -1)
    said = files.refusal(asked)
    assert said is not None and said.startswith(f"{changed} belongs to ") and f"(uid {OTHER})" in said
    subprocess.run(["sh", "-c", said.split("`")[1]], check=True)
    assert files.refusal(asked) is None


@as_root
def test_what_root_has_made_is_used_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch(0o644)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    assert files.refusal(tmp_path / "file") is None
    os.chown(tmp_path / "file", OTHER, -1)
    assert files.refusal(tmp_path / "file") is None
    os.chown(tmp_path / "file", 1234, -1)
    assert "(uid 1234)" in str(files.refusal(tmp_path / "file")) and " as root" in str(files.refusal(tmp_path / "file"))


def test_a_sticky_folder_is_no_danger_to_own_files_but_one_for_what_is_missing_in_it(tmp_path: Path) -> None:
    (folder := tmp_path / "tmp").mkdir()
    folder.chmod(0o1777)
    (folder / "file").touch(0o644)
    assert files.refusal(folder / "file") is None
    assert "every user" in str(files.refusal(folder)), "anybody may add to it"


def test_a_link_leads_to_what_is_looked_at(tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "file").touch(0o644)
    (link := tmp_path / "link").symlink_to(elsewhere / "file")
    assert files.refusal(link) is None
    elsewhere.chmod(0o777)
    assert str(elsewhere) in str(files.refusal(link))


def test_a_group_of_one_is_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = pwd.getpwuid(os.geteuid()).pw_name
    (file := tmp_path / "file").touch()
    file.chmod(0o664)

    def refused(name: str, *members: str) -> bool:
        group = files.grp.struct_group((name, "x", 1, list(members)))
        monkeypatch.setattr(files.grp, "getgrgid", lambda gid: group)
        return files.refusal(file) is not None

    assert not refused(me) and not refused(me, me)
    assert refused("staff") and refused(me, me, "eve")
    monkeypatch.setattr(os, "listxattr", lambda path: ["system.posix_acl_access"])
    assert refused(me), "with access control lists the bits of the group are those of all whom they name"


# --- what is looked at ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [PredictorFile.read, ClusterFile.read])
@pytest.mark.parametrize("change", [pytest.param("owner", marks=as_root), "mode", "folder"])
def test_files_that_decide_what_is_computed_are_refused_in_one_line(tmp_path: Path, read, change: str) -> None:
    (file := tmp_path / "f" / "file.safetensors").parent.mkdir()
    file.write_bytes(b"not even looked at")
    with pytest.raises(ConfigError) as before:
        read(file)
    if change == "owner":
        os.chown(file, OTHER, -1)
    else:
        (file if change == "mode" else file.parent).chmod(0o777)
    with pytest.raises(ConfigError) as after:
        read(file)
    assert "`ch" not in str(before.value) and "if you trust it, run `ch" in str(after.value)
    assert str(after.value).isprintable()


@as_root
@pytest.mark.parametrize(
    "name", [".", FINGERPRINT, f"{FINGERPRINT}/layer-001", f"{FINGERPRINT}/layer-001/expert-0001.safetensors"]
)
@pytest.mark.parametrize("change", [lambda path: os.chown(path, OTHER, -1), lambda path: path.chmod(0o777)])
def test_packed_experts_that_others_can_forge_are_refused(tmp_path: Path, name: str, change) -> None:
    """Every file has the right checksum, which whoever forges it can compute."""
    packed(tmp_path / "packed", SHAPE)
    changed = (tmp_path / "packed" / name).resolve()
    change(changed)
    with pytest.raises(StoreError, match="if you trust it, run `ch.*--spac-disk-dir DIR") as error:
        DiskStore(SHAPE, FINGERPRINT, tmp_path / "packed")
    assert str(changed) in str(error.value)
    subprocess.run(["sh", "-c", str(error.value).split("`")[1]], check=True)
    assert all(map(DiskStore(SHAPE, FINGERPRINT, tmp_path / "packed").holds, range(SHAPE.total)))


def test_a_folder_that_all_may_write_to_gets_no_lock(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(StoreError, match="every user.*chmod go-w.*--spac-disk-dir DIR"):
        StoreLock(tmp_path, FINGERPRINT)
    assert list(tmp_path.iterdir()) == []
    StoreLock(tmp_path / "below", FINGERPRINT).close()  # the way out where the folder itself cannot be changed


def test_a_server_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    preflight = pytest.importorskip("vllm_spac.integration.preflight", reason="vLLM is not installed")
    config = SpacConfig.parse({"slots": "25%", "store": "disk", "disk_dir": str(tmp_path)})
    preflight._check_folder(config, 8)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="disk_dir=.*--spac-disk-dir.*every user.*chmod go-w.*name another folder"):
        preflight._check_folder(config, 8)


# --- what is made -----------------------------------------------------------------------------------------------------


def test_packed_experts_are_this_users_alone(tmp_path: Path, any_umask: int) -> None:
    root = tmp_path / "cache" / "packed"
    lock = StoreLock(root, FINGERPRINT)
    store = packed(root, SHAPE)
    store._mark()
    lock.close()
    made = [root.parent, root, *root.rglob("*")]
    assert {(path.is_dir(), rights(path)) for path in made} == {(True, 0o700), (False, 0o600)}
    assert len(made) == 2 + 1 + 1 + 2 + SHAPE.total + 1


def test_a_folder_that_is_there_keeps_its_rights(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    prepare_folder(tmp_path)
    assert rights(tmp_path) == 0o755
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        prepare_folder(tmp_path / "file")


# --- the lock ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["link", "link to nothing", "hard link", "pipe", "folder"])
@pytest.mark.parametrize("lock", ["start", "remove"])
def test_a_lock_that_leads_elsewhere_is_refused(tmp_path: Path, kind: str, lock: str) -> None:
    (victim := tmp_path / "victim").write_text("secret")
    (root := tmp_path / "root").mkdir()
    path = root / f"{FINGERPRINT}.lock"
    make = {
        "link": lambda: path.symlink_to(victim),
        "link to nothing": lambda: path.symlink_to(tmp_path / "new"),
        "hard link": lambda: os.link(victim, path),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }
    make[kind]()
    (root / FINGERPRINT).mkdir()
    with pytest.raises((SpacError, OSError)):
        StoreLock(root, FINGERPRINT) if lock == "start" else remove(root / FINGERPRINT)
    assert victim.read_text() == "secret" and not (tmp_path / "new").exists()


def test_a_lock_that_is_there_is_used(tmp_path: Path) -> None:
    (tmp_path / f"{FINGERPRINT}.lock").touch()
    first, second = StoreLock(tmp_path, FINGERPRINT), None
    first.open()
    second = StoreLock(tmp_path, FINGERPRINT)
    assert not second.claim(1) and not first.claim(1)
    second.close()
    assert first.claim(1)
    first.close()


_HOLD = """
import sys
from pathlib import Path
from vllm_spac.system.files import LockFile
lock = LockFile(Path(sys.argv[1]))
assert lock.take()
print(flush=True)
sys.stdin.read()
"""


def test_a_start_that_waits_says_for_whom(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And goes on when that process ends, however it ends."""
    command = [sys.executable, "-c", _HOLD, str(tmp_path / f"{FINGERPRINT}.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as packer:
        assert packer.stdout is not None
        packer.stdout.readline()
        waiting = threading.Thread(target=lambda: StoreLock(tmp_path, FINGERPRINT).close(), daemon=True)
        waiting.start()
        while not caplog.records:
            waiting.join(0.05)
        assert waiting.is_alive()
        packer.kill()
    waiting.join(60)
    assert not waiting.is_alive()
    assert f"waiting for process {packer.pid} on {os.uname().nodename} to pack" in caplog.text


def test_a_holder_that_cannot_be_told_is_not_named(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = LockFile(path)
    host = os.uname().nodename
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    for text in ("", "12", "x y", f"{gone.pid} {host}", "9" * 5000, "\x1b[31m", "-1 a"):
        path.write_text(text)
        assert lock.holder() is None, text
    path.write_text("12 far\x1baway")
    assert lock.holder() == (12, "far\\x1baway")
    assert lock.take() and lock.holder() == (os.getpid(), host)
    lock.share()
    assert lock.holder() is None, "nobody has it alone"
    lock.close()


def test_a_lock_is_not_held_by_who_may_only_read_it(tmp_path: Path) -> None:
    """Whoever can open a lock can hold it: 0600 leaves that to its user."""
    StoreLock(tmp_path, FINGERPRINT).close()
    assert rights(tmp_path / f"{FINGERPRINT}.lock") == 0o600


def test_a_log_is_its_users_alone_and_no_link_is_followed(tmp_path: Path, any_umask: int) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"older\n")
    log.chmod(0o644)
    with files.open_log(log) as file:
        file.write(b"newer\n")
    assert log.read_bytes() == b"older\nnewer\n" and rights(log) == 0o600
    (tmp_path / "link").symlink_to(log)
    (tmp_path / "other").hardlink_to(log)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "other", "pipe"):
        with pytest.raises(OSError):
            files.open_log(tmp_path / name)
    assert log.read_bytes() == b"older\nnewer\n"


def test_a_read_only_folder_has_its_lock_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"{FINGERPRINT}.lock"
    LockFile(path).close()
    opened = os.open

    def read_only(name, flags, *mode):
        if flags & (os.O_RDWR | os.O_CREAT):
            raise PermissionError(13, "Permission denied", str(name))
        return opened(name, flags, *mode)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", read_only)
        lock = StoreLock(tmp_path, FINGERPRINT)
    lock.open()
    with open(path) as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock.close()
