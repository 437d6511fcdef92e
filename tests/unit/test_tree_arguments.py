"""What draft trees add to an engine's arguments, and what they refuse, each with the flag that helps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_spac.config.config import SpacConfig
from vllm_spac.config.tree_shape import TreeShape
from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.integration.hooks import drafts, patches
from vllm_spac.integration.loading import assembly
from vllm_spac.integration.stepping import tree_arguments, tree_scheduler
from vllm_spac.methods.trees.tensors import Scratch

HEAD = {"method": "eagle3", "model": "head"}


def engine_args(**given):
    usual = {"speculative_config": HEAD, "scheduler_cls": None, "block_size": None, "tensor_parallel_size": 1}
    return SimpleNamespace(**usual | given)


def test_the_draft_length_the_scheduler_and_the_block_size_are_set() -> None:
    args = engine_args()
    tree_arguments.request(args, SpacConfig(tree=16))
    assert args.speculative_config == HEAD | {"num_speculative_tokens": 16, "disable_padded_drafter_batch": True}
    assert args.scheduler_cls == tree_arguments.SCHEDULER and args.block_size == 32
    assert HEAD == {"method": "eagle3", "model": "head"}, "the user's own object is left as it is"


def on_a_gpu(monkeypatch, **given):
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    usual = {
        "enforce_eager": False,
        "attention_backend": None,
        "attention_config": SimpleNamespace(backend=None),
        "compilation_config": SimpleNamespace(cudagraph_mode=None),
    }
    args = engine_args(**usual | given)
    tree_arguments.request(args, SpacConfig(tree=16))
    return args


def test_on_a_gpu_trees_start_without_more_flags(monkeypatch) -> None:
    args = on_a_gpu(monkeypatch)
    assert args.enforce_eager and args.attention_backend == "TRITON_ATTN"


def test_what_the_user_chose_for_a_gpu_stays(monkeypatch) -> None:
    chosen = SimpleNamespace(cudagraph_mode=mode("NONE"))
    args = on_a_gpu(monkeypatch, compilation_config=chosen, attention_config=SimpleNamespace(backend="FLASH_ATTN"))
    assert not args.enforce_eager and args.attention_backend is None


@pytest.mark.parametrize(
    "given, problem",
    [
        ({"speculative_config": None}, "add --speculative-config"),
        ({"speculative_config": HEAD | {"num_speculative_tokens": 5}}, "drop num_speculative_tokens"),
        ({"speculative_config": HEAD | {"disable_padded_drafter_batch": False}}, "needs disable_padded_drafter_batch"),
        ({"scheduler_cls": "a.B"}, "drop --scheduler-cls"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}}, "drafts of ngram; use an EAGLE"),
    ],
)
def test_contradictions_are_refused(given: dict, problem: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=problem):
        tree_arguments.request(engine_args(**given), SpacConfig(tree=16))


def engine(**changes):
    parts = {
        "model_config": {
            "is_hybrid": False,
            "uses_mrope": False,
            "use_mla": False,
            "logits_processors": None,
            "max_model_len": 256,
        },
        "parallel_config": {
            "tensor_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "use_ubatching": False,
            "distributed_executor_backend": "uni",
        },
        "scheduler_config": {
            "async_scheduling": False,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
            "scheduler_cls": None,
        },
        "speculative_config": {
            "method": "eagle3",
            "rejection_sample_method": "standard",
            "parallel_drafting": False,
            "use_local_argmax_reduction": False,
            "use_heterogeneous_vocab": False,
        },
        "compilation_config": {"cudagraph_mode": None},
        "kernel_config": {"enable_jit_warmup": True},
        "attention_config": {"backend": SimpleNamespace(name="TRITON_ATTN")},
        "cache_config": {
            "cache_dtype": "auto",
            "block_size": 32,
            "num_gpu_blocks_override": None,
            "kv_cache_memory_bytes": None,
        },
    }
    whole = {"kv_transfer_config": None, "use_v2_model_runner": False}
    for name, value in changes.items():
        next((part for part in parts.values() if name in part), whole)[name] = value
    return SimpleNamespace(**whole, **{name: SimpleNamespace(**part) for name, part in parts.items()})


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"method": "ngram"}, "drafts of ngram; use an EAGLE head"),
        ({"async_scheduling": True}, "add --no-async-scheduling"),
        ({"is_hybrid": True}, "recurrent layers"),
        ({"uses_mrope": True}, "M-RoPE"),
        ({"use_mla": True}, "MLA"),
        ({"kv_transfer_config": object()}, "drop --kv-transfer-config"),
        ({"decode_context_parallel_size": 2}, "drop --spac-tree"),
        ({"max_num_seqs": 31}, "use --max-num-seqs 30, or use --max-num-batched-tokens 527"),
        ({"tree": 2, "max_num_seqs": 65}, "use --max-num-seqs 64, or use --max-num-batched-tokens 520"),
    ],
)
def test_engines_that_cannot_serve_trees_are_refused(change: dict, problem: str) -> None:
    config = SpacConfig(tree=change.pop("tree", 16))
    tree_arguments.check(config, engine())
    with pytest.raises(UnsupportedError, match=problem):
        tree_arguments.check(config, engine(**change))


def mode(name: str) -> SimpleNamespace:
    return SimpleNamespace(name=name)


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"cudagraph_mode": mode("PIECEWISE")}, "PIECEWISE.*FULL_DECODE_ONLY.*, or add --enforce-eager"),
        (
            {"cudagraph_mode": mode("FULL_AND_PIECEWISE")},
            "FULL_AND_PIECEWISE.*FULL_DECODE_ONLY.*, or add --enforce-eager",
        ),
        ({"use_ubatching": True}, "--enable-dbo; drop --enable-dbo"),
        ({"rejection_sample_method": "block"}, "rejection_sample_method=block; drop rejection"),
        ({"logits_processors": ["a.B"]}, "--logits-processors"),
        ({"cache_dtype": "int8_per_token_head"}, "--kv-cache-dtype int8_per_token_head; use --kv-cache-dtype auto"),
        ({"max_num_seqs": 31}, "use --max-num-seqs 30"),
    ],
)
def test_engines_with_the_v2_runner_that_cannot_serve_trees_are_refused(change: dict, problem: str) -> None:
    tree_arguments.check(SpacConfig(tree=16), engine(use_v2_model_runner=True, cudagraph_mode=mode("NONE")))
    with pytest.raises(UnsupportedError, match=problem):
        tree_arguments.check(SpacConfig(tree=16), engine(use_v2_model_runner=True, **change))


@pytest.mark.parametrize("backend, named", [(mode("FLASH_ATTN"), "FLASH_ATTN"), (None, "vLLM's choice of attention")])
def test_on_a_gpu_attention_is_what_trees_were_tried_with(backend, named: str, monkeypatch) -> None:
    from vllm.platforms import current_platform

    chosen = engine(use_v2_model_runner=True, cudagraph_mode=mode("NONE"), backend=backend)
    tree_arguments.check(SpacConfig(tree=16), chosen)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    with pytest.raises(UnsupportedError, match=f"{named}, .*; add --attention-backend TRITON_ATTN"):
        tree_arguments.check(SpacConfig(tree=16), chosen)


@pytest.mark.parametrize("ahead, scheduler", [(False, None), (True, tree_arguments.ASYNC_SCHEDULER)])
def test_steps_that_are_planned_ahead_have_a_scheduler_of_their_own(ahead: bool, scheduler: str | None) -> None:
    found = engine(use_v2_model_runner=True, async_scheduling=ahead, cudagraph_mode=mode("NONE"), scheduler_cls=None)
    tree_arguments.check(SpacConfig(tree=16), found)
    assert found.scheduler_config.scheduler_cls == scheduler


def test_the_v2_runner_does_not_record_which_draft_follows_which() -> None:
    with pytest.raises(UnsupportedError, match="--spac-record trace="):
        tree_arguments.check(SpacConfig(tree=16, record="trace=a.safetensors"), engine(use_v2_model_runner=True))


def test_the_guard_of_trees_with_v2_plans_them_and_cuts_their_nodes(monkeypatch) -> None:
    v2 = engine(use_v2_model_runner=True, distributed_executor_backend="uni")
    assert drafts.unguarded(v2) is None and drafts.unguarded(v2, trees=True) is None
    monkeypatch.setenv(patches.WITHOUT, f"{patches.SPECULATOR}.compute_draft_logits")
    for trees in (False, True):
        assert drafts.unguarded(v2, trees) is None, "how many drafts are made is planned without it"
    assert "compute_draft_logits" in str(drafts.uncut(v2))
    from vllm.config import CUDAGraphMode

    v2.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    assert "full CUDA graphs hold the steps" in str(drafts.uncut(v2)), "a GPU stood still in them"
    monkeypatch.delenv(patches.WITHOUT)
    assert "--spac-guard on@cut=always" in str(drafts.uncut(v2)) and drafts.uncut(v2, in_graphs=True) is None
    v2.kernel_config.enable_jit_warmup = False
    assert "drop --kernel-config.enable_jit_warmup" in str(drafts.uncut(v2, in_graphs=True)), "a first launch may wait"
    v2.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    v2.speculative_config.num_speculative_tokens_per_batch_size = [(1, 8, 4)]
    assert drafts.unguarded(v2) is None
    assert "plans how many nodes are drafted; drop num_speculative_tokens_per_batch_size" in str(
        drafts.unguarded(v2, trees=True)
    )


def test_what_a_tree_s_guard_plans_and_cuts_with_v2(caplog) -> None:
    caplog.set_level("INFO", logger="vllm.spac")
    v2 = engine(use_v2_model_runner=True, distributed_executor_backend="uni")
    v2.speculative_config.num_speculative_tokens = 8
    config, some = SpacConfig.parse({"tree": 8}), SimpleNamespace(holds_all=False)
    guard, cuts = assembly.guard(config, v2), assembly.cuts(config, v2, [some])
    assert guard.lengths == [0, 8] and cuts is not None, "also with expert workers, and under a budget"
    assert assembly.cuts(config, v2, [SimpleNamespace(holds_all=True)]) is None
    assert "none is cut on the device: each expert has its slot" in caplog.text
    ranks = engine(use_v2_model_runner=True, tensor_parallel_size=2)
    ranks.speculative_config.num_speculative_tokens = 8
    assert assembly.guard(config, ranks) is None and assembly.cuts(config, ranks, [some]) is None
    assert caplog.text.count("each of 2 ranks would choose the draft length by its own clock") == 2


def test_both_limits_bound_the_requests_that_nobody_chose(caplog) -> None:
    """17 rows, and 34 blocks of scratch, for each; a fifth of 1,408 blocks is 281."""
    for tokens, blocks, fit in ((2048, None, 120), (2048, 1409, 8), (100, 1409, 5), (2048, 10**6, 120)):
        found = engine(max_num_seqs=128, max_num_batched_tokens=tokens, num_gpu_blocks_override=blocks)
        with pytest.raises(UnsupportedError, match=f"use --max-num-seqs {fit}(,|$)"):
            tree_arguments.check(SpacConfig(tree=16), found)
        tree_arguments.limit_requests(SpacConfig(tree=16), found)
        assert found.scheduler_config.max_num_seqs == fit and f"trees set --max-num-seqs {fit}:" in caplog.text
        tree_arguments.check(SpacConfig(tree=16), found)
    few = engine(max_num_seqs=4, num_gpu_blocks_override=1409)
    tree_arguments.limit_requests(SpacConfig(tree=16), few)
    assert few.scheduler_config.max_num_seqs == 4, "never more than there were"
    plain = engine(max_num_seqs=128)
    tree_arguments.limit_requests(SpacConfig(), plain)
    assert plain.scheduler_config.max_num_seqs == 128


def test_no_remedy_is_itself_refused() -> None:
    """More tokens in a batch would not make room in the KV cache."""
    for blocks, larger in ((1409, False), (10**6, True)):
        with pytest.raises(UnsupportedError) as refused:
            tree_arguments.check(SpacConfig(tree=16), engine(max_num_seqs=128, num_gpu_blocks_override=blocks))
        assert ("--max-num-batched-tokens 2176" in str(refused.value)) == larger
    with pytest.raises(UnsupportedError, match="40 KV cache blocks.*; drop --spac-tree"):
        tree_arguments.check(SpacConfig(tree=16), engine(num_gpu_blocks_override=41))


class Pool:
    def __init__(self, blocks: int) -> None:
        self.blocks = blocks

    def get_num_free_blocks(self) -> int:
        return self.blocks

    def get_new_blocks(self, count: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(block_id=number) for number in range(1, count + 1)]


def test_scratch_is_at_most_a_fifth_of_the_cache_once_its_size_is_known() -> None:
    need = Scratch(TreeShape(16), requests=8, block_size=32)
    assert need.count == 8 * 2 * 17, "two blocks per row: a path may cross a block's edge"
    for blocks, requests in ((5 * need.count, None), (5 * need.count - 1, 7), (5 * need.count // 8, 1)):
        scheduler = SimpleNamespace(kv_cache_manager=SimpleNamespace(block_pool=Pool(blocks)))
        tree_scheduler.reserve(scheduler, engine(), TreeShape(16))
        assert getattr(scheduler, "max_num_running_reqs", None) == requests
    with pytest.raises(ConfigError, match=r"one request need 34 of 169 KV cache blocks .* use a smaller --spac-tree"):
        scheduler = SimpleNamespace(kv_cache_manager=SimpleNamespace(block_pool=Pool(5 * need.count // 8 - 1)))
        tree_scheduler.reserve(scheduler, engine(), TreeShape(16))


@pytest.mark.parametrize("shape, sequences", [(TreeShape(63), 64), (TreeShape(4), 5)])
def test_scratch_is_of_rows_and_its_sets_are_disjoint(shape, sequences: int) -> None:
    blocks = Scratch(shape, requests=3, block_size=4)
    assert blocks.count == 3 * blocks.each * max(sequences, 2 * shape.expanded)
    for taken in (blocks.trees(3), blocks.levels(3)):
        assert taken.unique().numel() == taken.numel() and int(taken.min()) == 1 and int(taken.max()) <= blocks.count
    assert blocks.trees(3).shape == (3, sequences, blocks.each)
