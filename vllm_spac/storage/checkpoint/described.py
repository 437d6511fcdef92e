"""What ``config.json`` alone tells of a model: its widths, the sizes of its weights and of its KV cache.

transformers builds the model without memory for weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_spac.errors import UnsupportedError, brief
from vllm_spac.storage.checkpoint import quant_config, quantisation
from vllm_spac.storage.checkpoint.headers import EXPERTS, LAYERS, Checkpoint, count, first_number

_MOST_LAYERS, _MOST_EXPERTS = 1024, 1 << 14  # of a model that is built
_INSTEAD = "name a folder with its *.safetensors, whose headers are enough"


def described(config: dict, folder: Path, kernels: quantisation.FormatKernels | None = None) -> Checkpoint:
    """Returns the sizes of the checkpoint that ``config`` describes; layers that only drafts use are left out.

    Exact for unquantised checkpoints. Of quantised ones, the sizes of scales are calculated, and every linear layer
    that the config does not exclude is taken to be quantised.

    Args:
        kernels: as in ``quantisation.stored_bytes``.

    Raises:
        UnsupportedError: a dense model, or one that transformers does not know or cannot build.
    """
    limits = {"layers": (LAYERS, _MOST_LAYERS), "experts": (EXPERTS, _MOST_EXPERTS)}
    for what, (names, most) in limits.items():
        if (found := first_number(config, names)) > most:
            raise UnsupportedError(f"{folder}/config.json says {found} {what}; at most {most} are calculated")
    if not first_number(config, EXPERTS):
        return count(config, folder, ())  # which refuses it
    return count(config, folder, _tensors(config, folder, kernels))


def _tensors(config: dict, folder: Path, kernels: quantisation.FormatKernels | None) -> Iterator[tuple[str, dict]]:
    """Yields name and header entry of each tensor."""
    quantised = quant_config.of(config)
    dtype, itemsize = _element(config)
    for name, shape in _shapes(config, folder):
        nbytes = itemsize
        for size in shape:
            nbytes *= size
        if quantised and len(shape) > 1 and not quant_config.excluded(quantised, name):
            nbytes = quantisation.stored_bytes(quantised, shape, kernels)
        elif quantised and name.endswith("_bias"):  # of GPT-OSS
            nbytes = quantisation.kept_bytes(quantised, name, shape, nbytes, kernels)
        yield name, {"dtype": dtype, "shape": list(shape), "data_offsets": [0, nbytes]}


def _element(config: dict) -> tuple[str, int]:
    """Returns the safetensors name and the bytes of an element; bfloat16 where the config does not say."""
    known = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
    named = (part.get(key) for part in quant_config.parts(config) for key in ("dtype", "torch_dtype"))
    return known.get(str(next(filter(None, named), "bfloat16")).removeprefix("torch."), ("BF16", 2))


def _shapes(config: dict, folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    try:
        import torch
        from transformers.utils import logging
    except ImportError as error:
        raise UnsupportedError(
            f"{folder}/config.json alone needs transformers, a part of vLLM ({error}); install vLLM, or {_INSTEAD}"
        ) from error

    plain = {name: value for name, value in config.items() if name not in quant_config.QUANTISED}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.device("meta"):
            model = build(plain, folder)
    except UnsupportedError:
        raise
    except Exception as error:  # whatever a model does with sizes that contradict each other
        problem = f"{type(error).__name__}: {brief(str(error))}"
        raise UnsupportedError(f"{folder}/config.json describes no model ({problem}); {_INSTEAD}") from error
    finally:
        logging.set_verbosity(verbosity)
    kept = set(model.state_dict())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):  # a tied matrix once
        if name in kept:
            yield name, tuple(tensor.shape)


def build(config: dict, folder: Path) -> Any:
    """Returns the model of the first architecture that transformers has, else that of the model type."""
    import transformers

    for name in config.get("architectures") or ():
        kind: Any = getattr(transformers, str(name), None)
        is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        if is_model:
            return kind(kind.config_class.from_dict(config))
    known, family = transformers.CONFIG_MAPPING, config.get("model_type")
    for kinds in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if family in known and known[family] in kinds._model_mapping:
            return kinds._model_mapping[known[family]](known[family].from_dict(config))
    raise UnsupportedError(
        f"{folder}: transformers {transformers.__version__} has no model of type {brief(family)}; {_INSTEAD}"
    )


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
_STATES = ("linear_attention", "mamba", "recurrent", "conv")  # kinds of layers with a state in place of a KV cache
_NEITHER = ("moe", "mlp")
_GATED_DELTA = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
_INTERVAL = 4  # of full attention in those models, where a config does not say


@dataclass(frozen=True)
class RecurrentState:
    """The state that a recurrent layer keeps of a request, as large however long that is.

    Attributes:
        rows: bytes of its convolution; ``draft``: more with each draft token of a step.
        values: of its matrices; ``wide``: they are in float32 on a GPU, too.
    """

    rows: int
    draft: int
    values: int
    wide: bool

    def nbytes(self, drafts: int, on_cpu: bool) -> int:
        """Returns its bytes; vLLM's kernels for a CPU have the matrices in float32."""
        return self.rows + drafts * self.draft + self.values * (4 if self.wide or on_cpu else _KV_BYTES)


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
        layer_kv = 2 * kv_heads * head * _KV_BYTES
        if latent:  # multi-head latent attention: one vector for all heads, and one for positions
            rotary = first_number(config, ("qk_rope_head_dim",))
            kv_heads, layer_kv = 1, (latent + rotary) * _KV_BYTES
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
            state=_state(config),
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache of one more token, while no window is full."""
        return self.layer_kv * len(self.windows)


def _kinds(config: dict, layers: int) -> list[str]:
    """Returns the kind of each layer, by vLLM's names of them; without a list of kinds, attention."""
    names = ("layer_types", "layers_block_type")
    listed = next((part[name] for part in quant_config.parts(config) for name in names if part.get(name)), None)
    if isinstance(listed, list):
        return [str(kind) for kind in listed[:layers]]
    interval = first_number(config, ("full_attention_interval",))
    if not interval and first_number(config, _GATED_DELTA[:1]):
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


def _state(config: dict) -> RecurrentState | None:
    """Returns the state of a gated delta net's layer: rows of its convolution in 16 bits, and a matrix per head."""
    sizes = [first_number(config, (name,)) for name in _GATED_DELTA]
    kernel = first_number(config, ("linear_conv_kernel_dim",))
    if not (all(sizes) and kernel):
        return None
    key_heads, value_heads, key, value = sizes
    row = (2 * key_heads * key + value_heads * value) * _KV_BYTES
    wide = any(part.get("mamba_ssm_dtype") == "float32" for part in quant_config.parts(config))
    return RecurrentState((kernel - 1) * row, row, value_heads * value * key, wide)
