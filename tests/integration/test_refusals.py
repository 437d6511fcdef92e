"""What cannot work is refused before a worker starts, naming the knob or flag and what would be right."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}


def write_config(folder: Path, config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def moe(tmp_path) -> Path:
    return write_config(tmp_path / "moe", QWEN)


def engine_config(model: Path, spac, **options):
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        additional_config={} if spac is None else {"spac": spac},
        **options,
    )
    return args.create_engine_config()


@pytest.mark.parametrize(
    ("spac", "named"),
    [
        ({"slot": "25%"}, ["'slot'", "did you mean 'slots'"]),
        ({"colour": 1}, ["'colour'", "known knobs", "slots", "policy"]),
        ({"slots": "many"}, ["slots='many'", "--spac-slots", "25%"]),
        ({"slots": "0"}, ["slots='0'", "--spac-slots"]),
        ({"slots": -3}, ["slots=", "--spac-slots"]),
        ({"slots": "120%"}, ["120%", "at most 100%"]),
        ({"slots": 3}, ["slots=3", "needs 4", "--spac-slots 4"]),
        ({"slots": 17}, ["slots=17", "16 experts", "--spac-slots 16"]),
        ({"store": "tape"}, ["store='tape'", "host", "disk"]),
        ({"policy": "oracle"}, ["policy='oracle'", "lfu", "lru"]),
        ({"io_threads": 0}, ["io_threads=0", "--spac-io-threads"]),
        ({"store": "host", "disk_dir": "/tmp"}, ["disk_dir", "store=disk"]),
        ({"disk_dir": "/etc/hostname/x"}, ["disk_dir=", "is not a folder"]),
        ("25%", ["must be a mapping"]),
        ({"policy": "belady"}, ["policy='belady'", "reuse"]),
        ({"budget": 17}, ["budget=17", "a layer has 16 experts"]),
        ({"budget": 3}, ["budget=3", "every token 4 experts", "truncation"]),
        ({"budget": 0, "budget_coverage": "truncation"}, ["budget=0", "--spac-budget"]),
        ({"budget_mass": 1.5}, ["budget_mass=1.5", "--spac-budget-mass"]),
        ({"execution": "magic"}, ["execution='magic'", "slots", "pointers"]),
        ({"execution": "pointers", "store": "disk"}, ["--spac-execution", "--spac-store host"]),
        ({"budget_mass": 0}, ["budget_mass=0", "--spac-budget-mass"]),
        ({"budget": 8, "budget_mass": 0.9}, ["budget and budget_mass", "use one of them"]),
        ({"budget": 8, "budget_ranking": "oracle"}, ["'oracle'", "vllm-spac quality", "router"]),
        ({"budget": 8, "budget_ranking": "static"}, ["static", "--spac-calibration", "vllm-spac calibrate"]),
        ({"budget": 8, "budget_coverage": "none"}, ["budget_coverage='none'", "substitution"]),
        ({"budget_file": "/not/there"}, ["budget_file=/not/there", "no such file"]),
        ({"calibration": "/not/there"}, ["calibration=/not/there", "no such file"]),
        ({"cpu_experts": "auto"}, ["cpu_experts=auto", "--spac-cpu-experts", "add --spac-store host"]),
        ({"cpu_experts": 2, "store": "disk"}, ["cpu_experts=2", "add --spac-store host"]),
    ],
    ids=str,
)
def test_bad_knobs(moe, spac, named):
    with pytest.raises(ValueError) as caught:
        engine_config(moe, spac)
    for part in named:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"worker_extension_cls": "collections.OrderedDict"}, "vllm_spac.integration.worker.SpacWorker"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(moe, options, named):
    with pytest.raises(ValueError) as caught:
        engine_config(moe, {"slots": "50%"}, **options)
    assert named in str(caught.value)


def test_a_dense_model(tmp_path):
    dense = {k: v for k, v in QWEN.items() if "expert" not in k and not k.startswith(("moe_", "norm_topk"))}
    model = write_config(tmp_path / "dense", {**dense, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    with pytest.raises(ValueError, match="dense model.*drop --plugin spac"):
        engine_config(model, {})


@pytest.mark.parametrize(
    ("quantisation", "options", "named"),
    [
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic"},
            {},
            r"one scale a tensor.*\(fp8\).*by block or channel",
        ),
        ({"quant_method": "mxfp4"}, {}, r"quantised experts \(mxfp4\): not supported; use one in FP8"),
        (GPTQ, {}, "--quantization auto_gptq gives.*; add --quantization moe_wna16 --moe-backend triton"),
        (GPTQ | {"sym": False}, {"quantization": "moe_wna16"}, r"zero points \(sym=false\)"),
        (None, {"quantization": "fp8_per_block"}, "--quantization fp8_per_block quantises experts while.*drop it"),
    ],
    ids=["scales of tensors", "unknown", "GPTQ for Marlin", "GPTQ with zero points", "while loading"],
)
def test_quantised_models(tmp_path, quantisation, options, named):
    facts = QWEN if quantisation is None else QWEN | {"quantization_config": quantisation}
    with pytest.raises(ValueError, match=named):
        engine_config(write_config(tmp_path / "model", facts), {}, **options)


@pytest.mark.parametrize(
    ("quantisation", "options"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, {}),
        (GPTQ, {"quantization": "moe_wna16"}),
    ],
    ids=["FP8", "GPTQ"],
)
def test_quantised_models_that_their_layers_decide_on(tmp_path, quantisation, options):
    engine_config(write_config(tmp_path / "model", QWEN | {"quantization_config": quantisation}), {}, **options)


@pytest.mark.parametrize(
    ("v2", "executor", "asynchronous", "remedy"),
    [
        (True, "uni", True, None),
        (True, "mp", False, "--distributed-executor-backend uni, or use --spac-guard off"),
        (False, "mp", False, None),
        (False, "uni", True, "--no-async-scheduling, or use --spac-guard off"),
    ],
)
def test_the_guard_where_draft_lengths_are_fixed(v2, executor, asynchronous, remedy):
    from vllm_spac.config import SpacConfig
    from vllm_spac.integration import preflight

    config = SimpleNamespace(
        use_v2_model_runner=v2,
        speculative_config=object(),
        parallel_config=SimpleNamespace(distributed_executor_backend=executor),
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
    )
    for config_of in (SpacConfig(), SpacConfig(guard="off")):  # on by itself, it is left out with a line in the log
        preflight.check_guard(config_of, config)
    if remedy is not None:
        with pytest.raises(ValueError, match=remedy):
            preflight.check_guard(SpacConfig(guard="on"), config)
        config.speculative_config = None
    preflight.check_guard(SpacConfig(guard="on"), config)


@pytest.mark.parametrize(
    ("spac", "needed"),
    [
        ({}, True),
        ({"store": "host"}, True),
        ({"slots": "15"}, True),
        ({"store": "disk"}, False),
        ({"slots": "100%"}, False),
        ({"slots": "16"}, False),
    ],
    ids=str,
)
def test_pinned_memory_is_asked_for_only_where_experts_lie_in_it(spac, needed):
    from vllm_spac.config import SpacConfig
    from vllm_spac.integration import preflight

    assert preflight.keeps_on_the_host(SpacConfig(**spac), experts=16) == needed


def test_an_unsupported_vllm(moe, monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    with pytest.raises(ValueError, match=r"vLLM 0\.31\.0 is not supported; supported are .*0\.32"):
        engine_config(moe, {})
    engine_config(moe, None)  # whoever does not ask for the plugin is not bothered


def test_without_asking_nothing_changes(moe):
    config = engine_config(moe, None)
    assert config.parallel_config.worker_extension_cls == ""
    assert config.additional_config == {}


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"activation": SimpleNamespace(value="relu2")}, "the activation relu2"),
        ({"activation": SimpleNamespace(value="swigluoai"), "swiglu_limit": 5.0}, "swigluoai with limit 5.0"),
        ({"swiglu_limit": 7.0}, "silu with limit 7.0"),
        ({"apply_router_weight_on_input": True}, "router weights on the input"),
    ],
    ids=str,
)
def test_layers_that_our_kernels_do_not_compute(facts, named):
    from vllm_spac.integration.experts_layer import ManagedExperts

    plain = {"activation": SimpleNamespace(value="silu"), "swiglu_limit": None, "swiglu_alpha": None}
    plain |= {"apply_router_weight_on_input": False, "layer_name": "layers.3"}
    ManagedExperts._check_kernels(SimpleNamespace(**plain))
    with pytest.raises(ValueError, match=f"{named}.* of layers.3; use --spac-execution slots"):
        ManagedExperts._check_kernels(SimpleNamespace(**plain | facts))


def test_a_worker_extension_built_on_ours_is_kept(moe):
    name = f"{__name__}.OwnExtension"
    from vllm_spac.integration import preflight, worker

    class OwnExtension(worker.SpacWorker):
        pass

    import vllm.utils.import_utils as import_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_utils, "resolve_obj_by_qualname", lambda _: OwnExtension)
        assert preflight.worker_extension(name) == name


def parse(*flags: str) -> argparse.Namespace:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()
    args = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(list(flags))
    EngineArgs.from_cli_args(args)
    return args


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "spac")


def test_flags_are_keys(tmp_path):
    flags = ["--plugin", "spac", "--spac-slots", "25%", "--spac-policy", "lfu", "--spac-disk-dir", str(tmp_path)]
    assert parse(*flags).additional_config["spac"] == {"slots": "25%", "policy": "lfu", "disk_dir": str(tmp_path)}
    assert parse("--plugin", "spac").additional_config["spac"] == {}


def test_flags_and_keys_are_merged():
    args = parse("--plugin", "spac", "--spac-slots", "8", "--additional-config", '{"spac": {"policy": "lfu"}}')
    assert args.additional_config["spac"] == {"policy": "lfu", "slots": "8"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--plugin", "spac", "--spac-slots", "lots"], "--spac-slots"),
        (["--plugin", "moe"], "invalid choice"),
        (["--plugin", "spac", "--spac-colour", "1"], "unrecognized"),
    ],
    ids=str,
)
def test_bad_flags_end_with_a_usage_error(flags, said, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*flags)
    assert caught.value.code not in (0, None)
    assert said in capsys.readouterr().err + str(caught.value)


def test_a_flag_without_the_plugin_is_not_ignored():
    with pytest.raises(SystemExit, match="--spac-slots needs --plugin spac"):
        parse("--spac-slots", "25%")


def test_bad_keys_on_the_command_line_are_one_line():
    with pytest.raises(SystemExit, match="unknown knob 'slot'"):
        parse("--additional-config", '{"spac": {"slot": 3}}')
