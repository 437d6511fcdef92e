"""The table of what is replaced in vLLM: it matches the installed vLLM and the sources of the replacements."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vllm_spac.errors import UnsupportedError
from vllm_spac.integration.hooks import patches

SOURCES = Path(patches.__file__).parent


def test_each_row_is_in_this_vllm() -> None:
    patches.require_names("frontend", "worker", "v1", "v2", "cpu")


def test_each_row_says_why_and_no_name_has_two() -> None:
    assert all(patch.why for patch in patches.PATCHES)
    assert len({patch.target for patch in patches.PATCHES}) == len(patches.PATCHES)
    assert all(patch.until or patch.on == "object" or patch.target.endswith("oot") for patch in patches.PATCHES)


def test_nothing_of_vllm_is_replaced_beside_the_table() -> None:
    """Wrappers are made by ``wrap``; whoever sets a name of vLLM's by hand would have to import its class to do so."""
    for path in SOURCES.rglob("*.py"):
        if path.name != "patches.py":
            found = re.search(r"^\s*[A-Z]\w+\.\w+ = |^\s*setattr\(", path.read_text(), re.MULTILINE)
            assert found is None, f"{path}: {found and found[0]}"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = ModuleType("spac_patched")

    class Thing:
        def method(self, one, *, two=2):
            return one, two

        @staticmethod
        def plain(one):
            return one

        @classmethod
        def made(cls, one):
            return cls, one

    found.Thing = Thing
    monkeypatch.setitem(sys.modules, "spac_patched", found)
    names = {"method": ("one", "two"), "plain": ("one",), "made": ("one",), "gone": (), "method2": ()}
    rows = {
        f"spac_patched:Thing.{n}": patches.Patch(f"spac_patched:Thing.{n}", "a test", "worker", t)
        for n, t in names.items()
    }
    monkeypatch.setattr(patches, "_BY_TARGET", rows)
    return found


def doubled(original):
    def wrapper(*args, **kwargs):
        return original(*args, **kwargs), "wrapped"

    return wrapper


def test_methods_of_every_kind_are_wrapped_once(module: ModuleType) -> None:
    for _ in range(2):
        for name in ("method", "plain", "made"):
            patches.wrap(f"spac_patched:Thing.{name}", doubled)
    thing = module.Thing()
    assert thing.method(1, two=3) == ((1, 3), "wrapped")
    assert module.Thing.plain(1) == (1, "wrapped") == thing.plain(1)
    assert module.Thing.made(1) == ((module.Thing, 1), "wrapped")


def test_a_name_that_is_gone_is_refused_with_its_name(module: ModuleType) -> None:
    with pytest.raises(UnsupportedError, match=r"has no spac_patched:Thing\.gone .* a test"):
        patches.wrap("spac_patched:Thing.gone", doubled)


def test_a_parameter_that_is_gone_is_refused_with_its_name(module: ModuleType, monkeypatch) -> None:
    row = patches.Patch("spac_patched:Thing.method", "a test", "worker", ("one", "three"))
    monkeypatch.setattr(patches, "_BY_TARGET", {row.target: row})
    with pytest.raises(UnsupportedError, match=r"calls spac_patched:Thing\.method without three"):
        patches.wrap("spac_patched:Thing.method", doubled)
    with pytest.raises(UnsupportedError, match="without three"):
        monkeypatch.setattr(patches, "PATCHES", (row,))
        patches.require_names("worker")
