"""What a GPU must have: each refusal says what is missing and what to do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from vllm_spac.errors import UnsupportedError
from vllm_spac.integration.hooks import device
from vllm_spac.integration.hooks.device import DeviceFacts

H200 = DeviceFacts("NVIDIA H200", cuda=True, capability=(9, 0), pinned=True, unified=True)


@pytest.mark.parametrize(
    ("facts", "needs", "said"),
    [
        ({"cuda": False, "name": "AMD Instinct"}, {}, ["AMD Instinct", "NVIDIA GPU", "CPU build"]),
        ({"capability": (7, 5), "name": "Tesla T4"}, {}, ["Tesla T4", "sm_75", "sm_80 or newer"]),
        ({"pinned": False}, {"pinned": True}, ["pinned", "store=host", "--spac-store disk", "--spac-slots 100%"]),
        ({"unified": False}, {"unified": True}, ["unified addressing", "--spac-plane slots"]),
    ],
    ids=str,
)
def test_refused(facts: dict, needs: dict, said: list[str]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        device.check_device(replace(H200, **facts), **{"pinned": False, **needs})
    for part in said:
        assert part in str(caught.value)


def test_only_what_is_needed_must_be_there() -> None:
    device.check_device(replace(H200, pinned=False, unified=False), pinned=False)
    device.check_device(replace(H200, unified=False), pinned=True)
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        device.check_device(replace(H200, capability=capability), pinned=True, unified=True)


def test_a_cpu_has_no_facts() -> None:
    assert device.query() is None


def test_facts_come_from_vllms_platform(monkeypatch) -> None:
    import vllm.platforms
    import vllm.utils.platform_utils as utils

    platform = SimpleNamespace(
        is_cpu=lambda: False,
        is_cuda=lambda: True,
        get_device_capability=lambda: SimpleNamespace(major=8, minor=9),
        get_device_name=lambda: "NVIDIA L40S",
    )
    monkeypatch.setattr(vllm.platforms, "current_platform", platform)
    monkeypatch.setattr(utils, "is_pin_memory_available", lambda: False)
    monkeypatch.setattr(utils, "is_uva_available", lambda: False)
    assert device.query() == DeviceFacts("NVIDIA L40S", True, (8, 9), pinned=False, unified=False)
