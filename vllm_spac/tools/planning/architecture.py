"""The widths of a model, from ``config.json`` alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_spac.errors import UnsupportedError
from vllm_spac.storage.checkpoint import quant_config
from vllm_spac.storage.checkpoint.headers import INNER, LAYERS, first_number
from vllm_spac.storage.checkpoint.kv_layers import KV_BYTES, KVLayers

HIDDEN = ("hidden_size", "d_model", "n_embd")
HEADS = ("num_attention_heads", "n_heads", "n_head")
_MOST_TOKENS = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Architecture(KVLayers):
    """Widths of a model, and what its layers keep."""

    hidden: int  # size of a row
    inner: int  # width of a routed expert
    dense: int  # width of a dense layer, 0 for none
    vocabulary: int
    # heads, kv_heads, head: of attention, and the size of one
    heads: int
    kv_heads: int
    head: int
    tied: bool  # the input embedding is also the output's matrix, which a step reads
    longest: int  # context that the model was made for, in tokens; 0: unknown

    @classmethod
    def of(cls, config: dict, where: Path) -> Architecture:
        """Reads the content of a ``config.json``; ``UnsupportedError`` names ``where`` if it lacks a size."""

        def needed(*names: str) -> int:
            if number := first_number(config, names):
                return number
            raise UnsupportedError(f"{where} does not say {names[0]}; use the config.json of the published checkpoint")

        heads, hidden, latent = needed(*HEADS), needed(*HIDDEN), first_number(config, ("kv_lora_rank",))
        kv_heads = first_number(config, ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")) or heads
        head = first_number(config, ("head_dim",)) or hidden // heads
        layer_kv = 2 * kv_heads * head * KV_BYTES
        if latent:  # multi-head latent attention: one vector for all heads, and one for positions
            rotary = first_number(config, ("qk_rope_head_dim",))
            kv_heads, layer_kv = 1, (latent + rotary) * KV_BYTES
            head = max(head, rotary + first_number(config, ("qk_nope_head_dim",)))
        kept = KVLayers.of_config(config, needed(*LAYERS), hidden, layer_kv)
        return cls(
            hidden=hidden,
            inner=needed(*INNER),
            dense=first_number(config, ("intermediate_size", "ffn_dim")),
            vocabulary=needed("vocab_size"),
            heads=heads,
            kv_heads=kv_heads,
            head=head,
            tied=any(part.get("tie_word_embeddings") is True for part in quant_config.parts(config)),
            longest=first_number(config, ("max_position_embeddings", "max_seq_len", "seq_length"), _MOST_TOKENS),
            **vars(kept),
        )
