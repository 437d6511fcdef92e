"""Sizes of published models from their ``config.json``, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.errors import UnsupportedError
from vllm_spac.storage.checkpoint import quant_config, quantisation
from vllm_spac.storage.checkpoint.described import described
from vllm_spac.storage.checkpoint.headers import read_config
from vllm_spac.storage.checkpoint.kv_layers import Steps
from vllm_spac.storage.checkpoint.published import published
from vllm_spac.storage.checkpoint.quantisation import FormatKernels
from vllm_spac.tools.planning.architecture import Architecture

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


INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 64}


def int4(**weights: object) -> dict:
    return {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": INT4 | weights}}}


@pytest.mark.parametrize(
    ("settings", "slots", "packed"),
    [
        (FP8, 4 * 2, 4 * 2),
        (int4(), 2 * 256, 2 * 256),
        (int4(group_size=256), 2 * 64, 4 * 64),  # a word has two scales
        (int4(symmetric=False), 2 * 256 + 128, 4 * 256),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 2 * 128 + 64, 4 * 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, 2 * 512, 2 * 512),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True}, 2 * 512, 4 * 512),
    ],
    ids=["fp8", "int4", "int4, one group", "int4 zero points", "awq", "gptq", "gptq int8"],
)
def test_our_kernels_store_other_scales(settings: dict, slots: int, packed: int) -> None:
    codes = 64 * 256 * (1 if settings is FP8 or settings.get("bits") == 8 else 0.5)
    assert quantisation.stored_bytes(settings, (64, 256), FormatKernels.GPU) == codes + slots
    assert quantisation.stored_bytes(settings, (64, 256), FormatKernels.OURS) == codes + packed


def test_columns_of_gpt_oss_are_first() -> None:
    """2880 columns have 90 exponents, stored as 92."""
    found = quantisation.stored_bytes({"quant_method": "mxfp4"}, (32, 2880, 5760))
    assert found == 32 * 5760 * (1440 + 92)


def nvfp4(activations: dict | None = None, **weights: object) -> dict:
    given = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16} | weights
    group = {"weights": given, "input_activations": activations, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"g": group}}


def modelopt(**changes: object) -> dict:
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*self_attn*"]} | changes


NVFP4_FLAGS = ("--spac-plane pointers", "--moe-backend marlin")


@pytest.mark.parametrize(
    "settings",
    [nvfp4(), nvfp4({"type": "float", "num_bits": 4}), modelopt(), modelopt(quant_algo="w4a16_nvfp4", group_size=16)],
    ids=["compressed", "W4A4", "modelopt", "modelopt W4A16"],
)
def test_nvfp4_is_for_pointers(settings: dict) -> None:
    assert quantisation.refusal(settings) is None and quantisation.flags(settings) == NVFP4_FLAGS
    assert "use --spac-plane table" in str(quantisation.refusal(settings, FormatKernels.GPU))
    words = 64 * 256 // 2 + 64 * 4 * (1 + 256 // 64)
    assert quantisation.stored_bytes(settings, (64, 256)) == words
    assert quantisation.stored_bytes(settings, (3, 64, 272)) == 3 * (64 * 136 + 64 * 4 * (1 + 5))
    assert not quant_config.excluded(settings, "model.layers.0.mlp.experts.0.up_proj")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (modelopt(quant_algo="FP8"), "experts in FP8"),
        (modelopt(quant_algo=None), "experts in NONE"),
        (modelopt(group_size=32), "NVFP4 experts by 32 columns"),
        (nvfp4(group_size=32), "float4 experts by tensor_group"),
        (nvfp4(strategy="group", group_size=32), "float4 experts by group"),
    ],
    ids=["FP8", "unnamed", "group", "compressed group", "MXFP4"],
)
def test_other_experts_of_four_bits_are_refused(settings: dict, said: str) -> None:
    for kernels in (None, FormatKernels.OURS, FormatKernels.GPU):
        assert said in str(quantisation.refusal(settings, kernels))
    assert quantisation.refusal(settings, FormatKernels.CPU) is not None


def test_what_modelopt_leaves_out() -> None:
    """Wildcards; in older checkpoints in a file of their own, which vLLM reads, too."""
    older = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head*"]}}
    found = quant_config.of({"quantization_config": older})
    assert found is not None and quantisation.flags(found) == NVFP4_FLAGS
    for settings, name in ((modelopt(), "model.layers.3.self_attn.q_proj.weight"), (found, "lm_head.weight")):
        assert quant_config.excluded(settings, name)
        assert not quant_config.excluded(settings, "model.layers.3.mlp.experts.0.up_proj")


def test_a_gate_that_is_left_out_is_no_part_of_experts() -> None:
    """As published for Mixtral in AWQ: vLLM looks for the name in that of all experts of a layer."""
    settings = {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["gate", "layers.3.mlp"]}
    for name, left_out in (
        ("model.layers.0.mlp.gate.weight", True),
        ("model.layers.0.mlp.experts.gate_up_proj", False),
        ("model.layers.0.mlp.experts.7.gate_proj.weight", False),
        ("model.layers.3.mlp.experts.gate_up_proj", True),
    ):
        assert quant_config.excluded(settings, name) == left_out, name
    one = {"quant_method": "fp8", "ignore": ["model.layers.0.mlp.experts.7.gate_proj"]}
    assert quant_config.excluded(one, "model.layers.0.mlp.experts.7.gate_proj.weight")


def test_a_file_of_modelopt_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    whole = described(read_config(tmp_path / "config.json"), tmp_path).expert_bytes[0]
    inner = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": inner}))
    assert described(read_config(tmp_path / "config.json"), tmp_path).expert_bytes[0] / whole == pytest.approx(
        4.5 / 16, rel=1e-2
    )
    (tmp_path / "hf_quant_config.json").write_text("[")
    with pytest.raises(UnsupportedError, match="hf_quant_config.json cannot be read"):
        read_config(tmp_path / "config.json")


def test_quantised_experts_are_smaller_and_embeddings_are_not() -> None:
    whole, small = described(MIXTRAL, HERE), described(MIXTRAL | {"quantization_config": FP8}, HERE)
    assert 0.5 < small.expert_bytes[0] / whole.expert_bytes[0] < 0.51
    assert small.other_bytes > 2 * 2 * 32000 * 4096
    kept = MIXTRAL | {"quantization_config": FP8 | {"modules_to_not_convert": ["self_attn"]}}
    assert small.other_bytes < described(kept, HERE).other_bytes == whole.other_bytes, "routers are never quantised"


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
_KEPT = ("layer_types", "sliding_window", "attention_chunk_size", "no_rope_layers", "global_head_dim")
_KEYS = st.sampled_from(
    [*MIXTRAL, *_KEPT, "kv_lora_rank", "head_dim", "text_config", "index_topk", "index_head_dim", "linear_attn_config"]
)


@given(st.dictionaries(_KEYS, _JSON | st.lists(_JSON, max_size=3) | st.dictionaries(_KEYS, _JSON, max_size=3)))
def test_whatever_a_config_holds_it_is_read_or_refused(changes: dict) -> None:
    try:
        found = Architecture.of(MIXTRAL | changes, HERE)
    except UnsupportedError:
        return
    assert found.kept_bytes <= found.token_bytes
    for drafts in (0, 4):
        few, many = (found.blocks(Steps(tokens, 256, drafts)).request_bytes for tokens in (100, 10_000))
        assert 0 <= few <= many


def test_widths() -> None:
    found = Architecture.of(MIXTRAL | {"max_position_embeddings": 32768}, HERE)
    assert found.token_bytes == 32 * 2 * 8 * 128 * 2 and found.longest == 32768 and not found.tied
    latent = MIXTRAL | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    assert Architecture.of(latent, HERE).token_bytes == 32 * (512 + 64) * 2
    kinds = ["linear_attention", "full_attention", "sliding_attention", "full_attention"] * 8
    mixed = Architecture.of(MIXTRAL | {"layer_types": kinds, "sliding_window": 4}, HERE)
    assert (mixed.windows, mixed.recurrent, mixed.state) == ((None, 4, None) * 8, 8, None)
    with pytest.raises(UnsupportedError, match="does not say vocab_size"):
        Architecture.of(MIXTRAL | {"vocab_size": None}, HERE)


# Bytes of KV cache of a token, by hand: layers x 2 x heads x width x 2 bytes, or layers x latent vector x 2 bytes.
TOKEN_BYTES = {
    "Qwen/Qwen3-30B-A3B": 48 * 2 * 4 * 128 * 2,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 32 * 2 * 8 * 128 * 2,
    "deepseek-ai/DeepSeek-V2-Lite-Chat": 27 * (512 + 64) * 2,
    "zai-org/GLM-4.5-Air": 46 * 2 * 8 * 128 * 2,
    "Qwen/Qwen3-235B-A22B": 94 * 2 * 4 * 128 * 2,
    "Qwen/Qwen3-30B-A3B-FP8": 48 * 2 * 4 * 128 * 2,
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": 48 * 2 * 4 * 128 * 2,
    "casperhansen/mixtral-instruct-awq": 32 * 2 * 8 * 128 * 2,
    "openai/gpt-oss-20b": 24 * 2 * 8 * 64 * 2,
    "openai/gpt-oss-120b": 36 * 2 * 8 * 64 * 2,
    "zai-org/GLM-4.5-Air-FP8": 46 * 2 * 8 * 128 * 2,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 12 * 2 * 2 * 256 * 2,
}


def test_the_kv_cache_of_a_token_of_each_published_model() -> None:
    found = {name: Architecture.of(config, HERE) for name, config in published().items()}
    assert {name: shape.token_bytes for name, shape in found.items()} == TOKEN_BYTES
    for name, shape in found.items():
        windows = [None] * len(shape.windows)
        assert list(shape.windows) == ([128, None] * (len(windows) // 2) if "gpt-oss" in name else windows)
        assert (shape.recurrent, shape.state is None) == ((36, False) if "Next" in name else (0, True))


GATED_DELTA = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


@pytest.mark.parametrize("said", [{"full_attention_interval": 4}, {}], ids=["interval", "family's interval"])
def test_layers_with_a_state_have_no_kv_cache(said: dict) -> None:
    """Of Qwen3-Next, 12 of 48 layers have one; the others keep a convolution's rows, and a matrix per head."""
    found = Architecture.of(MIXTRAL | GATED_DELTA | said | {"num_hidden_layers": 48}, HERE)
    assert (found.windows, found.recurrent) == ((None,) * 12, 36)
    assert found.token_bytes == 12 * found.layer_kv
    assert found.state is not None
    rows, values = 3 * (2 * 16 * 128 + 32 * 128) * 2, 32 * 128 * 128
    assert found.state.nbytes(0, on_cpu=False) == rows + 2 * values
    assert found.state.nbytes(2, on_cpu=True) == rows * 5 // 3 + 4 * values


def test_a_window_of_all_layers_is_kept_unless_it_is_off() -> None:
    def windows(**said: object) -> set:
        return set(Architecture.of(MIXTRAL | said, HERE).windows)

    assert windows(sliding_window=4096) == {4096}
    assert windows(sliding_window=4096, use_sliding_window=False) == {None}
    assert windows(sliding_window=4096, max_window_layers=28) == {None}, "vLLM's number of layers is not known"


def test_layers_of_llama_4_keep_a_chunk_but_for_those_without_positions() -> None:
    found = Architecture.of(MIXTRAL | {"attention_chunk_size": 8192}, HERE)
    assert found.windows == ((8192,) * 3 + (None,)) * 8 and found.chunked
    listed = Architecture.of(MIXTRAL | {"attention_chunk_size": 8192, "no_rope_layers": [1, 0] * 16}, HERE)
    assert listed.windows == (8192, None) * 16


def test_the_state_of_kimi_delta_attention_is_vllms() -> None:
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    linear = {"kda_layers": [1, 2, 3], "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}
    found = Architecture.of(MIXTRAL | {"num_hidden_layers": 4, "linear_attn_config": linear}, HERE)
    assert (found.windows, found.recurrent) == ((None,), 3) and found.state is not None
    for drafts in (0, 3):
        convolution, matrices = MambaStateShapeCalculator.kda_state_shape(1, 32, 128, num_spec=drafts)
        assert found.state.nbytes(drafts, on_cpu=False) == 2 * math.prod(convolution) + 4 * math.prod(matrices)


@pytest.mark.parametrize("expert", [{}, {"expert_dtype": "fp8"}])
def test_experts_in_fp8_are_no_other_format(expert: dict) -> None:
    """Also where the entry says so itself; in FP4 they are refused by name."""
    entry = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = quant_config.of({"quantization_config": entry | expert})
    assert found == entry and quantisation.refusal(found) is None
    other = quant_config.of({"quantization_config": entry | {"expert_dtype": "fp4"}})
    assert other is not None and "FP4 beside layers in FP8" in str(quantisation.refusal(other))
