"""Counters of what vLLM's drafter takes, called in the process of an engine by ``engine.py``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

_PROMPT = 18  # rows of a step, at least, that is taken for a prompt: a token and a tree of 16 drafts are fewer


@dataclass
class Drafted:
    """Draft tokens proposed after steps without prompts, and the seconds that the drafter took for them."""

    draft_tokens: int = 0
    draft_seconds: float = 0.0


_DRAFTED = Drafted()
_watched: set[int] = set()


def counters(llm: Any) -> dict[str, float]:
    """Returns what drafts took; the first call begins to time them."""
    llm.collective_rpc(_watch)
    return asdict(_DRAFTED)


def _watch(worker: Any) -> None:
    drafter = getattr(worker.model_runner, "drafter", None)
    if drafter is not None and id(drafter) not in _watched:
        _watched.add(id(drafter))
        drafter.propose = _timed(drafter.propose)


def _timed(propose: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        drafts = propose(*args, **kwargs)
        rows = kwargs.get("target_token_ids")
        if rows is not None and len(rows) < _PROMPT:
            _DRAFTED.draft_seconds += time.perf_counter() - begin
            _DRAFTED.draft_tokens += sum(map(len, drafts))
        return drafts

    return timed
