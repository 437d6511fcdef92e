"""Which CUDA graphs are requested of vLLM, and where they are split."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_spac.config.config import SpacConfig
from vllm_spac.core import MoEShape
from vllm_spac.errors import UnsupportedError
from vllm_spac.execution.address_table import MANY_ROWS
from vllm_spac.integration.hooks import graphs

SLOTS, POINTERS = SpacConfig(), SpacConfig(plane="pointers")
ALL = SpacConfig(slots="100%")  # the host decides, and each expert has one
WORKERS = SpacConfig(executor="processes", slots="100%")  # of theirs: rows leave the engine all the same
FULL = ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


@pytest.fixture
def cuda(monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)


def arguments(mode: str | None, *, eager: bool = False, speculative=None):
    from vllm.config import CUDAGraphMode

    compilation = SimpleNamespace(cudagraph_mode=None if mode is None else CUDAGraphMode[mode])
    return SimpleNamespace(compilation_config=compilation, enforce_eager=eager, speculative_config=speculative)


@pytest.mark.parametrize(
    ("config", "mode"),
    [(SLOTS, "NONE"), (WORKERS, "NONE"), (POINTERS, "FULL_DECODE_ONLY")],
    ids=["slots", "workers", "pointers"],
)
def test_a_mode_that_was_left_to_vllm_is_one_that_splits_nothing(cuda, config: SpacConfig, mode: str) -> None:
    """What is compiled up to MoE layers rounds at other places than stock vLLM (seen on an H100)."""
    args = arguments(None)
    given = args.compilation_config
    graphs.request(args, config)
    assert args.compilation_config.cudagraph_mode.name == mode
    assert given.cudagraph_mode is None, "the user's own object, which another engine may use"
    made = config_of(mode)
    graphs.add_splitting_op(made, config)
    assert made.compilation_config.splitting_ops == ["a::b"]


def test_where_vllms_own_kernels_run_the_mode_is_left_to_it(cuda) -> None:
    args = arguments(None)
    graphs.request(args, ALL)
    assert args.compilation_config.cudagraph_mode is None


@pytest.mark.parametrize(
    ("mode", "config"),
    [
        ("NONE", SLOTS),
        ("PIECEWISE", SLOTS),
        *((mode, config) for mode in ("PIECEWISE", *FULL) for config in (POINTERS, ALL)),
    ],
)
def test_what_can_be_is_kept(cuda, mode: str, config: SpacConfig) -> None:
    args = arguments(mode)
    graphs.request(args, config)
    assert args.compilation_config.cudagraph_mode.name == mode


HOST = {
    "--spac-plane pointers, or use --spac-slots 100%": {},
    "--spac-record": {"record": "trace=file"},
    "--spac-budget,": {"budget": 8},
    "--spac-http": {"http": "control"},
}


@pytest.mark.parametrize("mode", FULL)
@pytest.mark.parametrize(
    ("none_decided", "flag"),
    [({"plane": "pointers"}, "--spac-record"), *(({"slots": "100%"}, flag) for flag in HOST)],
    ids=str,
)
def test_full_graphs_that_were_asked_for_are_refused_where_layers_need_the_host(
    cuda, mode: str, none_decided: dict, flag: str
) -> None:
    config = SpacConfig(**HOST[flag], **(none_decided if HOST[flag] else {}))
    with pytest.raises(
        UnsupportedError, match=rf"cudagraph_mode {mode} .*{flag}.*'{{\"cudagraph_mode\": \"PIECEWISE\"}}'"
    ):
        graphs.request(arguments(mode), config)
    graphs.request(arguments(mode, eager=True), config)  # which turns them off
    args = arguments(None)
    graphs.request(args, config)
    assert args.compilation_config.cudagraph_mode.name == "NONE"


BUDGETS = [knobs for flag, knobs in HOST.items() if flag.startswith(("--spac-budget", "--spac-http"))]


@pytest.mark.parametrize("mode", [None, *FULL])
@pytest.mark.parametrize("knobs", BUDGETS, ids=str)
def test_full_graphs_hold_a_budget_over_pointers(cuda, mode: str | None, knobs: dict) -> None:
    """Also one that may be switched on while they are replayed."""
    config = SpacConfig(plane="pointers", **knobs)
    args = arguments(mode)
    graphs.request(args, config)
    assert args.compilation_config.cudagraph_mode.name == (mode or "FULL_DECODE_ONLY")
    assert graphs.hold_budget(config)
    for other in ({"record": "trace=file"}, {"plane": "slots"}):
        assert not graphs.hold_budget(SpacConfig(**{"plane": "pointers"} | knobs | other))
    assert not graphs.hold_budget(POINTERS)


@pytest.mark.parametrize(
    ("knobs", "left"),
    [
        ({"record": "trace=a"}, {"record": None}),
        ({"record": "trace=a,timeline=b,c"}, {"record": "timeline=b,c"}),
        ({"http": "control"}, {"http": None}),
        ({"http": "page,control"}, {"http": "page"}),
    ],
    ids=str,
)
def test_what_is_left_out_for_graphs_leaves_the_rest(knobs: dict, left: dict) -> None:
    """Of a knob with two values, the one that needs the host; commas of a path are the path's."""
    config = SpacConfig(slots="100%", **knobs)
    found = graphs.needs_host(config)
    assert found is not None and [remedy.changes for remedy in found[1]] == [left]
    assert graphs.needs_host(SpacConfig(slots="100%", **{name: value for name, value in left.items() if value})) is None


def test_what_needs_full_graphs_is_refused(cuda) -> None:
    with pytest.raises(UnsupportedError, match="drop it from --speculative-config"):
        graphs.request(arguments(None, speculative={"method": "mtp", "enable_adaptive_verification": True}), POINTERS)
    graphs.request(arguments(None, speculative={"method": "mtp"}), POINTERS)


def test_on_a_cpu_nothing_is_asked_for() -> None:
    args = arguments(None)
    graphs.request(args, SLOTS)
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


def config_of(mode: str):
    from vllm.config import CUDAGraphMode

    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode], splitting_ops=["a::b"])
    )


def test_only_graphs_are_split() -> None:
    split = ["a::b", graphs.MOE_LAYER]
    kept = ["a::b"]
    for mode, ops in {
        "PIECEWISE": split, "FULL_AND_PIECEWISE": split, "FULL": kept, "FULL_DECODE_ONLY": kept, "NONE": kept
    }.items():  # fmt: skip
        made = config_of(mode)
        graphs.add_splitting_op(made, POINTERS)
        assert made.compilation_config.splitting_ops == ops


@pytest.mark.parametrize(
    ("knobs", "held"), [({}, "the MoE layers,"), ({"http": "control"}, "the MoE layers and a budget,")]
)
def test_what_full_graphs_hold_is_logged(caplog, knobs: dict, held: str) -> None:
    graphs.add_splitting_op(config_of("FULL_DECODE_ONLY"), SpacConfig(plane="pointers", **knobs))
    assert f"they hold {held}" in caplog.text


@pytest.mark.parametrize("mode", FULL)
def test_graphs_over_slots_of_all_experts_are_vllms_own(monkeypatch, mode: str) -> None:
    made = config_of(mode)
    graphs.add_splitting_op(made, ALL)
    assert made.compilation_config.splitting_ops == ["a::b"]
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    graphs.add_splitting_op(made, ALL)


@pytest.mark.parametrize("knobs", [{}, {"record": "trace=file"}], ids=str)
def test_graphs_over_slots_of_all_experts_are_split_where_that_was_asked_for_or_needed(knobs: dict) -> None:
    made = config_of("PIECEWISE")
    graphs.add_splitting_op(made, SpacConfig(slots="100%", **knobs))
    assert made.compilation_config.splitting_ops == ["a::b", graphs.MOE_LAYER]


def test_graphs_that_became_full_on_the_way_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="cudagraph_mode FULL "):
        graphs.add_splitting_op(config_of("FULL"), SLOTS)


def test_graphs_that_split_by_themselves_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    with pytest.raises(UnsupportedError, match="VLLM_USE_BREAKABLE_CUDAGRAPH=0"):
        graphs.add_splitting_op(config_of("PIECEWISE"), SLOTS)
    with pytest.raises(UnsupportedError, match="VLLM_USE_BREAKABLE_CUDAGRAPH=0"):
        graphs.add_splitting_op(config_of("FULL_AND_PIECEWISE"), POINTERS)
    graphs.add_splitting_op(config_of("NONE"), SLOTS)
    graphs.add_splitting_op(config_of("FULL_DECODE_ONLY"), POINTERS)  # the default of models for which vLLM sets it


@pytest.mark.parametrize("mode", FULL)
@pytest.mark.parametrize(("captured", "refused"), [(4 * MANY_ROWS - 1, False), (4 * MANY_ROWS, True)])
def test_no_graph_holds_a_prompt_that_borrows_slots(mode: str, captured: int, refused: bool) -> None:
    made = config_of(mode)
    made.compilation_config.max_cudagraph_capture_size = captured
    shape = MoEShape(("layer",), 8, 2, {})
    if refused and mode == "FULL":
        with pytest.raises(UnsupportedError, match="64 and more borrow slots.*FULL_AND_PIECEWISE"):
            graphs.check_long_prompts(made, shape)
    else:
        graphs.check_long_prompts(made, shape)


@pytest.mark.parametrize(("batched", "captured", "rows"), [(64, 16, 64), (8, 16, 16), (8, None, 8)])
def test_a_forward_may_be_padded_beyond_what_is_batched(batched: int, captured: int | None, rows: int) -> None:
    made = SimpleNamespace(
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=captured),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=batched),
    )
    assert graphs.most_rows(made) == rows
