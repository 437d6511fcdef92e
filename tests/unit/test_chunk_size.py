"""How many rows of prompts a step computes on a GPU: where arithmetic meets the link, and as a plan has it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from vllm_spac.cache.sizing import MoEWidths, Widths
from vllm_spac.config import config
from vllm_spac.config.config import SpacConfig
from vllm_spac.decisions import costs, prompt_chunks
from vllm_spac.decisions.costs import PROFILE, Costs, Rate
from vllm_spac.integration import chunk_size, gpu_defaults, store_choice
from vllm_spac.integration.hooks import device
from vllm_spac.integration.hooks.device import DeviceFacts
from vllm_spac.storage.checkpoint.published import find_model, published
from vllm_spac.system.machine import Machine
from vllm_spac.tools.planning.planned_machine import PlannedMachine
from vllm_spac.tools.planning.planned_memory import Choice, Load, command, rows
from vllm_spac.tools.planning.planned_model import ServedModel

GIB = 1 << 30
QWEN, OSS = "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-120b"
LAYER = {"layer_bytes": GIB, "layer_values": 50_000_000, "row_bytes": 1 << 16}


@pytest.mark.parametrize(
    ("name", "capability", "found"),
    [
        ("NVIDIA GeForce RTX 4090", (8, 9), "rtx4090"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100"),
        ("NVIDIA H200", (9, 0), "h200"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "a100"),
        ("NVIDIA L40S", (8, 9), "rtx4090"),
        ("NVIDIA RTX A6000", (8, 6), "rtx3090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), "rtx5090"),
        ("NVIDIA B300 SXM6 AC", (10, 3), "b200"),
        ("a GPU of the future", (13, 0), "rtx5090"),
    ],
)
def test_a_gpu_has_the_data_sheet_of_its_name_or_its_generation(name, capability, found) -> None:
    assert costs.of_gpu(name, capability).name == found


def seconds(known: Costs, rows: int, missing: float, peak: float) -> tuple[float, float]:
    """Of loads and of arithmetic, by the definition of ``Rate``."""
    computed = rows * 2 * LAYER["layer_values"] / (peak * known.fast.flops_per_second)
    return missing * LAYER["layer_bytes"] / known.load.bytes_per_second, computed


@pytest.mark.parametrize(("how", "peak"), [("measured", 1.0), ("calculated", 0.5)])
def test_a_chunk_computes_as_long_as_it_loads(how: str, peak: float) -> None:
    known = Costs.read("rtx4090")
    known = known.model_copy(update={"provenance": known.provenance.model_copy(update={"how": how})})
    assert prompt_chunks.rows(known, missing=0.001, memory=1 << 50, **LAYER) == 1024, "little is read"
    for missing in (0.1, 0.5, 0.9):
        found = prompt_chunks.rows(known, missing=missing, memory=1 << 50, **LAYER)
        loads, computes = seconds(known, found, missing, peak)
        if found == 8192:
            assert seconds(known, 1024, missing, peak)[1] <= loads < seconds(known, found + 1024, missing, peak)[1]
        else:
            assert computes <= loads < seconds(known, found + 1024, missing, peak)[1] and not 1024 < found < 8192
    on_disk = known.provenance.model_copy(update={"store": "disk"})
    slower = known.model_copy(update={"provenance": on_disk, "host": Rate(bytes_per_second=1e9)})
    assert prompt_chunks.rows(slower, missing=0.1, memory=1 << 50, **LAYER) > 10 * prompt_chunks.rows(
        known, missing=0.1, memory=1 << 50, **LAYER
    ), "the link to host memory counts, not the disk"


def test_activations_are_bounded() -> None:
    known = Costs.read("h100")
    assert prompt_chunks.rows(known, missing=1.0, memory=80 * GIB, **LAYER) == 80 * GIB // 20 // (1 << 16)
    assert prompt_chunks.rows(known, missing=1.0, memory=GIB, **LAYER) == 8192
    unknown = known.model_copy(update={"fast": Rate(bytes_per_second=1e12)})
    assert prompt_chunks.rows(unknown, missing=1.0, memory=GIB, **LAYER) == 8192, "arithmetic was not measured"
    assert prompt_chunks.rows(known, missing=0.0, memory=GIB, **LAYER) == 1024, "nothing is read"


# -- what an engine starts with --


@pytest.fixture
def model(tmp_path: Path):
    def write(name: str) -> Path:
        folder = tmp_path / name.replace("/", "-")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(published()[name]))
        return folder

    return write


@pytest.fixture(autouse=True)
def unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this machine's rates would be is an empty folder."""
    monkeypatch.setattr(config, "DISK_DIR", tmp_path)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = DeviceFacts("NVIDIA GeForce RTX 4090", True, (8, 9), pinned=True, unified=True)
    monkeypatch.setattr(device, "query", lambda: facts)
    monkeypatch.setattr(device, "total_memory", lambda: 24 * GIB)
    monkeypatch.setattr(store_choice, "available_host_bytes", lambda: 128 * GIB)


def asked(folder: Path, usage: str | None = "OPENAI_API_SERVER", slots: str = "auto", **given):
    """An engine's rows after ``choose``; what it says is logged."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, **given)
    small = {UsageContext.OPENAI_API_SERVER: 2048, UsageContext.LLM_CLASS: 8192}
    args.get_batch_defaults = lambda ranks: (small, dict.fromkeys(small, 256))
    spac = {"slots": slots, "plane": "pointers"}
    said = list(chunk_size.choose(args, SpacConfig.parse(spac), usage and UsageContext[usage]))
    assert len(said) == (args.max_num_batched_tokens not in (None, given.get("max_num_batched_tokens")))
    logging.getLogger("vllm.spac").info("%s", said)
    return args.max_num_batched_tokens


@pytest.mark.parametrize("name", [QWEN, OSS])
@pytest.mark.parametrize(("context", "requests"), [(40960, 8), (8192, 1), (4096, 2)])
def test_a_start_and_a_plan_choose_the_same(name, context, requests, model, card, tmp_path) -> None:
    folder, machine = model(name), PlannedMachine.of("rtx4090", None, 1 << 40)
    planned = ServedModel.of(find_model(str(folder)), "pointers", capability=(8, 9))
    load = Load(context, requests)
    found = asked(folder, max_model_len=context, max_num_seqs=requests)
    assert found == rows(planned, machine, load)
    assert f"--max-num-batched-tokens {found} " in command(Choice(20, "host"), planned, machine, load)
    assert found == min(context * requests, found) and (context * requests < 10_000 or found > 8192)


def test_what_the_user_named_stays_and_vllms_own_is_the_least(model, card, tmp_path, caplog) -> None:
    folder = model(QWEN)
    assert asked(folder, max_num_batched_tokens=512) == 512
    assert asked(folder, slots="99%") is None, "little is read"
    assert asked(folder, max_model_len=1024, max_num_seqs=2) is None, "vLLM's own is as many"
    assert asked(folder, usage=None) is None
    assert asked(folder, slots="100%") is None
    with caplog.at_level("INFO", "vllm.spac"):
        assert asked(folder) == asked(folder, usage="LLM_CLASS") > 8192
    assert "the data sheet of rtx4090" in caplog.text


def test_nothing_is_set_on_a_cpu(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(device, "query", lambda: None)
    assert asked(model(QWEN)) is None


def test_measured_rates_come_first_and_those_of_another_machine_are_not_used(model, card, tmp_path, caplog) -> None:
    folder, sheet = model(QWEN), Costs.read("rtx4090")
    slow = {"fast": Rate(bytes_per_second=1e12, flops_per_second=4e13)}
    here = {"how": "measured", "machine": Machine.here(tmp_path)}
    for origin, found in [(here, 9216), ({"how": "calculated"}, 16384)]:
        profile = sheet.model_copy(update=slow | {"provenance": sheet.provenance.model_copy(update=origin)})
        (tmp_path / PROFILE).write_text(profile.model_dump_json())
        caplog.clear()
        with caplog.at_level("INFO", "vllm.spac"):
            assert asked(folder) == found
        assert (str(tmp_path / PROFILE) in caplog.text) and ("was calculated, not measured" in caplog.text) is (
            found == 16384
        )


def test_weights_per_row_are_attentions_four_matrices_and_three_of_each_selected_expert() -> None:
    found = Widths(2048, 32, 4, 128, 6144, (MoEWidths(8, 2048, 768),), 2)
    assert found.multiplied == 2048 * 128 * (32 + 2 * 4 + 32) + 8 * 3 * 2048 * 768


def test_one_line_says_the_plane_and_the_chunks(model, card, monkeypatch, caplog) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    monkeypatch.setattr(device, "is_cpu", lambda: False)
    for given, chunks in ({}, True), ({"max_num_batched_tokens": 4096}, False):
        args = EngineArgs(model=str(model(QWEN)), skip_tokenizer_init=True, additional_config={"spac": {}}, **given)
        caplog.clear()
        with caplog.at_level("INFO", "vllm.spac"):
            gpu_defaults.apply(args, SpacConfig.parse({}), UsageContext.OPENAI_API_SERVER)
        (said,) = [record.getMessage() for record in caplog.records if record.name == "vllm.spac"]
        assert "plane=pointers" in said and ("--max-num-batched-tokens" in said) is chunks
        assert args.max_num_batched_tokens == given.get("max_num_batched_tokens", 16384)
