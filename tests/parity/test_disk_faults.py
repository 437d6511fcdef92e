"""Damage between or during runs: the experts are packed again, or the engine refuses; never other tokens."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import engines
import pytest

from vllm_spac.errors import StoreError


@pytest.fixture(scope="module")
def family():
    return "qwen3_moe"


@pytest.fixture
def knobs(tmp_path) -> dict:
    return {"slots": "30%", "store": "disk", "disk_dir": str(tmp_path)}


def files(knobs: dict) -> list[Path]:
    return sorted(Path(knobs["disk_dir"]).rglob("expert-*.safetensors"))


def test_damaged_files_are_refused_and_then_packed_again(family, checkpoint, stock, knobs):
    first = engines.generate(checkpoint(family), knobs)
    assert first.tokens == stock(family).tokens
    packed = {path: path.stat().st_mtime_ns for path in files(knobs)}

    missing, short, *others = packed
    missing.unlink()
    short.write_bytes(short.read_bytes()[:-100])
    again = engines.generate(checkpoint(family), knobs)
    assert again.tokens == stock(family).tokens
    assert {path for path in others if path.stat().st_mtime_ns != packed[path]} == set(), "packed twice"

    for path in files(knobs):
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
    with pytest.raises(StoreError, match="is not what was packed.*restart to pack it again"):
        engines.generate(checkpoint(family), knobs)
    assert list(Path(knobs["disk_dir"]).rglob("*.corrupt"))


def test_damage_while_serving_stops_the_engine(family, checkpoint, knobs, monkeypatch):
    from vllm_spac.transfers import Transfers

    load = Transfers.load

    def damaging(self, loads, counters):
        if counters is not None:  # not while the slots are filled
            for key, _ in loads:
                path = self._store.path(key)
                path.write_bytes(path.read_bytes()[:-1] + b"?")
        return load(self, loads, counters)

    monkeypatch.setattr(Transfers, "load", damaging)
    with pytest.raises(Exception, match="is not what was packed"):
        engines.generate(checkpoint(family), knobs)


def test_a_full_disk_is_said_before_packing(family, checkpoint, knobs, monkeypatch):
    import collections
    import shutil

    usage = collections.namedtuple("usage", "total used free")(10**9, 10**9, 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StoreError, match=r"needs .* are free.*--spac-disk-dir"):
        engines.generate(checkpoint(family), knobs)
    assert files(knobs) == []


def test_too_little_host_memory_is_said_before_allocating(family, checkpoint, monkeypatch):
    from vllm_spac.tiers import host

    monkeypatch.setattr(host, "available_host_bytes", lambda: 2**30 + 2**20)
    with pytest.raises(StoreError, match=r"store=host needs 3\.0 MiB.*--spac-store disk"):
        engines.generate(checkpoint(family), {"slots": "30%", "store": "host"})


PACK = """
import sys
sys.path.insert(0, sys.argv[1])
import engines, time
from vllm_spac.tiers.disk import DiskStore
put = DiskStore.put
def slow(self, key, tensors):
    put(self, key, tensors)
    time.sleep(0.2)
DiskStore.put = slow
if __name__ == "__main__":
    engines.generate(sys.argv[2], {"slots": "30%", "store": "disk", "disk_dir": sys.argv[3]})
"""


def test_a_kill_while_packing_leaves_nothing_wrong_behind(family, checkpoint, stock, knobs):
    arguments = [sys.executable, "-c", PACK, str(Path(__file__).parent), str(checkpoint(family)), knobs["disk_dir"]]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 300
    while len(files(knobs)) < 5 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is None, process.stderr.read().decode()[-2000:]
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = files(knobs)
    assert 5 <= len(kept) < 64
    assert engines.generate(checkpoint(family), knobs).tokens == stock(family).tokens
    assert len(files(knobs)) == 64
