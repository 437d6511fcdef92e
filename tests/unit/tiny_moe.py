"""A Qwen3-MoE of a few kilobytes, for tests of what changes checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY, LAYERS, TOP_K = 96, 2, 2


def write_moe(folder: Path, experts: int) -> None:
    """Writes a random model in bf16 whose norms and outputs are no trivial ones."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=experts,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=16,
        intermediate_size=32,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "down_proj" in name:
                parameter.normal_(std=0.2)
            elif parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
