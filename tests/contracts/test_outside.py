"""Every knob that names a component accepts a class from outside the package, and refuses unfit ones with a reason."""

from __future__ import annotations

import outside
import pytest

from vllm_spac import components
from vllm_spac.config.config import SpacConfig, component_knobs
from vllm_spac.errors import ConfigError

CLASSES = {
    "store": outside.Blocks,
    "policy": outside.Fifo,
    "prefetch": outside.Same,
    "cpu_experts": outside.EverySecond,
    "cpu_kernel": outside.RowByRow,
}
BESIDE = {  # knobs that a knob means something beside
    "cpu_experts": {"store": "outside:Blocks"},
    "cpu_kernel": {"cpu_experts": "2", "store": "outside:Blocks"},
}
every_knob = pytest.mark.parametrize("knob", component_knobs())


def named(knob: str) -> str:
    return f"outside:{CLASSES[knob].__name__}"


@every_knob
def test_a_class_from_outside_is_found(knob: str) -> None:
    config = SpacConfig.parse({knob: named(knob), **BESIDE.get(knob, {})})
    assert components.find(component_knobs()[knob].family, getattr(config, knob)) is CLASSES[knob]


@every_knob
def test_each_component_that_can_serve_has_a_name(knob: str) -> None:
    name = component_knobs()[knob]
    for value in components.serving(name.family):
        assert name.check_name(value) == value
    assert "package.module:Class" in name.values()


@every_knob
@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("nothing", "is called 'nothing'"),
        ("base", "is called 'base'"),
        ("_thread", "is called '_thread'"),
        (7.5, "is called 7.5"),
        ("nowhere:X", "No module named 'nowhere'"),
        ("outside:Nobody", "has no attribute 'Nobody'"),
        ("outside:CALLS", "is no class but Counter"),
        ("collections:OrderedDict", "is the class OrderedDict, which is not one of"),
    ],
    ids=str,
)
def test_others_are_refused_with_what_was_found_and_what_is_known(knob: str, value: object, found: str) -> None:
    with pytest.raises(ConfigError, match=rf"{knob}=.* \(--spac-.*{found}.*use one of ") as caught:
        SpacConfig.parse({knob: value})
    known = str(caught.value).rpartition("use one of ")[2]
    assert all(name in known for name in components.serving(component_knobs()[knob].family))


@every_knob
def test_a_base_is_no_component(knob: str) -> None:
    base = components.base(component_knobs()[knob].family)
    with pytest.raises(ConfigError, match="it is abstract and lacks "):
        SpacConfig.parse({knob: f"{base.__module__}:{base.__name__}"})


@every_knob
def test_what_cannot_serve_says_why(knob: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLASSES[knob], "offline", "it is on holiday")
    with pytest.raises(ConfigError, match=f"{named(knob)}' cannot serve: it is on holiday; use one of"):
        SpacConfig.parse({knob: named(knob)})


@pytest.mark.parametrize(
    ("knob", "value", "why"),
    [
        ("store", "resident", "--spac-slots 100%"),
        ("policy", "belady", "future"),
        ("cpu_experts", "fixed", "--spac-cpu-experts N"),
        ("cpu_experts", "none", "--spac-cpu-experts off"),
    ],
)
def test_components_of_the_package_that_no_knob_names(knob: str, value: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{value}' cannot serve: .*{why}"):
        SpacConfig.parse({knob: value})


def test_a_ranking_from_outside_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument of the budget, which is no name of a component itself."""
    knob = SpacConfig.parse({"budget": "16@ranking=outside:Loudest"}).parsed_budget
    assert components.find("rankings", knob.ranking) is outside.Loudest
    for ranking, found in (("nothing", "is called 'nothing'"), ("nowhere:X", "No module named 'nowhere'")):
        with pytest.raises(ConfigError, match=f"budget=.*{found}.*use one of router, selected"):
            SpacConfig.parse({"budget": f"16@ranking={ranking}"})
    monkeypatch.setattr(outside.Loudest, "offline", "it is on holiday")
    with pytest.raises(ConfigError, match="outside:Loudest' cannot serve: it is on holiday; use one of"):
        SpacConfig.parse({"budget": "16@ranking=outside:Loudest"})


def test_combinations_ask_for_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused of a component of the package is refused of one from outside that is like it."""
    monkeypatch.setattr(outside.Blocks, "addressable", False)
    with pytest.raises(
        ConfigError, match=r"store=outside:Blocks \(--spac-store\) keeps none there; use --spac-store host"
    ):
        SpacConfig.parse({"plane": "pointers", "store": "outside:Blocks"})
    monkeypatch.setattr(outside.EverySecond, "uses_cpu", False)
    with pytest.raises(ConfigError, match="cpu_experts=outside:EverySecond .*computes none"):
        SpacConfig.parse({"cpu_experts": "outside:EverySecond"})
    monkeypatch.setattr(outside.Fifo, "on_device", False)
    with pytest.raises(ConfigError, match="policy=outside:Fifo .*has no formula .*use --spac-plane slots"):
        SpacConfig.parse({"plane": "pointers", "policy": "outside:Fifo"})
