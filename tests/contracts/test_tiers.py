"""Contract of expert stores: a read returns every bit, or raises an error.

A new file in ``tiers/`` is tested without a change here.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vllm_spac import components
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import StoreError
from vllm_spac.storage.base import ExpertStore, Slots

LAYERS, EXPERTS = 2, 3
SPECS = {
    "weights and biases in bf16": {
        "w13_weight": TensorSpec((64, 33), torch.bfloat16),
        "w2_weight": TensorSpec((33, 32), torch.bfloat16),
        "w13_bias": TensorSpec((65,), torch.bfloat16),
        "w2_bias": TensorSpec((7,), torch.bfloat16),
    },
    "one element": {"w": TensorSpec((1,), torch.bfloat16)},
    "one page": {"w": TensorSpec((1024,), torch.float32)},
    "one page and an element": {"w": TensorSpec((1025,), torch.float32)},
    "many odd pages": {"w": TensorSpec((3, 7, 1171), torch.float32)},
    "mixed dtypes": {  # in an order that is not that of the names, nor of the alignments
        "q": TensorSpec((5, 3), torch.int8),
        "a_scale": TensorSpec((), torch.float32),
        "zero": TensorSpec((3,), torch.uint8),
        "w": TensorSpec((3, 3), torch.float16),
        "f8": TensorSpec((11,), torch.float8_e4m3fn),
        "big": TensorSpec((3,), torch.float64),
    },
}

every_store = pytest.mark.parametrize("name", [*components.names("stores"), "outside:Blocks"])
every_layout = pytest.mark.parametrize("layout", SPECS)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def expert(specs: dict[str, TensorSpec], seed: int) -> dict[str, Tensor]:
    """Random bits, hence also infinities and NaN of every kind."""
    rng = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8, generator=rng).view(spec.dtype).view(spec.shape)
        for name, spec in specs.items()
    }


def poisoned(specs: dict[str, TensorSpec], slots: int = 1) -> dict[str, Tensor]:
    """All bits set: NaN in every floating type."""
    return {
        name: torch.full((slots * spec.nbytes,), 255, dtype=torch.uint8).view(spec.dtype).view(slots, *spec.shape)
        for name, spec in specs.items()
    }


def slot(tensors: dict[str, Tensor], index: int = 0) -> dict[str, Tensor]:
    return {name: tensor[index] for name, tensor in tensors.items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert bits(left[name]) == bits(right[name]), name


def shape_of(layout: str = "weights and biases in bf16") -> MoEShape:
    return MoEShape(tuple(f"model.layers.{i}.mlp.experts" for i in range(LAYERS)), EXPERTS, 2, SPECS[layout])


def open_store(name: str, folder: Path, layout: str = "weights and biases in bf16") -> ExpertStore:
    return components.build("stores", name, shape=shape_of(layout), fingerprint="0123abcd" * 4, folder=folder)


@pytest.fixture
def store(name: str, tmp_path: Path) -> Iterator[ExpertStore]:
    store = open_store(name, tmp_path)
    yield store
    store.close()


@every_layout
@every_store
def test_round_trip_bit_for_bit(name: str, layout: str, tmp_path: Path) -> None:
    """Into a poisoned slot between two others: all of it is overwritten, and nothing beside it.

    The slot is given as tensors alone, or with its memory, as loads give it.
    """
    store, specs = open_store(name, tmp_path, layout), SPECS[layout]
    for key in range(store.shape.total):
        store.put(key, expert(specs, key))
    for key in reversed(range(store.shape.total)):
        slots = poisoned(specs, 3)
        assert store.read(key, Slots(slots)[1] if key % 2 else slot(slots, 1)) == store.shape.expert_bytes
        assert_same(slot(slots, 1), expert(specs, key))
        for beside in (0, 2):
            assert_same(slot(slots, beside), slot(poisoned(specs)))
    store.close()


@every_layout
@every_store
def test_a_view_is_the_expert_where_it_lies(name: str, layout: str, tmp_path: Path) -> None:
    """Kernels read it by its address: whole, in one piece and always at the same place. A disk has none."""
    store, specs = open_store(name, tmp_path, layout), SPECS[layout]
    for key in range(store.shape.total):
        store.put(key, expert(specs, key))
    if not store.addressable:
        with pytest.raises(StoreError, match="have no address"):
            store.view(0)
        with pytest.raises(StoreError, match="have no address"):
            store.layer(0)
        return
    for key in range(store.shape.total):
        view = store.view(key)
        assert_same(dict(view), expert(specs, key))
        assert all(tensor.is_contiguous() for tensor in view.values())
        assert [t.data_ptr() for t in view.values()] == [t.data_ptr() for t in store.view(key).values()]
        layer, number = store.shape.split(key)
        assert store.layer(layer) is store.layer(layer), "kernels keep what they make of it"
        assert all(store.layer(layer)[name][number].data_ptr() == view[name].data_ptr() for name in specs)
    store.close()


@every_store
def test_holds_what_was_put(name: str, store: ExpertStore) -> None:
    assert not any(map(store.holds, range(store.shape.total)))
    for key in (4, 1):
        store.put(key, expert(store.shape.tensors, key))
        assert store.holds(key)
    assert [key for key in range(store.shape.total) if store.holds(key)] == [1, 4]


@every_store
@pytest.mark.parametrize("key", [0, 5])
def test_reading_what_was_never_put(name: str, key: int, store: ExpertStore) -> None:
    """Of a layer that has no expert at all, and of one that has others."""
    store.put(4, expert(store.shape.tensors, 4))
    with pytest.raises(StoreError):
        store.read(key, slot(poisoned(store.shape.tensors)))
    assert not store.holds(key)
    store.put(key, expert(store.shape.tensors, key))
    into = slot(poisoned(store.shape.tensors))
    store.read(key, into)
    assert_same(into, expert(store.shape.tensors, key))


@every_store
def test_put_keeps_a_copy(name: str, store: ExpertStore) -> None:
    given = expert(store.shape.tensors, 1)
    store.put(1, given)
    for tensor in given.values():
        tensor.view(torch.uint8).zero_()
    into = slot(poisoned(store.shape.tensors))
    store.read(1, into)
    assert_same(into, expert(store.shape.tensors, 1))


@every_store
def test_put_takes_tensors_that_share_a_buffer(name: str, store: ExpertStore) -> None:
    specs, start = store.shape.tensors, 0
    buffer = torch.empty(store.shape.expert_bytes, dtype=torch.uint8)
    given = {}
    for key, tensor in expert(specs, 1).items():
        given[key] = buffer[start : start + specs[key].nbytes].view(specs[key].dtype).view(specs[key].shape)
        given[key].copy_(tensor)
        start += specs[key].nbytes
    store.put(1, given)
    into = slot(poisoned(specs))
    store.read(1, into)
    assert_same(into, expert(specs, 1))


@every_store
def test_reads_from_many_threads_at_once(name: str, store: ExpertStore) -> None:
    specs, total = store.shape.tensors, store.shape.total
    for key in range(total):
        store.put(key, expert(specs, key))
    expected = [expert(specs, key) for key in range(total)]

    def check(thread: int) -> None:
        for turn in range(4 * total):
            key = (7 * turn + thread) % total
            into = slot(poisoned(specs))
            store.read(key, into)
            assert_same(into, expected[key])

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(check, thread) for thread in range(8)]:
            done.result()


@every_store
def test_room_for_none_is_there_on_a_full_machine(
    name: str, store: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything was packed in an earlier run: nothing is needed, so nothing can be lacking."""
    import importlib
    import shutil
    from collections import namedtuple

    module = importlib.import_module(type(store).__module__)
    monkeypatch.setattr(module, "available_host_bytes", lambda: 0, raising=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "total used free")(1, 1, 0))
    store.reserve(0)


@every_store
def test_describes_itself(name: str, store: ExpertStore) -> None:
    text = store.describe()
    assert text.strip() and "\n" not in text


@pytest.mark.parametrize("available", ["1.9 GiB", "0.0 KiB"])
def test_host_store_says_what_it_needs(available: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_spac.storage import host

    free = int(float(available.split()[0]) * 2**30)
    monkeypatch.setattr(host, "available_host_bytes", lambda: free)
    store = open_store("host", tmp_path, "many odd pages")
    experts = 2**30 // store.shape.expert_bytes + 1
    with pytest.raises(StoreError, match=r"needs 1\.0\d GiB .* for .* experts.*--spac-store disk --spac-disk-dir"):
        store.reserve(experts)
    monkeypatch.setattr(host, "available_host_bytes", lambda: 3 * 2**30)
    store.reserve(experts)
