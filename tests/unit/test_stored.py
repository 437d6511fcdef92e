"""The toy model's weights are unpacked once, and what left the tree comes back from the history."""

from __future__ import annotations

import importlib
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "toy"))
stored = importlib.import_module("stored")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "models"
    (folder / "target").mkdir(parents=True)
    monkeypatch.setattr(stored, "MODELS", folder)
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


def test_the_weights_in_the_tree_are_unpacked() -> None:
    """The tests' start has done it; what is packed is what engines read."""
    found = sorted(stored.MODELS.rglob("*.xz"))
    assert found
    for packed in found:
        assert lzma.decompress(packed.read_bytes()) == packed.with_suffix("").read_bytes()


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
