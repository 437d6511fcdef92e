"""Turns raw runs into rows: checks the tokens against stock's, then computes speeds. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from bound import Counts, other_per_step, run_bound, run_in_turn
from common import Spread
from plan import FULL, Configuration


@dataclass(frozen=True)
class Run:
    """One engine of one repeat: its result, or its error."""

    configuration: Configuration
    repeat: int
    result: dict | None = None
    error: str | None = None

    @property
    def answer(self) -> dict:
        """The result of a run that did not fail."""
        assert self.result is not None, self.error
        return self.result


@dataclass(frozen=True)
class Rates:
    """Bytes per second of fast memory and of the path over which missing experts come."""

    fast: float
    slow: float


@dataclass
class Row:
    """One configuration at one batch size. Speeds are None until its tokens have been found to be stock's.

    Attributes:
        verdict: ``same``, ``lossy`` (a budget: its tokens are its own), ``rounded`` (not the same, and not meant to be:
            it sums in another order than stock), ``differs``, ``failed`` or ``pending`` (stock has not answered yet).
        requests: of all its engines; ``equal_requests``: those with exactly stock's tokens. Of a row that rounds, most
            should be equal: a near-tie of two logits may turn, and then the rest of that request differs.
        dropped_share: share of its rows' routing weight that a budget dropped.
        ratio_to_bound: measured seconds over the bound's; 1 is as fast as this machine can be.
        ratio_in_turn: measured seconds over those in which loads, at the best rate, and computation take turns.
    """

    configuration: Configuration
    batch: int
    verdict: str
    why: str = ""
    requests: int = 0
    equal_requests: int = 0
    tokens_per_second: Spread | None = None
    ttft: Spread | None = None
    tpot: Spread | None = None
    ratio_to_stock: float | None = None
    cache_ratio: float | None = None
    hit_rate: float | None = None
    dropped_share: float | None = None
    counters: dict = field(default_factory=dict)
    bound_tokens_per_second: float | None = None
    ratio_to_bound: float | None = None
    ratio_in_turn: float | None = None

    @property
    def is_measured(self) -> bool:
        return self.verdict in ("same", "lossy", "rounded")

    @property
    def rate(self) -> Spread:
        """Tokens per second of a row that is measured."""
        assert self.tokens_per_second is not None, self.verdict
        return self.tokens_per_second

    @property
    def share(self) -> float:
        """Share of the experts in fast memory of a row that is measured and not stock's."""
        assert self.cache_ratio is not None, self.verdict
        return self.cache_ratio

    def plain(self) -> dict:
        return asdict(self) | {"name": self.configuration.name}


def rows(plan: list[Configuration], runs: list[Run], batches: list[int], rates: Rates | None) -> list[Row]:
    """Returns a row for each configuration that has run, batch size by batch size."""
    found: list[Row] = []
    for batch in batches:
        table = {c: _row(c, batch, _of(c, runs), _reference(c, batch, runs)) for c in plan if _of(c, runs)}
        for configuration, row in table.items():
            stock = table.get(Configuration(None, None, configuration.speculation))
            if row.is_measured and stock is not None and stock.is_measured:
                row.ratio_to_stock = row.rate.median / stock.rate.median
        if rates is not None:
            _add_bounds(list(table.values()), runs, batch, rates)
        found += table.values()
    return found


def reported(run: Run, rows_: list[Row]) -> dict:
    """Returns a run for the result; with times only if its tokens are stock's."""
    plain = {"configuration": run.configuration.label, "repeat": run.repeat, "error": run.error}
    if run.result is None:
        return plain
    same = {str(r.batch) for r in rows_ if r.configuration == run.configuration and r.is_measured}
    timed = ("seconds", "ttft", "tpot", "counters")
    batches = {
        batch: {name: measured[name] for name in timed} if batch in same else "not reported: tokens are not stock's"
        for batch, measured in run.result["batches"].items()
    }
    return plain | {"load_seconds": run.result["load_seconds"], "choices": run.result["choices"], "batches": batches}


def _of(configuration: Configuration, runs: list[Run]) -> list[Run]:
    return [run for run in runs if run.configuration == configuration]


def _reference(configuration: Configuration, batch: int, runs: list[Run]) -> list[list[int]] | None:
    """Returns stock's tokens at this speculation and batch size, of the first repeat that has them."""
    stock = _of(Configuration(None, None, configuration.speculation), runs)
    return next((run.result["batches"][str(batch)]["tokens"] for run in stock if run.result), None)


def _row(configuration: Configuration, batch: int, runs: list[Run], reference: list[list[int]] | None) -> Row:
    failed = next((run for run in runs if run.error), None)
    if failed is not None:
        return Row(configuration, batch, "failed", failed.error or "")
    if reference is None:
        return Row(configuration, batch, "pending", "stock has not answered yet")
    measured = [run.answer["batches"][str(batch)] for run in runs]
    verdict, why = "lossy" if configuration.budget is not None else "same", ""
    if verdict == "same" and (different := list(_differences(measured, reference))):
        verdict, why = "rounded" if configuration.rounds else "differs", "; ".join(different)
    pairs = [pair for m in measured for pair in zip(m["tokens"], reference, strict=True)]
    row = Row(configuration, batch, verdict, why, len(pairs), sum(said == stocks for said, stocks in pairs))
    if not row.is_measured:
        return row
    count = sum(map(len, reference))  # a budget changes which tokens are emitted, not how many
    row.tokens_per_second = Spread.of([count / m["seconds"] for m in measured])
    row.ttft = Spread.of([value for m in measured for value in m["ttft"]])
    row.tpot = _spread_of([value for m in measured for value in m["tpot"] if value is not None])
    if not configuration.is_stock:
        _add_counters(row, runs, measured)
    return row


def _spread_of(values: list[float]) -> Spread | None:
    return Spread.of(values) if values else None


def _differences(measured: list[dict], reference: list[list[int]]) -> Iterator[str]:
    for repeat, tokens in enumerate(m["tokens"] for m in measured):
        wrong = [index for index, (a, b) in enumerate(zip(tokens, reference, strict=True)) if a != b]
        if wrong:
            pairs = enumerate(zip(tokens[wrong[0]], reference[wrong[0]], strict=False))
            first = next((place for place, (a, b) in pairs if a != b), "its end")
            yield f"repeat {repeat}: {len(wrong)} of {len(reference)} requests, number {wrong[0]} from token {first} on"


def _add_counters(row: Row, runs: list[Run], measured: list[dict]) -> None:
    """Adds medians over the repeats; the counters of speculation and steps are those of the last one."""
    last = measured[-1]["counters"]
    names = ["hits", "misses", "loads", "cpu_experts", "stall_seconds", "waves"]
    names += ["prefetches", "prefetch_hits", "prefetch_wasted"]
    row.counters = {name: statistics.median(m["counters"][name] for m in measured) for name in names}
    row.counters["bytes"] = statistics.median(sum(m["counters"]["bytes"].values()) for m in measured)
    row.counters["steps"] = last["steps"]
    budget = last.get("budget", {})
    if budget.get("rows"):
        row.dropped_share = budget["dropped_weight"] / budget["rows"]
    if "speculation" in last:
        row.counters["speculation"] = last["speculation"]
    asked = row.counters["hits"] + row.counters["misses"] + row.counters["cpu_experts"]
    row.hit_rate = row.counters["hits"] / asked if asked else None
    choices = runs[-1].answer["choices"]
    row.cache_ratio = choices["slots"] / choices["experts"]


def _add_bounds(table: list[Row], runs: list[Run], batch: int, rates: Rates) -> None:
    """Adds the bounds of the rows, from the fastest run of the same speculation that had all experts resident."""
    rows_ = [row for row in table if row.is_measured and not row.configuration.is_stock]
    resident = {row.configuration.speculation: row for row in rows_ if row.configuration.slots == FULL}
    for row in rows_:
        full = resident.get(row.configuration.speculation)
        if full is None or row.configuration.rounds:  # rates of the CPU or the bus were not measured
            continue
        expert_bytes = _of(row.configuration, runs)[-1].answer["choices"]["expert_bytes"]
        fastest, took = min(_seconds(full, runs, batch)), statistics.median(_seconds(row, runs, batch))
        rest = other_per_step(fastest, _counts(full), expert_bytes, rates.fast)
        least = run_bound(_counts(row), expert_bytes, rates.fast, rates.slow, rest)
        row.ratio_to_bound = took / least if least else None
        row.ratio_in_turn = took / run_in_turn(row.counters["misses"], expert_bytes, rates.slow, fastest)
        row.bound_tokens_per_second = _tokens(row, runs, batch) / least if least else None


def _seconds(row: Row, runs: list[Run], batch: int) -> list[float]:
    return [run.answer["batches"][str(batch)]["seconds"] for run in _of(row.configuration, runs)]


def _tokens(row: Row, runs: list[Run], batch: int) -> int:
    said = _of(row.configuration, runs)[-1].answer["batches"][str(batch)]["tokens"]
    return sum(len(tokens) for tokens in said)


def _counts(row: Row) -> Counts:
    return Counts(row.counters["hits"], row.counters["misses"], sum(row.counters["steps"].values()))
