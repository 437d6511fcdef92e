"""What vLLM itself takes for a step is measured with a real engine, or it is said why not."""

from __future__ import annotations

import sys

import pytest

from vllm_spac.errors import SpacError
from vllm_spac.tools.machine import vllm_step


def test_a_step_of_stock_vllm() -> None:
    assert vllm_step.seconds_per_token(1) > 0


def test_an_engine_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SpacError, match="does not run a tiny model: exit code 1; add --no-vllm"):
        vllm_step.seconds_per_token(1)
