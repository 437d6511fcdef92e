"""Puts this folder on the path of its own tests, for the module that they share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that fail are tried as often as in an engine, without waiting in between."""
    from vllm_spac.storage import disk

    monkeypatch.setattr(disk, "PAUSES", (0.0,) * len(disk.PAUSES))
