"""The size of the KV cache: what slots leave for it, what requests can use, and what of it takes memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import recipes
from vllm_spac.integration.loading import fast_memory
from vllm_spac.tools.planning.planned_machine import PlannedMachine
from vllm_spac.tools.planning.planned_memory import Load, split

MIB = 1 << 20
EACH = 3 * MIB  # a request of ``config``


def config(
    *,
    requests: int = 8,
    tokens: int = 1024,
    prefixes: bool = False,
    mla: bool = False,
    text: dict | None = None,
    hybrid: bool = True,
    named: int | None = None,
    **cache,
) -> SimpleNamespace:
    """6 layers of 2 heads with 64 values of 2 bytes: 3 KiB per token."""
    from vllm.config import CacheConfig
    from vllm.v1.kv_cache_interface import KVCacheLayout

    given = {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": None}
    given["gpu_memory_utilization"] = CacheConfig.gpu_memory_utilization
    return SimpleNamespace(
        max_in_flight_tokens=256,
        num_speculative_tokens=0,
        speculative_config=None,
        attention_config=SimpleNamespace(hisparse_config=None),
        model_config=SimpleNamespace(
            max_model_len=tokens,
            original_max_model_len=named,
            use_mla=mla,
            dtype=torch.bfloat16,
            hf_text_config=SimpleNamespace(to_dict=lambda: text or {}),
            get_hidden_size=lambda: 128,
            get_num_layers=lambda parallel: 6,
            get_num_kv_heads=lambda parallel: 2,
            get_head_size=lambda: 64,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=requests, max_num_batched_tokens=256, disable_hybrid_kv_cache_manager=not hybrid
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=prefixes,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
            **(given | cache),
        ),
        kv_transfer_config=None,
    )


def layers(count: int = 6, block: int = 128) -> dict:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    return dict.fromkeys(map(str, range(count)), spec)


# -- what slots leave ---------------------------------------------------------------------------------------


def test_slots_leave_it_room_for_four_requests_or_for_as_many_as_there_can_be() -> None:
    assert fast_memory.beside_slots(config(requests=256), EACH) == 4 * EACH
    assert fast_memory.beside_slots(config(requests=1), EACH) == EACH
    assert fast_memory.beside_slots(config(requests=1, kv_cache_memory_bytes=5), EACH) == 5, "what the user said"


@pytest.mark.parametrize(
    ("asked", "free", "kept"),
    [
        ({"requests": 256}, 1000 * MIB, 3 * MIB),
        ({"requests": 256, "named": -1}, 1000 * MIB, 3 * MIB),
        ({"requests": 256}, 8 * MIB, 2 * MIB),
        ({"requests": 256}, -5, 0),
        ({"requests": 2}, 1000 * MIB, 2 * 3 * MIB),
        ({"requests": 2}, 16 * MIB, 4 * MIB),
        ({"requests": 256, "named": 1024}, 16 * MIB, 4 * 3 * MIB),
        ({"requests": 2, "named": 1024}, 16 * MIB, 2 * 3 * MIB),
        ({"requests": 256, "kv_cache_memory_bytes": 5}, 16 * MIB, 5),
    ],
    ids=str,
)
def test_on_a_gpu_it_is_one_request_or_a_quarter_unless_the_user_says_more(asked: dict, free: int, kept: int) -> None:
    """Both come out of the same memory there; what requests lack in length, vLLM shortens."""
    assert fast_memory.beside_slots(config(**asked), EACH, free) == kept


def test_the_log_says_what_it_is_and_what_shorter_requests_would_leave() -> None:
    def said(each: int, free: int | None, **asked) -> str:
        return fast_memory.describe(config(**asked), each, 24 * MIB, free)

    assert said(120 * MIB, 1 << 40, requests=256, tokens=40960) == (
        "120.0 MiB of KV cache (one request of 40,960 tokens; --max-model-len 8192 would leave 24.0 MiB more for slots)"
    )
    part = said(120 * MIB, 400 * MIB, requests=256, tokens=40960)
    assert part.startswith("100.0 MiB of KV cache (a part of one request of 40,960")
    assert said(EACH, 1 << 40, requests=256) == "3.0 MiB of KV cache (one request of 1,024 tokens)"
    assert "(2 requests of 1,024 tokens)" in said(EACH, 1 << 40, requests=2)
    assert said(EACH, 1 << 40, named=1024) == said(EACH, None) == "12.0 MiB of KV cache"
    assert said(0, 1 << 40) == "0.0 KiB of KV cache (a part of one request of 1,024 tokens)"


@pytest.mark.parametrize(("on_cpu", "given", "asked"), [(False, None, -1), (False, 512, 512), (True, None, None)])
def test_the_length_is_fitted_on_a_gpu_where_none_was_named(monkeypatch, on_cpu: bool, given, asked) -> None:
    monkeypatch.setattr(fast_memory, "is_cpu", lambda: on_cpu)
    args = SimpleNamespace(max_model_len=given)
    fast_memory.request(args)
    assert args.max_model_len == asked


# Percent of the experts in slots, where nothing is named; before that, with four full requests.
SHARES = {
    "Qwen/Qwen3-30B-A3B": {"rtx3090": (5, 26), "rtx4090": (4, 25), "rtx5090": (18, 39), "h100": (100, 100)},
    "mistralai/Mixtral-8x7B-Instruct-v0.1": {
        "rtx3090": (1, 15),
        "rtx4090": (1, 15),
        "rtx5090": (10, 24),
        "h100": (61, 76),
    },
    "deepseek-ai/DeepSeek-V2-Lite-Chat": {
        "rtx3090": (0, 51),
        "rtx4090": (0, 51),
        "rtx5090": (25, 78),
        "h100": (100, 100),
    },
    "zai-org/GLM-4.5-Air": {"rtx3090": (0, 2), "rtx4090": (0, 2), "rtx5090": (0, 5), "h100": (0, 22)},
    "Qwen/Qwen3-235B-A22B": {"rtx3090": (0, 0), "rtx4090": (0, 0), "rtx5090": (0, 2), "h100": (5, 11)},
}


@pytest.mark.parametrize("model", SHARES)
def test_slots_of_published_models_with_no_flag_but_the_plugins(model: str) -> None:
    recipe = {each["model"]: each for each in recipes.recipes()}[model]
    served = recipes.served(recipe)[0]
    shape, found = served.architecture, {}
    for card in SHARES[model]:
        parts = split(served, PlannedMachine.of(card, None, 1 << 40), Load(shape.longest, 1))
        both = parts.room + parts.kv
        asked = config(requests=256, tokens=shape.longest)
        each = shape.token_bytes * shape.longest
        now = both - fast_memory.beside_slots(asked, each, both)
        shares = (max(0, min(100, 100 * room // served.experts_bytes)) for room in (both - 4 * each, now))
        found[card] = tuple(shares)
    assert found == SHARES[model]


def test_latent_attention_keeps_one_vector() -> None:
    assert fast_memory.by_config(config()).request_bytes == EACH
    assert fast_memory.by_config(config(mla=True)).request_bytes == EACH // 2


def test_before_there_are_layers_the_configuration_says_which_keep_a_window() -> None:
    def blocks(text: dict, **asked) -> int:
        return fast_memory.by_config(config(text=text, **asked)).number

    text = {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 128}
    assert blocks(text) == 8 + (3 + 1), "a group of three layers each: all tokens, or a window and a part of a prompt"
    assert blocks(text, tokens=300) == 3 + (3 + 1)
    assert blocks(text, hybrid=False) == 8, "of six layers"
    assert blocks(text | {"sliding_window": None}) == 8


def test_a_request_takes_at_least_what_layers_with_all_tokens_keep() -> None:
    text = {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 128}
    hybrid = {"layer_types": ["linear_attention"] * 5 + ["full_attention"]}
    given = {"cache_dtype": "auto"}
    assert fast_memory.one_request(config(**given)) == EACH
    assert fast_memory.one_request(config(text=text, **given)) == EACH // 2
    assert fast_memory.one_request(config(text=hybrid, **given)) == EACH // 6
    assert fast_memory.one_request(config(named=-1, **given)) is None, "vLLM fits the length"
    assert fast_memory.one_request(config(cache_dtype="fp8")) is None


# -- what requests can use ----------------------------------------------------------------------------------


def test_requests_use_whole_blocks_and_vllm_one_more() -> None:
    block = 128 * 3 << 10
    assert fast_memory.usable(config(), layers()) == (8 * 8 + 1) * block
    assert fast_memory.usable(config(tokens=1025), layers()) == (8 * 9 + 1) * block
    assert fast_memory.usable(config(prefixes=True), layers()) == (2 * 8 * 8 + 1) * block, "prefixes of earlier ones"


def test_layers_with_a_window_use_fewer_blocks() -> None:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    window = SlidingWindowSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=64)
    mixed = layers() | {f"window {layer}": window for layer in range(6)}
    block = 128 * 3 << 10
    assert fast_memory.usable(config(), mixed) == (8 * (8 + 4) + 1) * block
    assert fast_memory.usable(config(), {}) == 0


# -- the hooks ----------------------------------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(fast_memory.logger, "info", lambda text, *values: lines.append(text % values))
    return lines


def worker(vllm_config: SimpleNamespace, managed: bool = True, tree: int = 0) -> SimpleNamespace:
    model = nn.Linear(1, 1)
    model.spac_kernel = None
    model.spac = SimpleNamespace(config=SimpleNamespace(tree_nodes=tree)) if managed else None
    runner = SimpleNamespace(get_model=lambda: model, get_kv_cache_spec=layers, vllm_config=vllm_config)
    return SimpleNamespace(model_runner=runner, vllm_config=vllm_config)


def chosen(found: int, *args, **kwargs) -> int:
    return fast_memory._bounded(lambda self: found)(worker(*args, **kwargs))


def test_what_requests_cannot_use_is_not_taken_and_the_log_says_so(said) -> None:
    needed = fast_memory.usable(config(), layers())
    assert chosen(20 << 30, config()) == needed
    (line,) = said
    assert "24.4 MiB" in line and "20.00 GiB" in line and "--max-num-seqs 8" in line and "--max-model-len 1024" in line
    assert "VLLM_CPU_KVCACHE_SPACE" in line


@pytest.mark.parametrize(
    "given",
    [{"kv_cache_memory_bytes": 20 << 30}, {"num_gpu_blocks_override": 80}, {"gpu_memory_utilization": 0.5}],
    ids=lambda given: next(iter(given)),
)
def test_a_size_that_the_user_chose_stays(said, given: dict) -> None:
    assert chosen(20 << 30, config(**given)) == 20 << 30 and said == []


@pytest.fixture
def ram(monkeypatch: pytest.MonkeyPatch):
    """Sets what vLLM finds available on each of two nodes of 32 GiB."""
    from vllm.utils import cpu_resource_utils

    def available(*gib: int) -> None:
        nodes = [SimpleNamespace(total_memory=32 << 30, available_memory=one << 30) for one in gib]
        monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", lambda: list(range(len(nodes))))
        monkeypatch.setattr(cpu_resource_utils, "get_memory_node_info", nodes.__getitem__)

    return available


def test_a_machine_that_others_use_too_gives_what_is_left(said, ram) -> None:
    """vLLM's default share of RAM would end each worker before it loads anything."""
    ram(31, 17)
    engine = config()
    fast_memory.limit_to_available(engine)
    assert engine.cache_config.gpu_memory_utilization == 0.5, "of the fuller node, less half a GiB for each process"
    (line,) = said
    assert "--gpu-memory-utilization 0.50" in line and "17.00 GiB of 32.00 GiB" in line
    assert not fast_memory.sized_by_user(engine), "so the KV cache is bounded by what requests can use"
    assert chosen(20 << 30, engine) == fast_memory.usable(engine, layers())


@pytest.mark.parametrize("given", [{"kv_cache_memory_bytes": 1 << 30}, {"gpu_memory_utilization": 0.8}, {}])
def test_what_the_user_named_or_a_free_machine_stays(said, ram, given: dict) -> None:
    ram(17 if given else 32)
    engine = config(**given)
    before = engine.cache_config.gpu_memory_utilization
    fast_memory.limit_to_available(engine)
    assert engine.cache_config.gpu_memory_utilization == before and said == []


def test_it_is_never_more_than_vllm_found(said) -> None:
    assert chosen(MIB, config()) == MIB and said == []


def test_other_engines_and_trees_keep_what_vllm_found(said) -> None:
    assert chosen(20 << 30, config(), managed=False) == 20 << 30
    assert chosen(20 << 30, config(), tree=8) == 20 << 30, "trees take scratch from it, a share"
    assert said == []


def settled(monkeypatch: pytest.MonkeyPatch, vllm_config: SimpleNamespace, rank: int = 0) -> torch.Tensor:
    """Returns the KV cache of two layers after the hook, of which some bytes were not zero: a sign of release."""
    monkeypatch.setattr(fast_memory, "own_memory", lambda: 600 * MIB)
    cache = torch.ones(64 * MIB, dtype=torch.uint8)
    at = worker(vllm_config)
    at.model_runner.kv_caches = [cache[: 32 * MIB].view(torch.bfloat16), [cache[32 * MIB :]]]
    at.model_runner.get_model().spac = SimpleNamespace(
        vllm_config=vllm_config,
        fast_bytes=100 * MIB,
        serving=SimpleNamespace(other_weights=20 * MIB),
        ranks=SimpleNamespace(rank=rank),
    )
    assert fast_memory._settled(lambda self: "warm")(at) == "warm"
    return cache


def test_the_cache_takes_no_memory_until_it_is_used_and_one_line_says_what_does(said, monkeypatch) -> None:
    cache = settled(monkeypatch, config())
    assert not cache[4096:-4096].any(), "its pages were not returned"
    (line,) = said
    assert "600.0 MiB: 100.0 MiB of slots, 20.0 MiB of other weights, 480.0 MiB of vLLM" in line
    assert "up to 64.0 MiB more for their KV cache, of which they can use 24.4 MiB: --kv-cache-memory-bytes" in line
    assert str(fast_memory.usable(config(), layers())) in line


def test_pages_that_a_connector_knows_stay(said, monkeypatch) -> None:
    given = config()
    given.kv_transfer_config = object()
    assert settled(monkeypatch, given).all()
