"""Writes a tiny random checkpoint of a model's family: its configuration with small sizes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from vllm_spac.errors import UnsupportedError, brief
from vllm_spac.storage.checkpoint import quant_config
from vllm_spac.storage.checkpoint.described import build
from vllm_spac.storage.checkpoint.headers import EXPERTS, LAYERS, TOP_K, read_checkpoint

VOCABULARY = 512
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
}
_LAYERS, _EXPERTS, _TOP_K, _HIDDEN, _INNER, _HEADS = 3, 16, 4, 256, 128, 4
# At most so much, where a configuration has it. What a kernel may depend on stays: widths of heads, latents, windows.
_MOST = {
    **dict.fromkeys(LAYERS, _LAYERS),
    **dict.fromkeys(EXPERTS, _EXPERTS),
    **dict.fromkeys(TOP_K, _TOP_K),
    "hidden_size": _HIDDEN,
    "intermediate_size": 2 * _INNER,
    "moe_intermediate_size": _INNER,
    "expert_intermediate_size": _INNER,
    "shared_expert_intermediate_size": _INNER,
    "shared_intermediate_size": _INNER,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_NONE = {"num_nextn_predict_layers": 0, "mlp_only_layers": [], "rope_scaling": None, "tie_word_embeddings": False}
_LEFT_OUT = ("auto_map", "vision_config", "audio_config", "_name_or_path", *quant_config.QUANTISED)


def shrunk(config: Mapping) -> dict:
    """Returns ``config`` with sizes of a model that starts in seconds; of one that also sees, the part that reads."""
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, Mapping) else dict(config)
    small = {name: value for name, value in text.items() if name not in (*_LEFT_OUT, "text_config")}
    for name, most in _MOST.items():
        if isinstance(value := small.get(name), int) and not isinstance(value, bool):
            small[name] = min(value, most)
    small |= {name: value for name, value in _NONE.items() if name in small}
    heads, fewer = small.get("num_attention_heads"), small.get("num_key_value_heads")
    if fewer is not None and text["num_key_value_heads"] < text.get("num_attention_heads", 0):
        small["num_key_value_heads"] = min(fewer, max(1, (heads or _HEADS) // 2))
    layers = next((small[name] for name in LAYERS if name in small), _LAYERS)
    for name, value in small.items():
        if isinstance(value, list) and name.endswith(("layer_types", "layers_block_type")):
            small[name] = value[-layers:]  # patterns end with the layer that differs
    return small


def write(config: Mapping, folder: Path, seed: int = 0) -> None:
    """Writes a random checkpoint of ``shrunk(config)`` in bfloat16.

    Raises:
        UnsupportedError: transformers has no such model, not in these sizes, or one without experts.
    """
    small = shrunk(config)
    torch.manual_seed(seed)
    try:
        model = build(small, folder)
        prepare(model)
        with _quiet():
            model.to(torch.bfloat16).save_pretrained(folder)
    except UnsupportedError:
        raise
    except Exception as error:  # whatever a model does with sizes that it does not like
        name = brief(str(config.get("model_type")))
        raise UnsupportedError(
            f"no tiny model of type {name} can be made ({type(error).__name__}: {brief(str(error))})"
        ) from error
    try:
        read_checkpoint(folder)
    except UnsupportedError as error:  # a class of vLLM's under the model type of another
        raise UnsupportedError(f"transformers' model of type {config.get('model_type')} has no experts") from error
    if config.get("architectures"):  # vLLM's own name for the model, which transformers may not know
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": list(config["architectures"])}))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context without transformers' progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def prepare(model: torch.nn.Module) -> None:
    """Scales random weights so that greedy tokens vary from step to step.

    A model that always says the same token would be equal to anything.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.mul_(6.0 if "expert" in name else 3.0)
            elif "bias" in name:
                parameter.normal_(std=0.2)
