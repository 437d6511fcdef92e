"""The widths of a model and its KV cache, from ``config.json`` alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_spac.errors import UnsupportedError
from vllm_spac.storage.checkpoint import quant_config
from vllm_spac.storage.checkpoint.headers import INNER, LAYERS, first_number, first_value
from vllm_spac.tools.planning.recurrent_state import GATED_DELTA, KV_BYTES, RecurrentState, state_of

HIDDEN = ("hidden_size", "d_model", "n_embd")
HEADS = ("num_attention_heads", "n_heads", "n_head")
_MOST_TOKENS = 1 << 40
_STATES = ("linear_attention", "mamba", "recurrent", "conv")  # kinds of layers with a state in place of a KV cache
_NEITHER = ("moe", "mlp")
_OF_PATTERN = {"M": "mamba", "E": "moe", "-": "mlp", "*": "attention"}
_INTERVAL = 4  # of full attention in those models, where a config does not say


@dataclass(frozen=True)
class Architecture:
    """Widths of a model.

    Attributes:
        hidden: size of a row; ``inner``: width of a routed expert; ``dense``: width of a dense layer, 0 for none.
        heads, kv_heads, head: of attention, and the size of one.
        tied: the input embedding is also the output's matrix, which a step reads.
        longest: context that the model was made for, in tokens; 0: unknown.
        layer_kv: bytes of KV cache of one token in one attention layer.
        windows: for each layer with a KV cache, the tokens that it keeps; None: all.
        recurrent: number of layers that keep a state in place of a KV cache.
        state: of one of them; None: there are none, or its size is not known.
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
    recurrent: int = 0
    state: RecurrentState | None = None

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
        layer_kv = 2 * kv_heads * head * KV_BYTES
        if latent:  # multi-head latent attention: one vector for all heads, and one for positions
            rotary = first_number(config, ("qk_rope_head_dim",))
            kv_heads, layer_kv = 1, (latent + rotary) * KV_BYTES
            head = max(head, rotary + first_number(config, ("qk_nope_head_dim",)))
        kinds = _kinds(config, needed(*LAYERS))
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
            windows=_windows(config, kinds),
            recurrent=sum(kind.startswith(_STATES) for kind in kinds),
            state=state_of(config, hidden),
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache of one more token, while no window is full."""
        return self.layer_kv * len(self.windows)


def _kinds(config: dict, layers: int) -> list[str]:
    """Returns the kind of each layer, by vLLM's names of them; without a list of kinds, attention."""
    listed = first_value(config, ("layer_types", "layers_block_type"))
    if isinstance(listed, list):
        return [str(kind) for kind in listed[:layers]]
    pattern = first_value(config, ("hybrid_override_pattern",))
    if isinstance(pattern, str):  # of Nemotron-H
        return [_OF_PATTERN.get(letter, "attention") for letter in pattern[:layers]]
    period, first = first_number(config, ("attn_layer_period",)), first_number(config, ("attn_layer_offset",))
    if period:  # of Jamba
        return ["attention" if place % period == first else "mamba" for place in range(layers)]
    interval = first_number(config, ("full_attention_interval",))
    if not interval and first_number(config, GATED_DELTA[:1]):
        interval = _INTERVAL
    if not interval:
        return ["attention"] * layers
    return ["linear_attention" if place % interval else "full_attention" for place in range(1, layers + 1)]


def _windows(config: dict, kinds: list[str]) -> tuple[int | None, ...]:
    """Returns the window of each layer with a KV cache; vLLM keeps all tokens where some layers attend to chunks."""
    found = list(quant_config.parts(config))
    off = any(part.get("use_sliding_window") is False or part.get("attention_chunk_size") for part in found)
    window = None if off else first_number(config, ("sliding_window",), _MOST_TOKENS) or None
    everywhere = not any(part.get(name) for part in found for name in ("layer_types", "max_window_layers"))
    kept = (kind for kind in kinds if not kind.startswith((*_STATES, *_NEITHER)))
    return tuple(window if everywhere or kind.startswith("sliding") else None for kind in kept)
