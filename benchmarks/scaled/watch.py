"""Further counters of a scaled machine's engine, called in its process by ``serving/engine.py``."""

from __future__ import annotations

from typing import Any

from benchmarks.scaled import pacing
from benchmarks.serving import drafting


def counters(llm: Any) -> dict[str, float]:
    """Returns how deadlines were kept (``pacing.Kept``) and what drafts took (``drafting.Drafted``)."""
    return pacing.counted() | drafting.counters(llm)
