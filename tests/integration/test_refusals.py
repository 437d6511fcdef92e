"""Unsupported settings are refused before a worker starts, with the knob or flag and the remedy."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import torch
from model_configs import qwen3_moe
from openai import InternalServerError
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))

from vllm_server import OF_THE_TESTS, PATIENCE, TARGET, Server

from vllm_spac.config.config import SpacConfig
from vllm_spac.core import MoEShape
from vllm_spac.decisions.predictor_file import Identity, PredictorFile, kinds
from vllm_spac.decisions.predictors._trained import Sizes
from vllm_spac.errors import ConfigError, StoreError, UnsupportedError
from vllm_spac.integration import compatibility, preflight
from vllm_spac.integration.hooks import device, patches
from vllm_spac.storage import disk
from vllm_spac.storage.checkpoint import headers

QWEN = qwen3_moe()

AUTO = {"cpu_experts": "auto", "store": "host"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
EXPERTS = {"enable_expert_parallel": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}


def write_config(folder: Path, config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")  # no tensors, which is not refused
    return folder


@pytest.fixture
def moe(tmp_path) -> Path:
    return write_config(tmp_path / "moe", QWEN)


def engine_config(model: Path, spac, **options):
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        max_model_len=128,
        additional_config={} if spac is None else {"spac": spac},
        **{"enforce_eager": True} | options,
    )
    return args.create_engine_config()


@pytest.mark.parametrize(
    ("spac", "named"),
    [
        ({"slot": "25%"}, ["'slot'", "did you mean 'slots'"]),
        ({"plane": "magic"}, ["plane='magic'", "slots", "pointers"]),
        ({"slots": 3}, ["slots=3", "needs 4", "--spac-slots 4"]),
        ({"slots": 17}, ["slots=17", "16 experts", "--spac-slots 16"]),
        ({"store": "host", "disk_dir": "/tmp"}, ["disk_dir", "--spac-store disk"]),
        ({"disk_dir": "/etc/hostname/x"}, ["disk_dir=", "is not a folder"]),
        ({"budget": 17}, ["budget=17", "a layer has 16 experts"]),
        ({"budget": 3}, ["budget=3", "every token 4 experts", "truncation"]),
        ({"cpu_experts": "auto"}, ["cpu_experts=auto", "--spac-cpu-experts", "add --spac-store host"]),
    ],
    ids=str,
)
def test_bad_knobs(moe, spac, named):
    with pytest.raises(ValueError) as caught:
        engine_config(moe, spac)
    for part in named:
        assert part in str(caught.value)


OUTSIDE = """
from vllm_spac.decisions.policies.base import Policy
from vllm_spac.decisions.policies.belady import Belady
from vllm_spac.decisions.policies.lru import LRU
from vllm_spac.methods.moe_spec.router_ranking import Router


class Fine(LRU):
    pass


class Abstract(Policy):
    pass


class Demanding(LRU):
    def __init__(self, size):
        super().__init__()


class Failing(LRU):
    def __init__(self):
        raise OSError("first line\\nsecond line")


class Offline(Belady):
    pass


class Oracle(Router):
    offline = "it needs the output of every expert"


instance = Fine()
"""


def predictors(fingerprint: str, layers: int) -> PredictorFile:
    """A file of the predictor ``quasi_hidden``, of layers of 16 experts."""
    identity = Identity(fingerprint, fingerprint, tuple(map(str, range(layers))))
    sizes = Sizes(layers, experts=16, top_k=4, width=8, reach=1)
    specs = kinds()["quasi_hidden"].specs(sizes)
    tensors = {"quasi_hidden": {part: torch.ones(shape, dtype=dtype) for part, (dtype, shape) in specs.items()}}
    return PredictorFile(identity, sizes, 1, tensors, {"gate": "no router"})


@pytest.fixture
def outside(tmp_path, monkeypatch) -> Path:
    """A folder of the user's modules and files, some of them bad."""
    (tmp_path / "spac_outside.py").write_text(OUTSIDE)
    (tmp_path / "spac_broken.py").write_text("def (")
    (tmp_path / "spac_exits.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "text").write_text("precious")
    (tmp_path / "deep").write_text("[" * 100_000)
    predictors("\x1b[2J", 2).save(tmp_path / "other.predictors")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("spac", "named"),
    [
        ({"policy": "spac_nowhere:X"}, r"policy='spac_nowhere:X' \(--spac-policy\).*No module named.*PYTHONPATH"),
        ({"policy": "spac_outside:Nope"}, "--spac-policy.*has no attribute 'Nope'"),
        ({"policy": "spac_outside:instance"}, "--spac-policy.*derive it from vllm_spac.decisions.policies.base.Policy"),
        ({"policy": "spac_outside:Oracle"}, "--spac-policy.*derive it from vllm_spac.decisions.policies.base.Policy"),
        ({"policy": "os:path"}, "--spac-policy.*derive it from"),
        ({"policy": "spac_outside:Abstract"}, "--spac-policy.*cannot be built.*abstract"),
        ({"policy": "spac_outside:Demanding"}, "--spac-policy.*cannot be built.*size.*give them defaults"),
        ({"policy": "spac_outside:Failing"}, r"--spac-policy.*cannot be built.*first line\\nsecond line"),
        ({"policy": "spac_outside:Offline"}, "--spac-policy.*must know the future"),
        ({"policy": "spac_broken:X"}, "--spac-policy.*SyntaxError"),
        ({"policy": "spac_exits:X"}, "--spac-policy.*SystemExit"),
        ({"policy": ":"}, "--spac-policy.*package.module:Class"),
        ({"budget": "8@ranking=spac_outside:Fine"}, "--spac-budget.*vllm_spac.methods.moe_spec.rankings.Ranking"),
        ({"budget": "8@ranking=spac_outside:Oracle"}, "--spac-budget.*every expert"),
        ({"budget": "8@ranking=spac_nowhere:X"}, "--spac-budget.*cannot load .*No module named"),
        ({"record": "trace=/no/such/folder/t"}, "--spac-record.*No such file or directory; name another file"),
        ({"record": "trace=/proc/x"}, "--spac-record.*cannot be written"),
        ({"record": "trace=text"}, "--spac-record.*no trace; remove it first, or name another"),
        ({"record": "trace=pipe"}, "--spac-record.*something else; name another"),
        ({"record": "trace=/dev/null"}, "--spac-record.*something else; name another"),
        ({"record": "trace=."}, "--spac-record.*something else; name another"),
        ({"record": "trace="}, "--spac-record.*path is empty"),
        ({"record": "timeline=/no/such/folder/t"}, "--spac-record.*No such file or directory; name another file"),
        ({"record": "timeline=text"}, "--spac-record.*no timeline; name another"),
        ({"record": "timeline=pipe"}, "--spac-record.*not a regular file; name another file"),
        ({"record": "timeline=."}, "--spac-record.*not a regular file; name another file"),
        (AUTO | {"profile": "text"}, "--spac-profile.*no profile of format"),
        (AUTO | {"profile": "deep"}, "--spac-profile.*no profile of format"),
        (AUTO | {"profile": "pipe"}, "--spac-profile.*not a regular file"),
        (AUTO | {"profile": "nosuch"}, "--spac-profile.*there is no profile.*rtx4090"),
        (AUTO | {"profile": "."}, "--spac-profile"),
        ({"prefetch": "neural@file=/not/there"}, "prefetch=/not/there.*no such file.*predictors train"),
        ({"prefetch": "neural@file=text"}, "text cannot be read as a file of predictors"),
        (
            {"prefetch": "shadow"},
            "prefetch=shadow.*work here: there is no draft model; add --speculative-config",
        ),
        (
            {"prefetch": "shadow@file=other.predictors"},
            "file of prefetch=shadow.*no effect",
        ),
        (
            {"prefetch": "draft_gate@k=2@cutoff=1"},
            "prefetch=draft_gate@k=2@cutoff=1.*work here: there is no draft model; add --speculative-config.*PARENT",
        ),
        (
            {"prefetch": "draft_gate@k=2@file=other.predictors"},
            "file of prefetch=draft_gate.*no effect.*use --spac-prefetch draft_gate@k=2$",
        ),
        ({"prefetch": "utility@k=2"}, "k of prefetch=utility@k=2.*looks? at drafts; use --spac-prefetch utility"),
        (
            {"prefetch": "neural@file=other.predictors@extra=0.2@cutoff=2"},
            "cutoff of prefetch=neural.*use --spac-prefetch neural@file=other.predictors@extra=0.2, or use --spac",
        ),
        ({"prefetch": "draft_gate@k=0"}, "k=0: use a whole number from 1"),
        ({"prefetch": "shadow@copies=2"}, "prefetch=.*shadow@copies=2"),
        ({"prefetch": "shadow@background=2", "plane": "pointers", "store": "host"}, "use --spac-prefetch shadow"),
        ({"prefetch": "shadow", "speculate": "restricted"}, "needs a predictor that looks one layer ahead"),
        ({"prefetch": "quasi_hidden@file=other.predictors"}, r"made for \\x1b\[2J.*not for this model"),
        ({"disk_dir": ""}, "disk_dir=''.*--spac-disk-dir.*path is empty"),
        ({"disk_dir": "~nouser"}, "--spac-disk-dir.*home folder"),
        ({"disk_dir": "a\0b"}, "--spac-disk-dir.*NUL"),
        ({"disk_dir": "x/" * 2500}, "--spac-disk-dir.*too long"),
        ({"disk_dir": "x" * 300}, "--spac-disk-dir.*too long"),
        ({"disk_dir": 5}, "--spac-disk-dir.*use a path"),
        ({"disk_dir": "/proc/x"}, "--spac-disk-dir.*/proc cannot be written to.*name a writable folder"),
        ({"disk_dir": "/proc"}, "--spac-disk-dir.*/proc cannot be written to.*name a writable folder"),
        ({"disk_dir": "dangling"}, "--spac-disk-dir.*dangling is a link to nothing"),
        ({"disk_dir": "dangling/below"}, "--spac-disk-dir.*dangling is a link to nothing"),
        ({"disk_dir": "loop"}, "--spac-disk-dir.*loop is"),
        ({"disk_dir": "text"}, "--spac-disk-dir.*text is not a folder"),
        ({"disk_dir": "pipe/x"}, "--spac-disk-dir.*pipe is not a folder"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_the_user_wrote_is_checked_before_a_worker_starts(moe, outside, spac, named):
    with pytest.raises(ValueError, match=named) as caught:
        engine_config(moe, spac)
    assert str(caught.value).isprintable() and str(caught.value).startswith("spac: ")
    assert (outside / "text").read_text() == "precious"


def test_predictors_that_look_at_layers_are_asked_on_a_device_too(moe, outside, tmp_path, monkeypatch):
    """With the V2 runner. What they read of a drafter must be there, as with V1's."""
    monkeypatch.setattr(compatibility.drafts, "plans_drafts", lambda vllm_config: True)
    folder = write_config(tmp_path / "copy", QWEN)
    copy = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
    engine_config(moe, {"prefetch": "shadow"}, speculative_config=copy)
    with pytest.raises(ValueError, match="prefetch=shadow.*work here: there is no draft model"):
        engine_config(moe, {"prefetch": "shadow"})
    with pytest.raises(ValueError, match=r"made for .*not for this model"):  # the file; nothing is refused before it
        engine_config(moe, {"prefetch": "quasi_hidden@file=other.predictors"})


def test_a_draft_model_of_this_width_has_layers_for_the_model_s_routers(moe, tmp_path):
    narrow = write_config(tmp_path / "narrow", QWEN | {"hidden_size": QWEN["hidden_size"] // 2})
    folder = write_config(tmp_path / "parent", QWEN)
    parent = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
    engine_config(moe, {"prefetch": "draft_gate@k=2@cutoff=1"}, speculative_config=parent)
    for drafts, named in (
        (parent | {"model": str(narrow)}, "the width of this model is .*draft model.*use --spac-prefetch gate"),
        (parent | {"model": str(moe)}, "the model is its own draft model.*use --spac-prefetch shadow"),
        (NGRAM, "ngram has no layers that stand for this model's; use --spac-prefetch gate"),
    ):
        with pytest.raises(ValueError, match=f"prefetch=draft_gate .*cannot work here: .*{named}"):
            engine_config(moe, {"prefetch": "draft_gate"}, speculative_config=drafts)


def test_a_shadow_is_a_draft_model_with_the_layers_and_experts_of_the_model(moe, tmp_path):
    other = write_config(tmp_path / "other", QWEN | {"num_experts": 8})
    copy = {"method": "draft_model", "model": str(moe), "num_speculative_tokens": 2}
    engine_config(moe, {"prefetch": "shadow"}, speculative_config=copy)
    for drafts, named in (
        (copy | {"model": str(other)}, "16 experts per layer, top-4, and the draft model .*8 experts.*use a copy"),
        (NGRAM, "ngram drafts without experts like this model's"),
    ):
        with pytest.raises(ValueError, match=f"prefetch=shadow .*cannot work here: .*{named}"):
            engine_config(moe, {"prefetch": "shadow"}, speculative_config=drafts)


@pytest.mark.parametrize(
    ("spac", "named"),
    [
        (
            {"executor": "cluster@file=/nowhere/cluster.json"},
            "no cluster in .*; run vllm-spac cluster start",
        ),
        ({"executor": f"cluster@file={__file__}"}, "run chmod 600|no file of vllm-spac cluster"),
    ],
    ids=str,
)
def test_workers_that_are_not_there(moe, spac, named):
    with pytest.raises(ConfigError, match=named):
        engine_config(moe, spac)


def test_a_predictor_is_of_this_model(tmp_path):
    from vllm_spac.integration.loading import ahead

    path = tmp_path / "p"
    predictors("f" * 32, 2).save(path)
    shape = MoEShape(("0", "1"), 16, 4, {})

    host = torch.device("cpu")

    def built(name: str, shapes: list[MoEShape], model: str = "f" * 32):
        config = SpacConfig.parse({"prefetch": f"{name}@file={path}"})
        return ahead.predictor(config, ahead.predictors(config, shapes, lambda: model, Path), host)

    assert built("quasi_hidden@depth=3", [shape]).sizes.layers == 2
    for wrong, says in (
        (("gate", [shape]), r"has no predictor gate \(no router\); use one of quasi_hidden"),
        (("quasi_hidden", [shape, shape]), "needs MoE layers of one shape, this model has 2"),
        (("quasi_hidden", [shape], "e" * 32), "not for this model or revision"),
        (("quasi_hidden", [replace(shape, experts=8)]), r"2 layers of 8\)"),
        (("quasi_hidden", [replace(shape, layers=("0",))]), r"1 layers of 16\)"),
    ):
        with pytest.raises(ConfigError, match=says):
            built(*wrong)
    assert ahead.predictors(SpacConfig.parse({}), [shape], lambda: "", Path) is None


def test_what_may_be_served(moe, outside, caplog):
    """A class from outside; a trace in place of a trace, with a warning; a packed folder that cannot be written to."""
    from vllm_spac.tools.traces.synthetic import synthetic_trace

    synthetic_trace(layers=2, experts=8, top_k=2, steps=2).save(outside / "old.trace")
    with caplog.at_level("WARNING", "vllm.spac"):
        engine_config(moe, {"policy": "spac_outside:Fine", "record": "trace=old.trace"})
    assert "the trace of this engine replaces it" in caplog.text
    engine_config(moe, {"slots": "100%", "disk_dir": "/proc/x"})  # nothing is packed
    assert (outside / "text").read_text() == "precious"


def test_a_packed_folder_may_be_read_only(moe, tmp_path, monkeypatch):
    """Whether it holds all experts is known when they are loaded."""

    def refuse(**options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(preflight.tempfile, "TemporaryFile", refuse)
    with pytest.raises(ValueError, match="Read-only file system; name a writable folder"):
        engine_config(moe, {"disk_dir": str(tmp_path)})
    (tmp_path / ("0123456789abcdef" * 2)).mkdir()
    engine_config(moe, {"disk_dir": str(tmp_path)})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"pipeline_parallel_size": 2},
            "--pipeline-parallel-size 2 with --enforce-eager on a CPU (stock vLLM fails at the first request)",
        ),
        ({"data_parallel_size": 2}, "rows of other replicas reach a layer after its experts were loaded) is not"),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, "or start one server per replica with --tensor-"),
        ({"enable_expert_parallel": True}, "--enable-expert-parallel with one rank is not supported; drop --enable"),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
            "use --distributed-executor",
        ),
        ({"enable_lora": True}, "--enable-lora"),
        ({"weight_transfer_config": {"backend": "nccl"}}, "--weight-transfer-config"),
        (
            {"worker_extension_cls": "collections.OrderedDict"},
            "vllm_spac.integration.serving.worker_extension.SpacWorker",
        ),
        ({"worker_extension_cls": "spac_nowhere.X"}, "--worker-extension-cls spac_nowhere.X cannot be imported"),
        ({"worker_extension_cls": "collections.Nope"}, "--worker-extension-cls collections.Nope cannot be imported"),
        ({"worker_extension_cls": "nodots"}, "--worker-extension-cls nodots cannot be imported"),
        ({"worker_extension_cls": "os.getcwd"}, "vllm_spac.integration.serving.worker_extension.SpacWorker"),
        ({"worker_extension_cls": "."}, "cannot be imported"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(moe, options, named):
    with pytest.raises(ValueError) as caught:
        engine_config(moe, {"slots": "50%"}, **options)
    assert named in str(caught.value) and str(caught.value).isprintable()


STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp", "enforce_eager": False}
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.mark.parametrize(
    ("knobs", "options", "named"),
    [
        ({"guard": "on"}, {"speculative_config": NGRAM}, "guard=on .*own clock; use --tensor-parallel-size 1, or"),
        (
            {"speculate": "restricted", "prefetch": "gate"},
            {},
            "speculate=restricted .* with --tensor-parallel-size 2 .*; drop --spac-speculate",
        ),
        ({"slots": "9"}, EXPERTS, "more than the 8 experts of a layer"),
        (
            {"executor": "processes"},
            {},
            "executor=processes .*-parallel-size 2 .*; drop --spac-executor, or use",
        ),
        (
            {},
            STAGES | EXPERTS,
            "-size 2 with --enable-expert-parallel .no engine has run it. is not supported; drop --enable",
        ),
        ({"executor": "processes"}, STAGES | {"tensor_parallel_size": 1}, "with --pipeline-parallel-size 2 .a worker"),
        (
            {},
            STAGES | {"speculative_config": NGRAM},
            "with drafts .the last stage alone has the drafter, and stock",
        ),
        ({"record": "timeline=x"}, STAGES, "record=timeline=x .* .no stage has the layers of all, and the last alone"),
        ({}, EXPERTS | {"tensor_parallel_size": 3}, "16 experts for 3 ranks is not supported; drop --enable"),
        ({}, EXPERTS | {"tensor_parallel_size": 8}, "2 experts per rank, fewer than the 4 of a token"),
    ],
    ids=str,
)
def test_what_several_ranks_cannot_do(tmp_path, knobs, options, named):
    moe = write_config(tmp_path / "moe", QWEN | {"num_attention_heads": 24, "num_key_value_heads": 24})
    with pytest.raises(ValueError, match=named):
        engine_config(moe, knobs, **RANKS | options)


def test_what_several_ranks_can_do(moe):
    engine_config(moe, {"slots": "50%", "budget": 4}, **RANKS)
    engine_config(moe, {"slots": "8"}, **RANKS | EXPERTS)
    engine_config(moe, {"slots": "8"}, **RANKS, nnodes=2, master_addr="127.0.0.1", master_port=29511)
    with pytest.raises(ValueError, match="--nnodes 2 with plane=pointers .*; use --spac-plane slots, or use --spac-pl"):
        engine_config(moe, {"plane": "pointers"}, **RANKS, nnodes=2, master_addr="127.0.0.1")
    engine_config(moe, {}, **RANKS | {"speculative_config": NGRAM})


@pytest.mark.parametrize("zeros", [True, False])
def test_zero_points_that_vllm_loads_for_the_first_rank_alone(tmp_path, on_a_gpu, monkeypatch, zeros):
    """Its loader of ``moe_wna16`` writes them by the numbers that the model has for experts, not the rank's."""
    monkeypatch.setattr("vllm.model_executor.layers.quantization.auto_awq.AutoAWQConfig.get_min_capability", lambda: -1)
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": zeros, "version": "gemm"}
    model = write_config(tmp_path / "moe", QWEN | {"quantization_config": awq})
    options = RANKS | EXPERTS | {"quantization": "moe_wna16"}
    named = "zero points and --quantization moe_wna16 .*; drop --enable-expert-parallel.*, or use --spac-plane table"
    with pytest.raises(ValueError, match=named) if zeros else contextlib.nullcontext():
        engine_config(model, {"slots": "8", "plane": "slots"}, **options)


TOY = Path(__file__).parents[2] / "benchmarks" / "toy" / "models" / "target"  # 6 layers x 64 experts, top-8


def test_an_argument_of_the_wrong_kind_says_how_it_is_written(moe):
    with pytest.raises(ConfigError, match=r"policy=reuse@half_lives=3 \(--spac-policy\): .*half_lives=\(3,\)"):
        engine_config(moe, {"policy": "reuse@half_lives=3"})


@pytest.mark.parametrize("extra", [{}, EXPERTS | {"tensor_parallel_size": 2}], ids=str)
def test_a_share_of_the_experts_with_which_no_token_runs(extra):
    ranks = extra.get("tensor_parallel_size", 1)
    with pytest.raises(
        ConfigError, match=rf"gives \d of {384 // ranks} experts, .* needs 8 .*; use --spac-slots (\d)%"
    ) as said:
        engine_config(TOY, {"slots": "1%"}, **extra)
    least = int(re.search(r"use --spac-slots (\d)% or more", str(said.value))[1])
    engine_config(TOY, {"slots": f"{least}%"}, **extra)
    with pytest.raises(ConfigError, match="one token"):
        engine_config(TOY, {"slots": f"{least - 1}%"}, **extra)


def test_a_kv_cache_that_is_larger_than_memory(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # goes before the flag
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes.* takes 1024\.00 GiB, and [\d.]+ GiB of RAM"):
        engine_config(TOY, {}, kv_cache_memory_bytes=1 << 40)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1024")
    with pytest.raises(ConfigError, match=r"VLLM_CPU_KVCACHE_SPACE\) takes 1024\.00 GiB"):
        engine_config(TOY, {})
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    engine_config(TOY, {}, kv_cache_memory_bytes=1 << 30)
    monkeypatch.setattr(preflight, "available_host_bytes", lambda: 1 << 20)
    with pytest.raises(
        ConfigError, match=r"the KV cache of 4 requests of --max-model-len 128 takes .*, and 1\.0 MiB of"
    ):
        engine_config(TOY, {})


def test_a_dense_model(tmp_path):
    dense = {k: v for k, v in QWEN.items() if "expert" not in k and not k.startswith(("moe_", "norm_topk"))}
    model = write_config(tmp_path / "dense", {**dense, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    with pytest.raises(ValueError, match="dense model.*drop --plugin spac"):
        engine_config(model, {})


@pytest.fixture
def on_a_gpu(monkeypatch) -> None:
    """The checks of quantised experts take this machine for one with a GPU."""
    monkeypatch.setattr(device, "is_cpu", lambda: False)


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    ("quantisation", "options", "named"),
    [
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic"},
            {},
            r"one scale per tensor.*\(fp8\).*by block or channel",
        ),
        ({"quant_method": "mxfp4"}, {}, r"\(mxfp4\): vLLM's kernel reads no slots; use --spac-plane table"),
        (NVFP4, {}, r"NVFP4 experts \(modelopt\): vLLM's kernel reads no slots; use --spac-plane table"),
        (
            GPTQ,
            {"quantization": "auto_gptq"},
            "--quantization auto_gptq runs .*; add --quantization moe_wna16 --moe-backend triton",
        ),
        (GPTQ | {"sym": False}, {"quantization": "moe_wna16"}, r"zero points \(sym=false\)"),
        (None, {"quantization": "fp8_per_block"}, "--quantization fp8_per_block quantises experts while.*drop it"),
    ],
    ids=["scales of tensors", "MXFP4", "NVFP4", "GPTQ for Marlin", "GPTQ with zero points", "while loading"],
)
def test_quantised_models(tmp_path, on_a_gpu, quantisation, options, named):
    facts = QWEN if quantisation is None else QWEN | {"quantization_config": quantisation}
    with pytest.raises(ValueError, match=named):
        engine_config(write_config(tmp_path / "model", facts), {}, **options)


@pytest.mark.parametrize(
    ("quantisation", "options", "spac"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, {}, {}),
        (GPTQ, {"quantization": "moe_wna16"}, {}),
        (GPTQ, {}, {}),
        (NVFP4, {}, {"executor": "processes@workers=2"}),
    ],
    ids=["FP8", "GPTQ", "GPTQ, nothing named", "NVFP4 at workers, which slots cannot hold"],
)
def test_quantised_models_that_their_layers_decide_on(tmp_path, on_a_gpu, quantisation, options, spac):
    engine_config(write_config(tmp_path / "model", QWEN | {"quantization_config": quantisation}), spac, **options)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("amx", "spac", "named"),
    [
        (False, {}, None),
        (False, {"plane": "pointers", "store": "host"}, None),
        (
            False,
            {"plane": "slots"},
            r"\(fp8\), for which stock vLLM has no kernel on a CPU without AMX; use --spac-plane",
        ),
        (True, {"plane": "slots"}, None),
    ],
    ids=["without AMX", "pointers without AMX", "slots without AMX", "slots with AMX"],
)
def test_quantised_models_on_a_cpu(tmp_path, monkeypatch, amx, spac, named):
    """Before anything is loaded, and with what works here."""
    monkeypatch.setattr(device, "is_cpu", lambda: True)
    monkeypatch.setattr(device, "runs_quantised_experts", lambda: amx)
    with contextlib.nullcontext() if named is None else pytest.raises(ValueError, match=named):
        engine_config(write_config(tmp_path / "model", QWEN | {"quantization_config": FP8}), spac)
    spared = FP8 | {"modules_to_not_convert": ["experts"]}
    engine_config(write_config(tmp_path / "spared", QWEN | {"quantization_config": spared}), spac)
    if not amx:  # and no layer can be built for our kernels
        monkeypatch.setenv(patches.WITHOUT, patches.SUPPORTED)
        with pytest.raises(ValueError, match="no kernel on a CPU without AMX"):
            engine_config(tmp_path / "model", spac)


@pytest.mark.parametrize(
    ("quantisation", "options", "named"),
    [
        (
            FP8 | {"weight_block_size": [64, 64]},
            {},
            r"FP8 experts by blocks of \[64, 64\] \(fp8\): vLLM has no kernel for",
        ),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, {}, "FP8 experts without scales by block"),
        (GPTQ | {"bits": 8}, {}, "experts of 8 bits .*vLLM has no kernel for a CPU; use --spac-plane table"),
        (GPTQ, {"quantization": "moe_wna16"}, "--quantization moe_wna16 selects kernels of a GPU; drop it on a CPU"),
        (NVFP4, {}, "quantised experts .*vLLM has no kernel for a CPU; use --spac-plane table"),
    ],
    ids=["FP8 by other blocks", "FP8 by tensors", "GPTQ of 8 bits", "GPTQ for a GPU", "NVFP4"],
)
def test_quantised_models_that_no_kernel_of_a_cpu_runs(tmp_path, monkeypatch, quantisation, options, named):
    monkeypatch.setattr(device, "is_cpu", lambda: True)
    monkeypatch.setattr(device, "runs_quantised_experts", lambda: True)
    with pytest.raises(ValueError, match=named):
        engine_config(
            write_config(tmp_path / "model", QWEN | {"quantization_config": quantisation}),
            {"plane": "slots"},
            **options,
        )


def guarded(v2, executor, asynchronous, ranks, method="eagle3"):
    """vLLM's configuration, as far as the guard and checks of drafts look at it."""
    plain = dict.fromkeys(("parallel_drafting", "use_local_argmax_reduction", "use_heterogeneous_vocab"), False)
    return SimpleNamespace(
        use_v2_model_runner=v2,
        speculative_config=None if method is None else SimpleNamespace(method=method, **plain),
        parallel_config=SimpleNamespace(
            distributed_executor_backend=executor,
            pipeline_parallel_size=1,
            tensor_parallel_size=ranks,
            enable_expert_parallel=False,
        ),
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
    )


@pytest.mark.parametrize(
    ("v2", "executor", "asynchronous", "ranks", "remedy"),
    [
        (True, "uni", True, 1, None),
        (True, "mp", False, 1, "set VLLM_USE_V2_MODEL_RUNNER=0, or use --spac-guard off"),
        (False, "mp", False, 1, None),
        (False, "uni", True, 1, "--no-async-scheduling, or use --spac-guard off"),
        (False, "mp", False, 2, "own clock; use --tensor-parallel-size 1, or use --spac-guard off"),
        (True, "mp", False, 2, "own clock; use --tensor-parallel-size 1, or use --spac-guard off"),
    ],
)
def test_the_guard_where_draft_lengths_are_fixed(v2, executor, asynchronous, ranks, remedy):
    config = guarded(v2, executor, asynchronous, ranks)
    for config_of in (SpacConfig(), SpacConfig(guard="off")):  # on by itself, it is left out with a line in the log
        compatibility.check(config_of, config, gpu=False)
    if remedy is not None:
        with pytest.raises(ValueError, match=remedy):
            compatibility.check(SpacConfig(guard="on"), config, gpu=False)
        config.speculative_config = None
    compatibility.check(SpacConfig(guard="on"), config, gpu=False)


def test_on_a_gpu_drafts_can_be_planned_in_the_engine_s_process(monkeypatch):
    monkeypatch.setattr(device, "is_cpu", lambda: False)
    reason = compatibility.drafts.unguarded(guarded(True, "mp", False, 1))
    assert reason.remedy.text == "add --distributed-executor-backend uni"


@pytest.mark.parametrize(
    ("knobs", "v2", "method", "remedy"),
    [
        ({}, False, "eagle3", None),
        ({}, False, None, None),
        ({}, False, "ngram", "ngram gives no probabilities.*use EAGLE.*or use --spac-budget 16$"),
        ({}, True, "eagle3", None),
        ({"policy": "utility"}, True, "eagle3", "V2 keeps the probabilities.*--spac-policy reuse"),
        ({"policy": "utility@upper=1"}, False, "eagle3", None),
        ({"policy": "utility", "plane": "pointers"}, False, "eagle3", "policy=utility.*--spac-policy reuse"),
    ],
)
def test_votes_that_cannot_be_weighted(knobs, v2, method, remedy):
    config = guarded(v2, None, False, 1, method)
    config.compilation_config = SimpleNamespace(cudagraph_mode=None)
    compatibility.check(SpacConfig(**knobs), config, gpu=False)
    if remedy is None:
        compatibility.check(SpacConfig(**knobs, budget="16@votes=path"), config, gpu=False)
    else:
        with pytest.raises(ValueError, match=f"spac: votes=path of budget=16@votes=path .--spac-budget.*{remedy}"):
            compatibility.check(SpacConfig(**knobs, budget="16@votes=path"), config, gpu=False)


def test_nodes_of_trees_have_no_routing():
    """Of an EAGLE head, which has no experts; a shadow would have to be the draft model in its place."""
    config = guarded(False, None, False, 1)
    for name, lacks in (("shadow", "drafts without experts"), ("draft_gate", "has no layers that stand")):
        with pytest.raises(ValueError, match=f"{name}.*here: eagle3 {lacks}.*, or drop --spac-prefetch"):
            compatibility.check(SpacConfig(prefetch=name, tree=8), config, gpu=False)


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
    from vllm_spac.config.config import SpacConfig

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
        ({"activation": "relu2"}, "the activation relu2"),
        ({"activation": "swigluoai", "limit": 5.0}, "swigluoai with limit 5.0"),
        ({"limit": 7.0}, "silu with limit 7.0"),
        ({"activation": "swigluoai_uninterleave", "beta": 0.5}, "swigluoai_uninterleave with beta 0.5"),
        ({"activation": "swiglustep", "limit": 7.0}, "swiglustep with limit 7.0"),
        ({"weighs_input": True}, "router weights on the input"),
        ({"quantised": "Fp8MoEMethod"}, r"the quantised experts \(Fp8MoEMethod\)"),
    ],
    ids=str,
)
def test_layers_that_our_kernels_do_not_compute(facts, named):
    from vllm_spac.execution.base import LayerFacts
    from vllm_spac.execution.device.pointers_execution import PointerExecution
    from vllm_spac.execution.host.slots_execution import SlotExecution

    plain = LayerFacts("layers.3", "silu")
    PointerExecution.check_layer(plain)
    PointerExecution.check_layer(replace(plain, limit=10.0))  # DeepSeek-V4, GLM-5.3
    openai = replace(plain, activation="swigluoai_uninterleave", limit=7.0, alpha=1.702, beta=1.0)
    PointerExecution.check_layer(openai)  # MiniMax-M3
    with pytest.raises(ValueError, match=f"{named}.* of layers.3; use --spac-plane slots"):
        PointerExecution.check_layer(replace(plain, **facts))
    SlotExecution.check_layer(replace(plain, **facts))


def test_a_worker_extension_built_on_ours_is_kept(moe):
    name = f"{__name__}.OwnExtension"
    from vllm_spac.integration.serving import worker_extension

    class OwnExtension(worker_extension.SpacWorker):
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
        (["--plugin", "spac", "--spac-colour", "1"], "there is no flag --spac-colour"),
        (["--plugin", "spac", "--spac-slot", "25%"], "there is no flag --spac-slot; did you mean --spac-slots?"),
        (["--plugin", "spac", "--spac-execution", "slots"], "--spac-execution is gone; use --spac-plane"),
        (["--plugin", "spac", "--spac-executor", "local@per_layer=1"], "local has no argument 'per_layer'"),
        (["--plugin", "spac", "--spac-lookahead", "1"], "no flag --spac-lookahead; vllm-spac knobs lists all"),
        (["--plugin", "spac", "--spac_slot=25%"], "did you mean --spac-slots?"),
        (["--plugin", "spac", "--spac-host-memory", "32"], "did you mean 32GiB?"),
    ],
    ids=str,
)
def test_bad_flags_end_with_a_usage_error(flags, said, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*flags)
    assert caught.value.code not in (0, None)
    assert said in capsys.readouterr().err + str(caught.value)


def test_flags_of_vllm_may_be_abbreviated_as_before():
    assert parse("--max-model-l", "64").max_model_len == 64


def test_a_flag_without_the_plugin_is_not_ignored():
    with pytest.raises(SystemExit, match="--spac-slots needs --plugin spac"):
        parse("--spac-slots", "25%")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (['{"spac": {"slot": 3}}'], "unknown knob 'slot'"),
        (['{"spac": 5}'], "must be a mapping of knobs"),
        (['{"spac": "x\\u001b\\n"}'], "must be a mapping of knobs"),
        (["[]", "--plugin", "spac"], "--additional-config must be a JSON object"),
    ],
    ids=str,
)
def test_bad_keys_on_the_command_line_are_one_line(flags, said):
    with pytest.raises(SystemExit, match=said) as caught:
        parse("--additional-config", *flags)
    assert str(caught.value).isprintable()


# --- before weights are read ------------------------------------------------------------------------------------------


def _weights(folder: Path, names: int = 16, layers: int = 2) -> Path:
    """The experts of ``QWEN``, of which a layer has 16."""
    made = {
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight": torch.zeros(64, 128, dtype=torch.bfloat16)
        for layer in range(layers)
        for expert in range(names)
        for kind in ("gate", "up", "down")
    }
    save_file(made, folder / "model.safetensors")
    return folder / "model.safetensors"


def test_a_file_of_weights_that_is_cut_off(moe):
    path = _weights(moe)
    engine_config(moe, {})
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(UnsupportedError, match=r"model.safetensors is not a complete .*experts.*download or copy it"):
        engine_config(moe, {})


def test_a_file_of_weights_that_the_index_names_and_that_is_not_there(moe):
    (moe / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    with pytest.raises(UnsupportedError, match=r"model-2.safetensors is not .*No such file"):
        engine_config(moe, {})


def test_a_tensor_of_the_index_that_a_complete_file_lacks(moe):
    path, index = _weights(moe), moe / "model.safetensors.index.json"
    names = dict.fromkeys(headers.entries(path), path.name)
    index.write_text(json.dumps({"weight_map": names}))
    engine_config(moe, {})
    index.write_text(json.dumps({"weight_map": names | {"model.norm.weight": path.name}}))
    with pytest.raises(UnsupportedError, match=r"model.safetensors lacks 'model.norm.weight', .*; download both again"):
        engine_config(moe, {})


def test_a_folder_without_weights(moe):
    (moe / "model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match=r"moe has no weight files .*; download the checkpoint completely"):
        engine_config(moe, {})
    (moe / "pytorch_model.bin").write_bytes(b"")
    engine_config(moe, {})


@pytest.mark.parametrize("text", ["{ not json", "[]"])
def test_a_config_that_is_none(moe, text):
    (moe / "config.json").write_text(text)
    with pytest.raises(UnsupportedError, match=r"spac: \S+/config.json (is no mapping|cannot be read.*); download it"):
        engine_config(moe, {})


@pytest.mark.parametrize("name", ["./nonexist", "/nonexist/model", "../nonexist"])
def test_a_path_to_nothing(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedError, match=f"spac: {name} is not a folder on this machine; check the path"):
        engine_config(name, {})


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        ("/nonexist/head", "is not a folder on this machine; check the path"),
        ("{tmp}", "is a folder without config.json"),
    ],
)
def test_a_drafter_that_is_not_there(moe, tmp_path, draft, says):
    drafts = {"method": "eagle3", "model": draft.format(tmp=tmp_path / "empty"), "num_speculative_tokens": 2}
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedError, match=f"spac: --speculative-config: {drafts['model']} {says}"):
        engine_config(moe, {}, speculative_config=drafts)


def test_a_name_that_the_hub_does_not_give():
    said = r"spac: nobody/nothing is not in the .* cache.*check the name"
    with pytest.raises(UnsupportedError, match=said) as caught, preflight.naming_model("nobody/nothing"):
        raise OSError("We couldn't connect to 'https://huggingface.co'\nCheck your internet connection")
    assert "Check your internet" not in str(caught.value)
    with pytest.raises(OSError, match="a disk"), preflight.naming_model("/a/folder"):
        raise OSError("a disk")


def test_a_drafter_that_the_hub_does_not_give():
    from vllm.transformers_utils import config

    assert preflight.NO_MODEL in inspect.getsource(config.get_config)
    drafts = {"method": "eagle3", "model": "nobody/head"}
    said = "spac: --speculative-config: nobody/head is not in the .* cache.*check the name"
    with pytest.raises(UnsupportedError, match=said), preflight.naming_drafter(drafts):
        raise ValueError(f"1 validation error\n  Value error, {preflight.NO_MODEL} 'nobody/head'.\nPlease verify")
    with pytest.raises(ValueError, match="another/model"), preflight.naming_drafter(drafts):
        raise ValueError(f"{preflight.NO_MODEL} 'another/model'.")


def test_a_kv_cache_that_one_request_does_not_fit_into(moe, monkeypatch):
    """A token has 2 layers x keys and values x 2 heads x 32 x 2 bytes, a request 128 tokens."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    whole = 128 * 512
    engine_config(moe, {}, kv_cache_memory_bytes=whole)
    with pytest.raises(ConfigError, match=rf"has {whole - 1} bytes, .* 128 takes {whole}; use --kv-cache-memory-bytes"):
        engine_config(moe, {}, kv_cache_memory_bytes=whole - 1)


def test_the_experts_of_an_mtp_head_need_room_on_the_disk(moe, tmp_path, monkeypatch):
    """The head has one layer of the checkpoint's three."""
    _weights(moe, layers=3)
    each, folder = 3 * 64 * 128 * 2 + 4096, tmp_path / "packed"
    room = {"free": (256 << 20) + 48 * each - 1}
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(**room))
    config = SpacConfig(slots="50%", store="disk", disk_dir=str(folder))
    vllm_config = engine_config(moe, {"slots": "50%", "store": "disk", "disk_dir": str(folder)})
    vllm_config.speculative_config = SimpleNamespace(method="mtp", draft_model_config=vllm_config.model_config)
    with pytest.raises(StoreError, match="packing 48 experts needs"):
        preflight._check_disk(config, vllm_config)
    room["free"] += 1
    preflight._check_disk(config, vllm_config)
    room["free"] -= 16 * each
    vllm_config.speculative_config.method = "eagle3"
    preflight._check_disk(config, vllm_config)


def test_a_disk_without_room_for_what_is_not_packed_yet(moe, tmp_path, monkeypatch):
    _weights(moe)
    each, folder = 3 * 64 * 128 * 2 + 4096, tmp_path / "packed"
    free = (256 << 20) + 32 * each - 1
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    knobs = {"slots": "50%", "store": "disk", "disk_dir": str(folder)}
    with pytest.raises(StoreError, match=r"packing 32 experts needs .*--spac-disk-dir DIR"):
        engine_config(moe, knobs)
    engine_config(moe, knobs | {"slots": "100%"})
    layer = folder / ("0" * 32) / "layer-000"
    layer.mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    (layer / "expert-0000.safetensors").write_bytes(bytes(each))
    engine_config(moe, knobs)


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"cpu_kernel": "looped_experts:Looped"}, ["cpu_kernel=looped_experts:Looped", "--spac-cpu-kernel native"]),
        ({"cpu_kernel": "native", "plane": "table"}, ["--spac-plane", "use --spac-cpu-kernel"]),
        ({"cpu_kernel": "native", "plane": "pointers"}, ["--spac-plane", "use --spac-cpu-kernel"]),
    ],
    ids=str,
)
def test_a_cpu_kernel_that_cannot_read_these_experts(moe, knobs, named):
    with pytest.raises(UnsupportedError) as caught:
        engine_config(moe, AUTO | knobs)
    assert all(part in str(caught.value) for part in named), caught.value


@pytest.mark.parametrize("plane", ["slots", "table", "pointers"])
def test_cpu_experts_where_nothing_was_compiled(moe, monkeypatch, plane):
    """vLLM's kernel needs none of ours; a kernel that answers no device serves where the host decides."""
    monkeypatch.setattr(compatibility, "missing", lambda: "no compiler")
    knobs = AUTO | {"plane": plane}
    if plane == "slots":
        engine_config(moe, knobs)
        return
    with pytest.raises(UnsupportedError, match="not compiled .*; install a C compiler, .* or drop --spac-cpu-experts"):
        engine_config(moe, knobs)
    knobs["cpu_kernel"] = "looped_experts:Silent"
    if plane == "table":
        engine_config(moe, knobs)
        return
    with pytest.raises(
        UnsupportedError, match="Silent .* answers no requests of a device, .*; use --spac-cpu-kernel simd"
    ):
        engine_config(moe, knobs)
    engine_config(moe, knobs | {"cpu_kernel": "looped_experts:Looped"})


def test_a_drafter_that_is_no_head(moe):
    drafter = {"method": "eagle3", "model": str(moe), "num_speculative_tokens": 2}
    with pytest.raises(UnsupportedError) as caught:
        engine_config(moe, {}, speculative_config=drafter)
    said = str(caught.value)
    assert "as eagle3 head" in said and "Eagle3Qwen3MoeForCausalLM" in said and len(said) < 500
    assert "drop --speculative-config" in said


def test_a_tree_bounds_the_requests_that_nobody_chose():
    """A request has 17 rows; a number that the user chose is refused, with one that fits."""
    drafts = {"method": "eagle3", "model": str(TARGET.parent / "eagle3")}
    options = {"speculative_config": drafts, "max_num_batched_tokens": 256}
    made = engine_config(TARGET, {"slots": "25%", "tree": 16}, **options)
    assert made.scheduler_config.max_num_seqs == 256 // 17
    with pytest.raises(UnsupportedError, match="use --max-num-seqs 15"):
        engine_config(TARGET, {"slots": "25%", "tree": 16}, max_num_seqs=16, **options)


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "of_gguf").mkdir()
    (tmp_path / "of_gguf" / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    (tmp_path / "renamed").write_bytes(b"GGUF")
    for name, says in (
        ("of_gguf/a.gguf", "is a GGUF file"),
        ("renamed", "is a GGUF file"),
        ("of_gguf", "a folder of GGUF files"),
        ("empty", "a folder without config.json"),
    ):
        with pytest.raises(UnsupportedError, match=f"{says}.*name a folder with config.json"):
            engine_config(tmp_path / name, {})


# --- as a user sees it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--plugin", "spac", "--spac-prefetch", "neural@file=/not/there"],
            "prefetch=/not/there (--spac-prefetch)",
        ),
        (["--additional-config", '{"spac": 5}'], "must be a mapping of knobs"),
    ],
    ids=["preflight", "arguments"],
)
def test_vllm_serve_ends_with_one_line(moe, flags, said):
    vllm = Path(sys.executable).with_name("vllm")
    done = forked.run(
        [vllm, "serve", moe, "--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "128", *flags]
    )
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("vllm: error: spac: ") and said in last


FAILING = """
from vllm_spac.decisions.policies.lru import LRU
from vllm_spac.errors import StoreError


class Failing(LRU):
    @classmethod
    def of(cls, context, **knobs):
        raise StoreError("spac: the disk is on fire; put it out")
"""


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_vllm_serve_ends_with_the_sentence_of_its_engine(tmp_path, level):
    """A policy of a user's is asked to serve when the weights are there, in the engine's process."""
    (tmp_path / "spac_failing.py").write_text(FAILING)
    model = write_config(tmp_path / "moe", QWEN)
    command = [Path(sys.executable).with_name("vllm"), "serve", model, "--skip-tokenizer-init", "--enforce-eager"]
    command += ["--max-model-len", "128", "--load-format", "dummy", "--plugin", "spac", "--spac-slots", "50%"]
    command += ["--spac-store", "host", "--spac-policy", "spac_failing:Failing"]
    changed = {"VLLM_LOGGING_LEVEL": level, "PYTHONPATH": str(tmp_path)}
    environment = os.environ | changed | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    said, last = done.stdout + done.stderr, done.stderr.strip().splitlines()[-1]
    assert "the disk is on fire" in said
    assert (last == "vllm: error: spac: the disk is on fire; put it out") is (level == "INFO"), done.stderr
    assert ("Traceback" in said) is (level == "DEBUG"), said


FAILING_LATER = """
import os
from vllm_spac.decisions.policies.lru import LRU
from vllm_spac.errors import StoreError


class Failing(LRU):
    def begin_layer(self, layer):
        if os.path.exists(os.environ["SPAC_TEST_FIRE"]):
            raise StoreError("spac: the disk is on fire; put it out")
"""


def test_a_server_ends_with_the_sentence_of_a_step_that_failed(tmp_path, monkeypatch):
    (tmp_path / "spac_failing.py").write_text(FAILING_LATER)
    fire = tmp_path / "fire"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SPAC_TEST_FIRE", str(fire))
    flags = ["--plugin", "spac", "--spac-slots", "25%", "--spac-store", "host"]
    server = Server(tmp_path, *flags, "--spac-policy", "spac_failing:Failing")
    try:
        server.wait()
        assert server.complete("import os\n")
        fire.touch()
        with pytest.raises(InternalServerError):
            server.complete("import os\n")
        server.process.wait(PATIENCE)
    finally:
        server.stop()
    log = server.log.read_text()
    assert "Traceback" not in log, log
    own = [line for line in log.splitlines() if line.startswith("vllm: error: ")]
    assert own == ["vllm: error: spac: the disk is on fire; put it out"]
    assert "EngineCore encountered a fatal error: spac: the disk is on fire" in log


def test_a_server_ends_with_the_sentence_of_a_kv_cache_without_room_for_a_tree(tmp_path, monkeypatch):
    """Of a cache of a named type, blocks are counted once it is set up."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    head = {"method": "eagle3", "model": str(TARGET.parent / "eagle3")}
    command = [Path(sys.executable).with_name("vllm"), "serve", TARGET, "--enforce-eager", "--max-model-len", "256"]
    command += ["--kv-cache-dtype", "bfloat16", "--kv-cache-memory-bytes", "3000000", "--speculative-config"]
    command += [json.dumps(head), "--plugin", "spac", "--spac-slots", "25%", "--spac-store", "host"]
    environment = {name: value for name, value in os.environ.items() if name not in OF_THE_TESTS}
    command += ["--spac-tree", "16", "--max-num-seqs", "4"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "Traceback" not in said, said
    (last,) = [line for line in said.splitlines() if line.startswith("vllm: error: ")]
    assert "trees (--spac-tree) of one request need 34 of 25 KV cache blocks" in last
    assert "requests at once" not in said


def test_an_offline_llm_raises_one_line(moe):
    from vllm import LLM

    with pytest.raises(ConfigError, match=r"policy='spac_nowhere:X' \(--spac-policy\)") as caught:
        LLM(str(moe), skip_tokenizer_init=True, additional_config={"spac": {"policy": "spac_nowhere:X"}})
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("cpu", "tree", "drafts", "warned"),
    [(True, 0, True, True), (True, 16, True, False), (True, 0, False, False), (False, 0, True, False)],
)
def test_chains_of_drafts_warn_of_sampling_on_a_cpu(monkeypatch, caplog, cpu, tree, drafts, warned) -> None:
    monkeypatch.setattr(preflight.device, "is_cpu", lambda: cpu)
    config = SimpleNamespace(speculative_config=SimpleNamespace() if drafts else None)
    preflight.warn_of_sampling(SpacConfig(tree=tree), config)
    assert ("temperature > 0" in caplog.text) == warned


@pytest.mark.parametrize(
    ("name", "value", "warned"),
    [
        ("OMP_WAIT_POLICY", "active", True),
        ("OMP_WAIT_POLICY", "passive", False),
        ("GOMP_SPINCOUNT", "infinity", True),
        ("GOMP_SPINCOUNT", "100000001", True),
        ("GOMP_SPINCOUNT", "300000", False),
        ("KMP_BLOCKTIME", "1", False),
        ("KMP_BLOCKTIME", "", False),
        ("OMP_NUM_THREADS", "infinity", False),
    ],
)
def test_idle_threads_that_spin_are_warned_of(caplog, name, value, warned) -> None:
    preflight.warn_of_spinning({name: value})
    assert (f"{name}={value}: idle OpenMP threads" in caplog.text) == warned


@pytest.mark.parametrize(
    ("environment", "warned"),
    [
        ({}, False),
        ({"OMP_NUM_THREADS": "1"}, True),
        ({"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"}, True),
        ({"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}, False),
    ],
)
def test_n_grams_that_take_more_threads_than_were_asked_for_are_warned_of(caplog, environment, warned) -> None:
    preflight.warn_of_numba(environment)
    assert ("set NUMBA_NUM_THREADS=1 too" in caplog.text) == warned
