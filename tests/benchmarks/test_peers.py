"""The comparison with llama.cpp: its file has the checkpoint's weights, its memory is what was said, its ratios."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from benchmarks.peers import beside_llama, gguf_model, int4, process_memory

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"

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


def test_experts_of_four_bits_are_the_same_in_both_files(tmp_path: Path) -> None:
    """Q4_0 as gguf's own package reads it, and the codes and scales that vLLM reads."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed; pip install 'vllm-spac[peers]'")
    gguf_model.convert(TOY, tmp_path / "toy.gguf", progress=False, four_bits=True)
    int4.write(TOY, tmp_path / "int4")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "toy.gguf").tensors}
    blocks = found["blk.3.ffn_down_exps.weight"]
    assert blocks.tensor_type == gguf.GGMLQuantizationType.Q4_0
    theirs = torch.from_numpy(gguf.quants.dequantize(blocks.data, blocks.tensor_type))
    ours, dense = load_file(tmp_path / "int4" / "model.safetensors"), load_file(TOY / "model.safetensors")
    for number in (0, 63):
        name = f"model.layers.3.mlp.experts.{number}.down_proj.weight"
        codes = (ours[f"{name}_packed"][..., None] >> 4 * torch.arange(8, dtype=torch.int32)).flatten(1) & 15
        scales = ours[f"{name}_scale"].float().repeat_interleave(int4.GROUP, 1)
        assert torch.equal((codes - 8) * scales, theirs[number])
        off = (theirs[number] - dense[name].float()).abs()
        assert (off <= 0.51 * scales).all() and tuple(ours[f"{name}_shape"]) == dense[name].shape
    assert ours.keys() >= {name for name in dense if ".experts." not in name}
    assert (
        json.loads((tmp_path / "int4" / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "Mixtral.* writes Qwen3MoeForCausalLM and DeepseekForCausalLM"),
        ({"norm_topk_prob": False}, "has norm_topk_prob False"),
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


HEADS, KV_HEADS, HIDDEN, NEURONS, EXPERTS, SHARED = 4, 2, 64, 16, 8, 3
LLAMA = {
    "vocab_size": 96,
    "hidden_size": HIDDEN,
    "intermediate_size": (SHARED + 1) * NEURONS,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
DEEPSEEK = {
    "architectures": ["DeepseekForCausalLM"],
    "moe_intermediate_size": NEURONS,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": SHARED,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "scoring_func": "softmax",
    "routed_scaling_factor": 0.5,
}


def carved(folder: Path):
    """Writes a dense Llama's weights as a ``DeepseekForCausalLM`` that computes the same; returns the Llama.

    All routed experts of a layer hold the same neurons, so that any choice gives the dense FFN's sum, if the weights of
    the top-k sum to 1 and are scaled.
    """
    import transformers

    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()
    weights = {}
    for name, weight in llama.state_dict().items():
        weight.copy_((weight if "norm" in name else torch.randn(weight.shape) * weight.shape[-1] ** -0.5).bfloat16())
        layer, _, part = name.partition("mlp.")
        if not part:
            weights[name] = weight
            continue
        cut = (SHARED * NEURONS, NEURONS)
        shared, routed = weight.split(cut, dim=1 if part.startswith("down") else 0)
        weights[f"{layer}mlp.shared_experts.{part}"] = shared
        routed = routed / DEEPSEEK["routed_scaling_factor"] if part.startswith("down") else routed
        weights |= {f"{layer}mlp.experts.{i}.{part}": routed for i in range(EXPERTS)}
        weights[f"{layer}mlp.gate.weight"] = torch.randn(EXPERTS, HIDDEN) * 0.1  # no weight is near 1
    save_file({name: weight.bfloat16().contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA | DEEPSEEK))
    vocabulary = {chr(33 + i): i for i in range(LLAMA["vocab_size"])}
    tokenizer = {"model": {"vocab": vocabulary, "merges": ["a b"]}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return llama


def test_paired_rows_rotate_as_halves_do() -> None:
    """Products of q and k: rotated by halves as vLLM does, and by neighbours after the rows were paired."""
    head, tokens = HIDDEN // HEADS, 5
    x, angles = torch.randn(tokens, HIDDEN), torch.outer(torch.arange(tokens), 0.5 ** torch.arange(head // 2))
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    q, k = torch.randn(HEADS * head, HIDDEN), torch.randn(HEADS * head, HIDDEN)

    def by_halves(rows: torch.Tensor) -> torch.Tensor:
        a, b = F.linear(x, rows).unflatten(1, (HEADS, 2, head // 2)).unbind(2)
        return torch.view_as_real(torch.complex(a, b) * turns).flatten(2)

    def by_neighbours(rows: torch.Tensor) -> torch.Tensor:
        pairs = F.linear(x, rows).unflatten(1, (HEADS, head // 2, 2))
        return torch.view_as_real(torch.view_as_complex(pairs) * turns).flatten(2)

    def products(rotated, pair) -> torch.Tensor:
        return torch.einsum("ihd,jhd->hij", rotated(pair(q)), rotated(pair(k)))

    goal = products(by_halves, lambda rows: rows)
    assert torch.allclose(products(by_neighbours, lambda rows: gguf_model.paired(rows, head)), goal, rtol=1e-3)
    assert not torch.allclose(products(by_neighbours, lambda rows: rows), goal, rtol=1e-3)


def test_a_deepseek_is_written_with_paired_rows(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed; pip install 'vllm-spac[peers]'")
    carved(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for dtype in (torch.bfloat16, torch.float32):
        gguf_model.convert(tmp_path, tmp_path / "x.gguf", dtype, progress=False)
        found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
        read = {name: torch.from_numpy(tensor.data.copy()) for name, tensor in found.items()}
        read = {name: each if each.dtype == torch.float32 else each.view(torch.bfloat16) for name, each in read.items()}
        old, new = "model.layers.1.self_attn.{}_proj.weight", "blk.1.attn_{}.weight"
        for part in "qk":
            paired = gguf_model.paired(weights[old.format(part)], HIDDEN // HEADS)
            assert torch.equal(read[new.format(part)], paired.to(dtype)), "each head of its own"
        assert torch.equal(read[new.format("v")], weights[old.format("v")].to(dtype))
        shared = weights["model.layers.0.mlp.shared_experts.up_proj.weight"]
        assert torch.equal(read["blk.0.ffn_up_shexp.weight"], shared.to(dtype))
        assert len(read) == 3 + 2 * 13


def test_llama_answers_as_the_deepseek_does(tmp_path: Path) -> None:
    """A file in float32: the same tokens as the dense Llama that its layers sum up to."""
    for package in ("gguf", "xllamacpp"):
        pytest.importorskip(package, reason=f"{package} is not installed; pip install 'vllm-spac[peers]'")
    llama = carved(tmp_path)
    gguf_model.convert(tmp_path, tmp_path / "x.gguf", torch.float32, progress=False)
    prompt, count = torch.arange(3, 27), 24
    said = llama.generate(prompt[None], max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None)
    with closing(beside_llama.Llama(tmp_path / "x.gguf", 64, 1, True, None, 120)) as process:
        assert process.turn(prompt.tolist(), count)["tokens"] == [said[0, len(prompt) :].tolist()]
    asked = [[{"ids": prompt.tolist(), "tokens": count, "schema": None}]] * 2
    with closing(beside_llama.Llama(tmp_path / "x.gguf", 128, 1, True, None, 120, slots=2)) as process:
        served = process.ask({"agents": asked, "first": prompt[:8].tolist()})["served"]
    assert [each["tokens"] for each in served] == [said[0, len(prompt) :].tolist()] * 2
    assert [len(each["times"]) for each in served] == [count] * 2
