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
rank, file = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
parallel_state._TP = SimpleNamespace(cpu_group=torch.distributed.group.WORLD)
ranks = Ranks(rank, 2)
found = [ranks.least(value + (10 - 20 * rank)) for value in (1 << 40, 5)]
ranks.wait()
print(found)
"""

FAILING = """
import sys
from vllm_spac.errors import StoreError
from vllm_spac.integration.hooks.ranks import Ranks
Ranks(int(sys.argv[1]), 2).end_process(StoreError("spac: no such file"))
print("goes on")
"""


def python(program: str, *arguments: object) -> subprocess.Popen:
    line = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ranks_agree_on_the_least(tmp_path: Path) -> None:
    both = [python(AGREEING, rank, tmp_path / "store") for rank in (0, 1)]
    said = [process.communicate(timeout=300) for process in both]
    assert [out.strip() for out, _ in said] == [str([(1 << 40) - 10, -5])] * 2, said
    assert Ranks().least(7) == 7


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_errors_vllm_does_not_see_ends(rank: int) -> None:
    process = python(FAILING, rank)
    out, err = process.communicate(timeout=300)
    assert process.returncode == rank and ("goes on" in out) is (rank == 0)
    assert ("spac: no such file (rank 1 of 2); its process ends, and the engine with it" in err) is (rank == 1)


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
    found = fast_memory.room(vllm_config, torch.device("cpu"), 100, 50, host_memory=20, ranks=4)
    assert found == 1000 - 100 - 20 - 50


def test_host_memory_of_all_ranks_together_must_be_there(monkeypatch) -> None:
    gib = 1 << 30
    monkeypatch.setattr(assembly, "available_host_bytes", lambda: 8 * gib)
    config = SpacConfig(host_memory="16GiB")
    assembly.check_host_memory(config, 3 * gib, ranks=2)  # both hold all of their experts
    with pytest.raises(ConfigError, match="needs 8.00 GiB, and 8.00 GiB are available.*at most .* 7168MiB"):
        assembly.check_host_memory(config, 4 * gib, ranks=2)


def test_the_ranks_of_an_engine_with_one() -> None:
    parallel = SimpleNamespace(tensor_parallel_size=1, enable_expert_parallel=False)
    alone = Ranks.of(SimpleNamespace(parallel_config=parallel))
    assert alone == Ranks() and alone.describe() == "" and alone.facts() == {}
    assert Ranks(1, 4).describe() == ", rank 1 of 4 (each holds 1/4 of every expert)"
    assert Ranks(1, 4, True).facts() == {"rank": 1, "ranks": 4, "divided": "experts"}
