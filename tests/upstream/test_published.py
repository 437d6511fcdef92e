"""Published checkpoints: each config ends in commands that the engine's rules accept, or in one sentence."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import published_plans
import pytest
from published_plans import CAPABILITIES, FOLDER, MACHINES, Facts, planned

from vllm_spac.config.config import SpacConfig
from vllm_spac.config.knobs import Knobs
from vllm_spac.errors import UnsupportedError
from vllm_spac.storage.checkpoint import quant_config, quantisation
from vllm_spac.storage.checkpoint.quantisation import FormatKernels
from vllm_spac.tools.planning.planned_machine import PlannedMachine

FOUND = published_plans.read()
KNOWN = {facts.name: facts for facts in FOUND}
GIB = 1 << 30
ids = [facts.name for facts in FOUND]


def checkpoint(facts: Facts):
    with facts.built():
        return facts.named.checkpoint()


def test_there_are_twenty_and_each_names_its_source() -> None:
    assert len(FOUND) >= 20
    for facts in FOUND:
        assert re.search(r"^[\w.-]+/[\w.-]+, \S+, commit [0-9a-f]{40}", facts.source), facts.name


@pytest.mark.parametrize("facts", FOUND, ids=ids)
def test_every_plan_is_accepted_or_one_sentence(facts: Facts, tmp_path: Path) -> None:
    """All choices, not only the fastest: their knobs go together, and kernels run these experts on that GPU."""
    for name, host in MACHINES:
        plan, capability = planned(facts, name, host), PlannedMachine.of(name).capability
        if plan.sentence:
            assert not plan.commands and "\n" not in plan.sentence and re.search(r"; (?:use|name|lower)", plan.sentence)
            continue
        for model, choice, line in plan.commands:
            options = shlex.split(line)
            if choice.store == "none":
                assert not any(word.startswith("--spac") for word in options), "stock's own choice"
                continue
            assert options[:3] == ["vllm", "serve", facts.name]
            knobs = {
                word.removeprefix("--spac-").replace("-", "_"): options[place + 1]
                for place, word in enumerate(options)
                if word.startswith("--spac-")
            }
            assert knobs.keys() <= Knobs.model_fields.keys(), line
            config = SpacConfig.parse(knobs | {"disk_dir": str(tmp_path)} if "disk" in knobs.values() else knobs)
            assert config.parsed_slots.share is not None or config.parsed_slots.tokens is not None
            if facts.entry is None:
                continue
            ours = config.execution_class.repacks or (config.plane == "auto" and model.execution != "slots")
            kernels = FormatKernels.OURS if ours else FormatKernels.GPU
            assert quantisation.refusal(facts.entry, kernels, capability) is None, line
            flags = quantisation.flags(facts.entry, kernels, capability, model.execution)
            assert not flags or " ".join(flags) in line.replace("'", ""), line


@pytest.mark.parametrize("facts", [each for each in FOUND if each.billions], ids=lambda facts: facts.name)
def test_parameters_are_as_many_as_published(facts: Facts) -> None:
    """Within 6 %: names are rounded, and towers for images count in some and not in others."""
    assert facts.billions is not None
    assert facts.parameters / 1e9 == pytest.approx(facts.billions, rel=0.06)


def test_experts_that_only_our_kernels_read_and_do_not_compute_need_a_gpu_that_holds_them_all() -> None:
    """relu2 has no gate; clamped gates are computed."""
    nano, super_ = (KNOWN[f"nvidia/NVIDIA-Nemotron-3-{size}-NVFP4"] for size in ("Nano-30B-A3B", "Super-120B-A12B"))
    assert planned(nano, "rtx4090", 64 * GIB).cell == "all" and published_plans.kernel(nano, (8, 9)) == "-"
    assert "activation relu2, which our kernels do not compute; use" in planned(super_, "rtx4090", 64 * GIB).sentence
    glm = KNOWN["RedHatAI/GLM-5.3-Flash-NVFP4"]
    assert published_plans.kernel(glm, (8, 9)) == "p" and planned(glm, "rtx4090", 64 * GIB).commands


def test_an_engine_refuses_them_before_they_load(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_spac.integration import preflight
    from vllm_spac.integration.hooks import device

    monkeypatch.setattr(device, "is_cpu", lambda: False)
    monkeypatch.setattr(device, "query", lambda: device.DeviceFacts("a GPU", True, (8, 9), True, True))
    facts = KNOWN["nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4"]
    known = {"model": facts.name, "quantization": "modelopt_fp4"}
    model = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: facts.config), **known)
    with pytest.raises(UnsupportedError, match="120B-A12B-NVFP4 has experts with the activation relu2.*; use"):
        preflight._check_quantisation(model, SpacConfig(plane="pointers"))
    others = facts.config | {"mlp_hidden_act": "silu"}
    model.hf_config = SimpleNamespace(to_dict=lambda: others)
    preflight._check_quantisation(model, SpacConfig(plane="pointers"))


def test_experts_have_the_bytes_that_others_report() -> None:
    """FreeToken's users pin 63 GiB of NVFP4 experts and 47.7 GiB of n-grams in 8 bits of Qwen3.8-Flash-Next."""
    sizes = checkpoint(KNOWN["nvidia/Qwen3.8-Flash-Next-NVFP4"])
    assert sum(sizes.layer_bytes.values()) / GIB == pytest.approx(63, rel=0.02)
    assert sizes.table_bytes / GIB == pytest.approx(47.7, rel=0.001)
    assert checkpoint(KNOWN["Qwen/Qwen3.8-Flash-Next"]).table_bytes / GIB == pytest.approx(2 * 47.7, rel=0.001)


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        # 4 bits and a scale of 8 for each 32 or 16; NVFP4 in slots has words of 4 scales, and one more for each row.
        ("deepseek-ai/DeepSeek-V4-Flash", 3 * 4096 * 2048 * 17 / 32),
        ("nvidia/DeepSeek-V4-Flash-NVFP4", 3 * 4096 * 2048 * 9 / 16),
        ("sgl-project/DeepSeek-V4-Flash-FP8", 3 * 4096 * 2048),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 2 * 1024 * 2688),
        ("RedHatAI/GLM-5.3-Flash-NVFP4", 3 * 4096 * 2048 * 9 / 16),
    ],
)
def test_experts_are_counted_in_the_format_that_their_checkpoint_gives_them(name: str, nbytes: float) -> None:
    assert checkpoint(KNOWN[name]).expert_bytes == [pytest.approx(nbytes, rel=0.01)]


@pytest.mark.parametrize(
    ("small", "whole"),
    [
        # Their experts alone are quantised, whatever their configs call the layers.
        ("RedHatAI/GLM-5.3-Flash-NVFP4", "zai-org/GLM-5.3-Flash"),
        ("nvidia/Qwen3.8-Flash-Next-NVFP4", "Qwen/Qwen3.8-Flash-Next"),
        ("RadixArk/Qwen3.8-Flash-Next-NVFP4", "Qwen/Qwen3.8-Flash-Next"),
        ("nvidia/Gemma-4-26B-A4B-NVFP4", "google/gemma-4-26B-A4B"),
    ],
)
def test_layers_beside_experts_stay_as_they_are(small: str, whole: str) -> None:
    assert checkpoint(KNOWN[small]).other_bytes == pytest.approx(checkpoint(KNOWN[whole]).other_bytes, rel=0.01)


def test_names_of_layers_left_out_are_those_of_the_checkpoint() -> None:
    """Of an NVFP4 Nemotron, 60 modules of ``backbone`` stay in 16 bits; transformers calls it ``model``."""
    facts = KNOWN["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4"]
    left = [name for name in facts.entry["ignore"] if name.startswith("backbone.")]
    assert left and all(
        quant_config.excluded(facts.entry, name.replace("backbone", "model") + ".weight") for name in left
    )
    assert not quant_config.excluded(facts.entry, "model.layers.1.mixer.experts.up_proj")
    assert not quant_config.excluded(
        KNOWN["nvidia/Qwen3.6-35B-A3B-NVFP4"].entry, "model.layers.0.mlp.experts.down_proj"
    )


def test_tables_take_host_memory_and_none_of_the_gpu() -> None:
    facts = KNOWN["Qwen/Qwen3.8-Flash-Next-FP8"]
    without = [(name, shape, layers) for name, shape, layers in facts.tensors if "ngram_embedding" not in name]
    bare = Facts(facts.name, facts.config, facts.source, tensors=tuple(without))
    for name, host in MACHINES:
        found, expected = (planned(each, name, host) for each in (facts, bare))
        slots = [{choice.percent for _, choice, _ in plan.commands} for plan in (found, expected)]
        assert slots[0] == slots[1], "as many as without tables"
    assert (found.cell, expected.cell) == ("18 % h d", "18 % h"), "on the largest machine, with room for one of them"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_head_s_format_is_not_that_of_the_experts(capability) -> None:
    """The layer of its MTP head is in FP8, which slots hold, and its experts are in NVFP4, which they do not."""
    assert quantisation.only_ours(KNOWN["RedHatAI/GLM-5.3-Flash-NVFP4"].entry, capability)


def test_the_group_of_other_layers_does_not_decide_for_experts() -> None:
    """Attention in FP8, which slots hold, and experts in NVFP4, which they do not; and the other way round."""
    groups = KNOWN["RedHatAI/GLM-5.3-Flash-NVFP4"].config["quantization_config"]["config_groups"]
    nvfp4, fp8 = groups["group_0"], groups["group_1"]
    for experts, others, ours in ((nvfp4, fp8, True), (fp8, nvfp4, False)):
        found = {
            "one": {**others, "targets": ["re:.*self_attn.*_proj$"]},
            "two": {**experts, "targets": [r"re:.*mlp\.experts\..*_proj$"]},
        }
        entry = {"quant_method": "compressed-tensors", "config_groups": found}
        assert quantisation.only_ours(entry, (9, 0)) == ours
        assert quant_config.excluded(entry, "model.layers.3.mlp.shared_experts.up_proj.weight")
        assert not quant_config.excluded(entry, "model.layers.3.self_attn.q_proj.weight")


def test_what_torch_would_pin_is_as_the_page_for_vllms_maintainers_says() -> None:
    page = (published_plans.HERE.parents[1] / "vllm_spac/integration/UPSTREAM.md").read_text(encoding="utf-8")
    layers = checkpoint(KNOWN["openai/gpt-oss-120b"]).layer_bytes.values()
    tables = [
        checkpoint(KNOWN[name]).table_bytes for name in ("Qwen/Qwen3.8-Flash-Next-FP8", "Qwen/Qwen3.8-Flash-Next")
    ]

    def pinned(nbytes: int) -> int:
        return 1 << (nbytes - 1).bit_length()

    assert f"{sum(layers) / GIB:.1f} GiB in blocks of a layer, would pin {sum(map(pinned, layers)) // GIB} GiB" in page
    said = [f"{size / GIB:.1f} GiB of Qwen3.8-Flash-Next pin {pinned(size) // GIB}" for size in tables[:1]]
    said += [f"and {size / GIB:.1f} pin {pinned(size) // GIB}" for size in tables[1:]]
    assert ", ".join(said) in " ".join(page.split())


def test_the_page_is_of_these_facts() -> None:
    """Otherwise: `python tests/upstream/published_plans.py`."""
    assert published_plans.DOCUMENT.read_text(encoding="utf-8") == published_plans.document(FOUND)


@pytest.mark.rest
@pytest.mark.parametrize("facts", FOUND, ids=ids)
def test_tensors_are_those_of_the_model_in_transformers(facts: Facts) -> None:
    """Otherwise: `python tests/upstream/published_plans.py --tensors`."""
    assert tuple(published_plans.tensors(facts.config, facts.name)) == facts.tensors
    assert all(math.prod(shape) > 0 for _, shape, _ in facts.tensors)


def test_each_file_is_written_as_the_script_writes_it(tmp_path: Path) -> None:
    import json

    for path in FOLDER.glob("*.json"):
        published_plans.write(tmp_path / "again.json", json.loads(path.read_text(encoding="utf-8")))
        assert (tmp_path / "again.json").read_text(encoding="utf-8") == path.read_text(encoding="utf-8"), path
