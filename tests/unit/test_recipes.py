"""The recipes of published models: their sizes, and that the document is what is calculated now."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import recipes

RECIPES = {recipe["model"]: recipe for recipe in recipes.recipes()}


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_has_its_published_parameters(name: str) -> None:
    found = recipes.served(RECIPES[name])[0].checkpoint
    parameters = (sum(found.layer_bytes.values()) + found.other_bytes) / 2
    assert parameters / 1e9 == pytest.approx(RECIPES[name]["billions"], rel=0.01)


def test_every_recipe_is_in_the_document() -> None:
    text = recipes.DOCUMENT.read_text(encoding="utf-8")
    assert len(RECIPES) == 5 and all(f"## {name}\n" in text for name in RECIPES)


def test_one_recipe_is_what_is_calculated() -> None:
    """In every run of the tests, so that the document cannot stay behind for long; all of them take a minute."""
    plan = recipes.planned(RECIPES["deepseek-ai/DeepSeek-V2-Lite-Chat"])
    assert "\n".join(recipes.section(plan)) in recipes.DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.full
def test_the_document_is_what_is_calculated() -> None:
    """Otherwise: `python benchmarks/recipes.py`."""
    plans = [recipes.planned(recipe) for recipe in RECIPES.values()]
    assert recipes.DOCUMENT.read_text(encoding="utf-8") == recipes.document(plans)
