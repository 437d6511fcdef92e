"""A checkpoint is read once and trusted until it is written; a different checkpoint has different facts."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_spac.errors import StoreError
from vllm_spac.integration.loading import fingerprint
from vllm_spac.storage.checkpoint import contents

SIZE = 9 << 20  # more than a block


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a test are as good as old."""
    monkeypatch.setattr(contents, "_SETTLED_NS", -(1 << 60))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read."""
    names: list[str] = []
    digest = contents._digest
    monkeypatch.setattr(contents, "_digest", lambda path, step: names.append(path.name) or digest(path, step))
    return names


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    for index in (1, 2):
        (tmp_path / "model" / f"model-0000{index}-of-00002.safetensors").write_bytes(os.urandom(SIZE))
    (tmp_path / "model" / "model.safetensors.index.json").write_text("{}")
    return tmp_path / "model"


def facts(model: Path, load_format: str = "auto") -> list:
    files = contents.weight_files(model, load_format)
    return contents.read(files, [model.parent / "packed"]).facts


def flip(path: Path, offset: int) -> None:
    """Write one byte, and give the file the mtime that it had."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the kernel's clock ticks every few milliseconds
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_nothing_is_read_twice(model: Path, opened: list[str], caplog: pytest.LogCaptureFixture) -> None:
    first = facts(model)
    assert sorted(opened) == sorted(path.name for path in model.iterdir())
    assert "3 of 3 weight files (18.0 MiB) were read" in caplog.text and str(model.parent / "packed") in caplog.text
    opened.clear(), caplog.clear()
    assert facts(model) == first and opened == []
    assert "3 of 3 weight files (18.0 MiB) were not read: inodes, sizes, mtimes and ctimes" in caplog.text


@pytest.mark.parametrize("offset", [0, 100_000, (8 << 20) - 1, 8 << 20, SIZE - 1])
def test_any_byte_that_changed_is_noticed_though_size_and_mtime_are_kept(
    model: Path, offset: int, opened: list[str]
) -> None:
    first, shard = facts(model), model / "model-00002-of-00002.safetensors"
    before = shard.stat()
    opened.clear()
    flip(shard, offset)
    assert (shard.stat().st_size, shard.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert facts(model) != first and opened == [shard.name]
    flip(shard, offset)
    assert facts(model) == first


CHANGES: dict[str, Callable[[Path], None]] = {
    "replaced": lambda model: shutil.copy2(model / "model-00001-of-00002.safetensors", model / "new").replace(
        model / "model-00002-of-00002.safetensors"
    ),
    "swapped": lambda model: [
        (model / a).rename(model / b)
        for a, b in (
            ("model-00001-of-00002.safetensors", "x"),
            ("model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"),
            ("x", "model-00002-of-00002.safetensors"),
        )
    ],
    "added": lambda model: (model / "model-00003.safetensors").write_bytes(b"x"),
    "removed": lambda model: (model / "model-00002-of-00002.safetensors").unlink(),
    "other index": lambda model: (model / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
    "shorter": lambda model: os.truncate(model / "model-00002-of-00002.safetensors", SIZE - 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_checkpoint_has_other_facts(model: Path, change: str) -> None:
    first = facts(model)
    CHANGES[change](model)
    assert facts(model) != first


def test_a_file_that_was_written_just_now_is_read_again(
    model: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second write may get the same ctime."""
    monkeypatch.setattr(contents, "_SETTLED_NS", 2_000_000_000)
    facts(model)
    opened.clear()
    facts(model)
    assert len(opened) == 3


def test_links_into_a_folder_of_blobs(tmp_path: Path, opened: list[str]) -> None:
    """As the cache of the hub has them."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir(), snapshot.mkdir(parents=True)
    for name in ("one", "two"):
        (blobs / name).write_bytes(os.urandom(1000))
    link = snapshot / "model.safetensors"
    link.symlink_to(Path("../../blobs/one"))
    first = facts(snapshot)
    opened.clear()
    assert facts(snapshot) == first and opened == []
    flip(blobs / "one", 500)
    assert facts(snapshot) != (other := first)
    flip(blobs / "one", 500)
    link.unlink()
    link.symlink_to(Path("../../blobs/two"))
    assert facts(snapshot) != other
    link.unlink()
    link.symlink_to(Path("../../blobs/three"))
    with pytest.raises(StoreError, match="cannot read .*three: No such file"):
        facts(snapshot)


@pytest.mark.parametrize(
    ("load_format", "names"),
    [
        ("auto", ["a.safetensors"]),
        ("safetensors", ["a.safetensors"]),
        ("pt", ["a.safetensors", "b.bin", "c.pt"]),
        ("npcache", ["a.safetensors", "b.bin", "c.pt", "weights"]),
    ],
)
def test_which_files_are_weights(tmp_path: Path, load_format: str, names: list[str]) -> None:
    (tmp_path / "np").mkdir()
    for name in ("a.safetensors", "b.bin", "c.pt", "tokenizer.json", "np/weights"):
        (tmp_path / name).touch()
    assert [path.name for path in contents.weight_files(tmp_path, load_format)] == names


@pytest.mark.parametrize("content", ["", "[]", '{"format": "spac-checkpoint-0", "files": {}}', '{"files": {"a": 1}}'])
def test_a_record_that_is_none(model: Path, content: str, opened: list[str], caplog: pytest.LogCaptureFixture) -> None:
    first = facts(model)
    (record,) = (model.parent / "packed").iterdir()
    record.write_text(content)
    opened.clear()
    assert facts(model) == first and len(opened) == 3
    assert f"{record} is not a record of a checkpoint" in caplog.text
    opened.clear()
    assert facts(model) == first and opened == []


def test_a_record_that_others_may_write_is_not_believed(model: Path, opened: list[str], caplog) -> None:
    first = facts(model)
    (record,) = (model.parent / "packed").iterdir()
    record.chmod(0o666)
    opened.clear()
    assert facts(model) == first and len(opened) == 3
    assert f"{record} of " in caplog.text and "the files of the checkpoint are read again" in caplog.text
    opened.clear()
    assert facts(model) == first and opened == [], "this start has written its own"


def test_a_folder_that_cannot_be_written_to(
    model: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Simulated, since root may write everywhere."""
    refused, write_text = [model.parent / "packed"], contents.write_text

    def refusing(path: Path, text: str) -> None:
        if path.parent in refused:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        write_text(path, text)

    monkeypatch.setattr(contents, "write_text", refusing)
    files, folders = contents.weight_files(model, "auto"), [model.parent / "packed", model.parent / "second"]
    for reads in (3, 0):
        opened.clear()
        contents.read(files, folders)
        assert len(opened) == reads
    shutil.rmtree(folders[1])
    refused.append(folders[1])
    caplog.clear()
    contents.read(files, folders)
    assert f"each start reads them, because {folders[0]}" in caplog.text


def test_a_file_that_changes_while_it_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = contents._digest

    def changing(path: Path, step) -> str:
        try:
            return digest(path, step)
        finally:
            flip(path, 0)

    monkeypatch.setattr(contents, "_digest", changing)
    with pytest.raises(StoreError, match=r"safetensors changed while it was read"):
        facts(model)


@pytest.mark.parametrize("change", ["written", "removed"])
def test_a_file_that_changes_after_it_was_read(model: Path, change: str) -> None:
    content = contents.read(contents.weight_files(model, "auto"), [model.parent / "packed"])
    content.check_unchanged()
    shard = model / "model-00001-of-00002.safetensors"
    flip(shard, 0) if change == "written" else shard.unlink()
    with pytest.raises(StoreError, match=f"{shard.name} was changed while the model was loaded"):
        content.check_unchanged()


# -- of vLLM's configuration --------------------------------------------------------------------------------


COMMIT, OTHER = "0a" * 20, "0b" * 20


def config(model, load_format: str = "auto", commit: str | None = None, **facts) -> SimpleNamespace:
    facts = {"revision": None, "hf_config": SimpleNamespace(_commit_hash=commit)} | facts
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), **facts), load_config=SimpleNamespace(load_format=load_format)
    )


def content(*args, **kwargs) -> list:
    return fingerprint.content_of(config(*args, **kwargs), Path("~/packed").expanduser()).facts


def test_a_model_of_the_hub_is_its_commit(caplog: pytest.LogCaptureFixture) -> None:
    assert (
        content("org/name", commit=COMMIT) == content("org/name", revision=COMMIT) != content("org/name", commit=OTHER)
    )
    assert f"the weights of org/name are trusted to be those of commit {COMMIT} and were not read" in caplog.text


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({}, "which commit of org/name is served is unknown; add --revision COMMIT"),
        ({"revision": "main"}, "--revision COMMIT.* or use --spac-store host"),
        ({"commit": COMMIT, "hf_config_path": "org/other"}, "--revision COMMIT"),
        ({"model_weights": "s3://bucket/model"}, "the content of s3://bucket/model cannot be identified; download it"),
    ],
    ids=str,
)
def test_weights_that_cannot_be_told_from_others(facts: dict, named: str) -> None:
    with pytest.raises(StoreError, match=named):
        content("org/name", **facts)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"{tmp_path} has no weight files that --load-format auto takes"):
        content(tmp_path)
    assert content(tmp_path, "dummy") == content("org/name", "dummy"), "dummy weights need no files"


def test_a_folder_is_its_files(model: Path, home: Path, opened: list[str]) -> None:
    assert content(model) == content(model) and len(opened) == 3
    assert [path.name[:11] for path in (home / "packed").iterdir()] == ["checkpoint-"]
