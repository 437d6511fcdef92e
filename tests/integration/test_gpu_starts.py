"""Starts on GPUs that people have: each is accepted, or refused with a remedy with which it is accepted.

A start is the command line that a user types, the headers of a published model and a machine. It goes through vLLM's
parser, the plugin's defaults and checks for that GPU, and vLLM's own configuration of an engine; no worker starts, and
no weight is there. A refusal's first remedies are followed, as its text has them.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from vllm_spac.config.config import SpacConfig, config_of
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import SpacError
from vllm_spac.storage import host
from vllm_spac.storage.checkpoint.published import published
from vllm_spac.storage.host import HostStore

GIB = 1 << 30
MOST_REMEDIES = 3
TOY = Path(__file__).parents[2] / "benchmarks" / "toy" / "models"


class Box(NamedTuple):
    """A machine: its GPU as vLLM's platform reports it, and GiB of memory of both."""

    name: str
    capability: tuple[int, int]
    memory: int
    pinned: bool = True
    unified: bool = True
    host: int = 1024


RTX3090 = Box("NVIDIA GeForce RTX 3090", (8, 6), 24)
RTX4090 = Box("NVIDIA GeForce RTX 4090", (8, 9), 24)
RTX5090 = Box("NVIDIA GeForce RTX 5090", (12, 0), 32)
H200 = Box("NVIDIA H200", (9, 0), 141)
WSL = RTX4090._replace(pinned=False, unified=False)
CARDS = (RTX3090, RTX4090, RTX5090)

SMALL = "Qwen/Qwen3-30B-A3B"
FORMATS = (SMALL, "Qwen/Qwen3-30B-A3B-FP8", "Qwen/Qwen3-30B-A3B-GPTQ-Int4", "casperhansen/mixtral-instruct-awq")
FORMATS += ("openai/gpt-oss-120b", "zai-org/GLM-4.5-Air-FP8")


def configs() -> dict[str, dict]:
    """``config.json`` of the published models, and of a hybrid one, one in NVFP4, and DeepSeek's R1."""
    import transformers

    hybrid = transformers.Qwen3NextConfig(dtype="bfloat16").to_dict() | {"architectures": ["Qwen3NextForCausalLM"]}
    nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    r1 = transformers.DeepseekV3Config(dtype="bfloat16").to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    return {
        **published(),
        "hybrid": hybrid,
        "nvfp4": published()[SMALL] | {"quantization_config": nvfp4},
        "R1": r1 | {"quantization_config": fp8},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    known, made = configs(), {}

    def get(model: str) -> Path:
        if model not in made:
            made[model] = tmp_path_factory.mktemp("model")
            (made[model] / "config.json").write_text(json.dumps(known[model]))
        return made[model]

    return get


@contextmanager
def on(box: Box, v2: bool) -> Iterator[None]:
    """The plugin sees this GPU; vLLM builds its configuration for this CPU."""
    from vllm import platforms
    from vllm.platforms.interface import DeviceCapability

    from vllm_spac.integration import preflight, store_choice
    from vllm_spac.integration.hooks import device, drafts, graphs
    from vllm_spac.integration.loading import fast_memory
    from vllm_spac.integration.stepping import tree_arguments as trees

    facts = device.DeviceFacts(box.name, True, box.capability, box.pinned, box.unified)
    found = DeviceCapability(*box.capability)
    with pytest.MonkeyPatch.context() as patch:
        for module in (device, fast_memory, graphs):
            patch.setattr(module, "is_cpu", lambda: False)
        patch.setattr(device, "query", lambda: facts)
        patch.setattr(device, "total_memory", lambda: box.memory * GIB)
        patch.setattr(store_choice, "available_host_bytes", lambda: box.host * GIB)
        patch.setattr(drafts, "plans_drafts", lambda config: v2)
        patch.setattr(preflight, "check_weights", lambda vllm_config: None)
        for module, name in ((trees, "request"), (preflight, "check_engine")):
            patch.setattr(module, name, partial(claiming, getattr(module, name)))
        patch.setattr(
            type(platforms.current_platform),
            "get_device_capability",
            classmethod(lambda cls, device_id=0: found),
        )
        yield


def claiming(check: Callable, *args: object) -> None:
    """Runs a check that asks the platform itself."""
    from vllm import platforms

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(platforms.current_platform), "is_cpu", lambda self: False)
        check(*args)


class Start:
    """A command on a machine, accepted.

    Attributes:
        args: vLLM's arguments, with what the plugin has set.
        spac: None: stock vLLM serves the model.
    """

    def __init__(self, box: Box, model: Path, flags: str, v2: bool = True) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.plugins import load_general_plugins
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        load_general_plugins()
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        line = ["--model", str(model), "--skip-tokenizer-init", "--plugin", "spac", *shlex.split(flags)]
        with on(box, v2):
            self.args = EngineArgs.from_cli_args(parser.parse_args(line))
            self.config = self.args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        self.spac: SpacConfig | None = config_of(self.config.additional_config)


def accepted(box: Box, model: Path, flags: str, tmp_path: Path, v2: bool = True) -> tuple[Start, list[str]]:
    """Follows remedies until a start is accepted; returns it and what was refused before."""
    refused: list[str] = []
    while True:
        try:
            return Start(box, model, flags, v2), refused
        except (SpacError, SystemExit) as error:
            said = str(error) or str(error.__cause__)
            assert len(refused) < MOST_REMEDIES and said not in refused, f"{flags}: {said}; before: {refused}"
            refused.append(said)
            if said.endswith("; drop VLLM_USE_V2_MODEL_RUNNER=0"):
                v2 = True
            else:
                flags = remedied(flags, said, tmp_path)


def remedied(flags: str, said: str, tmp_path: Path) -> str:
    """The command line with the first remedy of a refusal: what it adds, uses or drops."""
    remedy = re.split(r", or |; or | or ", said.rpartition("; ")[2])[0]
    words, changed = shlex.split(flags), False
    for name in re.findall(r"(?:drop|without) ((?:--[\w-]+(?: and )?)+)", remedy):
        for dropped in name.split(" and "):
            words, changed = without(words, dropped.strip()), True
    for name, value in re.findall(r"(--[\w-]+)(?: ('[^']*'|[\w.%@=/\"-]+))?", re.sub(r"(drop|without) .*", "", remedy)):
        given = [] if not value or value.startswith("--") else [value.strip("'").replace("DIR", str(tmp_path))]
        words, changed = [*without(words, name), name, *given], True
    assert changed, f"no remedy: {said}"
    return shlex.join(words)


def without(words: list[str], name: str) -> list[str]:
    if name not in words:
        return words
    at = words.index(name)
    valued = at + 1 < len(words) and not words[at + 1].startswith("--")
    return words[:at] + words[at + 1 + valued :]


# Stock's, see ``test_whole_models``.
FITS = {("Qwen/Qwen3-30B-A3B-GPTQ-Int4", box) for box in CARDS} | {("casperhansen/mixtral-instruct-awq", RTX5090)}


@pytest.mark.parametrize("box", CARDS, ids=lambda box: box.name)
@pytest.mark.parametrize("model", [*FORMATS, "hybrid", "R1"])
def test_the_default_command_serves_each_format_on_each_card(box: Box, model: str, folder, tmp_path) -> None:
    start, refused = accepted(box, folder(model), "", tmp_path)
    assert refused == [], "nobody named a flag"
    assert start.args.max_model_len == -1, "requests are shortened to what the KV cache holds"
    assert (start.spac is None) is ((model, box) in FITS)
    if start.spac is not None:
        assert start.spac.plane == "pointers" and start.spac.store_on("cuda") == "host"
        assert graphs_of(start) == "FULL_DECODE_ONLY"


def graphs_of(start: Start) -> str | None:
    mode = start.args.compilation_config.cudagraph_mode
    return None if mode is None else mode.name


def test_four_bits_of_a_blackwell_card(folder, tmp_path) -> None:
    start, refused = accepted(RTX5090, folder("nvfp4"), "--spac-slots 25%", tmp_path)
    assert refused == [] and start.spac is not None and start.spac.plane == "pointers"
    assert start.args.moe_backend == "marlin"


@pytest.mark.parametrize("model", [SMALL, "Qwen/Qwen3-30B-A3B-FP8", "hybrid"])
def test_a_system_that_pins_no_memory_reads_from_a_disk(model: str, folder, tmp_path) -> None:
    """WSL2, or a container without the right to."""
    start, refused = accepted(WSL, folder(model), "", tmp_path)
    assert start.spac is not None and start.spac.store_on("cuda") == "disk" and start.spac.plane == "slots"
    (said,) = refused
    assert "pinned" in said and "--spac-store disk" in said


@pytest.mark.parametrize("flags", ["--spac-plane pointers", "--spac-plane pointers --spac-cpu-experts auto"])
def test_a_plane_that_such_a_system_has_not(flags: str, folder, tmp_path) -> None:
    start, refused = accepted(WSL, folder(SMALL), flags, tmp_path)
    assert start.spac is not None and refused and start.spac.store_on("cuda") == "disk"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--data-parallel-size 2", "--data-parallel-size above 1"),
        ("--enable-expert-parallel", "--enable-expert-parallel with one rank"),
    ],
)
@pytest.mark.parametrize("model", [SMALL, "openai/gpt-oss-120b"])
def test_parallelism_that_cannot_serve_has_a_remedy(flags: str, problem: str, model: str, folder, tmp_path) -> None:
    start, refused = accepted(RTX3090, folder(model), f"--spac-slots 20% {flags}", tmp_path)
    assert problem in refused[0] and len(refused) == 1 and start.spac is not None


@pytest.mark.parametrize("flags", ["--pipeline-parallel-size 2", "--pipeline-parallel-size 2 --tensor-parallel-size 2"])
@pytest.mark.parametrize("model", [SMALL, "openai/gpt-oss-120b"])
def test_pipeline_stages_start(flags: str, model: str, folder, tmp_path) -> None:
    start, refused = accepted(RTX3090, folder(model), f"--spac-slots 20% {flags}", tmp_path)
    assert refused == [] and start.spac is not None and start.spac.plane == "pointers"
    assert start.config.parallel_config.pipeline_parallel_size == 2


def test_drafts_do_not_go_with_pipeline_stages(folder, tmp_path) -> None:
    flags = f"--spac-slots 20% --pipeline-parallel-size 2 {NGRAM}"
    start, refused = accepted(RTX3090, folder(SMALL), flags, tmp_path)
    assert len(refused) == 1 and "--pipeline-parallel-size 2 with drafts" in refused[0] and start.spac is not None


def test_quantised_experts_are_divided(folder, tmp_path) -> None:
    flags = "--tensor-parallel-size 2 --enable-expert-parallel"
    start, refused = accepted(RTX3090, folder("zai-org/GLM-4.5-Air-FP8"), flags, tmp_path)
    assert refused == [] and start.spac is not None
    assert start.config.parallel_config.tensor_parallel_size == 2


NGRAM = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'"""
HEAD = json.dumps({"method": "eagle3", "model": str(TOY / "eagle3"), "num_speculative_tokens": 4})


@pytest.mark.parametrize("v2", [True, False], ids=["V2", "V1"])
@pytest.mark.parametrize("drafts", [NGRAM, f"--speculative-config '{HEAD}'"], ids=["ngram", "eagle3"])
def test_one_request_with_drafts(drafts: str, v2: bool, folder, tmp_path) -> None:
    model = TOY / "target" if "eagle3" in drafts else folder(SMALL)
    start, refused = accepted(RTX4090, model, f"--spac-slots 25% --max-num-seqs 1 {drafts}", tmp_path, v2)
    assert refused == [] and start.spac is not None and start.spac.plane == "pointers"
    assert graphs_of(start) == "FULL_DECODE_ONLY"


@pytest.mark.parametrize("v2", [True, False], ids=["V2", "V1"])
@pytest.mark.parametrize("named", ["", "--attention-backend FLASH_ATTN", "--max-num-seqs 1"])
def test_a_draft_tree_on_a_gpu(named: str, v2: bool, tmp_path) -> None:
    """Eager, and with Triton's attention: set where nobody named another, else asked for."""
    drafts = json.dumps({"method": "eagle3", "model": str(TOY / "eagle3")})
    flags = f"--spac-slots 25% --spac-tree 16 --speculative-config '{drafts}' {named}"
    start, refused = accepted(RTX4090, TOY / "target", flags, tmp_path, v2)
    assert start.spac is not None and start.spac.tree_nodes == 16
    assert start.args.enforce_eager and start.config.attention_config.backend.name == "TRITON_ATTN"
    asked = ["TRITON_ATTN" if "FLASH" in named else None, None if v2 else "V1 runner"]
    assert len(refused) == sum(map(bool, asked)) and all(want in "".join(refused) for want in asked if want)


@pytest.mark.parametrize("box", CARDS, ids=lambda box: box.name)
def test_a_desktop_of_64_gb_needs_no_disk(box: Box, folder, tmp_path) -> None:
    """Of which 56 GiB are free beside 54 GiB of experts and the system: a few experts have slots for good."""
    desktop = box._replace(host=56)
    for model in (SMALL, "Qwen/Qwen3-30B-A3B-FP8", "openai/gpt-oss-120b"):
        start, refused = accepted(desktop, folder(model), "", tmp_path)
        assert refused == [] and start.spac is not None and start.spac.plane == "pointers"
        assert start.spac.store_on("cuda") == "host"


@pytest.mark.parametrize("box", CARDS, ids=lambda box: box.name)
def test_a_desktop_of_32_gb_starts_from_a_disk(box: Box, folder, tmp_path) -> None:
    """GPU and host memory together are too small; what fits stays in host memory."""
    start, refused = accepted(box._replace(host=26), folder(SMALL), "", tmp_path)
    assert refused == [] and start.spac is not None and start.spac.store_on("cuda") == "disk"
    assert start.spac.host_memory is not None and start.spac.plane == "pointers"


def test_host_memory_that_does_not_hold_the_experts(folder, tmp_path, monkeypatch) -> None:
    """With a plane that the user named, the store says so, which is opened in a worker: the engine takes its remedy."""
    monkeypatch.setattr(host, "available_host_bytes", lambda: 50 * GIB)
    tensors = {"w13_weight": (1536, 2048), "w2_weight": (2048, 768)}
    weights = {name: TensorSpec(size, torch.bfloat16) for name, size in tensors.items()}
    shape = MoEShape(tuple(map(str, range(48))), 128, 8, weights)
    with pytest.raises(SpacError, match="54.* of host memory .* are available") as refused:
        HostStore(shape, "").reserve(shape.total)
    flags = remedied("", str(refused.value), tmp_path)
    start, more = accepted(RTX4090._replace(host=50), folder(SMALL), flags, tmp_path)
    assert more == [] and start.spac is not None and start.spac.store_on("cuda") == "disk"
