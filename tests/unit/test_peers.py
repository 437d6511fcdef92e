"""The comparison with llama.cpp: its file has the checkpoint's weights, its memory is what was said, its ratios."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "serving"), str(BENCHMARKS / "peers")]
beside_llama = importlib.import_module("beside_llama")
gguf_model = importlib.import_module("gguf_model")
process_memory = importlib.import_module("process_memory")

TOY = BENCHMARKS / "toy" / "models" / "target"


def measured(tpot: list[float], tokens: list[list[int]], name: str = "spac"):
    found = beside_llama.Measured(name, used={"cpu_seconds": 6.0, "read_bytes": 1200.0})
    for seconds, said in zip(tpot, tokens, strict=True):
        found.add({"seconds": 1.0, "tpot": [seconds], "ttft": [0.5], "tokens": [said]})
    return found


def test_ratios_are_per_turn() -> None:
    """Twice, three times and half as fast; the last answers differ from their second token on."""
    ours = measured([0.1, 0.1, 0.4], [[1, 2], [3, 4], [5, 6]])
    theirs = measured([0.2, 0.3, 0.2], [[1, 2], [3, 4], [5, 7]], "weights")
    found = beside_llama.compared(ours, theirs, seed=0)
    assert found["ratio"] == pytest.approx(2) and found["interval"] == pytest.approx([0.5, 3])
    assert found["equal_answers"] == 2 and found["equal_first_tokens"] == 2
    said = beside_llama.summary(ours)
    assert said["tokens_per_second"] == pytest.approx(10) and said["cpu_seconds_per_token"] == 1
    assert said["read_bytes_per_token"] == 200


def test_a_process_and_its_children_are_counted() -> None:
    code = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        try:
            assert set(process_memory.tree(process.pid)) == {process.pid, child}
            assert process_memory.taken(process.pid)["total"] > process_memory.taken(child)["total"] > 0
            assert process_memory.used(process.pid)["cpu_seconds"] >= 0
        finally:
            os.kill(child, 9)


READ_MAPPED = """
import mmap, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
    assert sum(data[::4096]) > 0
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))
"""


def test_mapped_pages_count_as_memory(tmp_path: Path) -> None:
    """A process under a limit of 64 MiB reads a mapped file of 128 MiB without ever having all of it in memory."""
    file = tmp_path / "file"
    file.write_bytes(os.urandom(1 << 20) * 128)

    def resident(before) -> int:
        process_memory.forget_file(file)
        command = [sys.executable, "-c", READ_MAPPED, file]
        return int(subprocess.run(command, stdout=subprocess.PIPE, preexec_fn=before, check=True).stdout) << 10

    try:
        limit = process_memory.MemoryLimit("test", 64 << 20)
    except process_memory.LimitError as error:
        pytest.skip(str(error))
    try:
        assert resident(limit.join) < 96 << 20, "with shared pages of Python, which others have read"
    finally:
        limit.close()
    assert resident(None) > 128 << 20 and not limit.folder.exists()


def test_the_file_has_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed; pip install 'vllm-spac[peers]'")
    gguf_model.convert(TOY, tmp_path / "toy.gguf", progress=False)
    reader = gguf.GGUFReader(tmp_path / "toy.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    weights = {}
    for path in TOY.glob("*.safetensors"):
        weights |= load_file(path)

    def bf16(name: str) -> torch.Tensor:
        return torch.from_numpy(found[name].data.copy()).view(torch.bfloat16)

    assert torch.equal(bf16("token_embd.weight"), weights["model.embed_tokens.weight"])
    for number in (0, 63):
        expert = weights[f"model.layers.3.mlp.experts.{number}.down_proj.weight"]
        assert torch.equal(bf16("blk.3.ffn_down_exps.weight")[number], expert)
    router = torch.from_numpy(found["blk.5.ffn_gate_inp.weight"].data.copy())
    assert torch.equal(router, weights["model.layers.5.mlp.gate.weight"].float())
    assert len(found) == 3 + 6 * 12, "nothing else, nothing left out"
    config = json.loads((TOY / "config.json").read_text())
    assert reader.fields["qwen3moe.expert_used_count"].contents() == config["num_experts_per_tok"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mixtral"}, "no Qwen3-MoE"),
        ({"num_hidden_layers": 1}, "does not know"),
        ({"num_hidden_layers": 7}, "has no model.layers.6"),
    ],
)
def test_checkpoints_that_cannot_be_written(tmp_path: Path, change: dict, says: str) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed; pip install 'vllm-spac[peers]'")
    weights = {}
    for path in TOY.glob("*.safetensors"):
        weights |= load_file(path)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((TOY / "config.json").read_text()) | change))
    (tmp_path / "tokenizer.json").write_text((TOY / "tokenizer.json").read_text())
    with pytest.raises(gguf_model.UnsupportedModelError, match=says):
        gguf_model.convert(tmp_path, tmp_path / "x.gguf", progress=False)
    assert not (tmp_path / "x.gguf").exists()
