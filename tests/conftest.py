"""Fixtures for all tests: no deadlines on slow machines, readable log records whatever engines do to vLLM's logger."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # no look at the clock
settings.load_profile("busy")


@pytest.fixture(autouse=True)
def messages_reach_caplog(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Importing vLLM ends propagation, and the engine tests set its level to ERROR for the whole process."""
    logger = logging.getLogger("vllm.spac")
    before = logger.level
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(before)
