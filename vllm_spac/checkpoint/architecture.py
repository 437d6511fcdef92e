"""What ``config.json`` tells of a model beside the sizes of its weights: its widths, and the size of its KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_spac.checkpoint import quant_config
from vllm_spac.checkpoint.headers import LAYERS, first_number
from vllm_spac.errors import UnsupportedError

HIDDEN = ("hidden_size", "d_model", "n_embd")
HEADS = ("num_attention_heads", "n_heads", "n_head")
INNER = (
    "moe_intermediate_size",
    "expert_intermediate_size",
    "moe_ffn_hidden_size",
    "expert_ffn_hidden_size",
    "intermediate_size",
    "ffn_dim",
)
_KV_BYTES = 2  # of a value: the cache has the model's 16 bits
_MOST_TOKENS = 1 << 40
_WITHOUT_KV = ("linear_attention", "mamba", "recurrent", "conv")


@dataclass(frozen=True)
class Architecture:
    """Widths of a model.

    Attributes:
        hidden: size of a row; ``inner``: width of a routed expert; ``dense``: width of a dense layer, 0 for none.
        vocabulary: number of logits.
        heads, kv_heads, head: of attention, and the size of one.
        tied: the input embedding is also the output's matrix, which a step reads.
        longest: context that the model was made for, in tokens; 0: unknown.
        layer_kv: bytes of KV cache of one token in one attention layer.
        windows: for each layer with a KV cache, the tokens that it keeps; None: all.
    """

    hidden: int
    inner: int
    dense: int
    vocabulary: int
    heads: int
    kv_heads: int
    head: int
    tied: bool
    longest: int
    layer_kv: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, config: dict, where: Path) -> Architecture:
        """Reads the content of a ``config.json``.

        Raises:
            UnsupportedError: it lacks a size; ``where`` is named.
        """

        def needed(*names: str) -> int:
            if found := first_number(config, names):
                return found
            raise UnsupportedError(f"{where} does not say {names[0]}; use the config.json of the published checkpoint")

        heads, hidden, latent = needed(*HEADS), needed(*HIDDEN), first_number(config, ("kv_lora_rank",))
        kv_heads = first_number(config, ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")) or heads
        head = first_number(config, ("head_dim",)) or hidden // heads
        layer_kv = 2 * kv_heads * head * _KV_BYTES
        if latent:  # multi-head latent attention: one vector for all heads, and one for positions
            rotary = first_number(config, ("qk_rope_head_dim",))
            kv_heads, layer_kv = 1, (latent + rotary) * _KV_BYTES
            head = max(head, rotary + first_number(config, ("qk_nope_head_dim",)))
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
            layer_kv=layer_kv,
            windows=_windows(config, needed(*LAYERS)),
        )

    def kv_bytes(self, tokens: int) -> int:
        """Returns the bytes of KV cache of a request of ``tokens``; states of layers without one are left out."""
        return sum(self.layer_kv * (tokens if window is None else min(tokens, window)) for window in self.windows)


def _windows(config: dict, layers: int) -> tuple[int | None, ...]:
    """Returns the window of each layer with a KV cache; without ``layer_types``, all layers keep all tokens."""
    kinds = next((part["layer_types"] for part in quant_config.parts(config) if part.get("layer_types")), None)
    if not isinstance(kinds, list):
        return (None,) * layers
    window = first_number(config, ("sliding_window", "attention_chunk_size"), _MOST_TOKENS) or None
    kept = [str(kind) for kind in kinds[:layers] if not str(kind).startswith(_WITHOUT_KV)]
    return tuple(window if kind.startswith(("sliding", "chunked")) else None for kind in kept)
