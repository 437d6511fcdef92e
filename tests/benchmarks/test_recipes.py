"""The recipes of published models: their sizes, and that the document is what is calculated now."""

from __future__ import annotations

import re

import pytest

from benchmarks import recipes
from vllm_spac.tools.planning.planned_machine import PlannedMachine
from vllm_spac.tools.planning.planned_memory import Load, largest_slots, split

RECIPES = {recipe["model"]: recipe for recipe in recipes.recipes()}


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_has_its_published_parameters(name: str) -> None:
    """Of a quantised one: without its quantisation."""
    config = {key: value for key, value in RECIPES[name]["config"].items() if key != "quantization_config"}
    found = recipes.served(RECIPES[name] | {"config": config})[0].checkpoint
    parameters = (sum(found.layer_bytes.values()) + found.other_bytes) / 2
    assert parameters / 1e9 == pytest.approx(RECIPES[name]["billions"], rel=0.01)


def test_every_recipe_is_in_the_document() -> None:
    text = recipes.DOCUMENT.read_text(encoding="utf-8")
    assert len(RECIPES) == 11 and all(f"## {name}\n" in text for name in RECIPES)


@pytest.mark.parametrize(
    ("name", "machine", "nbytes", "execution"),
    [
        ("Qwen/Qwen3-30B-A3B-FP8", "rtx4090", 3 * 2048 * 768 * (1 + 4 / 128**2), "slots"),
        ("Qwen/Qwen3-30B-A3B-FP8", "rtx3090", 3 * 2048 * 768 * (1 + 4 / 128**2), "pointers"),
        ("Qwen/Qwen3-30B-A3B-GPTQ-Int4", "rtx3090", 3 * 2048 * 768 * (1 / 2 + 2 / 128), "slots"),
        ("casperhansen/mixtral-instruct-awq", "rtx4090", 3 * 4096 * 14336 * (1 / 2 + 2.5 / 128), "slots"),
        ("openai/gpt-oss-120b", "h100", 3 * 2880 * 2880 * (1 / 2 + 1 / 32), "pointers"),
        ("zai-org/GLM-4.5-Air-FP8", "rtx5090", 3 * 4096 * 1408, "slots"),
    ],
)
def test_a_quantised_expert_has_the_size_of_its_codes_and_scales(name, machine, nbytes, execution) -> None:
    capability = PlannedMachine.of(machine).capability
    found = recipes.served(RECIPES[name], capability)[0]
    assert found.quantised and found.execution == execution
    assert found.expert_bytes == pytest.approx(nbytes, rel=0.01)


def test_one_recipe_is_what_is_calculated() -> None:
    """In every run of the tests, so that the document cannot stay behind for long; all of them take a minute."""
    found = recipes.written(RECIPES["deepseek-ai/DeepSeek-V2-Lite-Chat"])
    assert "\n".join(found) in recipes.DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if "machines" in recipe])
def test_the_slots_of_a_table_are_those_that_fit(name: str) -> None:
    """Without a simulation: sizes of quantised experts, of buffers and of KV cache, on each machine."""
    recipe, text = RECIPES[name], recipes.DOCUMENT.read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(\w+)` \| (\d+) % \| ([^|]+) \| ?([-\d]*) \|", text.split(f"## {name}\n")[1].split("\n## ")[0], re.M
    )
    assert [machine for machine, *_ in rows] == recipe["machines"]
    for machine, percent, plane, drafts in rows:
        found = PlannedMachine.of(machine)
        ways = recipes.served(recipe, found.capability)
        load = Load(recipe["context"], recipe["concurrency"], int(drafts) if drafts.isdigit() else 0)
        fitting = {way.execution: largest_slots(way, split(way, found, load)) for way in ways}
        if plane.startswith("all fit"):
            assert (100, 0) in fitting.values()
        else:
            assert (int(percent), 0) == fitting[plane.strip("`")]


def test_one_line_of_newer_models_is_what_is_calculated() -> None:
    recipe = recipes.newer()[recipes.NEWER.index("RedHatAI/GLM-5.3-Flash-NVFP4")]
    found = recipes.newer_row(recipe, 128, [recipes.newer_plan(recipe, "rtx4090", 128)])
    [line] = [line for line in recipes.DOCUMENT.read_text(encoding="utf-8").splitlines() if found[:50] in line]
    assert found.split(" | ")[2].removesuffix(" |") == line.split(" | ")[3]


@pytest.mark.full
def test_the_document_is_what_is_calculated() -> None:
    """Otherwise: `python benchmarks/recipes.py`."""
    sections = [*(recipes.written(recipe) for recipe in RECIPES.values()), list(recipes.newer_section())]
    assert recipes.DOCUMENT.read_text(encoding="utf-8") == recipes.document(sections)
