"""A new policy or store is one new file: what is found by name, and what is refused, with the remedy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vllm_spac import components
from vllm_spac.config.config import SpacConfig
from vllm_spac.core import Rates
from vllm_spac.decisions import policies
from vllm_spac.errors import ConfigError

FAMILIES = sorted(components.FAMILIES)
CLASS = "from vllm_spac.decisions.policies.lru import LRU\n\n\nclass {name}(LRU):\n    pass\n"


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Adds a module to the family ``policies`` for one test."""
    import sys

    monkeypatch.setattr(policies, "__path__", [*policies.__path__, str(tmp_path)])
    added: list[str] = []

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        added.append(f"vllm_spac.decisions.policies.{name}")
        components.modules.cache_clear()

    yield write
    for name in added:
        sys.modules.pop(name, None)
    components.modules.cache_clear()


@pytest.mark.parametrize(("family", "some"), [("policies", ["lfu", "lru"]), ("stores", ["disk", "host", "resident"])])
def test_names_are_the_files_but_base(family: str, some: list[str]) -> None:
    names = components.names(family)
    assert names == sorted(names)
    assert set(some) <= set(names) and "base" not in names


@pytest.mark.parametrize("family", FAMILIES)
def test_every_file_holds_one_component(family: str) -> None:
    for name in components.names(family):
        assert components.find(family, name).__module__ == components.modules(family)[name]


def test_arguments_are_part_of_a_name() -> None:
    assert components.parse("utility@upper=1@variant=literal@boundaries=(3, 1)") == (
        "utility",
        {"upper": 1, "variant": "literal", "boundaries": (3, 1)},
    )
    assert components.find("policies", "utility@upper=1") is components.find("policies", "utility")
    policy = components.build("policies", "utility@upper=2")
    policy.observe(np.array([9, 0]))
    for count in (0, 9, 0, 9, 0, 9):
        policy.observe(np.array([count, 0]))
    assert policy.scores.max() <= 2


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("utility@upper", "sets nothing"),
        ("utility@lower=1", "utility has no argument 'lower'; it has boundaries, forget, gamma"),
        ("lru@upper=1", "it has none"),
        ("utility@upper=0", "cannot be built: .*upper >= 1"),
        ("utility@upper=many", "cannot be built"),
    ],
)
def test_wrong_arguments_are_refused(spec: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        components.build("policies", spec)


def test_arguments_that_the_caller_gives_cannot_be_set() -> None:
    given = {"rates": Rates(1.0, 1.0, 1.0), "layers": 1, "top_k": 1}
    assert components.build("balancers", "threshold@fixed=2", **given).threshold(0) == 2
    assert {"fixed", "gamma", "upper"} <= set(components.arguments_of(components.find("balancers", "threshold")))
    assert components.build("balancers", "threshold@upper=2", **given).upper == 2
    with pytest.raises(ConfigError, match="layers cannot be set here"):
        components.build("balancers", "threshold@layers=2", **given)


@pytest.mark.parametrize(
    ("knob", "spec", "has"),
    [
        ("cpu_experts", "threshold@rates=3", "it has fixed, gamma, misses, upper"),
        ("cpu_experts", "waterfill@expert_bytes=7", "it has admit, gamma, upper"),
        ("policy", "reuse@context=3", "it has half_lives"),
    ],
)
def test_arguments_that_the_engine_passes_are_refused_when_knobs_are_read(knob: str, spec: str, has: str) -> None:
    with pytest.raises(ConfigError, match=f"has no argument .*; {has}"):
        SpacConfig.parse({knob: spec, "store": "host"})


def test_a_new_file_is_a_new_component(add) -> None:
    add("spac_test_new", CLASS.format(name="New"))
    assert "spac_test_new" in components.names("policies")
    assert type(components.build("policies", "spac_test_new")).__name__ == "New"


@pytest.mark.parametrize("name", ["nope", "base", "LRU", "", "lru.py"])
def test_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="lfu, .*lru"):
        components.find("policies", name)


def test_two_classes_in_a_file_are_refused(add) -> None:
    add("spac_test_two", CLASS.format(name="One") + "\n\nclass Two(LRU):\n    pass\n")
    with pytest.raises(ConfigError, match="spac_test_two must hold one component, found 2"):
        components.find("policies", "spac_test_two")


def test_a_file_without_a_component_is_refused(add) -> None:
    add("spac_test_none", "from vllm_spac.decisions.policies.lru import LRU\n")
    with pytest.raises(ConfigError, match="spac_test_none must hold one component, found 0"):
        components.find("policies", "spac_test_none")


@pytest.mark.parametrize(
    "name",
    [
        "os:path",
        "os:getcwd",
        "collections:OrderedDict",
        "vllm_spac.methods.moe_spec.router_ranking:Router",
        "builtins:int",
    ],
)
def test_a_component_from_outside_must_be_a_class_of_the_family(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*derive it from vllm_spac.decisions.policies.base.Policy"):
        components.find("policies", name)


@pytest.mark.parametrize("text", ["1 / 0", "def (", "import sys; sys.exit(3)", "raise KeyError('x')", "import nosuch"])
def test_a_module_from_outside_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "spac_test_failing.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot load 'spac_test_failing:X' for policies") as caught:
        components.find("policies", "spac_test_failing:X")
    assert str(caught.value).isprintable()
