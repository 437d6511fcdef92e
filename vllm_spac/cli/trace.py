"""``vllm-spac trace``: statistics of recorded routing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_spac.cli.tables import compact, examples, print_table, say, shown
from vllm_spac.errors import ConfigError
from vllm_spac.system.host_memory import gib

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from vllm_spac.recording.trace_file import Trace

EXAMPLES = examples("""
vllm-spac trace show run.trace
""")

SHARES = (5, 10, 17, 25, 50, 75)


def show(file: Annotated[Path, typer.Argument(help="File written by --spac-trace.")]) -> None:
    """Show which experts are popular, how soon they are used again, hits of LRU caches, and locality."""
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
    _show_locality(console, trace)
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

    caption = (
        "right: share of all experts predicted correctly as hot or cold in the next step; the last two columns are "
        "baselines"
    )
    predictions = ("utility", "with K = 1", "nothing is hot", "as in the last step")
    heads = ("layer", "experts used", "uses by the top 10%", *(f"right: {name}" for name in predictions))
    used = (trace_statistics.uses(trace) > 0).sum(axis=1)
    columns = [
        trace_statistics.skew(trace),
        trace_statistics.accuracy(trace),
        trace_statistics.accuracy(trace, upper=1),
    ]
    columns += [trace_statistics.nothing_is_hot(trace), trace_statistics.as_last_step(trace)]
    rows = [
        (str(layer), str(used[layer]), *map(_percent, values))
        for layer, values in enumerate(zip(*columns, strict=True))
    ]
    table = compact("layers", heads, rows)
    table.caption = caption
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


def _show_locality(console: Console, trace: Trace) -> None:
    from vllm_spac.tools.traces.locality import PUBLISHED, Locality

    found = Locality.of(trace)
    counted = f"{found.tokens:,} of {found.rows:,} rows"
    if found.tokens == 0:
        console.print(f"locality: none of {found.rows:,} rows is known to follow another in a text", highlight=False)
        return
    columns, means = found.layers(), found.means()
    rows: list[Sequence[str]] = [
        (str(layer), *(show(columns[key][layer]) for key, (_, show) in FIGURES.items()))
        for layer in range(trace.facts.layers)
    ]
    rows += [(), ("all", *(show(means[key]) for key, (_, show) in FIGURES.items()))]
    heads = ("layer", *(name for name, _ in FIGURES.values()))
    console.print(compact(f"locality, {counted}: those known to be text, in its order", heads, rows))
    others = []
    for one in PUBLISHED:
        name, show = FIGURES[one.figure]
        others.append((one.model, name, show(one.value), show(means[one.figure])))
    text = ("model", "figure")
    console.print(compact("locality of published models", (*text, "there", "here"), others, left=text))
    for (source, conditions), figures in itertools.groupby(PUBLISHED, lambda one: (one.source, one.conditions)):
        names = ", ".join(FIGURES[one.figure][0] for one in figures)
        say(console, f"[dim]{names}: {source}: {conditions}[/]")


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.1f}"


def _count(value: float) -> str:
    return "-" if value != value else f"{value:.0f}"


def _percent(value: float) -> str:
    return "-" if value != value else f"{100 * value:.1f}%"


# Figures of ``Locality``: heading and format. Top half: of the routing weights of the selected experts.
FIGURES = {
    "overlap": ("overlap with the token before", _percent),
    "lru_small": ("LRU, 19%", _percent),
    "lru_large": ("LRU, 38%", _percent),
    "top_half_long": ("top half, 63 rows", _percent),
    "top_half_short": ("top half, 9 rows", _percent),
    "distinct": ("experts in 9 rows", _number),
    "least": ("least used", _percent),
    "most": ("most used", _percent),
    "rare": ("below 0.2%", _count),
    "sets_perplexity": ("sets", _count),
}


def timeline(file: Annotated[Path, typer.Argument(help="File written by --spac-timeline.")]) -> None:
    """Say where a timeline is opened."""
    raise ConfigError(f"{file} is for a viewer: open it in https://ui.perfetto.dev or chrome://tracing")
