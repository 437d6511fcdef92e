"""Checkpoints and stock answers, made once per session."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import engines  # noqa: E402
import zoo  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def v2_on_cpu() -> None:
    """Tests with V2's runner by Triton's interpreter are for machines without a GPU."""
    if engines.V2 and os.environ.get("TRITON_INTERPRET") == "1":
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            pytest.skip("Triton's interpreter runs V2's kernels on a CPU only; a GPU's tests are `make test-gpu`")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """``checkpoint(family)`` -> folder of a tiny random model."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = zoo.write(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(scope="session")
def stock(checkpoint):
    """``stock(family)`` -> what vLLM says without the plugin."""
    said: dict[str, engines.Run] = {}

    def get(family: str) -> engines.Run:
        if family not in said:
            said[family] = engines.generate(checkpoint(family))
            assert len({tuple(tokens) for tokens in said[family].tokens}) > 4, "this model says the same to everything"
        return said[family]

    return get
