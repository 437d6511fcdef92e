"""The widths of a model, its KV cache, and the states that recurrent layers keep, from ``config.json`` alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_spac.errors import UnsupportedError
from vllm_spac.storage.checkpoint import quant_config
from vllm_spac.storage.checkpoint.headers import INNER, LAYERS, first_number, first_value

KV_BYTES = 2  # of a value: caches have the model's 16 bits
_GATED_DELTA = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
_FLOAT32 = "float32"
HIDDEN = ("hidden_size", "d_model", "n_embd")
HEADS = ("num_attention_heads", "n_heads", "n_head")
_MOST_TOKENS = 1 << 40
_STATES = ("linear_attention", "mamba", "recurrent", "conv")  # kinds of layers with a state in place of a KV cache
_NEITHER = ("moe", "mlp")
_OF_PATTERN = {"M": "mamba", "E": "moe", "-": "mlp", "*": "attention"}
_INTERVAL = 4  # of full attention in those models, where a config does not say


@dataclass(frozen=True)
class RecurrentState:
    """The state that a recurrent layer keeps of a request, as large however long that is."""

    rows: int  # bytes of its convolution
    draft: int  # more with each draft token of a step
    values: int  # of its matrices
    wide: bool  # they are in float32 on a GPU, too

    def nbytes(self, drafts: int, on_cpu: bool) -> int:
        """Returns its bytes; vLLM's kernels for a CPU have the matrices in float32."""
        return self.rows + drafts * self.draft + self.values * (4 if self.wide or on_cpu else KV_BYTES)


@dataclass(frozen=True)
class Architecture:
    """Widths of a model."""

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
    layer_kv: int  # bytes of KV cache of one token in one attention layer
    windows: tuple[int | None, ...]  # for each layer with a KV cache, the tokens that it keeps; None: all
    recurrent: int = 0  # number of layers that keep a state in place of a KV cache
    state: RecurrentState | None = None  # of one of them; None: there are none, or its size is not known

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
            state=_state(config, hidden),
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
    if not interval and first_number(config, _GATED_DELTA[:1]):
        interval = _INTERVAL
    if not interval:
        return ["attention"] * layers
    return ["linear_attention" if place % interval else "full_attention" for place in range(1, layers + 1)]


def _windows(config: dict, kinds: list[str]) -> tuple[int | None, ...]:
    """Returns the window of each layer with a KV cache; vLLM keeps all tokens where some layers attend to chunks."""
    parts = list(quant_config.parts(config))
    off = any(part.get("use_sliding_window") is False or part.get("attention_chunk_size") for part in parts)
    window = None if off else first_number(config, ("sliding_window",), _MOST_TOKENS) or None
    everywhere = not any(part.get(name) for part in parts for name in ("layer_types", "max_window_layers"))
    kept = (kind for kind in kinds if not kind.startswith((*_STATES, *_NEITHER)))
    return tuple(window if everywhere or kind.startswith("sliding") else None for kind in kept)


def _state(config: dict, hidden: int) -> RecurrentState | None:
    """Returns the state of a model's recurrent layers; None: it has none, or of a kind that is not known.

    Sizes are those of vLLM's ``MambaStateShapeCalculator``; ``hidden`` is the size of a row.
    """

    def number(*names: str) -> int:
        return first_number(config, names)

    delta = [number(name) for name in (*_GATED_DELTA, "linear_conv_kernel_dim")]
    if all(delta):  # gated delta nets (Qwen3-Next)
        key_heads, value_heads, key, value, kernel = delta
        row = (2 * key_heads * key + value_heads * value) * KV_BYTES
        wide = first_value(config, ("mamba_ssm_dtype",)) == _FLOAT32
        return RecurrentState((kernel - 1) * row, row, value_heads * value * key, wide)
    kernel, expand = number("mamba_d_conv", "conv_kernel"), number("mamba_expand") or 2
    heads, width = number("mamba_n_heads", "mamba_num_heads"), number("mamba_d_state", "ssm_state_size")
    if heads and width and kernel:  # Mamba 2 (Granite 4, Nemotron-H)
        groups, head = number("mamba_n_groups", "n_groups") or 1, number("mamba_head_dim")
        inner = heads * head or expand * hidden
        row = (inner + 2 * groups * width) * KV_BYTES
        usual = _FLOAT32 if head else None  # Nemotron-H alone has a head's size, and vLLM widens its states
        wide = (first_value(config, ("mamba_ssm_cache_dtype",)) or usual) == _FLOAT32
        return RecurrentState((kernel - 1) * row, row, inner * width, wide)
    if (width := number("mamba_d_state")) and kernel:  # Mamba (Jamba)
        inner = expand * hidden
        return RecurrentState((kernel - 1) * inner * KV_BYTES, 0, inner * width, wide=False)
    if kernel := number("conv_L_cache"):  # short convolutions (LFM2)
        return RecurrentState((kernel - 1) * hidden * KV_BYTES, 0, 0, wide=False)
    return None
