"""Tiny random checkpoints of architectures that transformers does not have, from the model that vLLM builds.

vLLM builds the model for ``config.json``; each of its parameters is written under the names that vLLM's loader of that
architecture takes: the parts of merged projections apart, experts one by one. A name that the loader does not know, and
a parameter that it does not find, is an error when stock vLLM loads the checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# Parts of merged projections, unless the model's own mapping says otherwise.
_PARTS = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "qkvb_proj": ["q_proj", "k_proj", "v_proj", "b_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
}
# Of an MTP head: its input, an embedding beside a hidden state, of which it shall see the former more, so that some
# drafts are accepted.
_HEAD_INPUTS = ("eh_proj.weight", "mtp_linear_proj.0.weight")
_CONFIG_CLASS = """from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = {model_type!r}

    def __init__(self, **said):
        for part in ("text_config", "vision_config", "audio_config"):
            if isinstance(said.get(part), dict):
                known = said[part].get("model_type") in CONFIG_MAPPING
                said[part] = AutoConfig.for_model(**said[part]) if known else PretrainedConfig(**said[part])
        super().__init__(**said)
"""


def knows(model_type: str) -> bool:
    """Whether vLLM or transformers has a configuration class of this type."""
    from transformers import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    return model_type in _CONFIG_REGISTRY or model_type in CONFIG_MAPPING


def write_config(folder: Path, config: dict[str, Any], known: bool) -> None:
    """Writes ``config.json``; and, if neither vLLM nor transformers knows its type, a configuration class beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    if not known:
        (folder / "configuration_tiny.py").write_text(_CONFIG_CLASS.format(model_type=config["model_type"]))
        config = config | {"auto_map": {"AutoConfig": "configuration_tiny.TinyConfig"}}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_weights(
    folder: Path, options: dict[str, Any], renamed: dict[str, str], head: dict[str, str], seed: int = 0
) -> None:
    """Writes random weights for the model that vLLM builds for the configuration in ``folder``, and for its MTP head.

    Args:
        options: of ``vllm.LLM``; with a ``speculative_config``, the head is written too.
        renamed: parts of names in vLLM -> those in checkpoints, in this order, after prefixes.
        head: the same for the head.
    """
    print(json.dumps({"stage": "stock"}), flush=True)  # of ``one_family``: what fails while vLLM builds is stock's
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    with built(folder, options) as (config, models):
        text = config.model_config.hf_text_config
        for model, names in zip(models, (renamed, head), strict=False):
            prefixes = _prefixes(model)
            for name, like in _parts(model):
                name = _outer(name, prefixes)
                for old, new in names.items():
                    name = name.replace(old, new)
                if name not in tensors:  # a head shares embeddings
                    tensors[name] = (
                        _of_tokens(like, text, generator)
                        if name.endswith("tid2eid")
                        else _random(name, like, generator, bool(getattr(text, "swiglu_limit", None)))
                    )
    save_file(tensors, folder / "model.safetensors")


@contextlib.contextmanager
def built(folder: Path, options: dict[str, Any]) -> Iterator[tuple[Any, list[torch.nn.Module]]]:
    """An engine's ``VllmConfig``; and its model, before weights are loaded, with its MTP head if it has one."""
    from vllm.config import replace, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    settings = dict(skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, dtype="bfloat16")
    environment = dict(os.environ)
    config = EngineArgs(model=str(folder), **settings | options).create_engine_config()
    try:
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, backend="gloo")
            ensure_model_parallel_initialized(1, 1)
            models = [initialize_model(vllm_config=config)]
            if config.speculative_config is not None:
                draft = config.speculative_config.draft_model_config
                models.append(initialize_model(vllm_config=replace(config, model_config=draft)))
            yield config, models
    finally:
        cleanup_dist_env_and_memory()
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]


def _parts(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor of its shape) of what a checkpoint has for ``model``, with vLLM's names of modules."""
    packed = getattr(model, "packed_modules_mapping", {})
    own = {merged: [(part, 1) for part in parts] for merged, parts in packed.items()} | _stacked(model)
    seen: set[int] = set()
    for path, module in model.named_modules():
        # vLLM's attention registers scales that no checkpoint has.
        hidden = module._non_persistent_buffers_set | {"_k_scale", "_v_scale", "_q_scale", "_prob_scale"}
        persistent = [item for item in module.named_buffers(recurse=False) if item[0] not in hidden]
        for leaf, tensor in [*module.named_parameters(recurse=False), *persistent]:
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if leaf.startswith(("w13_", "w2_")) and hasattr(module, "get_expert_mapping"):
                yield from _experts(path, module, leaf, tensor)
                continue
            if leaf in ("ws", "w2s"):  # MiniCPM's experts
                names = ("w1", "w3") if leaf == "ws" else ("w2",)
                for expert, stored in enumerate(tensor.data):
                    for part, piece in zip(names, stored.chunk(len(names)), strict=True):
                        yield f"{path}.experts.{expert}.{part}.weight", piece
                continue
            before, _, last = path.rpartition(".")
            parts = own.get(last, [(part, 1) for part in _PARTS.get(last, [last])])
            sizes = [int(size) for size in getattr(module, "output_sizes", ())]
            if len(sizes) != sum(count for _, count in parts):
                yield f"{path}.{leaf}".lstrip("."), tensor.data
                continue
            rows = iter(sizes)
            pieces = tensor.data.split([sum(itertools.islice(rows, count)) for _, count in parts])
            for (part, _), piece in zip(parts, pieces, strict=True):
                yield f"{before}.{part}.{leaf}", piece


def _experts(path: str, module: Any, leaf: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """One expert's tensors after the other: w13 is gate and up, w2 is down."""
    before = path.removesuffix(".routed_experts").removesuffix("experts")
    gated = module.moe_config.is_act_and_mul
    matrix, _, kind = leaf.partition("_")
    for _, weight, expert, shard in module.get_expert_mapping():
        if (shard == "w2") != (matrix == "w2") or (shard == "w3" and not gated):
            continue
        stored = tensor.data[expert]
        if matrix == "w13" and gated:
            stored = stored.chunk(2)[0 if shard == "w1" else 1]
        yield f"{before}{weight}{kind}", stored


def _stacked(model: torch.nn.Module) -> dict[str, list[tuple[str, int]]]:
    """Merged projection -> (part, how many of vLLM's parts that is), from the mappings of ``model`` and its modules."""
    found: dict[str, dict[Any, tuple[str, int]]] = {}
    for module in model.modules():
        mapper = getattr(module, "hf_to_vllm_mapper", None)
        for part, (merged, index) in getattr(mapper, "orig_to_new_stacked", {}).items():
            first, *more = index if isinstance(index, (list, tuple)) else [index]
            name = part.strip(".").rpartition(".")[2]
            found.setdefault(merged.strip(".").rpartition(".")[2], {}).setdefault(first, (name, 1 + len(more)))
    order = {"q": 0, "k": 1, "v": 2}
    return {
        merged: [part for _, part in sorted(parts.items(), key=lambda item: order.get(item[0], item[0]))]
        for merged, parts in found.items()
        if all(isinstance(index, int) or index in order for index in parts)
    }


def _prefixes(model: torch.nn.Module) -> dict[str, str]:
    """Prefix in vLLM -> prefix in the checkpoint, from the mapping of ``model``; the longest first."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    found = getattr(mapper, "orig_to_new_prefix", {})
    # Of several prefixes of a checkpoint with one in vLLM, the last is the newest.
    pairs = {new: old for old, new in found.items() if new}
    return dict(sorted(pairs.items(), key=lambda pair: -len(pair[0])))


def _outer(name: str, prefixes: dict[str, str]) -> str:
    for new, old in prefixes.items():
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


def _of_tokens(like: torch.Tensor, text: Any, generator: torch.Generator) -> torch.Tensor:
    """The experts of each token, of DeepSeek-V4's first layers: as many different ones as it has columns."""
    ranked = torch.rand(len(like), text.n_routed_experts, generator=generator).argsort(-1)
    return ranked[:, : like.shape[1]].to(like.dtype).contiguous()


def _random(name: str, like: torch.Tensor, generator: torch.Generator, limited: bool = False) -> torch.Tensor:
    """Values scaled as in ``zoo``: tokens vary, and routers choose many experts; ``limited``: and gates are clamped."""
    if not like.is_floating_point():
        return torch.zeros_like(like)
    if like.ndim == 1 and "norm" in name and name.endswith("weight"):
        return torch.ones_like(like)
    if name.endswith(_HEAD_INPUTS):
        mixed = 0.3 * torch.randn(like.shape, generator=generator) / len(like) ** 0.5
        mixed[:, : len(like)] += torch.eye(len(like))
        return mixed.to(like.dtype)
    scale = 0.05 if "bias" in name else 0.12 if "experts." in name else 0.06
    if limited and "experts." in name and not name.endswith((".w2.weight", ".down_proj.weight")):
        scale = 0.9
    return (scale * torch.randn(like.shape, generator=generator)).to(like.dtype)
