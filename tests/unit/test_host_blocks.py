"""Host memory for experts: as much as is needed, pinned once and given back once. CUDA's runtime is a stand-in."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
from collections.abc import Iterator
from enum import IntEnum

import pytest
import torch

from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import PinError, StoreError
from vllm_spac.storage import host
from vllm_spac.storage.host import HostStore
from vllm_spac.system import host_blocks, host_memory
from vllm_spac.system.host_blocks import HostBlock, block_bytes

PAGE = mmap.PAGESIZE
SPECS = {
    "w13_weight": TensorSpec((3, PAGE), torch.bfloat16),  # six pages an expert
    "w2_weight": TensorSpec((PAGE - 1,), torch.uint8),
    "w2_bias": TensorSpec((1,), torch.float32),
}
EXPERTS = 3  # 18 pages, 3 pages less 3 bytes, 12 bytes
SHAPE = MoEShape(("first", "second", "third"), EXPERTS, 1, SPECS)


class Cudart:
    """Keeps what is registered, and refuses what the driver does: overlaps, strangers, more than the limit."""

    class cudaError(IntEnum):  # noqa: N801
        success = 0
        cudaErrorMemoryAllocation = 2
        cudaErrorHostMemoryAlreadyRegistered = 712
        cudaErrorHostMemoryNotRegistered = 713

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit, self.registered, self.log, self.forgotten = limit, {}, [], 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int):  # noqa: N802
        self.log.append(("register", address, nbytes, flags))
        if sum(self.registered.values()) + nbytes > self.limit:
            return self.cudaError.cudaErrorMemoryAllocation
        if any(a < address + nbytes and address < a + n for a, n in self.registered.items()):
            return self.cudaError.cudaErrorHostMemoryAlreadyRegistered
        self.registered[address] = nbytes
        return self.cudaError.success

    def cudaHostUnregister(self, address: int):  # noqa: N802
        self.log.append(("unregister", address))
        if self.registered.pop(address, None) is None:
            return self.cudaError.cudaErrorHostMemoryNotRegistered
        return self.cudaError.success

    def cudaGetErrorString(self, error) -> str:  # noqa: N802
        return {2: "out of memory"}.get(int(error), error.name)


@pytest.fixture
def cudart(monkeypatch) -> Iterator[Cudart]:
    found = Cudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(host_blocks, "_forget_error", lambda: setattr(found, "forgotten", found.forgotten + 1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: found.log.append(("synchronize",)))
    yield found
    gc.collect()  # blocks that an error's traceback kept are unpinned while there is this driver
    assert not found.registered, "memory stays pinned"


def fill(store: HostStore) -> None:
    for key in range(SHAPE.total):
        tensors = {n: torch.full((s.nbytes,), key, dtype=torch.uint8).view(s.dtype) for n, s in SPECS.items()}
        store.put(key, {n: t.view(SPECS[n].shape) for n, t in tensors.items()})


def test_a_store_pins_exactly_its_layers_and_unpins_each_once(cudart) -> None:
    store = HostStore(SHAPE, "")
    fill(store)
    assert [entry[0] for entry in cudart.log] == 3 * ["register"]
    assert list(cudart.registered.values()) == 3 * [(18 + 3 + 1) * PAGE], "torch would take 32 + 4 + 1 pages"
    assert not any(address % PAGE for address in cudart.registered)
    for key in range(SHAPE.total):
        for name, tensor in store.view(key).items():
            block = list(cudart.registered)[key // EXPERTS]
            assert block <= tensor.data_ptr() < tensor.data_ptr() + tensor.nbytes <= block + 22 * PAGE
            assert (tensor.view(-1).view(torch.uint8) == key).all(), name
    assert all(tensor.data_ptr() % PAGE == 0 for tensor in store.layer(1).values())
    store.close()
    store.close()
    assert not cudart.registered
    assert [entry[0] for entry in cudart.log[3:]] == ["synchronize", *3 * ["unregister"]]


def test_what_is_reserved_is_what_is_pinned(cudart, monkeypatch) -> None:
    store = HostStore(SHAPE, "")
    needed = 3 * 22 * PAGE
    monkeypatch.setattr(host, "available_host_bytes", lambda: needed + host._RESERVE - 1)
    with pytest.raises(StoreError, match="264.0 KiB" if PAGE == 4096 else "needs"):
        store.reserve(SHAPE.total)
    monkeypatch.setattr(host, "available_host_bytes", lambda: needed + host._RESERVE)
    store.reserve(SHAPE.total)
    fill(store)
    assert sum(cudart.registered.values()) == needed
    assert "264.0 KiB" in store.describe() or PAGE != 4096


def test_under_windows_the_remedy_is_windows_own(cudart, tmp_path, monkeypatch) -> None:
    (tmp_path / "osrelease").write_text("6.6.87.2-microsoft-standard-WSL2\n")
    monkeypatch.setattr(host_memory, "_RELEASE", tmp_path / "osrelease")
    cudart.limit = 21 * PAGE
    store = HostStore(SHAPE, "")
    with pytest.raises(PinError, match=r"about half of WSL's memory.*\.wslconfig") as caught:
        store.pin()
    store.close()
    assert "ulimit" not in str(caught.value)


def test_what_is_read_in_place_is_pinned_before_any_expert_is_packed(cudart) -> None:
    store = HostStore(SHAPE, "")
    store.pin()
    assert len(cudart.registered) == 3 and store.host_bytes == {"pinned": 3 * 22 * PAGE, "pageable": 0}
    fill(store)
    assert len(cudart.log) == 3, "no layer is pinned twice"
    store.close()


def test_of_what_is_read_in_place_a_part_may_be_pinned(cudart, caplog) -> None:
    """Beside as much as a layer takes, to which the others are read: in place of the last layer, here."""
    cudart.limit = 2 * 22 * PAGE
    store = HostStore(SHAPE, "")
    store.pin()
    fill(store)
    assert [store.in_reach(key) for key in range(SHAPE.total)] == [key < EXPERTS for key in range(SHAPE.total)]
    assert store.host_bytes == {"pinned": 2 * 22 * PAGE, "pageable": 2 * 22 * PAGE}
    (there,) = (a for a, _ in cudart.registered.items() if a != store.layer(0)["w13_weight"].data_ptr())
    assert all(there <= tensor.data_ptr() < there + 22 * PAGE for tensor in store.staging().values())
    (line,) = (line for line in caplog.messages if "are pinned" in line)
    assert "are pinned" in line
    slot = {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in SPECS.items()}
    store.read(SHAPE.total - 1, slot)
    assert all((tensor.view(-1).view(torch.uint8) == SHAPE.total - 1).all() for tensor in slot.values())
    store.close()
    assert not cudart.registered


def test_a_driver_that_pins_not_even_a_layer_is_an_error(cudart) -> None:
    cudart.limit, store = 21 * PAGE, HostStore(SHAPE, "")
    with pytest.raises(PinError, match=r"raise .*ulimit -l.*memlock=-1.* --spac-plane table") as caught:
        store.pin()
    assert caught.value.problem.endswith("of memory, error 2)") and cudart.forgotten == 2
    assert not any(map(store.holds, range(SHAPE.total)))
    store.close()
    assert not cudart.registered


def test_where_all_is_pinned_there_is_no_staging(cudart) -> None:
    store = HostStore(SHAPE, "")
    store.pin()
    assert len(cudart.registered) == 3 and store.in_reach(0)
    with pytest.raises(StoreError, match="in reach"):
        store.staging()
    store.close()


def test_what_is_copied_is_pinned_as_far_as_the_driver_allows(cudart, caplog) -> None:
    """Layers in their order; after the first refusal no other is tried, and the runtime's error is forgotten."""
    cudart.limit = 22 * PAGE
    store = HostStore(SHAPE, "")
    store.in_place = False
    store.pin()
    assert not cudart.log, "layers are pinned as they are packed"
    fill(store)
    assert [entry[0] for entry in cudart.log] == ["register", "register"] and cudart.forgotten == 1
    assert store.host_bytes == {"pinned": 22 * PAGE, "pageable": 2 * 22 * PAGE}
    (pinned,) = cudart.registered
    assert pinned == store.layer(0)["w13_weight"].data_ptr()
    (warning,) = caplog.messages
    assert "ulimit -l" in warning and (PAGE != 4096 or "88.0 KiB of 264.0 KiB" in warning)
    assert PAGE != 4096 or "of which 176.0 KiB could not be pinned" in store.describe()
    for key in range(SHAPE.total):
        assert all((t.view(-1).view(torch.uint8) == key).all() for t in store.view(key).values())
    store.close()
    assert not cudart.registered


def test_an_error_of_another_kind_is_not_a_limit(cudart) -> None:
    cudart.cudaHostRegister = lambda *_: cudart.cudaError.cudaErrorHostMemoryAlreadyRegistered
    with pytest.raises(StoreError, match="AlreadyRegistered") as caught:
        HostBlock(SPECS, EXPERTS, pin=True)
    assert not isinstance(caught.value, PinError) and cudart.forgotten == 0


def test_memory_that_cannot_be_unpinned_is_an_error(cudart) -> None:
    block = HostBlock(SPECS, EXPERTS, pin=True)
    cudart.registered.clear()
    with pytest.raises(StoreError, match="NotRegistered"):
        block.close()


def test_without_a_gpu_nothing_is_pinned(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("there is none"))
    block = HostBlock(SPECS, EXPERTS, pin=False)
    assert block.nbytes == block_bytes(SPECS.values(), EXPERTS) == 22 * PAGE
    assert all(not tensor.view(torch.uint8).any() for tensor in block.tensors.values())
    block.close()


def test_tensors_outlive_their_block(cudart) -> None:
    block = HostBlock(SPECS, EXPERTS, pin=True)
    tensor = block.tensors["w13_weight"]
    block.close()
    del block
    tensor.fill_(1)
    assert tensor.sum() == tensor.numel()


def test_more_than_the_address_space_is_refused() -> None:
    with pytest.raises(StoreError, match="cannot allocate .* of host memory for store=host .*--spac-store disk"):
        HostBlock({"w": TensorSpec((1 << 50,), torch.uint8)}, 1 << 10, pin=False)


def test_pinned_memory_is_not_shared_with_a_forked_process() -> None:
    """A copy on write would leave the GPU with the page that the parent no longer writes."""
    code = """
import re, sys, torch
from vllm_spac.system.host_blocks import HostBlock
from vllm_spac.core import TensorSpec
torch.cuda.cudart = lambda: type("C", (), {"cudaHostRegister": staticmethod(lambda *_: 0)})
address = HostBlock({"w": TensorSpec((1 << 20,), torch.uint8)}, 4, True).tensors["w"]
text = open("/proc/self/smaps").read()
entry = next(e for e in re.split(r"\\n(?=[0-9a-f]+-[0-9a-f]+ )", text) if e.startswith(f"{address.data_ptr():x}-"))
print(re.search("VmFlags: (.*)", entry)[1])
"""
    flags = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "dc" in flags, "do not copy on fork"


def test_a_block_that_nobody_closed_is_unpinned_before_its_memory_goes(cudart) -> None:
    """Else the driver keeps the range, and refuses the next block that the system puts there (seen on an H100)."""
    block = HostBlock(SPECS, EXPERTS, pin=True)
    (address,) = cudart.registered
    del block
    assert not cudart.registered and cudart.log[-1] == ("unregister", address)


def test_settled_experts_take_no_host_memory_and_are_in_their_slots(cudart, monkeypatch) -> None:
    """Four of nine: the last two of the first layer, and the last one of each other."""
    slots = {name: torch.zeros(6, *spec.shape, dtype=spec.dtype) for name, spec in SPECS.items()}
    store = HostStore(SHAPE, "")
    store.reserve_slots(4, slots)
    assert store.tensors is slots and list(store.settled) == [1, 2, 5, 8]
    held = [block_bytes(SPECS.values(), count) for count in (1, 2, 2)]
    monkeypatch.setattr(host, "available_host_bytes", lambda: sum(held) + host._RESERVE - 1)
    with pytest.raises(StoreError, match="needs"):
        store.reserve(SHAPE.total)
    monkeypatch.setattr(host, "available_host_bytes", lambda: sum(held) + host._RESERVE)
    store.reserve(SHAPE.total)
    store.pin()
    assert store.host_bytes == {"pinned": sum(held), "pageable": 0}
    assert sum(cudart.registered.values()) == sum(held) and len(cudart.registered) == 3 * len(SPECS)
    fill(store)
    assert all(map(store.holds, range(SHAPE.total)))
    for key in range(SHAPE.total):
        for name, tensor in store.view(key).items():
            assert (tensor.view(-1).view(torch.uint8) == key).all(), (key, name)
            settled = key in store.settled
            assert settled == (
                tensor.data_ptr() == slots[name][list(store.settled).index(key) if settled else 0].data_ptr()
            )
            layer, expert = divmod(key, EXPERTS)
            row = store.layer(layer)[name][expert]
            assert (row.data_ptr() == tensor.data_ptr()) is not settled, "an expert's number is its row"
            pinned = any(a <= row.data_ptr() < a + n for a, n in cudart.registered.items())
            assert pinned or settled
    assert all(not rows[4:].any() for rows in slots.values()), "the other slots are left alone"
    assert "4 experts have slots for good" in store.describe()
    store.close()
    assert not cudart.registered


def test_what_is_not_held_takes_no_memory() -> None:
    """256 experts of 1 MiB of which one is written: the others are addresses."""
    code = """
import torch
from vllm_spac.core import TensorSpec
from vllm_spac.system.host_blocks import HostBlock
from vllm_spac.system.host_memory import own_memory
before = own_memory()
block = HostBlock({"w": TensorSpec((1 << 20,), torch.uint8)}, 256, pin=False, held=1)
block.tensors["w"][0].fill_(1)
print(block.tensors["w"].shape[0], block.nbytes, own_memory() - before)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    experts, nbytes, taken = map(int, found)
    assert (experts, nbytes) == (256, 1 << 20)
    assert taken < 16 << 20, "a huge page, and what the interpreter takes meanwhile"
