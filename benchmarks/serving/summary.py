"""Turns raw runs into rows: checks the tokens against stock's, then computes speeds. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from benchmarks.common import Spread
from benchmarks.serving.cases import POINTERS, STOCK, Case


@dataclass(frozen=True)
class Run:
    """One engine of one repeat: its result, or its error."""

    case: Case
    repeat: int
    result: dict | None = None
    error: str | None = None

    @property
    def answer(self) -> dict:
        """The result of a run that did not fail."""
        assert self.result is not None, self.error
        return self.result


@dataclass
class Row:
    """One case at one batch size. Speeds are None until its tokens have been found to be stock's.

    Attributes:
        verdict: ``same``, ``rounded`` (not the same, and not meant to be: it sums in another order than stock),
            ``differs``, ``failed`` or ``pending`` (stock has not answered yet).
        requests: of all its engines; ``equal_requests``: those with exactly stock's tokens. Of a row that rounds, most
            should be equal: a near-tie of two logits may turn, and then the rest of that request differs.
    """

    case: Case
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
    counters: dict = field(default_factory=dict)

    @property
    def is_measured(self) -> bool:
        return self.verdict in ("same", "rounded")

    @property
    def rate(self) -> Spread:
        """Tokens per second of a row that is measured."""
        assert self.tokens_per_second is not None, self.verdict
        return self.tokens_per_second

    def plain(self) -> dict:
        case, knobs = self.case, dict(self.case.knobs or {})
        policy = f"{knobs['policy']}{POINTERS * case.rounds}" if knobs else None
        configuration = {"slots": knobs.get("slots", case.share), "policy": policy}
        configuration |= {"speculation": case.speculation, "offload": case.offload}
        rest = {name: value for name, value in asdict(self).items() if name != "case"}
        return {"configuration": configuration} | rest | {"name": case.name}


def rows(cases: list[Case], runs: list[Run], batches: list[int]) -> list[Row]:
    """Returns a row for each case that has run, batch size by batch size."""
    found: list[Row] = []
    for batch in batches:
        mine = [_row(case, batch, _of(case, runs), _reference(case, batch, runs)) for case in cases if _of(case, runs)]
        for row in mine:
            stock = next((other for other in mine if other.case == _stock(row.case)), None)
            if row.is_measured and stock is not None and stock.is_measured:
                row.ratio_to_stock = row.rate.median / stock.rate.median
        found += mine
    return found


def reported(run: Run, rows_: list[Row]) -> dict:
    """Returns a run for the result; with times only if its tokens are stock's."""
    plain = {"configuration": run.case.label, "repeat": run.repeat, "error": run.error}
    if run.result is None:
        return plain
    same = {str(r.batch) for r in rows_ if r.case == run.case and r.is_measured}
    timed = ("seconds", "ttft", "tpot", "counters")
    batches = {
        batch: {name: measured[name] for name in timed} if batch in same else "not reported: tokens are not stock's"
        for batch, measured in run.result["batches"].items()
    }
    return plain | {"load_seconds": run.result["load_seconds"], "choices": run.result["choices"], "batches": batches}


def _of(case: Case, runs: list[Run]) -> list[Run]:
    return [run for run in runs if run.case == case]


def _stock(case: Case) -> Case:
    """Returns stock vLLM at the speculation of ``case``."""
    return Case(STOCK, None, case.speculation)


def _reference(case: Case, batch: int, runs: list[Run]) -> list[list[int]] | None:
    """Returns stock's tokens at this speculation and batch size, of the first repeat that has them."""
    stock = _of(_stock(case), runs)
    return next((run.result["batches"][str(batch)]["tokens"] for run in stock if run.result), None)


def _row(case: Case, batch: int, runs: list[Run], reference: list[list[int]] | None) -> Row:
    failed = next((run for run in runs if run.error), None)
    if failed is not None:
        return Row(case, batch, "failed", failed.error or "")
    if reference is None:
        return Row(case, batch, "pending", "stock has not answered yet")
    measured = [run.answer["batches"][str(batch)] for run in runs]
    verdict, why = "same", ""
    if different := list(_differences(measured, reference)):
        verdict, why = "rounded" if case.rounds else "differs", "; ".join(different)
    pairs = [pair for m in measured for pair in zip(m["tokens"], reference, strict=True)]
    row = Row(case, batch, verdict, why, len(pairs), sum(said == stocks for said, stocks in pairs))
    if not row.is_measured:
        return row
    count = sum(map(len, reference))
    row.tokens_per_second = Spread.of([count / m["seconds"] for m in measured])
    row.ttft = Spread.of([value for m in measured for value in m["ttft"]])
    row.tpot = _spread_of([value for m in measured for value in m["tpot"] if value is not None])
    if not case.is_stock:
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
    if "speculation" in last:
        row.counters["speculation"] = last["speculation"]
    asked = row.counters["hits"] + row.counters["misses"] + row.counters["cpu_experts"]
    row.hit_rate = row.counters["hits"] / asked if asked else None
    choices = runs[-1].answer["choices"]
    row.cache_ratio = choices["slots"] / choices["experts"]
