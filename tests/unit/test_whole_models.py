"""A model that fits the GPU is left to stock vLLM, if nothing was asked of the plugin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_spac.config.config import SpacConfig
from vllm_spac.integration import gpu_defaults, plugin
from vllm_spac.integration.hooks import device
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
    (tmp_path / "config.json").write_text(json.dumps(published()[QWEN]))

    def made(knobs: dict | None = None, **options: Any) -> EngineArgs:
        spac = {"spac": knobs or {}, "other": 1}
        asked = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, additional_config=spac, **options)
        asked.spac_command = True
        return asked

    return made


def served(asked: Any) -> SpacConfig | None:
    return gpu_defaults.apply(asked, SpacConfig.parse(asked.additional_config["spac"]))


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
    monkeypatch.setattr(plugin.patches, "require_names", lambda where: None)
    asked, passed = args(), []
    created = plugin._checked(lambda self: passed.append(self) or "stock's")
    assert created(asked) == "stock's" and passed == [asked]
    assert asked.worker_extension_cls == "" and asked.max_num_batched_tokens is None


@pytest.mark.parametrize(
    ("knobs", "options"),
    [
        ({"slots": "100%"}, {}),
        ({"budget": 16}, {}),
        ({"http": "page"}, {}),
        ({"record": "trace=a.trace"}, {}),
        ({}, {"enable_lora": True}),
        ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
        ({}, {"pipeline_parallel_size": 2}),
        ({}, {"gpu_memory_utilization": 0.7}),
        ({}, {"kv_cache_memory_bytes": 40 * GIB}),
        ({}, {"max_model_len": 40960, "max_num_seqs": 16}),
    ],
    ids=str,
)
def test_what_was_asked_of_the_plugin_or_does_not_fit_is_the_plugins(args, knobs: dict, options: dict) -> None:
    asked = args(knobs, **options)
    config = served(asked)
    assert config is not None and config.plane != "auto" and asked.additional_config["spac"]["plane"] == config.plane


def test_a_program_keeps_the_plugin_and_its_counters(args) -> None:
    asked = args()
    del asked.spac_command
    assert served(asked) is not None


@pytest.mark.parametrize(("gib", "fits"), [(72, True), (71, True), (64, False), (24, False)])
def test_the_card_decides(args, monkeypatch, gib: int, fits: bool) -> None:
    monkeypatch.setattr(device, "total_memory", lambda: gib * GIB)
    assert (served(args()) is None) is fits


def test_two_cards_hold_a_half_each(args, monkeypatch) -> None:
    monkeypatch.setattr(device, "total_memory", lambda: 48 * GIB)
    assert served(args()) is not None and served(args(tensor_parallel_size=2)) is None


def test_a_device_whose_memory_is_unknown_is_the_plugins(args, monkeypatch) -> None:
    monkeypatch.setattr(device, "total_memory", lambda: None)
    assert served(args()) is not None
