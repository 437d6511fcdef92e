"""Which CUDA graphs vLLM is asked for, and where they are split."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_spac.errors import UnsupportedError
from vllm_spac.integration import graphs


@pytest.fixture
def cuda(monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)


def arguments(mode: str | None, *, eager: bool = False, speculative=None):
    from vllm.config import CUDAGraphMode

    compilation = SimpleNamespace(cudagraph_mode=None if mode is None else CUDAGraphMode[mode])
    return SimpleNamespace(compilation_config=compilation, enforce_eager=eager, speculative_config=speculative)


def test_left_to_vllm_graphs_become_piecewise(cuda) -> None:
    args = arguments(None)
    given = args.compilation_config
    graphs.request(args)
    assert args.compilation_config.cudagraph_mode.name == "PIECEWISE"
    assert given.cudagraph_mode is None, "the user's own object, which another engine may use"


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE"])
def test_what_can_be_is_kept(cuda, mode: str) -> None:
    args = arguments(mode)
    graphs.request(args)
    assert args.compilation_config.cudagraph_mode.name == mode


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_full_graphs_that_were_asked_for_are_refused(cuda, mode: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"cudagraph_mode {mode} .*'{{\"cudagraph_mode\": \"PIECEWISE\"}}'"):
        graphs.request(arguments(mode))
    graphs.request(arguments(mode, eager=True))  # which turns them off


def test_what_needs_full_graphs_is_refused(cuda) -> None:
    with pytest.raises(UnsupportedError, match="drop it from --speculative-config"):
        graphs.request(arguments(None, speculative={"method": "mtp", "enable_adaptive_verification": True}))
    graphs.request(arguments(None, speculative={"method": "mtp"}))


def test_on_a_cpu_nothing_is_asked_for() -> None:
    args = arguments(None)
    graphs.request(args)
    assert args.compilation_config.cudagraph_mode is None


@pytest.mark.parametrize(
    ("ops", "split"),
    [
        (None, [graphs.MOE_LAYER]),
        (["vllm::unified_attention_with_output"], ["vllm::unified_attention_with_output", graphs.MOE_LAYER]),
        (["a::b", graphs.MOE_LAYER, "c::d"], ["a::b", "c::d", graphs.MOE_LAYER]),
    ],
    ids=str,
)
def test_ours_is_added_to_the_ops_to_split_at(ops, split) -> None:
    before = None if ops is None else list(ops)
    assert graphs.with_moe_layer(ops) == split
    assert ops == before


def config(mode: str):
    from vllm.config import CUDAGraphMode

    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode], splitting_ops=["a::b"])
    )


def test_only_graphs_are_split() -> None:
    for mode, ops in (("PIECEWISE", ["a::b", graphs.MOE_LAYER]), ("NONE", ["a::b"])):
        made = config(mode)
        graphs.split(made)
        assert made.compilation_config.splitting_ops == ops


def test_graphs_that_became_full_on_the_way_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="cudagraph_mode FULL "):
        graphs.split(config("FULL"))


def test_graphs_that_split_by_themselves_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    with pytest.raises(UnsupportedError, match="VLLM_USE_BREAKABLE_CUDAGRAPH=0"):
        graphs.split(config("PIECEWISE"))
    graphs.split(config("NONE"))
