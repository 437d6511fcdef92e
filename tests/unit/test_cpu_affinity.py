"""Threads that read experts leave the core that vLLM has bound their parent to."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemoryStore

from vllm_spac.cache import transfers as transfers_module
from vllm_spac.cache.transfers import Transfers
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.system import machine
from vllm_spac.system.machine import Machine


@pytest.fixture
def bound(monkeypatch):
    """Noted by an unbound process; then the calling thread is bound to one CPU of several."""
    free = os.sched_getaffinity(0)
    if len(free) < 2:
        pytest.skip("this machine lets the tests use one CPU only")
    monkeypatch.delenv(machine.VARIABLE, raising=False)
    machine.save_cpus()
    os.sched_setaffinity(0, {min(free)})
    yield free
    os.sched_setaffinity(0, free)


def test_reads_on_demand_and_ahead(bound, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers_module, "_HAND_OFF", -1)  # so few bytes are read by the caller alone
    seen: dict[str, set[int]] = {}

    class Store(MemoryStore):
        def read(self, key, into):
            seen[threading.current_thread().name.rpartition("_")[0]] = os.sched_getaffinity(0)
            return super().read(key, into)

    store = Store(MoEShape(("layer",), 4, 1, {"w": TensorSpec((1,), torch.float32)}), "")
    for key in range(4):
        store.put(key, {"w": torch.ones(1)})
    transfers = Transfers(store, {"w": torch.zeros(4, 1)}, 1, "somewhere")
    transfers.load([(0, 0), (1, 1)], None)  # one of them in this thread
    transfers.ahead.fetch([(2, 2), (3, 3)])
    while transfers.ahead.keys:
        transfers.ahead.take_finished()
        time.sleep(0.001)
    transfers.close()
    assert {name: cpus for name, cpus in seen.items() if name} == {"spac-io": bound, "spac-ahead": bound}
    assert os.sched_getaffinity(0) == {min(bound)}, "the thread that computes stays where vLLM put it"


def test_who_is_bound_does_not_note_it(bound) -> None:
    machine.save_cpus()
    assert machine.cpus() == bound
    assert Machine.here().cores == len(bound), "a profile fits the workers of this machine"


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(1, 12))
def test_processes_share_the_cpus(found, count) -> None:
    """Each CPU is one process's, and shares differ by one at most; where there are too few, all processes use all."""
    parts = []
    for index in range(count):
        machine.limit_cpus(index, count)
        parts.append(machine.part(found))
    machine.limit_cpus(0, 1)
    assert all(parts) and machine.part(found) == found
    if len(found) >= count:
        assert sorted(cpu for part in parts for cpu in part) == sorted(found)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_threads_that_read_stay_on_their_share(bound) -> None:
    ordered = sorted(bound)
    try:
        machine.limit_cpus(1, 2)
        machine.reset_affinity()
        assert os.sched_getaffinity(0) == set(ordered[len(ordered) // 2 :])
    finally:
        machine.limit_cpus(0, 1)


def test_cpus_that_went_away_are_said(bound, monkeypatch, caplog) -> None:
    monkeypatch.setenv(machine.VARIABLE, "4095")
    machine.reset_affinity()
    assert "stays on the CPUs" in caplog.text and os.sched_getaffinity(0) == {min(bound)}
