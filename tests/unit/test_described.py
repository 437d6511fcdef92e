"""Sizes of published models from their ``config.json``, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.checkpoint import quantisation
from vllm_spac.checkpoint.architecture import Architecture
from vllm_spac.checkpoint.described import described
from vllm_spac.errors import UnsupportedError

HERE = Path("model")
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_mixtral_has_its_published_parameters() -> None:
    found = described(MIXTRAL, HERE)
    assert (sum(found.layer_bytes.values()) + found.other_bytes) // 2 == 46_702_792_704
    assert found.expert_bytes == [3 * 4096 * 14336 * 2] and (found.experts, found.top_k) == (8, 2)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float16", 2), (None, 2)])
def test_elements_have_the_dtype_of_the_config(dtype: str | None, size: int) -> None:
    assert described(MIXTRAL | {"torch_dtype": dtype}, HERE).expert_bytes == [3 * 4096 * 14336 * size]


def test_a_name_that_transformers_lacks_is_found_by_its_type() -> None:
    assert described(MIXTRAL | {"architectures": ["OtherForCausalLM", "pipeline"]}, HERE) == described(MIXTRAL, HERE)


@pytest.mark.parametrize(
    ("settings", "nbytes"),
    [
        (FP8, 64 * 256 + 4 * 1 * 2),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, 64 * 256 // 2 + 2 * 512),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
            64 * 256 // 2 + 2 * 128 + 128 // 2,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "g": {"weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 64}}
                },
            },
            64 * 256 // 2 + 2 * 256,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "g": {
                        "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
                        "input_activations": {"type": "float", "num_bits": 8},
                    }
                },
            },
            64 * 256 + 4 * 64,
        ),
    ],
    ids=["fp8", "gptq", "awq", "int4", "fp8-channel"],
)
def test_quantised_weights_have_their_scales(settings: dict, nbytes: int) -> None:
    assert quantisation.refusal(settings) is None
    assert quantisation.stored_bytes(settings, (64, 256)) == nbytes
    assert quantisation.stored_bytes(settings, (3, 64, 256)) == 3 * nbytes


def test_quantised_experts_are_smaller_and_embeddings_are_not() -> None:
    whole, small = described(MIXTRAL, HERE), described(MIXTRAL | {"quantization_config": FP8}, HERE)
    assert 0.5 < small.expert_bytes[0] / whole.expert_bytes[0] < 0.51
    assert small.other_bytes > 2 * 2 * 32000 * 4096
    kept = MIXTRAL | {"quantization_config": FP8 | {"modules_to_not_convert": ["self_attn"]}}
    assert small.other_bytes < described(kept, HERE).other_bytes < whole.other_bytes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_local_experts": None}, "is a dense model"),
        ({"model_type": "unheard", "architectures": None}, "has no model of type 'unheard'; name a folder"),
        ({"hidden_size": "wide"}, "describes no model"),
        ({"num_hidden_layers": 5000}, "5000 layers; at most"),
        ({"num_local_experts": 1 << 19}, "experts; at most"),
        ({"num_experts_per_tok": 9}, "a token uses 9 of 8 experts"),
    ],
)
def test_refused(changes: dict, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        described(MIXTRAL | changes, HERE)


_JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
_KEYS = st.sampled_from([*MIXTRAL, "layer_types", "sliding_window", "kv_lora_rank", "head_dim", "text_config"])


@given(st.dictionaries(_KEYS, _JSON | st.lists(_JSON, max_size=3) | st.dictionaries(_KEYS, _JSON, max_size=3)))
def test_whatever_a_config_holds_it_is_read_or_refused(changes: dict) -> None:
    try:
        found = Architecture.of(MIXTRAL | changes, HERE)
    except UnsupportedError:
        return
    assert 0 <= found.kv_bytes(3) <= found.kv_bytes(4)


def test_widths() -> None:
    found = Architecture.of(MIXTRAL | {"max_position_embeddings": 32768}, HERE)
    assert found.kv_bytes(10) == 10 * 32 * 2 * 8 * 128 * 2 and found.longest == 32768 and not found.tied
    latent = MIXTRAL | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    assert Architecture.of(latent, HERE).kv_bytes(10) == 10 * 32 * (512 + 64) * 2
    kinds = ["linear_attention", "full_attention", "sliding_attention", "full_attention"] * 8
    mixed = Architecture.of(MIXTRAL | {"layer_types": kinds, "sliding_window": 4}, HERE)
    assert mixed.kv_bytes(10) == (16 * 10 + 8 * 4) * 2 * 8 * 128 * 2
    with pytest.raises(UnsupportedError, match="does not say vocab_size"):
        Architecture.of(MIXTRAL | {"vocab_size": None}, HERE)
