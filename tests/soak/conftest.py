"""Servers and stock's answers that the attacks share."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "integration")]

import exchange  # noqa: E402
import serving  # noqa: E402


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    """Stock vLLM, which serves until the session ends."""
    with serving.started(tmp_path_factory.mktemp("stock")) as server:
        yield server


@pytest.fixture(scope="session")
def answers(stock) -> list[list[int]]:
    """Stock's greedy tokens for ``exchange.PROMPTS``."""
    tokens = exchange.tokens(stock.url)
    assert len(set(map(tuple, tokens))) > len(tokens) / 2, "this model says the same to everything"
    return tokens


@pytest.fixture
def starting(tmp_path):
    """``starting(disk_dir, *flags)`` -> a server with 25 % slots that may still be loading; gone behind the test."""
    with contextlib.ExitStack() as servers:

        def start(disk_dir: Path, *flags: str):
            server = serving.Server(tmp_path, *serving.FLAGS, *serving.offloaded(disk_dir), *flags)
            servers.callback(server.stop)
            return server

        yield start
