"""Another plane where the driver pins too little: what changes with it, and when it may."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_spac.config.config import SpacConfig, config_of
from vllm_spac.errors import PinError, Remedy, StoreError
from vllm_spac.integration.hooks import graphs, plane_change
from vllm_spac.integration.hooks.ranks import Ranks

POINTERS = {"plane": "pointers", "slots": "25%", "prefetch": "gate", "cpu_experts": "auto"}


def engine(mode: str | None = None, *, chosen: bool = True):
    """vLLM's configuration of an engine whose plane the plugin has chosen, or its user."""
    from vllm.config import CUDAGraphMode

    made = SimpleNamespace(
        additional_config={"spac": POINTERS, "other": 1},
        compilation_config=SimpleNamespace(cudagraph_mode=None if mode is None else CUDAGraphMode[mode]),
    )
    if chosen:
        plane_change.prepare(made)
    return made


def refuse(kind: type[StoreError] = PinError):
    def pin() -> None:
        raise kind.refused("spac: cannot pin 1 GiB", Remedy("buy memory"))

    return pin


class OfTwo(Ranks):
    """This rank's answer and that of another."""

    def least_of_all(self, value: int) -> int:
        return min(value, 0)  # that failed


def test_a_plane_that_the_user_named_does_not_change() -> None:
    with pytest.raises(PinError, match="buy memory"):
        plane_change.refused(refuse(), engine(chosen=False), Ranks())


def test_what_is_no_limit_of_pinned_memory_is_an_error_all_the_same() -> None:
    with pytest.raises(StoreError, match="buy memory"):
        plane_change.refused(refuse(StoreError), engine(), Ranks())


def test_all_ranks_change_if_one_must() -> None:
    assert plane_change.refused(lambda: None, engine(), Ranks()) == ""
    assert plane_change.refused(refuse(), engine(), Ranks()) == "cannot pin 1 GiB"
    assert "another rank" in plane_change.refused(lambda: None, engine(), OfTwo(0, 2))


@pytest.mark.parametrize(
    ("mode", "left"),
    [
        (None, "NONE"),
        ("NONE", "NONE"),
        ("FULL", "NONE"),
        ("FULL_DECODE_ONLY", "NONE"),
        ("PIECEWISE", "PIECEWISE"),
        ("FULL_AND_PIECEWISE", "PIECEWISE"),
    ],
)
def test_every_other_knob_stays_and_no_graph_holds_a_layer(mode: str | None, left: str, caplog) -> None:
    made = engine(mode)
    shared = made.additional_config  # with copies that vLLM made of its configuration
    config = plane_change.change(made, "cannot pin 1 GiB")
    assert config == config_of(shared) == SpacConfig.parse(POINTERS | {"plane": "table"}) and shared["other"] == 1
    assert made.compilation_config.cudagraph_mode.name == left
    assert graphs.needs_host(config) is not None
    graphs.check_mode(left, config, breakable=False)
    (line,) = caplog.messages
    assert line.startswith(f"spac: plane=table instead of pointers, with CUDA graphs {left}: cannot pin 1 GiB; raise")
    assert plane_change.facts(made)["plane_change"].startswith("table instead of pointers: cannot pin 1 GiB; raise")


def test_nothing_is_said_where_nothing_changed() -> None:
    assert plane_change.facts(engine()) == {}
