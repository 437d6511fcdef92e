"""Damage between or during runs: the experts are packed again, or the engine refuses; never other tokens."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import compare
import engines
import forked
import pytest
from exactness import assert_same_tokens
from safetensors.torch import load_file, save_file

from vllm_spac.errors import StoreError
from vllm_spac.storage.checkpoint.headers import read_checkpoint


@pytest.fixture(scope="module")
def family():
    return "qwen3_moe"


@pytest.fixture
def knobs(tmp_path) -> dict:
    return {"slots": "30%", "store": "disk", "disk_dir": str(tmp_path)}


@pytest.fixture(params=[0, 0.2], ids=["two tiers", "three tiers"])
def tiers(request, family, checkpoint, knobs) -> dict:
    """``knobs``, and the same with host memory for a fifth of the experts."""
    if not request.param:
        return knobs
    experts = sum(read_checkpoint(checkpoint(family)).layer_bytes.values())
    return knobs | {"host_memory": int(request.param * experts)}


def files(knobs: dict) -> list[Path]:
    return sorted(Path(knobs["disk_dir"]).rglob("expert-*.safetensors"))


def damage(knobs: dict, experts: list[tuple[int, int]]) -> list[Path]:
    """Flip a bit of the data of each (layer, expert)."""
    paths = [path for layer, expert in experts for path in files(knobs) if path.match(f"*-{layer:03}/*-{expert:04}.*")]
    for path in paths:
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
    return paths


FIRST = [(0, 0), (0, 3), (1, 1), (2, 2), (3, 0)]  # get a slot when the slots are filled
LAST = [(0, 15), (1, 14), (1, 15), (2, 13), (3, 12)]  # do not


def test_all_that_is_damaged_is_packed_again_by_one_start(family, checkpoint, stock, tiers):
    """Some are read when slots and host memory are filled, and then all are checked, also those that are not."""
    engines.generate(checkpoint(family), tiers)
    damaged = damage(tiers, [*FIRST, *LAST])
    assert len(damaged) == 10
    packed = {path: path.stat().st_mtime_ns for path in files(tiers)}
    assert_same_tokens(engines.generate(checkpoint(family), tiers), stock(family))
    assert [path for path in files(tiers) if path.stat().st_mtime_ns != packed[path]] == sorted(damaged)
    assert len(list(Path(tiers["disk_dir"]).rglob("*.corrupt"))) == 10


def test_only_what_is_missing_short_or_damaged_is_packed_again(family, checkpoint, stock, knobs):
    first = engines.generate(checkpoint(family), knobs)
    assert_same_tokens(first, stock(family))
    damaged = damage(knobs, FIRST)
    missing, short = files(knobs)[-2:]
    missing.unlink()
    short.write_bytes(short.read_bytes()[:-100])
    packed = {path: path.stat().st_mtime_ns for path in files(knobs)}
    assert_same_tokens(engines.generate(checkpoint(family), knobs), stock(family))
    again = [path for path in files(knobs) if path.stat().st_mtime_ns != packed.get(path)]
    assert again == sorted([*damaged, missing, short]) and len(files(knobs)) == 64


def test_damage_while_serving_stops_the_engine_and_is_gone_after_a_restart(family, checkpoint, stock, tiers):
    """Only the expert that was asked for is known to be damaged; the next start looks for the others."""
    from vllm_spac.cache.transfers import Transfers

    load = Transfers.load
    everywhere = [(layer, expert) for layer in range(4) for expert in range(6, 16)]

    def damaging(self, loads, counters):
        if counters is not None and not damaged:  # not while slots and host memory are filled
            damaged.extend(damage(tiers, everywhere))
        return load(self, loads, counters)

    damaged: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transfers, "load", damaging)
        with pytest.raises(Exception, match="is not what was packed"):
            engines.generate(checkpoint(family), tiers)
    gc.collect()  # the engine, which the error kept, before there is another one
    aside = list(Path(tiers["disk_dir"]).rglob("*.corrupt"))
    assert 0 < len(aside) < len(damaged) == 40
    assert_same_tokens(engines.generate(checkpoint(family), tiers), stock(family))
    assert len(list(Path(tiers["disk_dir"]).rglob("*.corrupt"))) == 40


def test_after_an_error_no_step_runs_and_none_is_waited_for(family, checkpoint, knobs, monkeypatch):
    """vLLM keeps the broken step's requests: it would run steps without a row, and generate would not return."""
    from vllm_spac.storage import disk
    from vllm_spac.storage.disk import DiskStore

    def refuse(self, path, parts):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with engines.engine(checkpoint(family), knobs) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(DiskStore, "_read_file", refuse)
            patch.setattr(disk.time, "sleep", lambda seconds: None)
            with pytest.raises(StoreError, match="Input/output error") as first:
                engines.say(llm)
        for _ in range(2):  # the disk is well again
            assert llm.llm_engine.has_unfinished_requests()
            with pytest.raises(StoreError) as again:
                engines.say(llm)
            assert str(again.value) == str(first.value)
        engine = weakref.ref(llm.llm_engine.engine_core)
        del llm, first, again
    gc.collect()
    assert engine() is None, "no frame of the error holds the engine"


def test_reads_that_fail_for_a_moment_change_nothing_but_a_counter(family, checkpoint, stock, tiers, monkeypatch):
    """Every fifth read, at the start and while serving: by an error, or by bytes that were damaged on the way."""
    from vllm_spac.storage import disk
    from vllm_spac.storage.disk import DiskStore

    engines.generate(checkpoint(family), tiers)
    real, reads = DiskStore._read_file, itertools.count(1)

    def unsteady(self, path, parts):
        if (number := next(reads)) % 10 == 5:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        size = real(self, path, parts)
        parts[-2 if len(parts) > 1 else 0][100] ^= number % 10 == 0
        return size

    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "_read_file", unsteady)
        patch.setattr(disk.time, "sleep", lambda seconds: None)
        run = engines.generate(checkpoint(family), tiers)
    assert_same_tokens(run, stock(family))
    assert run.stats["read_retries"] == (next(reads) - 1) // 5 > 20 and run.stats["prefetch_failed"] == 0
    assert not list(Path(tiers["disk_dir"]).rglob("*.corrupt"))


def test_a_read_that_does_not_return_is_reported_once(family, checkpoint, stock, knobs, monkeypatch):
    """With the stack of the thread that waits for it; the engine goes on when it returns."""
    from vllm_spac.recording.watchdog import SECONDS, Watchdog
    from vllm_spac.storage.disk import DiskStore

    real, looks, over = DiskStore._read_file, [0], threading.Event()
    waits: list[str] = []

    def waiting(self, path, parts):
        if serving and not waits:
            waits.append(threading.current_thread().name)
            assert over.wait(120), "the watchdog does not look"
        return real(self, path, parts)

    def clock() -> float:
        """A second passes with each look while the read waits, and a thousand seconds in all."""
        looks[0] += bool(waits) and not over.is_set()
        if looks[0] > 100 * SECONDS:
            over.set()
        return float(looks[0])

    serving = False
    monkeypatch.setattr(Watchdog, "clock", staticmethod(clock))
    monkeypatch.setattr(Watchdog, "period", 0.001)
    monkeypatch.setattr(DiskStore, "_read_file", waiting)
    with engines.engine(checkpoint(family), knobs) as llm:
        serving = True
        said = engines.say(llm)
    assert_same_tokens(engines.Run(said), stock(family))
    (text,) = [path.read_text() for path in Path(knobs["disk_dir"]).glob("stall-*.txt")]
    (blocked,) = [part for part in text.split("\nthread ") if f" in {waiting.__name__}\n" in part]
    assert blocked.startswith(f"{waits[0]} (") and "layer 0" in text


def test_another_checkpoint_with_the_old_times(family, checkpoint, knobs, tmp_path):
    """Names, sizes and mtimes are kept, as rsync and images do; the experts are those of the new one all the same."""
    model = shutil.copytree(checkpoint(family), tmp_path / "model")
    engines.generate(model, knobs)
    weights = model / "model.safetensors"
    before, tensors = weights.stat(), load_file(weights)
    (name,) = (name for name in tensors if "layers.2" in name and name.endswith("experts.3.down_proj.weight"))
    tensors[name] = -tensors[name]
    save_file(tensors, weights, {"format": "pt"})
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert_same_tokens(engines.generate(model, knobs), engines.generate(model))


def test_a_checkpoint_that_changes_while_it_is_packed(family, checkpoint, stock, knobs, tmp_path, monkeypatch):
    from vllm_spac.storage.disk import DiskStore

    model, put = shutil.copytree(checkpoint(family), tmp_path / "model"), DiskStore.put

    def touching(self, key, tensors):
        (model / "model.safetensors").touch()
        put(self, key, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "put", touching)
        with pytest.raises(StoreError, match=r"model\.safetensors was changed while the model was loaded"):
            engines.generate(model, knobs)
    assert files(knobs) == [], "experts of who knows which checkpoint were kept"
    assert_same_tokens(engines.generate(model, knobs), stock(family))


READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 77
touch "$1/x" 2> /dev/null && exit 78
shift
exec "$@"
"""


@pytest.mark.parametrize("lock", [pytest.param(True, marks=pytest.mark.full), False], ids=["lock file", "no lock file"])
def test_packed_experts_on_a_read_only_disk(lock, family, checkpoint, stock, knobs):
    engines.generate(checkpoint(family), knobs)
    if not lock:
        (path,) = Path(knobs["disk_dir"]).glob("*.lock")
        path.unlink()
    wrapper = ["unshare", "--mount", "bash", "-c", READ_ONLY, "bash", knobs["disk_dir"]]
    program, log_all = compare.program(checkpoint(family), knobs), forked.ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "INFO"}
    command = [*wrapper, sys.executable, *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=log_all)
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    assert_same_tokens(engines.Run(**forked.answer(done)), stock(family))
    log = done.stdout + done.stderr
    assert "O, read-only)" in log and ("without a lock" in log) is not lock


def test_a_full_disk_is_said_before_packing(family, checkpoint, knobs, monkeypatch):
    import collections
    import shutil

    usage = collections.namedtuple("usage", "total used free")(10**9, 10**9, 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StoreError, match=r"needs .* are free.*--spac-disk-dir"):
        engines.generate(checkpoint(family), knobs)
    assert files(knobs) == []


def test_too_little_host_memory_is_said_before_allocating(family, checkpoint, monkeypatch):
    from vllm_spac.storage import host

    monkeypatch.setattr(host, "available_host_bytes", lambda: 2**30 + 2**20)
    with pytest.raises(StoreError, match=r"store=host needs 3\.0 MiB.*--spac-store disk"):
        engines.generate(checkpoint(family), {"slots": "30%", "store": "host"})


PACK = """
import sys
sys.path.insert(0, sys.argv[1])
import engines, time
from vllm_spac.storage.disk import DiskStore
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
    assert_same_tokens(engines.generate(checkpoint(family), knobs), stock(family))
    assert len(files(knobs)) == 64
