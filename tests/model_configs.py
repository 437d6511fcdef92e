"""The ``config.json`` of a model whose sizes a test chooses."""

from __future__ import annotations

from typing import Any

_SMALL = (
    {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 16, "num_experts_per_tok": 4}
    | {"vocab_size": 512, "max_position_embeddings": 1024, "norm_topk_prob": True, "decoder_sparse_step": 1}
    | {"mlp_only_layers": [], "tie_word_embeddings": False, "dtype": "bfloat16"}
)


def qwen3_moe(**sizes: Any) -> dict[str, Any]:
    """Of two layers with 16 experts, of which a token selects 4; ``sizes`` are in their places."""
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | _SMALL | sizes
