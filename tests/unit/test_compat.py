"""The hooks were tested with some versions of vLLM; any other must be refused, not tried."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from vllm_spac.errors import UnsupportedError
from vllm_spac.integration.hooks.device import check_supported_vllm


@pytest.mark.parametrize(
    "version", ["0.32.0", "0.32.0+cpu", "0.32.1", "0.33.0rc1", "0.33.0", "0.33.2.post1", "0.32.1.dev7+g0123abc"]
)
def test_tested_versions_are_accepted(version: str) -> None:
    check_supported_vllm(version)


@pytest.mark.parametrize(
    "version", ["0.31", "0.31.9", "0.9.2", "0.34.0", "0.34.0rc1", "0.34.0.dev1+cpu", "1.0", "1.33.0"]
)
def test_other_versions_are_refused_with_those_that_work(version: str) -> None:
    with pytest.raises(UnsupportedError, match="0.32 or 0.33") as error:
        check_supported_vllm(version)
    assert f"vLLM {version} is not supported" in str(error.value)
    assert ">=0.32" in str(error.value) and "<0.34" in str(error.value)


def test_a_build_without_a_version_is_refused() -> None:
    """vLLM calls itself ``dev`` when it was built outside of a git checkout."""
    with pytest.raises(UnsupportedError, match="dev"):
        check_supported_vllm("dev")


def test_the_installed_version_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.31.0"))
    with pytest.raises(UnsupportedError, match="0.31.0"):
        check_supported_vllm()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    check_supported_vllm()
