"""What draft trees need of an engine: settings that are added to its arguments, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_spac.config import rules
from vllm_spac.config.config import SpacConfig
from vllm_spac.errors import ConfigError, Remedy, UnsupportedError, add, drop, use
from vllm_spac.integration.hooks import drafts, patches
from vllm_spac.integration.hooks.ranks import Refusal
from vllm_spac.methods.trees import tree_room
from vllm_spac.methods.trees.tensors import Scratch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_spac.config.tree_shape import TreeShape

logger = logging.getLogger("vllm.spac")

SCHEDULER = "vllm_spac.integration.stepping.tree_scheduler.TreeScheduler"
ASYNC_SCHEDULER = "vllm_spac.integration.stepping.tree_scheduler.AsyncTreeScheduler"
_V2 = Remedy("drop VLLM_USE_V2_MODEL_RUNNER=0", {"VLLM_USE_V2_MODEL_RUNNER": None})
_BLOCK = 32  # tokens; vLLM's own for CPUs is 128, and scratch is counted in blocks
_METHODS = ("eagle", "eagle3")
_HEAD = {"method": "eagle3", "model": "HEAD"}
_DECODE_GRAPHS = Remedy(
    """add --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}'""",
    {"--compilation-config.cudagraph_mode": "FULL_DECODE_ONLY"},
)
_EAGLE = Remedy(f"add --speculative-config '{json.dumps(_HEAD)}'", {"--speculative-config": _HEAD})


def request(engine_args: EngineArgs, config: SpacConfig) -> None:
    """Adds what trees need to ``EngineArgs``: the draft length, the scheduler with scratch, small blocks.

    Raises:
        ConfigError: the user's arguments contradict it.
    """
    from vllm.platforms import current_platform

    if not config.tree_nodes:
        return
    named = f"tree={config.tree} (--spac-tree)"
    given = engine_args.speculative_config
    if not isinstance(given, dict):
        raise ConfigError.refused(f"spac: {named} is drafted by an EAGLE head", _EAGLE, drop("tree"))
    if (method := given.get("method")) not in (None, *_METHODS):
        raise ConfigError.refused(
            f"spac: {named} does not work with drafts of {method}",
            Remedy("use an EAGLE head", _EAGLE.changes),
            drop("tree"),
        )
    asked = given.get("num_speculative_tokens")
    if asked not in (None, config.tree_nodes):
        raise ConfigError.refused(
            f"spac: {named} and num_speculative_tokens={asked} name two numbers of draft tokens",
            drafts.without("num_speculative_tokens"),
        )
    if given.get("disable_padded_drafter_batch") is False:
        padded = "disable_padded_drafter_batch"
        raise ConfigError.refused(f"spac: {named} needs {padded}, and it is false", drafts.without(padded))
    if engine_args.scheduler_cls is not None:
        raise ConfigError.refused(f"spac: {named} brings its own scheduler", drop("vllm_scheduler_cls"))
    engine_args.speculative_config = {
        **given,
        "num_speculative_tokens": config.tree_nodes,
        "disable_padded_drafter_batch": True,
    }
    engine_args.scheduler_cls = SCHEDULER
    if engine_args.block_size is None:
        engine_args.block_size = _BLOCK
        logger.info("spac: trees set --block-size %d: scratch is counted in blocks", _BLOCK)
    if not current_platform.is_cpu():
        _on_a_gpu(engine_args)


def _on_a_gpu(engine_args: EngineArgs) -> None:
    """Adds what trees were run with on a GPU, where the user chose nothing else."""
    if engine_args.compilation_config.cudagraph_mode is None and not engine_args.enforce_eager:
        engine_args.enforce_eager = True
        logger.info(
            "spac: trees set --enforce-eager: no GPU has run them in CUDA graphs yet; to do so, add "
            """--compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}'"""
        )
    if engine_args.attention_backend is None and engine_args.attention_config.backend is None:
        engine_args.attention_backend = "TRITON_ATTN"
        logger.info("spac: trees set --attention-backend TRITON_ATTN, whose kernels take a tree's rows")


def limit_requests(config: SpacConfig, vllm_config: VllmConfig) -> None:
    """Lowers how many requests run at once, which the user did not choose, to those whose trees fit."""
    if config.draft_tree is None:
        return
    scheduler = vllm_config.scheduler_config
    if 0 < (fit := requests_of(config.draft_tree, vllm_config, _blocks(vllm_config))) < scheduler.max_num_seqs:
        scheduler.max_num_seqs = fit
        logger.info("spac: trees set --max-num-seqs %d: rows of a forward and KV cache blocks suffice for these", fit)


def requests_of(shape: TreeShape, vllm_config: VllmConfig, blocks: int | None, rows: int | None = None) -> int:
    """As ``tree_room.most_requests``, of an engine, and no more than it has requests.

    Args:
        blocks: of the KV cache that requests can use; None: not known yet.
        rows: most of a forward, where it is not what the engine has.
    """
    scheduler, longest = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
    rows = scheduler.max_num_batched_tokens if rows is None else rows
    fit = tree_room.most_requests(shape, rows, blocks, vllm_config.cache_config.block_size, longest)
    return min(fit, scheduler.max_num_seqs)


def requests_at_once(shape: TreeShape, vllm_config: VllmConfig, usable: int, block_size: int) -> int:
    """As ``requests_of``, once the KV cache has its size, of ``usable`` blocks.

    Raises:
        ConfigError: the trees of one request would take too much of it; says what helps.
    """
    if fit := requests_of(shape, vllm_config, usable):
        return fit
    need = Scratch(shape, 1, block_size).count
    raise ConfigError(
        f"spac: trees (--spac-tree) of one request need {need} of {usable} KV cache blocks of {block_size} tokens as "
        "scratch, at most a fifth is given to them; use a smaller --spac-tree, a smaller --block-size, or a larger "
        "--kv-cache-memory-bytes"
    )


def _blocks(vllm_config: VllmConfig) -> int | None:
    """Returns the KV cache blocks that requests can use; None where they are known once memory has been measured."""
    cache, model, speculation = vllm_config.cache_config, vllm_config.model_config, vllm_config.speculative_config
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override - 1  # one is vLLM's own
    if cache.kv_cache_memory_bytes is None or str(cache.cache_dtype) != "auto":
        return None
    of_token = 0
    for each in (model, speculation.draft_model_config):
        values = each.get_num_kv_heads(vllm_config.parallel_config) * each.get_head_size()
        of_token += 2 * values * each.get_num_layers(vllm_config.parallel_config) * model.dtype.itemsize
    return cache.kv_cache_memory_bytes // (of_token * cache.block_size) - 1


def check(config: SpacConfig, vllm_config: VllmConfig) -> None:
    """Refuses engines that cannot serve trees exactly; names the scheduler for those that plan steps ahead.

    Raises:
        UnsupportedError: names what is in the way, and what helps.
    """
    if not config.tree_nodes:
        return
    for refused, what, instead in _refusals(config, vllm_config):
        if refused:
            raise UnsupportedError.refused(
                f"spac: tree={config.tree} (--spac-tree) does not work with {what}", *instead
            )
    if vllm_config.scheduler_config.async_scheduling:
        vllm_config.scheduler_config.scheduler_cls = ASYNC_SCHEDULER


def _refusals(config: SpacConfig, vllm_config: VllmConfig) -> Iterator[Refusal]:
    """Yields (whether it is in the way, what it is, what to do instead)."""
    from vllm.platforms import current_platform

    model, parallel, scheduler = vllm_config.model_config, vllm_config.parallel_config, vllm_config.scheduler_config
    chains = (drafts.CHAINS,)
    method = vllm_config.speculative_config.method
    head = Remedy("use an EAGLE head", _EAGLE.changes)
    yield method not in _METHODS, f"drafts of {method}", (head, *chains)
    hooks = [f"{runner}.initialize_kv_cache" for runner in (patches.RUNNER_V1, patches.RUNNER_V2)]
    off = drafts.switched_off(vllm_config, (hooks[0], f"{patches.RUNNER_V1}.propose_draft_token_ids"), hooks[1:])
    if off is not None:
        yield True, f"these hooks: {off.problem}", (off.remedy, *chains)
    if drafts.plans_drafts(vllm_config):
        yield from _refusals_of_v2(config, vllm_config, chains)
    else:
        yield not current_platform.is_cpu(), "vLLM's V1 runner on a GPU", (_V2,)
        yield scheduler.async_scheduling, "async scheduling in vLLM's V1 runner", (drafts.IN_ORDER,)
    yield model.is_hybrid, "recurrent layers, which have one state per request", chains
    yield model.uses_mrope, "M-RoPE", chains
    yield model.use_mla, "MLA attention", chains
    yield vllm_config.kv_transfer_config is not None, "--kv-transfer-config", (drop("vllm_kv_transfer_config"),)
    yield parallel.decode_context_parallel_size > 1, "--decode-context-parallel-size above 1", chains
    yield parallel.prefill_context_parallel_size > 1, "--prefill-context-parallel-size above 1", chains
    shape, asked = config.draft_tree, scheduler.max_num_seqs
    assert shape is not None
    blocks = _blocks(vllm_config)
    fit = requests_of(shape, vllm_config, blocks)
    rows, most = asked * tree_room.rows_of(shape), scheduler.max_num_batched_tokens
    if rows > most:
        what = f"--max-num-batched-tokens {most}: trees of {asked} requests have {rows} rows"
        larger = (
            [use(vllm_max_num_batched_tokens=rows)] if requests_of(shape, vllm_config, blocks, rows) >= asked else []
        )
    else:
        what = f"{blocks} KV cache blocks, of which the scratch of {asked} requests takes more than a fifth"
        larger = []
    smaller = use(vllm_max_num_seqs=fit) if fit else drop("tree")
    yield fit < asked, what, (smaller, *larger)


def _refusals_of_v2(config: SpacConfig, vllm_config: VllmConfig, chains: tuple[Remedy, ...]) -> Iterator[Refusal]:
    """As ``_refusals``, what is in the way with V2's runner only."""
    from vllm.platforms import current_platform

    speculation, backend = vllm_config.speculative_config, vllm_config.attention_config.backend
    mode, named = vllm_config.compilation_config.cudagraph_mode, getattr(backend, "name", "vLLM's choice of attention")
    kind = "NONE" if mode is None else mode.name
    yield (
        kind not in ("NONE", "FULL_DECODE_ONLY"),
        f"CUDA graphs ({kind}), of which full ones of decode steps alone hold trees",
        (_DECODE_GRAPHS, drafts.EAGER),
    )
    tried = current_platform.is_cpu() or named == "TRITON_ATTN"
    yield not tried, f"{named}, which it was not tried with", (add(vllm_attention_backend="TRITON_ATTN"),)
    untraced, kept = (rules.untraced(config), *chains), "for V2 keeps on the device which draft follows which"
    yield config.trace is not None, f"--spac-record trace={config.trace}, {kept}", untraced
    yield vllm_config.parallel_config.use_ubatching, "--enable-dbo", (drop("vllm_enable_dbo"),)
    yield (
        speculation.rejection_sample_method != "standard",
        f"rejection_sample_method={speculation.rejection_sample_method}",
        (drafts.without("rejection_sample_method"),),
    )
    model = vllm_config.model_config
    yield bool(model.logits_processors), "--logits-processors", chains
    yield getattr(vllm_config, "watermark_config", None) is not None, "watermarks", chains
    for name in ("return_sampling_mask", "enable_trace_replay"):
        yield getattr(model, name, False), f"--{name.replace('_', '-')}", chains
    kept = str(vllm_config.cache_config.cache_dtype)
    yield "per_token_head" in kept, f"--kv-cache-dtype {kept}", (use(vllm_kv_cache_dtype="auto"),)
