"""How much fast memory the experts may take, leaving room for the KV cache."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from vllm_spac.integration import graphs
from vllm_spac.system.host_memory import available_host_bytes, gib

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.spac")

_SAMPLER_COPIES = 3  # float32 logits; the same after penalties and temperature; probabilities
_GRAPH = 8 << 20  # bytes per captured graph, in addition to the shared pool; assumed, not measured
_SLACK = 512 << 20  # bytes: workspaces of cuBLAS and attention, fragmentation of the allocator; assumed, not measured
_FULL_REQUESTS = 4  # requests of maximum length whose KV cache must fit next to the experts


@dataclass(frozen=True)
class MoEWidths:
    """Sizes that determine the activations of a MoE layer: experts per token, hidden size, width of an expert."""

    top_k: int
    hidden: int
    inner: int


@dataclass(frozen=True)
class Working:
    """Bytes of fast memory that vLLM needs at run time, in addition to weights and KV cache.

    Attributes:
        sampling: logits of every request and of its drafts, in float32, ``_SAMPLER_COPIES`` times.
        activations: those of the largest forward that vLLM profiles. Per row: three vectors of the hidden size, and the
            largest of the layers' intermediate results. These are: the two buffers of vLLM's Triton MoE kernel, with
            max(inner, hidden) and max(2 inner, hidden) values per pair of row and expert; attention's projections,
            twice, and its output; gate, up and their product in a dense layer.
        graphs: the graph pool, as large as the activations of the largest captured forward, and ``_GRAPH`` per graph.
        slack: ``_SLACK``.
    """

    sampling: int
    activations: int
    graphs: int
    slack: int

    @classmethod
    def of(cls, vllm_config: VllmConfig, device: torch.device, layers: Iterable[MoEWidths]) -> Working:
        """Computes them from a checked configuration; ``layers``: the distinct kinds of MoE layers of the model."""
        model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        compilation, speculation = vllm_config.compilation_config, vllm_config.speculative_config
        most = graphs.most_rows(vllm_config)
        drafts = 0 if speculation is None else speculation.num_speculative_tokens or 0
        sampled = min(most, scheduler.max_num_seqs * (1 + drafts))
        row = _row_bytes(vllm_config, layers)
        captured, sizes = 0, 0
        mode = compilation.cudagraph_mode
        if device.type != "cpu" and mode is not None and mode.name != "NONE":
            captured = compilation.max_cudagraph_capture_size or 0
            kinds = {mode.decode_mode().name, mode.mixed_mode().name} - {"NONE"}
            sizes = len(compilation.cudagraph_capture_sizes or ()) * len(kinds)
        return cls(
            sampling=sampled * model.get_vocab_size() * 4 * _SAMPLER_COPIES,
            activations=most * row,
            graphs=captured * row + sizes * _GRAPH,
            slack=_SLACK,
        )

    @property
    def total(self) -> int:
        return self.sampling + self.activations + self.graphs + self.slack

    def describe(self) -> str:
        """A description for the log."""
        return (
            f"{gib(self.total)} for run-time buffers: logits and sampling {gib(self.sampling)}, activations "
            f"{gib(self.activations)}, CUDA graphs {gib(self.graphs)}, slack {gib(self.slack)}"
        )


def _row_bytes(vllm_config: VllmConfig, layers: Iterable[MoEWidths]) -> int:
    """Bytes of activations per row that a forward holds at a time, see ``Working``."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    heads, kv = model.get_num_attention_heads(parallel), model.get_num_kv_heads(parallel)
    insides = [(3 * heads + 4 * kv) * model.get_head_size()]
    insides += [w.top_k * (max(w.inner, w.hidden) + max(2 * w.inner, w.hidden)) for w in layers]
    insides.append(3 * (getattr(model.hf_text_config, "intermediate_size", None) or 0))
    return (3 * model.get_hidden_size() + max(insides)) * model.dtype.itemsize


def budget(
    vllm_config: VllmConfig, device: torch.device, other_weights: int, working: int, host_memory: int = 0
) -> int:
    """Bytes available for slots: what vLLM may use, less what the other weights, a draft, the KV cache and steps need.

    Args:
        vllm_config: of the engine.
        device: the fast memory's.
        other_weights: bytes of the weights that are not experts. On a GPU they are already allocated; on a machine
            without one, where fast memory is RAM, they occupy memory only when they are loaded.
        working: ``Working.total``, bytes.
        host_memory: bytes of experts between slots and disk, a part of fast memory where that is RAM.
    """
    utilization = vllm_config.cache_config.gpu_memory_utilization
    if device.type == "cpu":
        used, total = psutil.Process().memory_info().rss, psutil.virtual_memory().total
        free = min(utilization * total - used, available_host_bytes())
        if vllm_config.cache_config.kv_cache_memory_bytes is not None:  # the KV cache has its own share
            free = available_host_bytes()
        free -= other_weights + host_memory
    else:
        available, total = torch.cuda.mem_get_info(device)
        free = available - (1 - utilization) * total
    return int(free) - draft_bytes(vllm_config) - kv_bytes(vllm_config) - working


def draft_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of the draft model, which is loaded after the target; estimated by the size of its files.

    Prediction layers in the target's own checkpoint (MTP) count like as many of its layers.
    """
    speculation, target = vllm_config.speculative_config, vllm_config.model_config
    draft = None if speculation is None else speculation.draft_model_config
    if draft is None or draft is target:
        return 0
    files = [path for path in Path(draft.model).glob("*.safetensors") if not path.name.startswith("consolidated")]
    nbytes = sum(path.stat().st_size for path in files or Path(draft.model).glob("*.bin"))
    if draft.model == target.model and speculation.method != "draft_model":
        if speculation.method != "mtp":
            return 0
        layers = target.get_num_layers(vllm_config.parallel_config)
        predicting = getattr(draft.hf_config, "n_predict", None) or 1
        nbytes = -(-nbytes * predicting // (layers + predicting))
    if nbytes == 0:
        logger.warning(
            "spac: the size of the draft %s is unknown before it is loaded, so no fast memory is reserved for it; if "
            "it does not fit, use fewer --spac-slots or a lower --gpu-memory-utilization",
            draft.model,
        )
    return nbytes


def kv_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of KV cache: the configured size, else enough for ``_FULL_REQUESTS`` requests of maximum length."""
    explicit = vllm_config.cache_config.kv_cache_memory_bytes
    if explicit is not None:
        return explicit
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    token = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    requests = min(_FULL_REQUESTS, vllm_config.scheduler_config.max_num_seqs)
    return token * model.dtype.itemsize * model.max_model_len * requests
