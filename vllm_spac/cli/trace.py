"""``vllm-spac trace``: statistics of recorded routing, and what other policies would have achieved on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_spac.cache.sizing import parse_list, slot_counts
from vllm_spac.cli.tables import compact, examples, print_table, shown
from vllm_spac.errors import ConfigError
from vllm_spac.system.files import writing
from vllm_spac.system.host_memory import gib

if TYPE_CHECKING:
    import numpy as np

    from vllm_spac.decisions.costs import Costs
    from vllm_spac.recording.trace_file import Trace
    from vllm_spac.tools.traces.replayed import Outcome

SHOW_EXAMPLES = examples("""
vllm-spac trace show run.trace
""")

SHARES = (5, 10, 17, 25, 50, 75)


def show(file: Annotated[Path, typer.Argument(help="File written by --spac-record.")]) -> None:
    """Show which experts are popular, how soon they are used again, and hits of LRU caches."""
    from vllm_spac.recording.trace_file import Trace
    from vllm_spac.tools.traces import trace_statistics

    trace = Trace.load(file)
    if trace.records == 0:
        raise ConfigError(f"{file} holds no forward of a MoE layer; record a longer run")
    console = Console()
    print_table(console, _facts(file, trace))
    print_table(console, _layers(trace))
    stack, steps = trace_statistics.distances(trace)
    own, _ = trace_statistics.distances(trace, by_layer=True)
    facts = trace.facts
    curves = (trace_statistics.lru_curve(stack, facts.total), trace_statistics.lru_curve(own, facts.experts))
    print_table(console, _curve(trace, *curves))
    again = steps[steps >= 0]
    if len(again):
        import numpy as np

        half, most = np.percentile(again, [50, 90])
        console.print(f"an expert is used again after {half:.0f} steps (median), {most:.0f} (90%)", highlight=False)


def _facts(file: Path, trace: Trace) -> Table:
    import numpy as np

    from vllm_spac.recording.trace_file import ROW_KINDS, STEP_KINDS
    from vllm_spac.tools.traces.trace_statistics import accepted_by_depth

    def kinds(codes: np.ndarray, names: tuple[str, ...]) -> str:
        counts = np.bincount(codes, minlength=len(names)).tolist()
        return ", ".join(f"{count:,} {name}" for count, name in zip(counts, names, strict=True) if count) or "none"

    facts = trace.facts
    table = Table(title=shown(file), show_header=False, title_justify="left")
    table.add_row("model", shown(facts.model) or "?")
    table.add_row("MoE layers x experts", f"{facts.layers} x {facts.experts} = {facts.total}")
    table.add_row("experts per token (top-k)", str(facts.top_k))
    table.add_row("one expert", gib(facts.expert_bytes) if facts.expert_bytes else "?")
    table.add_row("steps", kinds(trace.step_kind, STEP_KINDS))
    table.add_row("rows", kinds(trace.row_kind, ROW_KINDS))
    table.add_row("tokens emitted", f"{int(trace.step_tokens.sum()):,}")
    if depths := accepted_by_depth(trace):
        table.add_row("drafts accepted, by depth", ", ".join(f"{took:,} of {drafts:,}" for drafts, took in depths))
    table.add_row("weights", "no" if trace.weights is None else "yes")
    return table


def _layers(trace: Trace) -> Table:
    from vllm_spac.tools.traces import trace_statistics
    from vllm_spac.tools.traces.trace_text import Text

    text = Text.of(trace)
    heads = ("layer", "experts used", "uses by the top 10%", "selected by the token before, too")
    used = (trace_statistics.uses(trace) > 0).sum(axis=1)
    columns = used, trace_statistics.skew(trace), trace_statistics.overlap(text)
    rows: list[Sequence[str]] = [
        (str(layer), str(count), _percent(most), _percent(again))
        for layer, (count, most, again) in enumerate(zip(*columns, strict=True))
    ]
    rows += [(), ("all", "", "", _percent(columns[-1].mean()))]
    table = compact("layers", heads, rows)
    table.caption = f"last column: {len(text):,} of {text.rows:,} rows, those known to be text, in its order"
    return table


def _curve(trace: Trace, whole: np.ndarray, layered: np.ndarray) -> Table:
    """Hit rates by slots: one LRU over all layers, and one LRU per layer with equal numbers of slots."""
    heads, rows = ("share", "slots", "one LRU", "slots per layer", "one LRU per layer"), []
    for share in SHARES:
        slots = -(-share * trace.facts.total // 100)
        if slots >= trace.facts.top_k:
            each = slots // trace.facts.layers
            own = _percent(layered[each]) if each >= trace.facts.top_k else "-"
            rows.append((f"{share}%", str(slots), _percent(whole[slots]), str(each), own))
    return compact("hits of LRU, starting empty", heads, rows)


def _percent(value: float) -> str:
    return "-" if value != value else f"{100 * value:.1f}%"


SIMULATE_EXAMPLES = examples("""
vllm-spac trace simulate run.trace --profile rtx4090
vllm-spac trace simulate run.trace --profile here.json --slots 5%,10%,25%,50% --policy lru,utility,belady
vllm-spac trace simulate run.trace --profile rtx4090 --policy utility@upper=1,utility@boundaries=(3,1)
vllm-spac trace simulate run.trace --profile rtx4090 --policy reuse --prefetch utility@depth=8   [dim]# reads ahead[/]
vllm-spac trace simulate run.trace --profile rtx4090 --prefetch oracle@reach=1@recall=0.8   [dim]# worth a predictor?[/]
vllm-spac trace simulate run.trace --profile disk.json --host-memory 8GiB   [dim]# slots, host memory, disk[/]
vllm-spac trace simulate run.trace --profile h200 --execution slots,pointers --policy reuse
""")


def simulate(
    trace: Annotated[Path, typer.Argument(help="File written by --spac-record.")],
    profile: Annotated[str, typer.Option(help="Costs of a machine: a file, or rtx4090 or h200 (calculated).")],
    execution: Annotated[str, typer.Option(help="How layers access experts: slots, pointers, or both.")] = "slots",
    policy: Annotated[
        str | None,
        typer.Option(
            help="Policies, each with knobs if need be: name@knob=value. layer_lru and belady are for slots only.",
            show_default="lru,layer_lru,lfu,utility,reuse,belady",
        ),
    ] = None,
    slots: Annotated[str, typer.Option(help="Sizes of fast memory, as --spac-slots.")] = "5%,10%,25%,50%",
    balancer: Annotated[str, typer.Option(help="Selects experts for the CPU: none, threshold or waterfill.")] = "none",
    prefetch: Annotated[
        str,
        typer.Option(
            help="With slots: predictor of reads ahead, as --spac-prefetch, optionally with knobs, but without "
            "a limit of what they add, unless extra sets one; oracle: the ceiling."
        ),
    ] = "off",
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="With slots: host memory between slots and disk, as --spac-host-memory; its loads cost the "
            "profile's host."
        ),
    ] = None,
    expert_bytes: Annotated[int | None, typer.Option(help="Size of an expert, instead of the trace's.", min=1)] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")] = None,
) -> None:
    """Show what policies would have achieved on a recorded run: hits, bytes, stalls, time per token, and its bound."""
    from vllm_spac.config.config import SpacConfig
    from vllm_spac.decisions.costs import Costs
    from vllm_spac.recording.trace_file import Trace
    from vllm_spac.tools.traces.simulation import simulate as replay

    costs, recorded = Costs.read(profile), Trace.load(trace)
    foreseeable = balancer == "none" and prefetch == "off"
    cases: list[dict[str, Any]] = [
        {"slots": count, "policy": name, "execution": way}
        for count in slot_counts(slots, recorded.facts)
        for way in _executions(execution)
        for name in (parse_list(policy) if policy else _policies(way, foreseeable))
    ]
    common: dict[str, Any] = {
        "balancer": balancer,
        "prefetch": prefetch,
        "layer_ahead": True,  # as serving reads
        "expert_bytes": expert_bytes,
        "host_bytes": 0 if host_memory is None else SpacConfig.parse({"host_memory": host_memory}).host_memory,
    }
    outcomes = [
        replay(recorded, costs=costs, **case, **common)
        for case in track(cases, "simulating", console=Console(stderr=True), transient=True)
    ]
    console = Console()
    print_table(console, _outcomes(trace, costs, outcomes))
    if output is not None:
        facts = {"trace": str(trace), "model": asdict(recorded.facts), "profile": costs.model_dump(mode="json")}
        content = facts | {"outcomes": [asdict(outcome) for outcome in outcomes]}
        with writing(output):
            output.write_text(json.dumps(content, indent=2) + "\n")


def _executions(asked: str) -> list[str]:
    from vllm_spac.tools.traces.simulation import EXECUTIONS

    found = list(EXECUTIONS) if asked == "both" else parse_list(asked)
    if not found or not set(found) <= set(EXECUTIONS):
        raise ConfigError(f"--execution {asked}: use {', '.join(EXECUTIONS)}, or both")
    return found


def _policies(execution: str, foreseeable: bool) -> list[str]:
    """Policies that are compared by default; ``belady``, the upper bound, where uses follow from the trace alone."""
    if execution == "slots":
        return ["lru", "layer_lru", "lfu", "utility", "reuse", *(["belady"] if foreseeable else [])]
    return ["lru", "lfu", "utility", "reuse"]


_NOTHING = ("", "-", "0", gib(0), "0.00 s")  # what an outcome does not have: bytes from host memory, reads ahead, …


def _outcomes(trace: Path, costs: Costs, outcomes: Sequence[Outcome]) -> Table:
    title = f"{shown(trace)} on {shown(costs.name)} ({costs.provenance.how})"
    amounts = ("hit rate", "moved", "from host", "ahead", "streamed", "on the CPU", "stalled")
    heads = ("slots", "execution", "policy", *amounts, "TPOT ms", "bound ms", "ratio")
    several = {outcome.execution for outcome in outcomes} != {"slots"}
    rows: list[Sequence[str]] = []
    last = None
    for outcome in outcomes:
        if last not in (None, outcome.slots):
            rows.append(())
        last = outcome.slots
        rows.append(
            (
                f"{outcome.slots} ({100 * outcome.share:.0f}%)",
                outcome.execution if several else "",
                shown(outcome.policy),
                f"{100 * outcome.hit_rate:.1f}%",
                gib(outcome.bytes),
                f"{outcome.host_loads:,}",
                f"{outcome.prefetches:,}",
                gib(outcome.streamed_bytes),
                f"{outcome.cpu:,}",
                f"{outcome.stall_seconds:.2f} s",
                *("-" if value is None else f"{1e3 * value:.2f}" for value in (outcome.tpot, outcome.bound_tpot)),
                f"{outcome.ratio:.2f}",
            )
        )
    table = compact(title, heads, rows, left=("execution", "policy"), nothing=_NOTHING)
    table.caption = shown(costs.provenance.source)
    return table
