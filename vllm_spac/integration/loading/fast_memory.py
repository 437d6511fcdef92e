"""How much fast memory the experts may take, leaving room for the KV cache.

The KV cache gets what slots leave and requests can use. On a CPU, where all of it is RAM, what the worker itself takes
is measured first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from vllm_spac.cache.sizing import Batch, MoEWidths, Widths, Working
from vllm_spac.integration.hooks import drafts, graphs, patches
from vllm_spac.integration.hooks.device import is_cpu
from vllm_spac.integration.hooks.model_host import experts_of
from vllm_spac.integration.hooks.ranks import several
from vllm_spac.storage.checkpoint.kv_layers import Blocks, KVLayers, Steps
from vllm_spac.system.host_memory import available_host_bytes, gib, own_memory, release_freed_memory, release_zeros

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import KVCacheSpec

_FULL_REQUESTS = 4  # requests of maximum length whose KV cache must fit next to the experts
_SHARE = 4  # of a GPU's memory for both, the KV cache gets at most this part where the length is not the user's
SHORT = 8192  # tokens of a request that the log names
_STARTING = 1 << 29  # bytes of RAM that a process takes before vLLM looks at what is available
_LOWERED = "spac_lowered"  # attribute of the cache's configuration
FITTED = -1  # --max-model-len: vLLM takes the longest that fits


def sized_by_user(vllm_config: VllmConfig) -> bool:
    """Whether the user said how large the KV cache is, or how much memory vLLM may take."""
    from vllm.config import CacheConfig

    cache = vllm_config.cache_config
    given = cache.kv_cache_memory_bytes, cache.num_gpu_blocks_override
    usual = getattr(cache, _LOWERED, CacheConfig.gpu_memory_utilization)
    return given != (None, None) or cache.gpu_memory_utilization != usual


def limit_to_available(vllm_config: VllmConfig) -> None:
    """Lowers the share of RAM that a CPU's worker takes to what is available, where the user named none.

    With vLLM's default no worker starts on a machine of which other processes use more than a twelfth.
    """
    cache = vllm_config.cache_config
    if not is_cpu() or sized_by_user(vllm_config):
        return
    from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

    nodes = [get_memory_node_info(node) for node in get_visible_memory_node()]
    least = min(nodes, key=lambda node: node.available_memory / node.total_memory)
    taken = _STARTING * (1 + several(vllm_config)[0])
    share = math.floor(100 * (least.available_memory - taken) / least.total_memory) / 100
    if not 0 < share < cache.gpu_memory_utilization:
        return
    logger.info(
        "spac: --gpu-memory-utilization %.2f, since %s of %s of RAM are available; vLLM's %.2f may start no worker",
        share,
        gib(least.available_memory),
        gib(least.total_memory),
        cache.gpu_memory_utilization,
    )
    cache.gpu_memory_utilization = share
    setattr(cache, _LOWERED, share)  # for ``sized_by_user``, also in the worker's process


def built(vllm_config: VllmConfig, tokens: int | None = None) -> Blocks:
    """Returns the KV cache of a request by what vLLM's own layers say of it, once they are built.

    After the weights are loaded, vLLM fits the size of blocks to the layers and chooses their order in memory. Here
    it does so in a copy of its configuration.

    Args:
        tokens: of the request; None: ``max_model_len``.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
    from vllm.v1.worker.worker_base import get_current_attn_backends

    config = copy(vllm_config)
    config.cache_config, config.model_config = copy(vllm_config.cache_config), copy(vllm_config.model_config)
    config.model_config.max_model_len = tokens or vllm_config.model_config.max_model_len
    current_platform.update_block_size_for_backend(config)
    specs = get_kv_cache_spec(config)
    if not specs:
        return Blocks(0, 0)
    layouts = get_supported_kv_cache_layouts(get_current_attn_backends(config))
    resolve_kv_cache_layout(config, [[layout.name for layout in layouts]], specs.values())
    return _blocks(config, specs)


def by_config(vllm_config: VllmConfig) -> Blocks:
    """Returns the same before there are layers, from the model's configuration."""
    steps = Steps(
        vllm_config.model_config.max_model_len,
        vllm_config.max_in_flight_tokens,
        vllm_config.num_speculative_tokens,
        is_cpu(),
    )
    return _layers(vllm_config).blocks(steps)


def _layers(vllm_config: VllmConfig) -> KVLayers:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    values = model.get_num_kv_heads(parallel) * model.get_head_size()
    each = values * (1 if model.use_mla else 2) * model.dtype.itemsize  # MLA: one vector for keys and values
    layers = KVLayers.of_config(
        model.hf_text_config.to_dict(), model.get_num_layers(parallel), model.get_hidden_size(), each
    )
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        layers = replace(layers, windows=(None,) * len(layers.windows))
    return layers


def _blocks(vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec]) -> Blocks:
    """Returns the blocks of a request, as vLLM groups these layers."""
    from vllm.v1.core import kv_cache_utils

    groups = kv_cache_utils.get_kv_cache_groups(vllm_config, dict(specs))
    if not groups:
        return Blocks(0, 0)
    each = kv_cache_utils._pool_bytes_per_block(vllm_config, groups)
    return Blocks(kv_cache_utils._max_memory_usage_bytes_from_groups(vllm_config, groups) // each, each)


def usable(vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec]) -> int:
    """Bytes of KV cache that requests can use.

    These are ``max_num_seqs`` requests of ``max_model_len`` tokens, and with a prefix cache as much again for what
    earlier requests left, and the block that vLLM keeps empty.

    Args:
        specs: of each layer with a KV cache, the draft model's included.
    """
    kept = 2 if vllm_config.cache_config.enable_prefix_caching else 1
    return _blocks(vllm_config, specs).pool_bytes(kept * vllm_config.scheduler_config.max_num_seqs)


def requests(vllm_config: VllmConfig) -> str:
    """Those that ``usable`` counts, for the log."""
    count, tokens = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len
    prefixes = " and as many prefixes of earlier ones" if vllm_config.cache_config.enable_prefix_caching else ""
    return f"--max-num-seqs {count} requests of --max-model-len {tokens} tokens{prefixes}"


def request(engine_args: EngineArgs) -> None:
    """Lets vLLM shorten requests to what the KV cache holds, on a GPU whose user did not name their length.

    Else a model of long requests leaves no room for experts, or does not start at all.
    """
    if not is_cpu() and engine_args.max_model_len is None:
        engine_args.max_model_len = FITTED


def beside_slots(vllm_config: VllmConfig, each: int, free: int | None = None) -> int:
    """Bytes that slots leave for it: the configured size, else enough for ``_FULL_REQUESTS`` of maximum length.

    On a GPU, where both come out of the same memory, that is for the length that the user named, or for as few requests
    as may run at once. Otherwise it is one request, or a part of what is free: then requests are shortened.

    Args:
        each: bytes of a request of maximum length.
        free: on a GPU, bytes for slots and KV cache together.
    """
    explicit = vllm_config.cache_config.kv_cache_memory_bytes
    if explicit is not None:
        return explicit
    return kept(each, vllm_config.scheduler_config.max_num_seqs, _is_named(vllm_config), free)


def kept(each: int, requests: int, named: bool, free: int | None) -> int:
    """As ``beside_slots``, where the size is not configured.

    Args:
        requests: that may run at once.
        named: whether the user named their length.
    """
    few = min(_FULL_REQUESTS, requests)
    if free is None or named:
        return few * each
    return min(each * (few if requests <= _FULL_REQUESTS else 1), max(0, free) // _SHARE)


def describe(vllm_config: VllmConfig, each: int, shorter: int, free: int | None = None) -> str:
    """What ``beside_slots`` leaves, for the log; ``shorter``: bytes of a request of ``SHORT`` tokens."""
    kv = beside_slots(vllm_config, each, free)
    if free is None or vllm_config.cache_config.kv_cache_memory_bytes is not None or _is_named(vllm_config):
        return f"{gib(kv)} of KV cache"
    count = kv // each if each else 0
    kept = {0: "a part of one request", 1: "one request"}.get(count, f"{count} requests")
    short = _FULL_REQUESTS * shorter
    more = f"; --max-model-len {SHORT} would leave {gib(kv - short)} more for slots" if short < kv else ""
    return f"{gib(kv)} of KV cache ({kept} of {vllm_config.model_config.max_model_len:,} tokens{more})"


def least_requests(vllm_config: VllmConfig) -> str:
    """Those that ``beside_slots`` leaves room for, for an error."""
    count = _reserved(vllm_config)
    return f"{count} requests" if count > 1 else "one request"


def _reserved(vllm_config: VllmConfig) -> int:
    return min(_FULL_REQUESTS, vllm_config.scheduler_config.max_num_seqs)


def _is_named(vllm_config: VllmConfig) -> bool:
    """Whether the user named the length of requests."""
    return vllm_config.model_config.original_max_model_len not in (None, FITTED)


def one_request(vllm_config: VllmConfig) -> int | None:
    """Least bytes of KV cache that a request of maximum length takes; None where the configuration does not tell.

    It does not where vLLM fits the length to the cache, or stores other numbers than the model's.
    """
    model = vllm_config.model_config
    if model.original_max_model_len == FITTED or str(vllm_config.cache_config.cache_dtype) != "auto":
        return None
    return model.max_model_len * _layers(vllm_config).kept_bytes


logger = logging.getLogger("vllm.spac")


def install() -> None:
    """Wraps the worker of a CPU: how large the KV cache is, and what follows once it exists. A second call is none."""
    patches.install(f"{patches.CPU_WORKER}.determine_available_memory", _bounded)
    patches.install(f"{patches.CPU_WORKER}.compile_or_warm_up_model", _settled)


def _bounded(determine: Callable[[Any], int]):
    def bounded(self) -> int:
        found = determine(self)
        experts, config = experts_of(self.model_runner), self.vllm_config
        if experts is None or experts.config.tree_nodes or sized_by_user(config):  # trees take a share as scratch
            return found
        most = usable(config, self.model_runner.get_kv_cache_spec())
        if most >= found:
            return found
        logger.info(
            "spac: the KV cache is %s, not the %s that are left, because %s can use no more; to choose its size, set "
            "--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE or --gpu-memory-utilization",
            gib(most),
            gib(found),
            requests(config),
        )
        return most

    return bounded


def _settled(warm_up: Callable):
    def settled(self):
        result = warm_up(self)
        if (experts := experts_of(self.model_runner)) is not None:
            release_unused(experts, self.model_runner)
        return result

    return settled


def release_unused(experts: Any, runner: Any) -> None:
    """Returns memory that no request needs yet, and logs what the rest is; once vLLM has warmed up.

    vLLM fills the KV cache with zeros, which makes it resident. It is in no page until a request writes to it.
    """
    caches = list(_caches(runner))
    if experts.vllm_config.kv_transfer_config is None:  # a connector may have registered the pages
        for cache in caches:
            release_zeros(cache)
    release_freed_memory()
    if experts.ranks.rank == 0:
        logger.info("spac: %s", _described(experts, sum(cache.nbytes for cache in caches), runner))


def _caches(runner: Any) -> Iterator[torch.Tensor]:
    """Yields the memory of the KV cache, uint8 [bytes], each allocation once."""
    seen = set()
    for cache in runner.kv_caches:
        for tensor in cache if isinstance(cache, list | tuple) else (cache,):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _described(experts: Any, kv: int, runner: Any) -> str:
    slots, weights, total = experts.fast_bytes, experts.serving.other_weights, own_memory()
    text = (
        f"this worker takes {gib(total)}: {gib(slots)} of slots, {gib(weights)} of other weights, "
        f"{gib(max(0, total - slots - weights))} of vLLM, torch and buffers; requests take up to {gib(kv)} more for "
        "their KV cache"
    )
    most = usable(experts.vllm_config, runner.get_kv_cache_spec())
    if most < kv:
        text += f", of which they can use {gib(most)}: --kv-cache-memory-bytes {most}"
    return text


def working(vllm_config: VllmConfig, device: torch.device, layers: Iterable[MoEWidths]) -> Working:
    """Computes the run-time buffers from a checked configuration; ``layers``: the kinds of MoE layers of the model."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    scheduler, speculation = vllm_config.scheduler_config, vllm_config.speculative_config
    compilation = vllm_config.compilation_config
    most = graphs.most_rows(vllm_config)
    drafts = 0 if speculation is None else speculation.num_speculative_tokens or 0
    captured, sizes = 0, 0
    mode = compilation.cudagraph_mode
    if device.type != "cpu" and mode is not None and mode.name != "NONE":
        captured = compilation.max_cudagraph_capture_size or 0
        kinds = {mode.decode_mode().name, mode.mixed_mode().name} - {"NONE"}
        sizes = len(compilation.cudagraph_capture_sizes or ()) * len(kinds)
    sampled = min(most, scheduler.max_num_seqs * (1 + drafts))
    found = widths(model, parallel, layers)
    return Working.of(found, model.get_vocab_size(), Batch(most, sampled, captured, sizes))


def widths(model: ModelConfig, parallel: ParallelConfig, layers: Iterable[MoEWidths]) -> Widths:
    """Returns the widths of a model; ``layers``: its kinds of MoE layers."""
    return Widths(
        hidden=model.get_hidden_size(),
        heads=model.get_num_attention_heads(parallel),
        kv_heads=model.get_num_kv_heads(parallel),
        head=model.get_head_size(),
        dense=getattr(model.hf_text_config, "intermediate_size", None) or 0,
        moe=tuple(layers),
        itemsize=model.dtype.itemsize,
    )


def room(
    vllm_config: VllmConfig,
    device: torch.device,
    other_weights: int,
    working: int,
    host_memory: int = 0,
    share: float = 1,
) -> int:
    """Bytes for slots and KV cache: what vLLM may use, less what the other weights, a draft and steps need.

    Args:
        other_weights: bytes of the weights that are not experts. On a GPU they are already allocated; on a machine
            without one, where fast memory is RAM, they occupy memory only when they are loaded.
        working: ``Working.total``, bytes.
        host_memory: bytes of experts between slots and disk, a part of fast memory where that is RAM.
        share: of RAM, that this rank may take. A GPU is of one rank alone.
    """
    utilization = vllm_config.cache_config.gpu_memory_utilization
    if device.type == "cpu":
        used, total = psutil.Process().memory_info().rss, psutil.virtual_memory().total
        available = int(available_host_bytes() * share)
        free = min(utilization * total * share - used, available)
        if vllm_config.cache_config.kv_cache_memory_bytes is not None:  # the KV cache has its own share
            free = available
        free -= other_weights + host_memory
    else:
        available, total = torch.cuda.mem_get_info(device)
        free = float(available)
        if vllm_config.cache_config.kv_cache_memory_bytes is None:  # else vLLM ignores the utilization
            free = min(free, utilization * total - torch.cuda.memory_reserved(device))
    return int(free) - draft_bytes(vllm_config) - working


def draft_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of the draft model, which is loaded after the target; estimated by the size of its files.

    Prediction layers in the target's own checkpoint (MTP) count like as many of its layers.
    """
    speculation, target = vllm_config.speculative_config, vllm_config.model_config
    draft = None if speculation is None else speculation.draft_model_config
    if draft is None or draft is target or drafts.of_itself(vllm_config):
        return 0
    files = [path for path in Path(draft.model).glob("*.safetensors") if not path.name.startswith("consolidated")]
    nbytes = sum(path.stat().st_size for path in files or Path(draft.model).glob("*.bin"))
    if draft.model == target.model and speculation.method != "draft_model":
        layers = target.get_num_layers(vllm_config.parallel_config)
        predicting = getattr(draft.hf_config, "n_predict", None) or 1
        # Of DSpark's stages in the target's checkpoint, no configuration says the size.
        nbytes = -(-nbytes * predicting // (layers + predicting)) if speculation.method == "mtp" else 0
    if nbytes == 0:
        logger.warning(
            "spac: the size of the draft %s is unknown before it is loaded, so no fast memory is reserved for it; if "
            "it does not fit, use fewer --spac-slots or a lower --gpu-memory-utilization",
            draft.model,
        )
    return nbytes
