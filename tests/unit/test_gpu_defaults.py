"""What an engine on a GPU gets where its user named nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vllm_spac.config.config import SpacConfig
from vllm_spac.config.types import ONLY_OURS_ON_A_GPU, ROUNDED_ON_A_GPU
from vllm_spac.integration import gpu_defaults, store_choice
from vllm_spac.integration.hooks import device

H100 = device.DeviceFacts("an H100", True, (9, 0), pinned=True, unified=True)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


def model(**changes):
    text = {"hidden_act": "silu", "moe_intermediate_size": 768, "intermediate_size": 6144, "swiglu_limit": None}
    text |= {name: value for name, value in changes.items() if name in text}
    return SimpleNamespace(
        quantization=changes.get("quantization"),
        hf_text_config=SimpleNamespace(**text),
        hf_config=SimpleNamespace(
            to_dict=lambda: {
                "quantization_config": changes.get("config"),
                "num_nextn_predict_layers": changes.get("head"),
            }
        ),
        architectures=[changes.get("architecture", "Qwen3MoeForCausalLM")],
        dtype=torch.bfloat16,
        get_hidden_size=lambda: changes.get("hidden", 2048),
    )


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(device, "is_cpu", lambda: False)
    monkeypatch.setattr(device, "query", lambda: H100)
    monkeypatch.setattr(store_choice, "choose", lambda *_: None)  # there is no checkpoint


def started(knobs: dict, *, of: SimpleNamespace | None = None, **options) -> tuple[SpacConfig, dict]:
    """Returns the configuration of an engine with these knobs, and what its workers will be passed."""
    args = arguments(knobs, of or model(), **options)
    config = gpu_defaults.apply(args, SpacConfig.parse(knobs))
    assert config is not None and args.additional_config["other"] == 1
    return config, args.additional_config["spac"]


def arguments(knobs: dict, of: SimpleNamespace, **options) -> SimpleNamespace:
    usual = {"enable_expert_parallel": False, "moe_backend": "auto", "quantization": None, "speculative_config": None}
    usual |= {"tensor_parallel_size": 1, "enable_lora": False, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    usual |= {"nnodes": 1}
    return SimpleNamespace(
        additional_config={"spac": knobs, "other": 1},
        create_model_config=lambda: of,
        kernel_config=SimpleNamespace(moe_backend="auto"),
        **usual | options,
    )


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"slots": "25%", "policy": "lru"},
        {"budget": 16},
        {"prefetch": "gate"},
        {"cpu_experts": "auto"},
        {"host_memory": "8GiB"},
        {"store": "disk", "host_memory": "8GiB", "prefetch": "gate"},
    ],
    ids=str,
)
def test_on_a_gpu_no_layer_waits_for_the_host(gpu, caplog, knobs: dict) -> None:
    config, passed = started(knobs, of=model())
    assert config.execution_name == "pointers" and passed == {**knobs, "plane": "pointers"}
    assert ROUNDED_ON_A_GPU in caplog.text


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"slots": "100%"}, "each expert has a slot"),
        ({"store": "disk"}, "reads missing experts in host memory, and store=disk"),
        ({"prefetch": "shadow@k=8"}, "--spac-prefetch"),
        ({"prefetch": "utility@extra=0.2"}, "no host moves them"),
        ({"policy": "layer_lru"}, "--spac-policy"),
        ({"budget": "16@votes=path"}, "votes=path (--spac-budget)"),
    ],
    ids=str,
)
def test_what_pointers_cannot_do_is_done_with_slots_and_the_log_says_why(gpu, caplog, knobs: dict, reason: str) -> None:
    config, passed = started(knobs, of=model())
    assert config.execution_name == "slots" and passed == {**knobs, "plane": "slots"}
    assert "spac: plane=slots: " in caplog.text and reason in caplog.text


def test_several_machines_take_slots(gpu, caplog) -> None:
    assert started({}, of=model(), nnodes=2, tensor_parallel_size=2)[0].execution_name == "slots"
    assert "2 machines" in caplog.text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quantization": "online"}, "quantised while they are loaded"),
        ({"hidden_act": "relu2"}, "activation relu2"),
        ({"hidden_act": "silu", "swiglu_limit": 7.0}, "activation silu with limit 7.0"),
        ({"hidden_act": None}, "names no activation"),
        ({"architecture": "Llama4ForConditionalGeneration"}, "weighs inputs"),
        ({"moe_intermediate_size": 700}, "rows of 700 weights"),
        ({"hidden": 2052}, "rows of 2052 weights"),
    ],
    ids=str,
)
def test_models_that_the_kernel_does_not_compute(gpu, caplog, changes: dict, reason: str) -> None:
    assert started({}, of=model(**changes))[0].execution_name == "slots"
    assert reason in caplog.text


@pytest.mark.parametrize("name", ["silu", "swish", "gelu", "gelu_pytorch_tanh"])
def test_activations_have_several_names(gpu, name: str) -> None:
    assert started({}, of=model(hidden_act=name))[0].execution_name == "pointers"


@pytest.mark.parametrize(
    ("architecture", "limit"),
    [("Glm5NextForConditionalGeneration", 10.0), ("GptOssForCausalLM", 7.0), ("Qwen3MoeForCausalLM", None)],
)
def test_limits_of_gates_that_the_kernel_has(gpu, architecture: str, limit: float | None) -> None:
    made = model(hidden_act="silu", swiglu_limit=limit, architecture=architecture)
    assert started({}, of=made)[0].execution_name == "pointers"


@pytest.mark.parametrize(
    "facts",
    [replace(H100, unified=False), replace(H100, pinned=False), replace(H100, capability=(7, 5)), None],
    ids=str,
)
def test_devices_that_cannot_read_in_place(gpu, monkeypatch, facts) -> None:
    monkeypatch.setattr(device, "query", lambda: facts)
    assert started({}, of=model())[0].execution_name == "slots"


def test_the_device_decides_about_divided_experts_too(gpu) -> None:
    assert started({}, of=model(), enable_expert_parallel=True)[0].execution_name == "pointers"


@pytest.mark.parametrize(
    ("knobs", "execution"),
    [
        ({"plane": "slots"}, "slots"),
        ({"plane": "pointers"}, "pointers"),
        ({"plane": "table"}, "table"),
        ({"plane": "table", "cpu_experts": "auto"}, "table"),
    ],
    ids=str,
)
def test_what_the_user_named_stays(gpu, knobs: dict, execution: str) -> None:
    config, passed = started(knobs, of=model())
    assert config.execution_name == execution and knobs.items() <= passed.items()


def test_nothing_is_chosen_on_a_cpu() -> None:
    config, passed = started({})
    assert config.execution_name == "slots" and passed == {}


@pytest.mark.parametrize(
    ("found", "facts", "execution", "backend", "loader"),
    [
        ({}, H100, "pointers", "triton", None),
        ({"quantization": "fp8", "config": FP8}, H100, "pointers", "triton", None),
        ({"quantization": "fp8", "config": FP8}, replace(H100, capability=(8, 6)), "pointers", "marlin", None),
        ({"quantization": "mxfp4", "config": MXFP4}, H100, "pointers", "marlin", None),
        ({"quantization": "gptq", "config": GPTQ}, H100, "pointers", "auto", None),
        ({"quantization": "awq", "config": AWQ}, H100, "pointers", "triton", "moe_wna16"),
        ({"quantization": "awq", "config": AWQ | {"zero_point": True}}, H100, "pointers", "auto", None),
        ({"quantization": "online"}, H100, "slots", "auto", None),
    ],
    ids=["bf16", "fp8", "fp8 on an RTX 3090", "mxfp4", "gptq", "awq, no zeros", "awq", "quantised while it is loaded"],
)
def test_vllms_kernels_are_those_that_go_with_it(gpu, monkeypatch, found, facts, execution, backend, loader) -> None:
    """Its own choice may be one that finds no slots: FlashInfer's on Blackwell, a monolithic one for GPT-OSS."""
    monkeypatch.setattr(device, "query", lambda: facts)
    args = arguments({}, model(**found))
    config = gpu_defaults.apply(args, SpacConfig())
    assert config is not None and config.execution_name == execution
    assert (args.moe_backend, args.quantization) == (backend, loader)


def test_expert_workers_get_experts_as_the_checkpoint_has_them(gpu) -> None:
    """In whose layout vLLM's Triton kernel has them, too; another of its kernels converts them."""
    knobs = {"executor": "processes@workers=2"}
    args = arguments(knobs, model())
    config = gpu_defaults.apply(args, SpacConfig.parse(knobs))
    assert config is not None and config.execution_name == "workers" and config.store_on("cuda") == "disk"
    assert args.moe_backend == "triton" and args.additional_config["spac"] == knobs


@pytest.mark.parametrize("knobs", [{"store": "disk"}, {"prefetch": "shadow"}, {"slots": "100%"}], ids=str)
def test_formats_that_no_slots_of_vllms_kernel_hold_get_ours(gpu, caplog, knobs: dict) -> None:
    config, passed = started(knobs, of=model(quantization="mxfp4", config=MXFP4))
    assert config.execution_name == "table" and passed == {**knobs, "plane": "table"}
    assert "plane=table: " in caplog.text and "reads no slots" in caplog.text


def test_no_knob_is_named_that_would_be_refused(gpu, caplog) -> None:
    config, _ = started({}, of=model(quantization="mxfp4", config=MXFP4))
    assert config.execution_name == "pointers"
    assert ONLY_OURS_ON_A_GPU in caplog.text and "--spac-plane slots" not in caplog.text


@pytest.mark.parametrize("knobs", [{}, {"store": "disk"}], ids=str)
@pytest.mark.parametrize("config", [None, GPTQ, AWQ], ids=["bf16", "GPTQ", "AWQ"])
def test_one_line_says_all_that_was_set(gpu, caplog, knobs: dict, config: dict | None) -> None:
    """Also vLLM's own options, by which the kernel is chosen."""
    caplog.set_level("INFO")
    args = arguments(knobs, model(quantization=config and config["quant_method"], config=config))
    gpu_defaults.apply(args, SpacConfig.parse(knobs))
    (record,) = caplog.records
    passed = args.additional_config["spac"]
    expected = [f"{name}={passed[name]}" for name in passed.keys() - knobs.keys()]
    expected += [f"--moe-backend {args.moe_backend}"] * (args.moe_backend != "auto")
    expected += [f"--quantization {args.quantization}"] * (args.quantization is not None)
    assert passed["plane"] and all(each in record.message for each in expected)


@pytest.mark.parametrize("named", [{"moe_backend": "marlin"}, {"kernel_config": SimpleNamespace(moe_backend="marlin")}])
def test_a_backend_that_the_user_named_stays(gpu, named: dict) -> None:
    args = arguments({}, model())
    vars(args).update(named)
    gpu_defaults.apply(args, SpacConfig())
    assert args.moe_backend == named.get("moe_backend", "auto")


def test_a_head_of_the_checkpoint_is_named_and_not_used(gpu, caplog) -> None:
    caplog.set_level("INFO")
    named = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'"""
    for head, given, said in ((1, None, True), (1, {"method": "ngram"}, False), (0, None, False), (None, None, False)):
        args = arguments({}, model(head=head), speculative_config=given)
        assert gpu_defaults.apply(args, SpacConfig.parse({})) is not None and args.speculative_config == given
        (record,) = caplog.records
        assert (named in record.getMessage()) is said
        caplog.clear()


def test_the_options_are_those_of_vllm() -> None:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model="m")
    assert (args.moe_backend, args.kernel_config.moe_backend, args.quantization) == ("auto", "auto", None)
