"""Models and traces are unpacked once, and what left the tree comes back from the history."""

from __future__ import annotations

import lzma
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.toy import stored


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "models"
    (folder / "target").mkdir(parents=True)
    monkeypatch.setattr(stored, "BENCHMARKS", folder)
    return folder


def test_weights_are_unpacked_once_and_again_when_they_change(models: Path) -> None:
    packed, weights = (models / "target" / f"model.safetensors{suffix}" for suffix in (".xz", ""))
    packed.write_bytes(lzma.compress(b"weights"))
    assert stored.unpack() == [weights] and weights.read_bytes() == b"weights"
    assert stored.unpack() == [] and sorted(models.rglob("*.*")) == [weights, packed]
    packed.write_bytes(lzma.compress(b"others"))
    later = weights.stat().st_mtime + 1
    os.utime(packed, (later, later))
    assert stored.unpack() == [weights] and weights.read_bytes() == b"others"


@pytest.mark.parametrize("data", [b"", b"a", b"lulu", b"lulul", bytes(range(256)) * 5])
@pytest.mark.parametrize("name", ["none1.trace", "model.safetensors"])
def test_what_is_packed_is_unpacked(models: Path, data: bytes, name: str) -> None:
    (models / name).write_bytes(data)
    packed = stored.pack(models / name)
    (models / name).unlink()
    assert stored.unpack() == [models / name] and (models / name).read_bytes() == data
    assert packed.name == ("model.safetensors.halves.xz" if name == "model.safetensors" else "none1.trace.xz")


def test_what_is_in_the_tree_is_unpacked() -> None:
    """The tests' start has done it; what is packed is what engines and simulations read."""
    found = sorted(stored.BENCHMARKS.rglob("*.xz"))
    assert {path.parent.name for path in found} == {"target", "draft", "eagle3", "traces", "local", "real"}
    for packed in found:
        path = packed.with_name(packed.name.removesuffix(".xz").removesuffix(stored.HALVES))
        assert stored.content(packed) == path.read_bytes(), packed


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x")
    return subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_a_folder_that_left_the_tree(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (models / "local").mkdir()
    (models / "local" / "config.json").write_text("{}")
    with pytest.raises(stored.StoredError, match="not a git repository"):
        stored.restore(models / "local")
    git(models.parent, "init", "-q")
    git(models.parent, "add", ".")
    git(models.parent, "commit", "-qm", "all")
    monkeypatch.setattr(stored, "HISTORY", git(models.parent, "rev-parse", "HEAD").strip())
    git(models.parent, "rm", "-qr", "models/local")
    (models.parent / ".gitignore").write_text("models/local\n")
    git(models.parent, "add", ".")
    git(models.parent, "commit", "-qm", "less")
    assert not (models / "local").exists()
    stored.restore(models / "local")
    assert (models / "local" / "config.json").read_text() == "{}"
    assert git(models.parent, "status", "--porcelain") == ""
    monkeypatch.setattr(stored, "HISTORY", "0" * 40)
    with pytest.raises(stored.StoredError, match="git fetch --unshallow"):
        stored.restore(models / "local")
