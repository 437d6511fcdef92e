"""What ranks agree on, and how one that fails ends; processes without an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_spac.config.config import SpacConfig
from vllm_spac.errors import ConfigError
from vllm_spac.integration.hooks.ranks import Ranks
from vllm_spac.integration.loading import assembly, fast_memory

AGREEING = """
import sys
from types import SimpleNamespace
import torch
from vllm.distributed import parallel_state
from vllm_spac.integration.hooks.ranks import Ranks
rank, file, stages = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
everywhere = SimpleNamespace(cpu_group=torch.distributed.group.WORLD)
parallel_state._WORLD = everywhere
parallel_state._TP = everywhere if stages == 1 else None
ranks = Ranks(rank, 2, stages=stages)
values = [value + (10 - 20 * rank) for value in (1 << 40, 5)]
found = [[ranks.least(value), ranks.least_of_all(value)] for value in values]
ranks.wait()
print(found)
"""

FAILING = """
import sys
from vllm_spac.errors import StoreError
from vllm_spac.integration.hooks.ranks import Ranks
Ranks(int(sys.argv[1]), 2, stages=int(sys.argv[2])).end_process(StoreError("spac: no such file"))
print("goes on")
"""


def python(program: str, *arguments: object) -> subprocess.Popen:
    line = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_agree_on_the_least(stages: int, tmp_path: Path) -> None:
    """Those of one stage do; a stage by itself takes what is its own, and still knows what all of them have."""
    both = [python(AGREEING, rank, tmp_path / "store", stages) for rank in (0, 1)]
    said = [process.communicate(timeout=300) for process in both]
    least, own = [(1 << 40) - 10, -5], [[(1 << 40) + 10, 15], [(1 << 40) - 10, -5]]
    each = [least, least] if stages == 1 else own
    assert [out.strip() for out, _ in said] == [
        str([list(pair) for pair in zip(found, least, strict=True)]) for found in each
    ], said
    assert Ranks().least(7) == Ranks().least_of_all(7) == 7


@pytest.mark.parametrize(("rank", "stages"), [(0, 1), (1, 1), (0, 2), (1, 2)])
def test_a_rank_whose_errors_vllm_does_not_see_ends(rank: int, stages: int) -> None:
    """vLLM hears of the first rank of the last stage."""
    process = python(FAILING, rank, stages)
    out, err = process.communicate(timeout=300)
    heard = rank == (0 if stages == 1 else 1)
    assert process.returncode == (not heard) and ("goes on" in out) is heard
    ends = f"spac: no such file (rank {rank} of 2); its process ends, and the engine with it"
    assert (ends in err) is not heard


def test_ram_is_divided(monkeypatch) -> None:
    """A rank of four gets a quarter of what is free, less what it needs itself."""
    model = SimpleNamespace(model="m")
    vllm_config = SimpleNamespace(
        model_config=model,
        speculative_config=None,
        parallel_config=None,
        cache_config=SimpleNamespace(gpu_memory_utilization=0.9, kv_cache_memory_bytes=5),
    )
    monkeypatch.setattr(fast_memory, "available_host_bytes", lambda: 4000)
    found = fast_memory.room(vllm_config, torch.device("cpu"), 100, 50, host_memory=20, share=Ranks(0, 4).share)
    assert found == 1000 - 100 - 20 - 50


def test_host_memory_of_all_ranks_together_must_be_there(monkeypatch) -> None:
    gib = 1 << 30
    monkeypatch.setattr(assembly, "available_host_bytes", lambda: 8 * gib)
    config = SpacConfig(host_memory="16GiB")
    assembly.check_host_memory(config, 3 * gib, share=0.5)  # both hold all of their experts
    with pytest.raises(ConfigError, match="needs 8.00 GiB, and 8.00 GiB are available.*at most .* 7168MiB"):
        assembly.check_host_memory(config, 4 * gib, share=0.5)


def test_the_ranks_of_an_engine_with_one() -> None:
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, enable_expert_parallel=False)
    alone = Ranks.of(SimpleNamespace(parallel_config=parallel, model_config=None))
    assert alone == Ranks() and alone.describe() == "" and alone.facts() == {}
    assert Ranks(1, 4).describe() == ", rank 1 of 4 (each holds 1/4 of every expert)"
    assert Ranks(1, 4, True).facts() == {"rank": 1, "ranks": 4, "divided": "experts"}


def test_stages_share_memory_by_their_layers() -> None:
    """Two stages of two ranks each, the first with three quarters of the layers."""
    first, last = Ranks(1, 4, stages=2, part=0.75), Ranks(2, 4, stages=2, part=0.25)
    assert (first.stage, first.share) == (0, 0.375) and (last.stage, last.share) == (1, 0.125)
    assert first.describe() == ", stage 0 of 2, rank 1 of 4 (each holds 1/2 of every expert)"
    assert Ranks(1, 2, stages=2).describe() == ", stage 1 of 2"
    assert last.facts() == {"rank": 2, "ranks": 4, "stage": 1, "divided": "layers and tensors"}
    assert Ranks(1, 2, stages=2).facts()["divided"] == "layers"


def test_ranks_of_a_machine_share_its_memory(monkeypatch) -> None:
    """Two machines: of two stages of two ranks each has one stage, of four ranks of one stage each has half."""
    from vllm.distributed import parallel_state

    def of(number: int, stages: int, beside: int) -> Ranks:
        monkeypatch.setattr(parallel_state, "_PP", SimpleNamespace(rank_in_group=number // beside))
        monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=number % beside))
        parallel = SimpleNamespace(
            tensor_parallel_size=beside, pipeline_parallel_size=stages, enable_expert_parallel=False, nnodes=2
        )
        model = SimpleNamespace(get_total_num_hidden_layers=lambda: 10)
        return Ranks.of(SimpleNamespace(parallel_config=parallel, model_config=model))

    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "7,3")
    for number in range(4):
        ranks = of(number, 2, 2)
        assert ranks.share == pytest.approx(0.5) and ranks.place == (number % 2, 2) and ranks.nodes == 2
    assert of(1, 2, 1).share == of(0, 2, 1).share == pytest.approx(1) and of(1, 2, 1).place == (0, 1)
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION")
    assert [of(number, 1, 4).place for number in range(4)] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert of(3, 1, 4).share == pytest.approx(0.5)


WATCHING = """
import socket, sys, time
import torch
from types import SimpleNamespace
from vllm.distributed import parallel_state
from vllm_spac.integration.hooks.ranks import Ranks
rank, file = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=3)
def broadcast_object(found, src):
    objects = [found]
    torch.distributed.broadcast_object_list(objects, src=src)
    return objects[0]
parallel_state._WORLD = SimpleNamespace(broadcast_object=broadcast_object)
create = socket.create_server
def create_server(*arguments, **options):
    listener = create(*arguments, **options)
    strange = socket.create_connection(listener.getsockname())
    strange.sendall(b"?" * 16)
    strange.close()
    return listener
socket.create_server = create_server
Ranks(rank, 3, nodes=3, here=1 / 3).watch("127.0.0.1")
torch.distributed.destroy_process_group()
print("watches", flush=True)
time.sleep(200)
"""


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_of_another_machine_that_is_gone_ends_all(killed: int, tmp_path: Path) -> None:
    """Whichever it is, and while no step runs. A connection of anyone else is none of a rank."""
    found = [python(WATCHING, rank, tmp_path / "store") for rank in range(3)]
    try:
        for process in found:
            assert process.stdout.readline() == "watches\n", process.stderr.read()
        found[killed].kill()
        for rank, process in enumerate(found):
            _, err = process.communicate(timeout=100)
            gone = f"a rank beside this one (rank {rank} of 3) is gone; its process ends"
            assert rank == killed or (process.returncode == 1 and gone in err), err
    finally:
        for process in found:
            process.kill()
