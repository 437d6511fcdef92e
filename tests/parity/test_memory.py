"""Loading holds the slots and about one layer, never all experts; a KV cache takes what requests use of it.

Several ranks, and expert workers, hold their part of the slots each. The tiny models of other tests do not show that:
their parts are padded by the kernel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
from safetensors.torch import save_file

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 8, 64, 512, 512
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE * 2
LAYER_BYTES = EXPERTS * EXPERT_BYTES  # 96 MiB; all: 768 MiB

PROGRAM = """
import json, os, sys, threading, time
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1")
import torch
from vllm import LLM
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
def rss():
    fields = dict(line.split(":") for line in open("/proc/self/status") if line.startswith(("RssAnon", "RssFile")))
    return sum(int(value.split()[0]) * 1024 for value in fields.values())
peak = [0]
load_model = CPUModelRunner.load_model
def measured(self, *args, **kwargs):
    done = threading.Event()
    peak[:] = [rss(), 0]
    def watch():
        while not done.wait(0.01):
            peak[1] = max(peak[1], rss())
    thread = threading.Thread(target=watch); thread.start()
    load_model(self, *args, **kwargs)
    done.set(); thread.join()
CPUModelRunner.load_model = measured
LLM(model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, max_num_seqs=2,
    dtype="bfloat16", additional_config=json.loads(sys.argv[2]))
print(json.dumps(peak[1] - peak[0]))
"""

PEAKS = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import engines

def peak(_=None):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

if __name__ == "__main__":
    import psutil
    from vllm_spac.methods.od_moe.places import MODULE

    model, spac, options = json.loads(sys.argv[2])
    kv = dict(num_gpu_blocks_override=None, kv_cache_memory_bytes=16 << 20, max_model_len=128, max_num_seqs=2)
    with engines.engine(model, spac, **kv, **options) as llm:
        engines.say(llm, [[5, 6, 7]], max_tokens=4)
        ranks = llm.collective_rpc(peak)
        workers = [
            next(int(line.split()[1]) << 10 for line in Path(f"/proc/{child.pid}/status").read_text().splitlines()
                 if line.startswith("VmHWM"))
            for child in psutil.Process().children(recursive=True)
            if MODULE in child.cmdline()
        ]
        print(json.dumps([ranks, workers]))
"""
TWO_RANKS = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> Path:
    """One shard for everything: the worst case for a loader that maps its files."""
    folder = tmp_path_factory.mktemp("big")
    config = json.loads((Path(__file__).parent / "qwen3_moe.json").read_text())
    config |= dict(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_experts=EXPERTS, moe_intermediate_size=INTERMEDIATE
    )
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(torch.bfloat16)

    heads, kv, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    tensors = {"model.embed_tokens.weight": random(512, HIDDEN), "lm_head.weight": random(512, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q_proj", heads * size), ("k_proj", kv * size), ("v_proj", kv * size)):
            tensors[f"{prefix}self_attn.{name}.weight"] = random(rows, HIDDEN)
        tensors[f"{prefix}self_attn.o_proj.weight"] = random(HIDDEN, heads * size)
        for name, count in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):
            tensors[f"{prefix}{name}.weight"] = torch.ones(count, dtype=torch.bfloat16)
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        tensors[f"{prefix}mlp.gate.weight"] = random(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name in ("gate_proj", "up_proj"):
                tensors[f"{prefix}mlp.experts.{expert}.{name}.weight"] = random(INTERMEDIATE, HIDDEN)
            tensors[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = random(HIDDEN, INTERMEDIATE)
    save_file(tensors, folder / "model.safetensors")
    return folder


def growth(model: Path, additional: dict) -> int:
    """Bytes by which the resident memory of a process grows at most while the model is loaded."""
    arguments = [sys.executable, "-c", PROGRAM, str(model), json.dumps(additional)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.strip().splitlines()[-1])


def peaks(model: Path, spac: dict | None, **options) -> list[list[int]]:
    """The greatest resident bytes of the processes that run the model, and those of expert workers."""
    given = json.dumps([str(model), spac, options])
    changes = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # a function for collective_rpc
    if options:
        changes |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return forked.answer(forked.run(["-c", PEAKS, Path(__file__).parent, given], changes))


def beyond(big: list[int], tiny: list[int]) -> list[int]:
    """What the processes of the big model take more than those of a tiny one."""
    return [peak - least for peak, least in zip(sorted(big), sorted(tiny), strict=True)]


def in_mib(counts: dict[str, list[int]]) -> dict[str, list[str]]:
    return {name: [f"{count / 2**20:.0f} MiB" for count in each] for name, each in counts.items()}


def test_the_kv_cache_takes_memory_only_where_requests_use_it(checkpoint, tmp_path):
    """vLLM fills its 1 GiB with zeros, which makes all of it resident; the tiny model itself takes some MiB."""

    def grown(spac: dict | None) -> list[int]:
        program = [Path(__file__).with_name("resident.py"), checkpoint("qwen3_moe"), json.dumps(spac)]
        return forked.answer(forked.run(program))

    ours, stock = grown({"slots": "25%", "store": "disk", "disk_dir": str(tmp_path)}), grown(None)
    print("grew by", {"spac": ours, "stock": stock}, "MiB")
    assert min(stock) > 1000
    assert max(ours) < 300


@pytest.mark.full
def test_loading_holds_the_slots_and_about_one_layer(big, checkpoint, tmp_path):
    """Against a tiny model, whose growth is what libraries take that are first used while a model is loaded."""
    slots = 0.25 * LAYERS * LAYER_BYTES
    spac = {"spac": {"slots": "25%", "disk_dir": str(tmp_path)}}
    tiny, first, second = growth(checkpoint("qwen3_moe"), spac), growth(big, spac), growth(big, spac)
    stock = growth(big, {})
    shown = {"tiny": tiny, "packing": first, "packed": second, "stock": stock}
    print("grew by", {name: f"{count / 2**20:.0f} MiB" for name, count in shown.items()})
    assert stock - tiny > LAYERS * LAYER_BYTES
    # A layer as it came, 16 MiB of it converted, 32 MiB of the mapped file, attention and embeddings.
    assert first - tiny < slots + 1.75 * LAYER_BYTES
    assert second - tiny < slots + LAYER_BYTES


@pytest.mark.full
def test_loading_for_pointers_holds_the_store_the_slots_and_about_one_layer(big, checkpoint):
    """Host memory has every expert, and here fast memory is host memory too."""
    kept = 1.25 * LAYERS * LAYER_BYTES
    spac = {"spac": {"slots": "25%", "plane": "pointers"}}
    tiny, grown = growth(checkpoint("qwen3_moe"), spac), growth(big, spac)
    print("grew by", {name: f"{count / 2**20:.0f} MiB" for name, count in {"tiny": tiny, "big": grown}.items()})
    assert grown - tiny < kept + 1.75 * LAYER_BYTES


@pytest.mark.full
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks spin while they wait: needs 2 CPUs")
def test_each_rank_holds_its_part_of_the_slots(big, checkpoint, tmp_path):
    """Half of each expert in a slot; stock's ranks hold half of all experts."""
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(tmp_path)}
    runs = ((checkpoint("qwen3_moe"), spac), (big, spac), (big, None))
    tiny, ours, stock = (peaks(model, knobs, **TWO_RANKS)[0] for model, knobs in runs)
    grown = {"packing": beyond(ours, tiny), "stock": beyond(stock, tiny)}
    print("ranks grew by", in_mib(grown))
    half = LAYERS * LAYER_BYTES / 2
    assert min(grown["stock"]) > half
    assert 0.9 * 0.25 * half < min(grown["packing"])
    assert max(grown["packing"]) < 0.25 * half + LAYER_BYTES / 2


@pytest.mark.full
def test_each_expert_worker_holds_its_layers_slots(big, checkpoint, tmp_path):
    """Two workers with half of the layers each; the engine keeps no expert, and at most one layer while it packs."""
    spac = {"slots": "25%", "executor": "processes@workers=2", "disk_dir": str(tmp_path)}
    (tiny, tiny_workers), (engine, workers) = (peaks(model, spac) for model in (checkpoint("qwen3_moe"), big))
    grown = {"engine": beyond(engine, tiny), "workers": beyond(workers, tiny_workers)}
    print("grew by", in_mib(grown))
    slots = 0.25 * LAYERS * LAYER_BYTES / 2
    assert len(workers) == 2 and min(grown["workers"]) > 0.9 * slots
    assert max(grown["workers"]) < slots + LAYER_BYTES / 2
    assert max(grown["engine"]) < LAYER_BYTES
