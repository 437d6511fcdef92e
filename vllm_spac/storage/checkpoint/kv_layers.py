"""What a model's layers keep of a request: KV cache and states, from ``config.json`` alone, as vLLM counts them. Pure.

It is for what is decided before layers exist: plans, and what an engine refuses or chooses. Once vLLM has built the
layers, their own specs are asked (``integration/loading/fast_memory``). A test compares both, family by family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vllm_spac.storage.checkpoint import quant_config
from vllm_spac.storage.checkpoint.headers import first_number, first_value

KV_BYTES = 2  # of a value: caches have the model's 16 bits
_GATED_DELTA = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
_FLOAT32 = "float32"
_MOST_TOKENS = 1 << 40
_STATES = ("linear_attention", "mamba", "recurrent", "conv")  # kinds of layers with a state in place of a KV cache
_NEITHER = ("moe", "mlp")
_WINDOWED = ("sliding", "chunked")  # kinds of layers that keep a part of a request's tokens
_OF_PATTERN = {"M": "mamba", "E": "moe", "-": "mlp", "*": "attention"}
_INTERVAL = 4  # of full attention in models that mix it with another kind, where a config does not say
_BLOCK = 128  # tokens: a request's KV cache is whole blocks, of at most this size
_BLOCK_GPU = 16  # of which multiples hold a recurrent layer's state on a GPU
_STATES_KEPT = 2  # of a request in a recurrent layer, with vLLM's prefix cache
_UNEVEN = 1.5  # vLLM pads kinds of layers to the most common where they differ by less
_KIMI_DELTA = ("num_heads", "head_dim", "short_conv_kernel_size")
_INDEX_SCALED = 128  # values of an indexer's key, of one byte each, that share a scale of four


@dataclass(frozen=True)
class RecurrentState:
    """The state that a recurrent layer keeps of a request, as large however long that is."""

    rows: int  # bytes of its convolution
    draft: int  # more with each draft token of a step
    values: int  # of its matrices
    wide: bool  # they are in float32 on a GPU, too
    checkpoints: int = 0  # states more that are kept of a prompt, for the prefix cache

    def nbytes(self, drafts: int, on_cpu: bool) -> int:
        """Returns its bytes; vLLM's kernels for a CPU have the matrices in float32."""
        return self.rows + drafts * self.draft + self.values * (4 if self.wide or on_cpu else KV_BYTES)


class Steps(NamedTuple):
    """What a request's KV cache depends on besides the model."""

    context: int  # tokens of the request
    in_flight: int  # most tokens of steps that have not ended
    drafts: int = 0  # of a step
    on_cpu: bool = False


class Blocks(NamedTuple):
    """Blocks of vLLM's pool: those of one request, and the bytes of each."""

    number: int
    nbytes: int

    @property
    def request_bytes(self) -> int:
        """Bytes of one request."""
        return self.number * self.nbytes

    def pool_bytes(self, requests: int) -> int:
        """Bytes of so many requests, and of the block that vLLM holds back."""
        return (requests * self.number + 1) * self.nbytes


class _Kind(NamedTuple):
    layers: int
    blocks: int  # of a request
    page: int  # bytes of a block in one layer


@dataclass(frozen=True, kw_only=True)
class KVLayers:
    """The layers of a model that keep something of a request."""

    layer_kv: int  # bytes of KV cache of one token in one attention layer
    windows: tuple[int | None, ...]  # for each layer with a KV cache, the tokens that it keeps; None: all
    chunked: bool = False  # the windows are chunks, which begin at a multiple of their size
    wide_kv: int = (
        0  # instead of ``layer_kv`` in layers that keep all tokens, where these have other heads; 0: the same
    )
    indexed: int = 0  # bytes of one token in the indexers of all layers, of models with sparse attention
    recurrent: int = 0  # number of layers that keep a state in place of a KV cache
    state: RecurrentState | None = None  # of one of them; None: there are none, or its size is not known

    @classmethod
    def of_config(cls, config: Mapping, layers: int, hidden: int, layer_kv: int) -> KVLayers:
        """Reads the content of a ``config.json``.

        Args:
            layers: number of the model's layers.
            hidden: size of a row.
            layer_kv: bytes of KV cache of one token in one attention layer.
        """
        config = dict(config)
        kinds = _kinds(config, layers)
        windows, chunked = _windows(config, kinds)
        return KVLayers(
            layer_kv=layer_kv,
            windows=windows,
            chunked=chunked,
            wide_kv=_wide(config, layer_kv),
            indexed=_indexed(config, len(windows)),
            recurrent=sum(kind.startswith(_STATES) for kind in kinds),
            state=_state(config, hidden),
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache of one more token, while no window is full."""
        full = self.wide_kv or self.layer_kv
        return self.indexed + sum(full if window is None else self.layer_kv for window in self.windows)

    @property
    def kept_bytes(self) -> int:
        """Bytes of one more token of a request of any length: of the layers that keep all of them."""
        return self.windows.count(None) * (self.wide_kv or self.layer_kv)

    def blocks(self, steps: Steps) -> Blocks:
        """Returns the blocks that vLLM reserves for a request.

        Layers share blocks: a group for each kind of layers, or several of the more common kind, each with as many
        layers. A layer with a window keeps the tokens before it and those of all steps in flight; a recurrent one keeps
        states, each in a block. Where their size is not known, they are left out.
        """
        kinds = self._kinds_of(steps)
        if not kinds:
            return Blocks(0, 0)
        least, most = (choose(kind.layers for kind in kinds) for choose in (min, max))
        layers = most if most < _UNEVEN * least else least
        page = max(kind.page for kind in kinds)
        return Blocks(sum(-(-kind.layers // layers) * kind.blocks for kind in kinds), layers * page)

    def _kinds_of(self, steps: Steps) -> list[_Kind]:
        block, full, kinds = self._block(steps), self.wide_kv or self.layer_kv, []
        index = self.indexed // len(self.windows) if self.windows else 0
        largest = max((full if window is None else self.layer_kv for window in self.windows), default=0)
        for window, count in Counter(self.windows).items():
            each = full if window is None else self.layer_kv
            tokens = block * (largest // each if each and largest % each == 0 else 1)  # pages are of one size
            before, begins_within = (0, 0) if window is None else (window, 0) if self.chunked else (window - 1, 1)
            kept = steps.context if window is None else min(before + steps.in_flight, steps.context)
            kinds.append(_Kind(count, -(-kept // tokens) + begins_within, block * (largest + index)))
        if self.state is not None and self.recurrent:
            states = _STATES_KEPT + self.state.checkpoints + steps.drafts
            page = block * (largest + index) or self.state.nbytes(steps.drafts, steps.on_cpu)
            kinds.append(_Kind(self.recurrent, states, page))
        return kinds

    def _block(self, steps: Steps) -> int:
        """Returns the tokens of a block, which is as large as the state of a recurrent layer at least."""
        if self.state is None or not (self.recurrent and self.layer_kv):
            return _BLOCK
        step = _BLOCK if steps.on_cpu else _BLOCK_GPU
        return step * -(-self.state.nbytes(steps.drafts, steps.on_cpu) // (step * self.layer_kv))


def _kinds(config: dict, layers: int) -> list[str]:
    """Returns the kind of each layer, by vLLM's names of them; without a list of kinds, attention."""
    listed = first_value(config, ("layer_types", "layers_block_type"))
    if isinstance(listed, list):
        return [str(kind) for kind in listed[:layers]]
    pattern = first_value(config, ("hybrid_override_pattern",))
    if isinstance(pattern, str):  # of Nemotron-H
        return [_OF_PATTERN.get(letter, "attention") for letter in pattern[:layers]]
    linear = first_value(config, ("linear_attn_config",))
    if isinstance(linear, Mapping) and isinstance(linear.get("kda_layers"), list):  # of Kimi-Linear, counted from 1
        return ["linear_attention" if place in linear["kda_layers"] else "attention" for place in range(1, layers + 1)]
    period, first = first_number(config, ("attn_layer_period",)), first_number(config, ("attn_layer_offset",))
    if period:  # of Jamba
        return ["attention" if place % period == first else "mamba" for place in range(layers)]
    interval = first_number(config, ("full_attention_interval",))
    if not interval and first_number(config, _GATED_DELTA[:1]):
        interval = _INTERVAL
    if not interval:
        return ["attention"] * layers
    return ["linear_attention" if place % interval else "full_attention" for place in range(1, layers + 1)]


def _windows(config: dict, kinds: list[str]) -> tuple[tuple[int | None, ...], bool]:
    """Returns the window of each layer with a KV cache, and whether these are chunks."""
    parts = list(quant_config.parts(config))
    kept = [kind for kind in kinds if not kind.startswith((*_STATES, *_NEITHER))]
    if chunk := first_number(config, ("attention_chunk_size",), _MOST_TOKENS):
        return tuple(None if full else chunk for full in _unrotated(config, len(kinds))), True
    off = any(part.get("use_sliding_window") is False for part in parts)
    window = None if off else first_number(config, ("sliding_window",), _MOST_TOKENS) or None
    everywhere = not any(part.get(name) for part in parts for name in ("layer_types", "max_window_layers"))
    return tuple(window if everywhere or kind.startswith(_WINDOWED) else None for kind in kept), False


def _unrotated(config: dict, layers: int) -> list[bool]:
    """Returns for each layer of Llama 4 whether it has no positions, and so attends to all tokens."""
    listed = first_value(config, ("no_rope_layers",))  # 1 where a layer rotates
    if isinstance(listed, list) and len(listed) >= layers:
        return [not each for each in listed[:layers]]
    interval = first_number(config, ("no_rope_layer_interval",)) or _INTERVAL
    return [(place + 1) % interval == 0 for place in range(layers)]


def _wide(config: dict, layer_kv: int) -> int:
    """Returns the bytes of a token in layers that keep all, where these have heads of another size (Gemma 4)."""
    head, wide = first_number(config, ("head_dim",)), first_number(config, ("global_head_dim",))
    heads = first_number(config, ("num_key_value_heads",))
    wide_heads = first_number(config, ("num_global_key_value_heads",)) or heads
    return layer_kv * wide * wide_heads // (head * heads) if head and wide and heads else 0


def _indexed(config: dict, layers: int) -> int:
    """Returns the bytes of a token in the indexers of all layers that have one.

    DeepSeek V3.2 and GLM-5 have keys in FP8 with scales. Qwen4-Exp has one of 16 bits for several tokens, MiniMax M3
    one for each token in the layers that are sparse.
    """
    if (head := first_number(config, ("indexer_head_dim",))) and (
        ratio := first_number(config, ("indexer_compress_ratio",))
    ):
        return layers * head * KV_BYTES // ratio
    sparse = first_value(config, ("sparse_attention_config",))
    if isinstance(sparse, Mapping) and sparse.get("use_sparse_attention"):
        frequencies = sparse.get("sparse_attention_freq")
        count = sum(map(bool, frequencies[:layers])) if isinstance(frequencies, list) else layers
        return count * first_number(dict(sparse), ("sparse_index_dim",)) * KV_BYTES
    head = first_number(config, ("index_head_dim",))
    if not head or not first_number(config, ("index_topk",)) or not first_number(config, ("kv_lora_rank",)):
        return 0
    each = head + 4 * (head // _INDEX_SCALED)
    pattern, every = first_value(config, ("index_topk_pattern",)), first_number(config, ("index_topk_freq",)) or 1
    if isinstance(pattern, str | list):
        return each * sum(str(letter) != "S" for letter in pattern[:layers])
    first = first_number(config, ("index_skip_topk_offset",)) or 2  # layers that all have one
    return each * sum(max(place - first + 1, 0) % every == 0 for place in range(layers))


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
    linear = first_value(config, ("linear_attn_config",))
    if isinstance(linear, Mapping):  # Kimi delta attention
        heads, head, kernel = (first_number(dict(linear), (name,)) for name in _KIMI_DELTA)
        row = 3 * heads * head * KV_BYTES
        return RecurrentState(max(0, kernel - 1) * row, row, heads * head * head, wide=True) if row else None
    kernel, expand = number("mamba_d_conv", "conv_kernel"), number("mamba_expand") or 2
    heads, width = number("mamba_n_heads", "mamba_num_heads"), number("mamba_d_state", "ssm_state_size")
    if heads and width and kernel:  # Mamba 2 (Granite 4, Nemotron-H)
        groups, head = number("mamba_n_groups", "n_groups") or 1, number("mamba_head_dim")
        inner = heads * head or expand * hidden
        row = (inner + 2 * groups * width) * KV_BYTES
        usual = _FLOAT32 if head else None  # Nemotron-H alone has a head's size, and vLLM widens its states
        wide = (first_value(config, ("mamba_ssm_cache_dtype",)) or usual) == _FLOAT32
        return RecurrentState((kernel - 1) * row, row, inner * width, wide, checkpoints=1)
    if (width := number("mamba_d_state")) and kernel:  # Mamba (Jamba)
        inner = expand * hidden
        return RecurrentState((kernel - 1) * inner * KV_BYTES, 0, inner * width, wide=False)
    if kernel := number("conv_L_cache"):  # short convolutions (LFM2)
        return RecurrentState((kernel - 1) * hidden * KV_BYTES, 0, 0, wide=False)
    return None
