"""The states that recurrent layers keep in place of a KV cache, as vLLM sizes them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_spac.storage.checkpoint.headers import first_number, first_value

KV_BYTES = 2  # of a value: caches have the model's 16 bits
GATED_DELTA = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
_FLOAT32 = "float32"


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
        return self.rows + drafts * self.draft + self.values * (4 if self.wide or on_cpu else KV_BYTES)


def state_of(config: dict, hidden: int) -> RecurrentState | None:
    """Returns the state of a model's recurrent layers; None: it has none, or of a kind that is not known.

    Known are gated delta nets (Qwen3-Next), Mamba 2 (Granite 4, Nemotron-H), Mamba (Jamba) and short convolutions
    (LFM2). Sizes are those of vLLM's ``MambaStateShapeCalculator``.

    Args:
        hidden: size of a row.

    Raises:
        UnsupportedError: a size is no number.
    """
    found = (kind(config, hidden) for kind in (_gated_delta, _mamba2, _mamba, _short_convolution))
    return next((state for state in found if state is not None), None)


def _gated_delta(config: dict, hidden: int) -> RecurrentState | None:
    sizes = [first_number(config, (name,)) for name in (*GATED_DELTA, "linear_conv_kernel_dim")]
    if not all(sizes):
        return None
    key_heads, value_heads, key, value, kernel = sizes
    row = (2 * key_heads * key + value_heads * value) * KV_BYTES
    wide = first_value(config, ("mamba_ssm_dtype",)) == _FLOAT32
    return RecurrentState((kernel - 1) * row, row, value_heads * value * key, wide)


def _mamba2(config: dict, hidden: int) -> RecurrentState | None:
    heads = first_number(config, ("mamba_n_heads", "mamba_num_heads"))
    width, kernel = first_number(config, ("mamba_d_state", "ssm_state_size")), _kernel(config)
    if not (heads and width and kernel):
        return None
    groups = first_number(config, ("mamba_n_groups", "n_groups")) or 1
    expand, head = first_number(config, ("mamba_expand",)), first_number(config, ("mamba_head_dim",))
    inner = heads * head or (expand or 2) * hidden
    row = (inner + 2 * groups * width) * KV_BYTES
    usual = _FLOAT32 if head else None  # Nemotron-H alone has a head's size, and vLLM widens its states
    wide = (first_value(config, ("mamba_ssm_cache_dtype",)) or usual) == _FLOAT32
    return RecurrentState((kernel - 1) * row, row, inner * width, wide)


def _mamba(config: dict, hidden: int) -> RecurrentState | None:
    width, kernel = first_number(config, ("mamba_d_state",)), _kernel(config)
    if not (width and kernel):
        return None
    inner = (first_number(config, ("mamba_expand",)) or 2) * hidden
    return RecurrentState((kernel - 1) * inner * KV_BYTES, 0, inner * width, wide=False)


def _short_convolution(config: dict, hidden: int) -> RecurrentState | None:
    kernel = first_number(config, ("conv_L_cache",))
    return RecurrentState((kernel - 1) * hidden * KV_BYTES, 0, 0, wide=False) if kernel else None


def _kernel(config: dict) -> int:
    return first_number(config, ("mamba_d_conv", "conv_kernel"))
