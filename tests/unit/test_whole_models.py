"""A model that fits the GPU is left to stock vLLM; whoever asks more of the plugin gets stock's kernel and graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_spac.config.config import SpacConfig
from vllm_spac.errors import flag
from vllm_spac.integration import gpu_defaults, plugin, store_choice, whole_models
from vllm_spac.integration.hooks import device, graphs
from vllm_spac.storage.checkpoint.published import published

GIB = 1 << 30
QWEN = "Qwen/Qwen3-30B-A3B"  # 56.9 GiB of weights, 96 KiB of KV cache a token


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Arguments of ``vllm serve`` for a model of which only ``config.json`` is here, on a GPU of 80 GiB."""
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(device, "is_cpu", lambda: False)
    monkeypatch.setattr(device, "query", lambda: device.DeviceFacts("an H100", True, (9, 0), True, True))
    monkeypatch.setattr(device, "total_memory", lambda: 80 * GIB)
    monkeypatch.setattr(store_choice, "available_host_bytes", lambda: 128 * GIB)
    (tmp_path / "config.json").write_text(json.dumps(published()[QWEN]))

    def made(knobs: dict | None = None, **options: Any) -> EngineArgs:
        spac = {"spac": knobs or {}, "other": 1}
        asked = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, additional_config=spac, **options)
        asked.spac_command = True
        return asked

    return made


def served(asked: Any) -> SpacConfig | None:
    return gpu_defaults.apply(asked, SpacConfig.parse(asked.additional_config["spac"]))


def mode_of(asked: Any, config: SpacConfig, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The CUDA graphs that are requested of vLLM; None: its own."""
    monkeypatch.setattr(graphs, "is_cpu", lambda: False)
    graphs.request(asked, config)
    mode = asked.compilation_config.cudagraph_mode
    return None if mode is None else mode.name


def test_where_all_experts_fit_the_engine_is_stocks(args, caplog) -> None:
    """Its kernel, graphs and parts of prompts: only how long requests may be is fitted, so that it starts."""
    caplog.set_level("INFO")
    asked, stock = args(), args()
    assert served(asked) is None
    assert asked.additional_config == {"other": 1} and asked.max_model_len == -1
    left = {"additional_config", "max_model_len"}
    assert all(value == vars(stock)[name] for name, value in vars(asked).items() if name not in left)
    (record,) = (each for each in caplog.records if each.name == "vllm.spac")
    assert (
        "all experts fit: 56.87 GiB of weights" in record.message and "stock vLLM serves this as fast" in record.message
    )
    assert "GET /spac/stats" in record.message and "--spac-slots 100%" in record.message


def test_no_worker_of_it_has_anything_of_the_plugins(args, monkeypatch) -> None:
    monkeypatch.setattr(plugin.patches, "check_names", lambda where: None)
    asked, passed = args(), []
    created = plugin._checked(lambda self: passed.append(self) or "stock's")
    assert created(asked) == "stock's" and passed == [asked]
    assert asked.worker_extension_cls == "" and asked.max_num_batched_tokens is None


@pytest.mark.parametrize(
    ("knobs", "options"),
    [
        ({"slots": "100%"}, {}),
        ({"slots": "25%", "http": "page"}, {}),
        ({"plane": "pointers"}, {}),
        ({}, {"enable_lora": True}),
        ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
        ({}, {"pipeline_parallel_size": 2}),
        ({}, {"gpu_memory_utilization": 0.7}),
        ({}, {"kv_cache_memory_bytes": 40 * GIB}),
        ({}, {"max_model_len": 40960, "max_num_seqs": 16}),
        ({"http": "page"}, {"gpu_memory_utilization": 0.7}),
    ],
    ids=str,
)
def test_where_the_user_says_what_fits_or_it_does_not_nothing_changes(args, knobs: dict, options: dict) -> None:
    asked = args(knobs, **options)
    config = served(asked)
    assert config is not None and config.plane != "auto" and config.slots == knobs.get("slots", "auto")
    assert asked.additional_config["spac"] == {**knobs, "plane": config.plane}


ASKED = ("prefetch", "record", "budget", "speculate", "http")  # in the order of the knobs
IDLE: list[dict] = [
    {"store": "disk"},
    {"store": "disk", "host_memory": "8GiB", "disk_dir": "/tmp"},
    {"policy": "lru"},
    {"prefetch": "gate"},
    {"cpu_experts": "auto", "cpu_kernel": "simd"},
    {"guard": "off", "io_threads": 2},
    {"tuned": "off"},
]


@pytest.mark.parametrize("knobs", IDLE, ids=str)
def test_knobs_of_memory_that_nothing_is_read_from_cost_no_stock_server(args, caplog, knobs: dict) -> None:
    caplog.set_level("INFO")
    asked = args(knobs)
    assert served(asked) is None and asked.additional_config == {"other": 1}
    (said,) = (each.message for each in caplog.records if each.name == "vllm.spac")
    assert "nothing is left to --spac-" in said and all(flag(name) in said for name in knobs)


@pytest.mark.parametrize(
    ("knobs", "command"),
    [
        ({"http": "page"}, True),
        ({"record": "timeline=a"}, True),
        ({"plane": "slots"}, True),
        ({"http": "page", "policy": "lru", "store": "disk"}, True),
        ({}, False),
        ({"policy": "lru"}, False),
        ({"slots": "100%"}, True),
    ],
    ids=str,
)
def test_what_only_observes_costs_neither_stocks_kernel_nor_its_graphs(
    args, monkeypatch, caplog, knobs: dict, command: bool
) -> None:
    """Nor a program that may read the counters, or whoever named the slots."""
    caplog.set_level("INFO")
    asked = args(knobs)
    asked.spac_command = command
    config = served(asked)
    assert config is not None and (config.plane, config.slots) == ("slots", "100%")
    assert mode_of(asked, config, monkeypatch) is None and asked.max_num_batched_tokens is None
    assert asked.additional_config["spac"] == {
        **{name: value for name, value in knobs.items() if name not in ("policy", "store")},
        "slots": "100%",
        "plane": "slots",
    }
    if "slots" not in knobs:
        assert "slots=100%: all experts fit: 56.87 GiB of weights" in caplog.text
    if "plane" not in knobs:
        assert "plane=slots: each expert has a slot: vLLM's kernel and CUDA graphs, as without" in caplog.text
        assert ("nothing is left to" in caplog.text) is ("policy" in knobs)


@pytest.mark.parametrize(
    ("knobs", "plane", "mode"),
    [
        ({"budget": "16"}, "pointers", "FULL_DECODE_ONLY"),
        ({"http": "page,control"}, "pointers", "FULL_DECODE_ONLY"),
        ({"speculate": "predicted", "prefetch": "gate"}, "slots", None),
        ({"record": "trace=a"}, "slots", "NONE"),
        ({"record": "trace=a", "budget": "16"}, "slots", "NONE"),
        ({"budget": "16@votes=path"}, "slots", "NONE"),
    ],
    ids=str,
)
@pytest.mark.parametrize("named", [False, True])
def test_the_log_says_which_knob_keeps_the_plugin_inside_of_layers(
    args, monkeypatch, caplog, knobs: dict, plane: str, mode: str | None, named: bool
) -> None:
    """A budget gets the graphs that hold one, also where the user named the slots."""
    caplog.set_level("INFO")
    asked = args(knobs | ({"slots": "100%"} if named else {}))
    config = served(asked)
    assert config is not None and (config.plane, config.slots) == (plane, "100%")
    assert mode_of(asked, config, monkeypatch) == mode
    if not named:
        assert (
            f"the plugin's layers stay for {' and '.join(flag(each) for each in ASKED if each in knobs)}" in caplog.text
        )
    assert "as without the plugin" not in caplog.text


def test_its_settings_are_those_of_a_second_call(args) -> None:
    """vLLM makes an engine's configuration more than once of the same arguments."""
    asked = args({"http": "page"})
    first = served(asked)
    assert first == served(asked) and first is not None


@pytest.mark.parametrize(("gib", "fits"), [(72, True), (71, True), (64, False), (24, False)])
def test_the_card_decides(args, monkeypatch, gib: int, fits: bool) -> None:
    monkeypatch.setattr(device, "total_memory", lambda: gib * GIB)
    assert (served(args()) is None) is fits


def test_two_cards_hold_a_half_each(args, monkeypatch) -> None:
    monkeypatch.setattr(device, "total_memory", lambda: 48 * GIB)
    assert served(args()) is not None and served(args(tensor_parallel_size=2)) is None


def test_latent_attention_keeps_one_vector_a_token(args, tmp_path) -> None:
    """As vLLM counts it, whatever number of heads the checkpoint names."""
    (tmp_path / "config.json").write_text(json.dumps(published()["deepseek-ai/DeepSeek-V2-Lite-Chat"]))
    asked = args(max_model_len=4096, max_num_seqs=1)
    found = whole_models.count(asked, asked.create_model_config())
    assert found is not None and found.kv == pytest.approx(27 * 576 * 2 * 4096, rel=0.01)


def test_a_device_whose_memory_is_unknown_is_the_plugins(args, monkeypatch) -> None:
    monkeypatch.setattr(device, "total_memory", lambda: None)
    assert served(args()) is not None


@pytest.mark.parametrize(
    ("host", "knobs", "store"),
    [
        (64, {}, "host"),  # 58 GiB hold all experts
        (52, {}, "host"),  # 6 GiB too few, of 14 GiB of slots
        (42, {}, "disk"),  # 16 too few
        (52, {"slots": "10%"}, "disk"),  # 5.4 GiB of slots
        (52, {"slots": "16"}, "disk"),  # of each layer: 6.75 GiB, where 8 are missing
        (52, {"plane": "slots"}, "disk"),  # no kernel reads host memory in place
    ],
)
def test_host_memory_that_is_a_little_short_is_no_reason_for_a_disk(args, monkeypatch, host, knobs, store) -> None:
    """54 GiB of experts on a GPU of 24 GiB: those that host memory has no room for have slots for good."""
    monkeypatch.setattr(device, "query", lambda: device.DeviceFacts("an RTX 4090", True, (8, 9), True, True))
    monkeypatch.setattr(device, "total_memory", lambda: 24 * GIB)
    monkeypatch.setattr(store_choice, "available_host_bytes", lambda: host * GIB)
    config = served(args(knobs))
    assert config is not None and config.store_on("cuda") == store
    assert config.plane == knobs.get("plane", "pointers")
