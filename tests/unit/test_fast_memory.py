"""Memory that vLLM needs after the slots are allocated: for a draft, for logits, activations and graphs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_spac.cache.sizing import MoEWidths, Working
from vllm_spac.integration.loading import fast_memory


def config(target: str, draft: str | None, method: str, predicting: int | None = None) -> SimpleNamespace:
    model = SimpleNamespace(model=target, get_num_layers=lambda parallel: 4)
    hf_config = SimpleNamespace(n_predict=predicting)
    other = model if draft is None else SimpleNamespace(model=draft, hf_config=hf_config)
    speculation = SimpleNamespace(method=method, draft_model_config=other)
    return SimpleNamespace(model_config=model, speculative_config=speculation, parallel_config=None)


@pytest.fixture
def folders(tmp_path):
    for name, files in {
        "target": {"model-1.safetensors": 600, "model-2.safetensors": 400},
        "draft": {"model.safetensors": 70, "consolidated.safetensors": 70, "pytorch_model.bin": 70, "config.json": 9},
        "old": {"pytorch_model.bin": 50},
    }.items():
        (tmp_path / name).mkdir()
        for file, size in files.items():
            (tmp_path / name / file).write_bytes(bytes(size))
    return {name: str(tmp_path / name) for name in ("target", "draft", "old")}


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """Warnings; vLLM, once it is imported, keeps its loggers' records to itself."""
    lines: list[str] = []
    monkeypatch.setattr(fast_memory.logger, "warning", lambda text, *values: lines.append(text % values))
    return lines


@pytest.mark.parametrize(
    ("draft", "method", "predicting", "nbytes"),
    [
        (None, "ngram", None, 0),
        ("draft", "draft_model", None, 70),
        ("draft", "eagle3", None, 70),
        ("old", "draft_model", None, 50),
        ("target", "draft_model", None, 0),  # it drafts for itself
        ("target", "mtp", 1, 200),
        ("target", "mtp", 4, 500),
    ],
)
def test_a_draft_is_as_large_as_its_files(folders, said, draft, method, predicting, nbytes) -> None:
    asked = config(folders["target"], draft and folders[draft], method, predicting)
    assert fast_memory.draft_bytes(asked) == nbytes
    assert not said


@pytest.mark.parametrize(("draft", "method"), [("someone/draft", "eagle3"), ("target", "dspark")])
def test_a_draft_of_unknown_size_is_named(folders, said, draft: str, method: str) -> None:
    """One that is not here, or stages in the target's checkpoint of which nothing says the size."""
    named = folders.get(draft, draft)
    assert fast_memory.draft_bytes(config(folders["target"], named, method)) == 0
    (line,) = said
    assert named in line and "--spac-slots" in line


# -- what runs ---------------------------------------------------------------------------------------------

MIB = 1 << 20
QWEN = MoEWidths(top_k=8, hidden=2048, inner=768)  # Qwen3-30B-A3B


def serving(
    *,
    requests: int = 256,
    rows: int = 16384,
    mode: str = "NONE",
    sizes: int = 51,
    most: int = 512,
    drafts: int | None = None,
):
    from vllm.config import CUDAGraphMode

    model = SimpleNamespace(
        dtype=torch.bfloat16,
        hf_text_config=SimpleNamespace(intermediate_size=6144),
        get_vocab_size=lambda: 151936,
        get_hidden_size=lambda: 2048,
        get_head_size=lambda: 128,
        get_num_attention_heads=lambda parallel: 32,
        get_num_kv_heads=lambda parallel: 4,
    )
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode[mode],
        cudagraph_capture_sizes=list(range(sizes)),
        max_cudagraph_capture_size=most if mode != "NONE" else 0,
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=requests, max_num_batched_tokens=rows),
        compilation_config=compilation,
        speculative_config=None if drafts is None else SimpleNamespace(num_speculative_tokens=drafts),
    )


def working(device: str = "cuda", **asked) -> Working:
    return fast_memory.working(serving(**asked), torch.device(device), [QWEN])


def test_logits_are_those_of_every_request_and_its_drafts() -> None:
    assert working().sampling == 256 * 151936 * 4 * 3
    assert working(requests=1024).sampling == 1024 * 151936 * 4 * 3, "1.7 GiB, which 1 GiB for all was not"
    assert working(drafts=3).sampling == 4 * working().sampling
    assert working(drafts=3, rows=300).sampling == 300 * 151936 * 4 * 3, "no more rows than a forward has"


def test_activations_are_those_of_the_largest_forward() -> None:
    row = 2 * (
        3 * 2048 + 8 * (2048 + 2048)
    )  # more than attention's 2 * (96 + 16) * 128 and a dense layer's 2 * 3 * 6144
    assert working().activations == 16384 * row
    assert working(rows=64, mode="FULL", most=512).activations == 512 * row, "padded for a graph"
    wide = MoEWidths(top_k=2, hidden=4096, inner=14336)
    assert fast_memory.working(serving(rows=1), torch.device("cuda"), [QWEN, wide]).activations == 2 * (
        3 * 2048 + 2 * (14336 + 28672)
    )
    assert fast_memory.working(serving(rows=1), torch.device("cuda"), []).activations == 2 * (3 * 2048 + 3 * 6144)


@pytest.mark.parametrize(
    ("mode", "kinds"), [("NONE", 0), ("PIECEWISE", 1), ("FULL", 1), ("FULL_DECODE_ONLY", 1), ("FULL_AND_PIECEWISE", 2)]
)
def test_graphs_share_a_pool_and_have_something_of_their_own(mode: str, kinds: int) -> None:
    pool = 512 * 2 * (3 * 2048 + 8 * 4096)
    assert working(mode=mode).graphs == (pool + kinds * 51 * 8 * MIB if kinds else 0)
    assert working("cpu", mode=mode).graphs == 0


def test_what_runs_is_what_the_slots_leave(monkeypatch) -> None:
    found = working(mode="FULL_AND_PIECEWISE")
    assert found.total == found.sampling + found.activations + found.graphs + found.slack
    asked = config("target", None, "ngram")
    asked.cache_config = SimpleNamespace(gpu_memory_utilization=0.9, kv_cache_memory_bytes=5 * MIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4000 * MIB, 5000 * MIB))
    free = fast_memory.room(asked, torch.device("cuda"), 0, 100 * MIB)
    assert free == (4000 - 100) * MIB, "vLLM ignores the utilization if the KV cache has a size"


@pytest.mark.parametrize(
    ("utilization", "available", "free"),
    [(0.9, 4800, 4500 - 200), (0.3, 1900, 1500 - 200), (0.9, 1900, 1900)],
    ids=["alone", "beside another process", "beside one that takes more than it may"],
)
def test_what_other_processes_take_is_not_ours(monkeypatch, utilization: float, available: int, free: int) -> None:
    """As vLLM counts: the utilization is of one engine, and several may share a GPU."""
    asked = config("target", None, "ngram")
    asked.cache_config = SimpleNamespace(gpu_memory_utilization=utilization, kv_cache_memory_bytes=None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (available * MIB, 5000 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 200 * MIB)
    assert fast_memory.room(asked, torch.device("cuda"), 0, 0) == free * MIB


def test_the_log_says_how_it_comes_about() -> None:
    assert working().describe() == (
        "2.12 GiB for run-time buffers: logits and sampling 445.1 MiB, activations 1.19 GiB, CUDA graphs 0.0 KiB, "
        "slack 512.0 MiB"
    )


def test_it_is_read_from_what_vllm_really_has(tmp_path) -> None:
    """vLLM's own configuration."""
    import json

    from vllm.engine.arg_utils import EngineArgs

    facts = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 96,
    }
    facts |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    facts |= {"vocab_size": 512, "max_position_embeddings": 64, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, max_num_seqs=4, max_num_batched_tokens=64)
    made = args.create_engine_config()
    found = fast_memory.working(made, torch.device("cpu"), [MoEWidths(2, 64, 96)])
    assert found.sampling == 4 * 512 * 4 * 3
    assert found.activations == 64 * 2 * (3 * 64 + 2 * (96 + 192))
