"""A driver that pins too little host memory: layers wait for what is read to pinned memory; next to none is an error.

CUDA's runtime is a stand-in that refuses after some bytes, on a real engine. What is not pinned has no address there.
"""

from __future__ import annotations

import json

import engines
import forked
import pytest
from exactness import FLOAT32

PROGRAM = """
import json, sys
import engines
import torch
import vllm_spac
from vllm_spac.integration import gpu_defaults
from vllm_spac.storage import host
from vllm_spac.system import host_blocks

asked = json.loads(sys.argv[1])
registered, lines = {}, []


class Driver:
    @staticmethod
    def cudaHostRegister(address, nbytes, flags):
        if sum(registered.values()) + nbytes > asked["limit"]:
            return 2
        registered[address] = nbytes
        return 0

    @staticmethod
    def cudaHostUnregister(address):
        return 0 if registered.pop(address, None) else 713

    cudaGetErrorString = staticmethod(lambda error: "out of memory")


class Log:  # whatever handlers and levels vLLM gives its loggers
    @staticmethod
    def warning(text, *values):
        lines.append(text % values)


class Torch:  # of the store alone: vLLM asks torch.cuda, too
    class cuda:
        is_available = staticmethod(lambda: True)
        synchronize = staticmethod(lambda: None)
        cudart = staticmethod(lambda: Driver)

    def __getattr__(self, name):
        return getattr(torch, name)


host.torch = host_blocks.torch = Torch()
host.logger = Log
host_blocks._forget_error = lambda: None
host_blocks.processors = type("Processors", (), {"gpu_node": staticmethod(lambda: None)})
gpu_defaults._on_a_cpu = lambda arguments, config: (
    gpu_defaults._with(arguments, plane="pointers") if config.plane == "auto" else config
)
try:
    with engines.engine(asked["model"], asked["spac"], **asked["options"]) as llm:
        tokens = engines.say(llm)
        found = vllm_spac.stats(llm)["workers"][0]
        pinned = sum(registered.values())
    print(json.dumps({"tokens": tokens, "stats": found, "lines": lines, "pinned": pinned}))
except Exception as error:
    print(json.dumps({"error": str(error), "lines": lines, "left": len(registered)}))
"""


def served(model: str, limit: int, **knobs) -> dict:
    spac = {"slots": "50%", "store": "host", "guard": "off", **knobs}
    asked = {"model": str(model), "limit": limit, "spac": spac, "options": FLOAT32}
    return forked.answer(forked.run(["-c", PROGRAM, json.dumps(asked)]))


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def whole(model) -> dict:
    """Served by a driver that pins all."""
    return served(model, 1 << 40)


def test_all_is_pinned_where_the_driver_allows_it(model, whole) -> None:
    stats = whole["stats"]
    assert stats["execution"] == "pointers"
    assert stats["host_bytes"] == {"pinned": whole["pinned"], "pageable": 0} and whole["pinned"] > 0
    assert whole["tokens"] == engines.generate(model, **FLOAT32).tokens


@pytest.mark.parametrize(
    ("plane", "knobs"),
    [("auto", {}), ("pointers", {"cpu_experts": "2"}), ("auto", {"prefetch": "gate", "budget": "4"})],
    ids=["", "cpu", "prefetch"],
)
def test_layers_wait_for_what_is_not_pinned(model, whole, plane: str, knobs: dict) -> None:
    """As many layers are pinned as the driver allows beside room for one; one line says so."""
    limit = whole["pinned"] * 3 // 4
    run = served(model, limit, plane=plane, **knobs)
    stats, (line,) = run["stats"], [line for line in run["lines"] if "are pinned" in line]
    assert run["tokens"] == engines.generate(model, **FLOAT32).tokens
    assert stats["execution"] == "pointers" and stats["misses"] > 0
    assert stats["stall_seconds"] > 0, "layers have waited"
    assert stats["host_bytes"]["pinned"] == run["pinned"] <= limit and stats["host_bytes"]["pageable"] > 0
    assert "error 2" in line and not any("instead of" in each for each in run["lines"])


@pytest.mark.parametrize("knobs", [{}, {"plane": "pointers"}, {"store": "disk", "host_memory": 1 << 20}], ids=str)
def test_nothing_pinned_at_all_is_an_error(model, knobs: dict, tmp_path) -> None:
    folder = {"disk_dir": str(tmp_path)} if "store" in knobs else {}
    run = served(model, 0, **knobs | folder)
    assert "cannot pin" in run["error"] and "--spac-plane table" in run["error"] and run["left"] == 0


def test_the_plane_that_the_error_names_serves(model, whole) -> None:
    run = served(model, 0, plane="table")
    assert run["tokens"] == engines.generate(model, **FLOAT32).tokens
    assert run["stats"]["host_bytes"] == {"pinned": 0, "pageable": whole["pinned"]}


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_host_memory_before_a_disk_is_as_large_as_what_is_pinned(model, whole, share: float, tmp_path) -> None:
    """Beside room for a layer."""
    layers = whole["stats"]["layers"]
    limit = int(share * whole["pinned"] * (1 + 1 / layers))
    run = served(model, limit, store="disk", disk_dir=str(tmp_path), host_memory=whole["pinned"])
    stats = run["stats"]
    assert run["tokens"] == engines.generate(model, **FLOAT32).tokens
    assert stats["execution"] == "pointers" and stats["misses"] > 0 and stats["bytes"]["disk"] > 0
    assert stats["host_bytes"] == {"pinned": run["pinned"], "pageable": 0}
    rows, experts = stats["host_experts"], stats["experts"]
    assert experts // 8 < rows <= experts // 2 if share < 1 else rows > experts // 2
