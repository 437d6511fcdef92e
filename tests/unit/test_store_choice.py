"""Where experts are that fit neither a card of 24 GB nor, perhaps, host memory: what is planned is what starts."""

from __future__ import annotations

import contextlib
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_configs import qwen3_moe

from vllm_spac import components
from vllm_spac.cache import sizing
from vllm_spac.cache.host_tier import HostTier
from vllm_spac.cache.transfers import HostRows, Transfers
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.types import SlotCount
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import ConfigError
from vllm_spac.integration import gpu_defaults, store_choice, whole_models
from vllm_spac.integration.hooks import device
from vllm_spac.integration.loading import assembly
from vllm_spac.recording.metrics import Counters
from vllm_spac.storage.base import allocate
from vllm_spac.storage.checkpoint.published import find_model, published
from vllm_spac.storage.disk import DiskStore
from vllm_spac.storage.host import HostStore
from vllm_spac.system.host_memory import SYSTEM_RESERVE
from vllm_spac.tools.planning import planned_serving as plans
from vllm_spac.tools.planning.planned_machine import USABLE, PlannedMachine
from vllm_spac.tools.planning.planned_memory import Choice, Load, command, slot_bytes
from vllm_spac.tools.planning.planned_model import ServedModel

GIB, MIB = 1 << 30, 1 << 20
QWEN, OSS = "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-120b"
ADA = device.DeviceFacts("NVIDIA GeForce RTX 4090", True, (8, 9), True, True)
ONE = Load(8192, 1)


# -- the four rows: what is planned, and what starts -------------------------------------------------------------------


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Arguments of ``vllm serve MODEL --plugin spac`` on a machine with a 24 GB card and so much free host memory."""
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(device, "is_cpu", lambda: False)
    monkeypatch.setattr(device, "query", lambda: ADA)
    monkeypatch.setattr(device, "total_memory", lambda: 24 * GIB)

    def made(model: str, free: int, knobs: dict | None = None, **options: Any) -> EngineArgs:
        (tmp_path / "config.json").write_text(json.dumps(published()[model]))
        monkeypatch.setattr(store_choice, "available_host_bytes", lambda: free)
        asked = EngineArgs(
            model=str(tmp_path), skip_tokenizer_init=True, additional_config={"spac": knobs or {}}, **options
        )
        asked.spac_command = True
        return asked

    return made


def started(asked: Any) -> SpacConfig:
    config = gpu_defaults.apply(asked, SpacConfig.parse(asked.additional_config["spac"]))
    assert config is not None and config == SpacConfig.parse(asked.additional_config["spac"])
    return config


@pytest.fixture
def model(tmp_path: Path):
    def named(name: str, plane: str) -> ServedModel:
        (tmp_path / "config.json").write_text(json.dumps(published()[name]))
        return next(ServedModel.ways(find_model(str(tmp_path)), plane, on_cpu=False, capability=(8, 9)))

    return named


@pytest.mark.parametrize(
    ("name", "host", "store", "plane"),
    [
        (QWEN, 64, "host", "pointers"),
        (QWEN, 96, "host", "pointers"),
        (QWEN, 48, "host", "pointers"),  # 1,494 experts have slots for good
        (OSS, 64, "host", "pointers"),  # 31
        (QWEN, 40, "disk", "pointers"),
        (OSS, 48, "disk", "pointers"),
        (OSS, 96, "host", "pointers"),
    ],
)
def test_what_is_planned_is_what_starts(arguments, model, caplog, name: str, host: int, store: str, plane: str) -> None:
    """With no knob: the same store, and on a disk as much host memory as a plan has to spare; one line says so."""
    caplog.set_level("INFO")
    asked = arguments(name, int(USABLE * host * GIB))
    config = started(asked)
    assert (config.store_on("cuda"), config.execution_name) == (store, plane)
    machine, whole = PlannedMachine.of("rtx4090", 24 * GIB, host * GIB), model(name, plane)
    planned = {choice.store for choice in plans.choices(whole, machine, ONE)}
    assert planned == ({"host"} if store == "host" else {"tiers"})
    said = [each.message for each in caplog.records if "store=disk" in each.message]
    assert len(said) == (store == "disk")
    if store == "disk":
        through = max(whole.checkpoint.layer_bytes.values())
        assert config.host_memory == (machine.spare - through) >> 20 << 20 and "host memory are free" in said[0]
        (best,) = (
            choice
            for choice in plans.choices(whole, machine, ONE)
            if choice.store == "tiers" and not choice.drafts and not choice.cpu
        )
        assert best.host_bytes <= config.host_memory
        held = slot_bytes(whole, best.percent) + best.host_bytes
        assert held < whole.experts_bytes, "else some had slots for good, and there were no disk"
        flags = shlex.split(command(best, whole, machine, ONE))
        assert flags[flags.index("--spac-host-memory") + 1] == f"{best.host_bytes >> 20}MiB"


def test_n_gram_tables_leave_less_host_memory(arguments, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """vLLM pins them when it builds the model, after the store was chosen; the same as that much less memory."""
    from vllm.config.engram import EngramConfig

    caplog.set_level("INFO")
    less = started(arguments(QWEN, 40 * GIB))
    sizes, tables = whole_models.sizes, 20 * GIB
    monkeypatch.setattr(whole_models, "sizes", lambda *given: replace(sizes(*given), table_bytes=tables))
    beside = started(arguments(QWEN, 60 * GIB))
    assert beside.store == less.store == "disk" and beside.host_memory == less.host_memory > 0
    assert any(
        "40.00 GiB of host memory are free beside 20.00 GiB of n-gram tables" in each for each in caplog.messages
    )
    on_gpu = started(arguments(QWEN, 60 * GIB, engram_config=EngramConfig(cpu_offload=False)))
    assert on_gpu.store_on("cuda") == "host"
    with pytest.raises(ConfigError, match=r"20\.00 GiB of n-gram tables in host memory, of which 16\.00 GiB are free"):
        started(arguments(QWEN, 16 * GIB))


@pytest.mark.parametrize(
    "knobs",
    [
        {"store": "host"},
        {"slots": "100%"},
        {"executor": "processes"},
    ],
    ids=str,
)
def test_what_leaves_no_other_store_is_the_users(arguments, knobs: dict) -> None:
    asked = arguments(OSS, 32 * GIB, knobs)
    assert store_choice.choose(asked, SpacConfig.parse(knobs), asked.create_model_config(), None, False) is None
    config = started(asked)
    assert "host_memory" not in config.model_fields_set and config.store == knobs.get("store")


@pytest.mark.parametrize("knobs", [{"plane": "pointers"}, {"cpu_experts": "auto"}], ids=str)
@pytest.mark.parametrize(("host", "store"), [(32 * GIB, "disk"), (SYSTEM_RESERVE, "host")])
def test_layers_that_read_in_place_have_host_memory_before_a_disk(
    arguments, knobs: dict, host: int, store: str
) -> None:
    config = started(arguments(OSS, host, knobs))
    assert config.plane == "pointers" and config.store_on("cuda") == store
    assert (config.host_memory is not None) == (store == "disk")


def test_host_memory_that_the_user_gives_stays(arguments) -> None:
    config = started(arguments(OSS, 32 * GIB, {"host_memory": "8GiB"}))
    assert config.host_memory == 8 * GIB and config.store_on("cuda") == "disk"


def test_a_disk_alone_where_no_host_memory_is_to_spare(arguments) -> None:
    config = started(arguments(OSS, SYSTEM_RESERVE + (1 << 28) - 1))
    assert config.store == "disk" and config.host_memory is None
    assert started(arguments(OSS, SYSTEM_RESERVE + (1 << 28))).host_memory == 1 << 28


def test_a_model_whose_experts_all_get_slots_needs_no_disk(arguments, monkeypatch) -> None:
    monkeypatch.setattr(device, "total_memory", lambda: 80 * GIB)
    config = started(arguments(QWEN, 32 * GIB, {"plane": "table"}))
    assert config.store is None and config.store_on("cuda") == "host"


# -- the accounts: what a plan says host memory holds, and what is allocated -------------------------------------------

CONFIG = qwen3_moe(
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    num_hidden_layers=24,
    num_experts=32,
    vocab_size=1000,
    max_position_embeddings=2048,
)
LAYERS, EXPERTS = 24, 32
SPECS = {
    "w13_weight": TensorSpec((128, 128), torch.bfloat16),  # eight pages
    "w2_weight": TensorSpec((128, 64), torch.bfloat16),  # four
}
SHAPE = MoEShape(tuple(map(str, range(LAYERS))), EXPERTS, 4, SPECS)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    found = ServedModel.of(find_model(str(folder)))
    assert found.experts_bytes == SHAPE.total * SHAPE.expert_bytes == 36 * MIB
    return found


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> DiskStore:
    store = DiskStore(SHAPE, "f" * 32, tmp_path_factory.mktemp("packed"))
    for key in range(SHAPE.total):
        store.put(key, {n: torch.full(s.shape, float(key), dtype=s.dtype) for n, s in SPECS.items()})
    return store


@pytest.fixture(autouse=True)
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is planned in steps of as little as flags can say."""
    monkeypatch.setattr(plans, "_TIER_STEP", MIB)


def tiers(percent: int, spare: int, tiny: ServedModel) -> Choice:
    machine = PlannedMachine.of("rtx4090", 24 * GIB, -int(-(spare + SYSTEM_RESERVE) // USABLE))
    assert 0 <= machine.spare - spare < 4
    return plans._with_host_memory(Choice(percent, "tiers"), tiny, machine)


def built(percent: int, host_bytes: int) -> tuple[int, HostRows]:
    """The slots and the host memory of an engine that starts with what the plan's command says."""
    config = SpacConfig.parse(
        {"slots": f"{percent}%", "store": "disk", "host_memory": f"{host_bytes >> 20}MiB", "policy": "lru"}
    )
    slots = sizing.resolve(config.parsed_slots, SHAPE, SHAPE.total * SHAPE.expert_bytes)
    rows = assembly.host_rows(config, SHAPE, slots, 0, 1.0, torch.device("cpu"))
    assert rows is not None
    return slots, rows


def served(slots: int, rows: HostRows, disk: DiskStore, loads: int = 150) -> Counters:
    """Loads experts of random layers, up to all of one at once, in slots of random others; each is compared."""
    slot_of, free = np.full(SHAPE.total, -1), list(range(slots))
    tensors, counters, rng = allocate(SPECS, slots, "cpu"), Counters(), np.random.default_rng(0)
    with contextlib.closing(Transfers(disk, tensors, 4, "disk", rows=rows)) as transfers:
        for key in range(slots):
            assert transfers.load([(key, free[key])], None) == {}
            slot_of[key] = free[key]
        for _ in transfers.fill_host(rows.tier.first(range(SHAPE.total), slot_of)):
            pass
        for _ in range(loads):
            layer = rng.integers(LAYERS)
            of_layer = range(layer * EXPERTS, (layer + 1) * EXPERTS)
            wanted = [key for key in rng.permutation(of_layer)[: rng.integers(1, EXPERTS + 1)] if slot_of[key] < 0]
            wanted = [int(key) for key in wanted[: slots // 2]]
            others = [key for key in np.flatnonzero(slot_of >= 0) if key not in of_layer]
            victims = [int(key) for key in rng.permutation(others)[: len(wanted)]]
            wanted = wanted[: len(victims)]
            pairs = [(key, int(slot_of[victim])) for key, victim in zip(wanted, victims, strict=True)]
            slot_of[victims] = -1
            assert transfers.load(pairs, counters) == {}
            for key, slot in pairs:
                slot_of[key] = slot
                assert all((tensor[slot] == key).all() for tensor in tensors.values()), "another expert's bytes"
        rows.tier.check_integrity()
    return counters


@pytest.mark.parametrize("percent", [10, 20, 28, 50])
def test_with_room_to_spare_nothing_is_read_from_the_disk_again(tiny, disk, percent: int) -> None:
    """Slots and host memory hold each expert once, and one layer more, which moves; no byte of the rest is taken."""
    choice = tiers(percent, 36 * MIB - 1, tiny)
    slots, rows = built(percent, choice.host_bytes)
    assert not rows.tier.inclusive and rows.tier.rows == SHAPE.total - slots + EXPERTS
    assert rows.host_bytes == {"pinned": 0, "pageable": rows.tier.rows * SHAPE.expert_bytes}
    assert 0 <= choice.host_bytes - rows.block.nbytes < MIB, "the plan's bytes, in steps"
    counters = served(slots, rows, disk)
    assert counters.host_loads == counters.loads > 100 and "disk" not in counters.bytes


def test_more_than_is_useful_is_not_taken(disk, caplog) -> None:
    caplog.set_level("INFO")
    slots, rows = built(50, 64 * MIB)
    assert rows.tier.rows == SHAPE.total - slots + EXPERTS < SHAPE.total
    assert "of host_memory (--spac-host-memory) 19.5 MiB are taken, not 64.0 MiB" in caplog.text
    assert "disk" not in served(slots, rows, disk).bytes


def test_where_memory_is_short_all_of_it_is_used(tiny, disk) -> None:
    choice = tiers(28, 20 * MIB, tiny)
    slots, rows = built(28, choice.host_bytes)
    assert choice.host_bytes == 20 * MIB and rows.tier.rows == 20 * MIB // SHAPE.expert_bytes
    counters = served(slots, rows, disk)
    assert 0 < counters.host_loads < counters.loads and counters.bytes["disk"] > 0


def test_host_memory_for_all_experts_is_what_a_plan_says(tiny) -> None:
    store = HostStore(SHAPE, "")
    for key in range(SHAPE.total):
        store.put(key, {n: torch.zeros(s.shape, dtype=s.dtype) for n, s in SPECS.items()})
    assert sum(store.host_bytes.values()) == tiny.experts_bytes
    store.close()


def test_slots_in_percent_are_those_of_the_plan(tiny) -> None:
    for percent in (10, 28, 50):
        slots = sizing.resolve(SlotCount.parse(f"{percent}%"), SHAPE, 1 << 40)
        assert slots * SHAPE.expert_bytes == slot_bytes(tiny, percent)


def test_a_tier_is_exclusive_where_only_both_hold_all() -> None:
    """With 4 rows a slot and more it would be inclusive, and read from the disk what slots hold twice."""
    lru = components.build("policies", "lru")
    assert [HostTier(100, rows, 10, lru).inclusive for rows in (39, 40, 89, 90, 99, 100)] == [
        *(False, True, True),
        *(False, False, True),
    ]
