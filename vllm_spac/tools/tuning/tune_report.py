"""What a run of ``vllm-spac tune`` found: the profile, and sentences on it. Pure."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_spac.config.tuned_profile import DEFAULT, Candidate, Measured
from vllm_spac.config.types import flag
from vllm_spac.tools.tuning.session import TuneOutcome


def measured(outcome: TuneOutcome, candidates: Sequence[Candidate]) -> tuple[Measured, ...]:
    """Returns what was measured of each candidate, the fastest first and those without a speed last."""
    rows = [_row(outcome, candidate) for candidate in candidates]
    return tuple(sorted(rows, key=lambda row: -(row.speed or 0.0)))


def _row(outcome: TuneOutcome, candidate: Candidate) -> Measured:
    name, last = candidate.name, outcome.last.get(candidate.name)
    if last is None:
        return Measured(name=name, note=candidate.note, problem="no time was left")
    tokens = outcome.tokens.get(name)
    wrong = tokens is not None and tokens.verdict == "wrong" and name != DEFAULT
    return Measured(
        name=name,
        speed=None if wrong else outcome.speeds.get(name),
        tokens_per_second=statistics.median(last.rates) if last.rates else None,
        first_token=statistics.median(last.first_token) if last.first_token else None,
        rounds=last.round + 1,
        tokens="" if tokens is None else str(tokens),
        note=candidate.note,
        problem=last_line(last.problem) if last.problem else "other tokens than the default's" if wrong else "",
    )


def last_line(log: str) -> str:
    """Returns the last line of a log that says anything."""
    return next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "it says nothing")


def sentences(outcome: TuneOutcome) -> Iterator[str]:
    """Yields what was decided, and why."""
    name = None if outcome.contender is None else outcome.contender.name
    if name is None:
        if outcome.untried:
            yield "nothing that was tried so far was faster than the default"
        else:
            yield "nothing was faster than the default: it is kept"
        return
    if (tokens := outcome.tokens.get(name)) is not None and tokens.verdict == "wrong":
        yield f"{name} was the fastest and gave other tokens in turns with the default, which is kept"
    elif outcome.ratio is None:
        yield f"{name} was the fastest so far; the time was too short to compare it with the default in turns"
    else:
        yield f"in turns, {name} over the default, tokens per second: {outcome.ratio}"
        if not outcome.ratio.is_faster:
            yield "the interval includes 1, so the default is kept"
    if tokens is not None and tokens.verdict == "near-ties":
        exact = """--engine '{"dtype": "float32"}'"""
        yield f"its tokens are the default's but for {tokens}; {exact} allows no difference"
    if outcome.contender is not None and outcome.contender.note:
        yield f"{name} is {outcome.contender.note}"


def errors(outcome: TuneOutcome) -> Iterator[str]:
    """Yields a sentence on each candidate whose tokens were wrong."""
    for name, tokens in outcome.tokens.items():
        if tokens.verdict == "wrong":
            what = "does not repeat its own tokens" if name == DEFAULT else "is never kept"
            yield f"{name}: tokens are {tokens}; it {what}; please report this with the command and the model"


def command(model: str, candidate: Candidate, disk_dir: Path | None) -> str:
    """Returns the command that serves so without a profile."""
    options: list[str] = []
    for name, value in (candidate.knobs or {}).items():
        options += [flag(name), str(value)]
    if disk_dir is not None:
        options += [flag("disk_dir"), str(disk_dir)]
    if candidate.drafts is not None:
        options += ["--speculative-config", json.dumps(dict(candidate.drafts))]
    return shlex.join(["vllm", "serve", model, "--plugin", "spac", *options])
