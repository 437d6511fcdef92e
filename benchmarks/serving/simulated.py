"""Compares simulated with measured time per token.

An engine with all experts but one in fast memory records the routing and the time of a step outside its experts;
profiles of this machine, before and after each engine because disks of virtual machines drift, give the costs of
loading and computing an expert. From these the simulator predicts times for fewer slots, which engines with as many
slots measure. Nothing is fitted to the latter, except for a second figure: simulated with the seconds per load that
the engine itself waited, which separates differences of the disk from errors of the simulator.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import plan
import prompts
from common import RESULTS, ROOT, exit_on_sigterm, is_toy, provenance, show, write_result
from processes import run_engine
from run import Settings

from vllm_spac.decisions.costs import Costs, HostWork, Rate
from vllm_spac.recording.trace_file import Trace
from vllm_spac.storage.checkpoint.headers import read_checkpoint
from vllm_spac.tools.machine.measure import measure
from vllm_spac.tools.machine.vllm_kernel import cpu_kernel
from vllm_spac.tools.traces.simulation import simulate

_EPILOG = """[bold]Examples[/]

python benchmarks/serving/simulated.py .cache/toy/mid --eagle3 .cache/toy/mid-eagle3

python benchmarks/serving/simulated.py .cache/toy/mid --slots 10%,25% --policy reuse --speculation none
"""
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@app.command(help=__doc__, epilog=_EPILOG)
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.", exists=True, file_okay=False)],
    slots: Annotated[str, typer.Option(help="Values of --spac-slots.")] = "5%,10%,25%,50%",
    policy: Annotated[str, typer.Option(help="Eviction policies.")] = "reuse,lru",
    speculation: Annotated[str, typer.Option(help=f"Of {', '.join(plan.SPECULATIONS)}.")] = "none,eagle3",
    draft_tokens: Annotated[int, typer.Option(min=1, help="Draft tokens per speculative step.")] = 4,
    eagle3: Annotated[Path | None, typer.Option(help="EAGLE-3 head. Default: eagle3 next to the model.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft model. Default: draft next to the model.")] = None,
    count: Annotated[int, typer.Option("--prompts", min=1, help="Prompts, one after the other.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 64,
    disk_dir: Annotated[Path, typer.Option(help="Folder of the packed experts.")] = ROOT / ".cache" / "serving",
    repeats: Annotated[int, typer.Option(min=1, help="Engines per configuration; means are reported.")] = 2,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "simulated_toy.json",
) -> None:
    exit_on_sigterm()
    origin = provenance()
    drafts = plan.Drafts(draft_tokens, eagle3 or model.parent / "eagle3", draft or model.parent / "draft")
    common = model, (1,), prompt_tokens, output_tokens, 0, True, "disk", disk_dir, drafts, 1800.0
    settings = Settings(*common, guard="off")  # drafts as in the trace
    layout = read_checkpoint(model)
    total, (nbytes,) = layout.total, layout.expert_bytes

    def profile() -> Costs:
        return measure(nbytes, disk_dir, store="disk", seconds=0.4, kernel=cpu_kernel())

    ids = prompts.load(model, count, prompt_tokens, 0).ids
    speculations, policies, sizes = plan.split(speculation), plan.split(policy), plan.split(slots)
    rows: list[dict] = []
    outside: dict[str, float] = {}
    with Progress(console=Console(stderr=True)) as progress, tempfile.TemporaryDirectory() as scratch:
        task = progress.add_task("", total=len(speculations) * (1 + repeats * (1 + len(sizes) * len(policies))))
        for drafting in sorted(
            speculations, key=lambda name: name != "none"
        ):  # without drafts first: its step time is needed below
            progress.update(task, description=f"{drafting}: all experts but one")
            path, most = Path(scratch, f"{drafting}.trace"), f"{100 * (total - 1) / total:.4f}%"
            whole = plan.Configuration(most, policies[0], drafting)
            engines(settings, whole, ids, 1, path)
            progress.advance(task)
            before = profile()
            resident = engines(settings, whole, ids, repeats)
            progress.advance(task, repeats)
            after = profile()
            trace = Trace.load(path)
            known = between(before, after).model_copy(update={"other": outside.get("none", 0.0)})
            outside[drafting] = _outside(trace, total - 1, policies[0], known, resident, drafting != "none")
            update = {"other": outside["none"]} | ({"draft": outside[drafting]} if drafting != "none" else {})
            for size in sizes:
                for name in policies:
                    progress.update(task, description=f"{drafting}: {size} {name}")
                    measured = engines(settings, plan.Configuration(size, name, drafting), ids, repeats)
                    progress.advance(task, repeats)
                    before, after = after, profile()
                    known = between(before, after).model_copy(update=update)
                    count_of = math.ceil(_share(size) * total)
                    outcome = simulate(trace, count_of, known, policy=name)
                    seen = Rate(bytes_per_second=nbytes / measured["load_seconds"])
                    own = simulate(trace, count_of, known.model_copy(update={"load": seen}), policy=name)
                    row = _row(drafting, size, name, measured, outcome) | {"profiled_load": known.load.model_dump()}
                    own_load = {"seconds_a_load": measured["load_seconds"], "simulated_tpot_with_it": own.tpot}
                    rows.append(row | own_load | {"error_with_it": own.tpot / measured["tpot"] - 1})
    result = {
        "label": "toy model" if is_toy(model) else None,
        "model": model.name,
        "prompts": [len(ids), prompt_tokens],
        "output_tokens": output_tokens,
        "draft_tokens": draft_tokens,
        "repeats": repeats,
        "seconds_outside_experts": {"step": outside.get("none"), "draft token": outside.get("eagle3")},
        "last_profile": after.model_dump(mode="json"),
        "rows": rows,
        "provenance": origin,
    }
    write_result(output, result)
    compared = "measured_tpot", "simulated_tpot", "error", "error_with_it", "measured_hit_rate", "simulated_hit_rate"
    show("seconds per token", rows, "speculation", "slots", "policy", *compared)


def _share(size: str) -> Fraction:
    share = plan.SlotCount.parse(size).share
    if share is None:
        raise typer.BadParameter(f"{size}: use a percentage of all experts")
    return share


def engines(settings: Settings, configuration, ids, repeats: int, trace: Path | None = None) -> dict:
    """Returns means over engines of the time per token and of the hit rate; the last one records its routing."""
    times, rates, loads = [], [], []
    for repeat in range(repeats):
        job = settings.job(configuration, ids)
        if trace is not None and repeat == repeats - 1:
            job["spac"]["trace"] = str(trace)
        result, error = run_engine(job, False, settings.timeout)
        if error or result is None:
            raise typer.BadParameter(f"{configuration.label}: {error}")
        batch = result["batches"]["1"]
        times += batch["tpot"]
        counters = batch["counters"]
        rates.append(counters["hits"] / (counters["hits"] + counters["misses"]))
        loads.append(counters["stall_seconds"] / max(1, counters["loads"]))
    means = {"hit_rate": statistics.fmean(rates), "load_seconds": statistics.fmean(loads)}
    return {"tpot": statistics.fmean(times), "low": min(times), "high": max(times), **means}


def between(first: Costs, second: Costs) -> Costs:
    """Returns the mean of two profiles, cost by cost."""

    def rate(a: Rate, b: Rate) -> Rate:
        pairs = ((a.bytes_per_second, b.bytes_per_second), (a.flops_per_second, b.flops_per_second))
        moved, computed = (2 / (1 / x + 1 / y) if x and y else x or y for x, y in pairs)
        assert moved is not None
        return Rate(fixed=(a.fixed + b.fixed) / 2, bytes_per_second=moved, flops_per_second=computed)

    rates = {name: rate(getattr(first, name), getattr(second, name)) for name in ("fast", "load", "cpu")}
    works = first.host_work.model_dump(), second.host_work.model_dump()
    work = HostWork(**{name: (mine + works[1][name]) / 2 for name, mine in works[0].items()})
    return first.model_copy(update=rates | {"host_work": work})


def _outside(trace: Trace, slots: int, policy: str, known: Costs, whole: dict, drafts: bool) -> float:
    """Returns the seconds per step, or per draft token, outside of experts, from a run with hardly any misses."""
    outcome = simulate(trace, slots, known, policy=policy)
    generating = trace.step_kind != 0
    tokens = int(trace.step_tokens[generating].sum())
    left = (whole["tpot"] - outcome.tpot) * tokens
    units = int((trace.row_kind == 3).sum()) if drafts else int(generating.sum())
    return max(0.0, left / units)


def _row(drafting: str, size: str, policy: str, measured: dict, outcome) -> dict:
    return {
        "speculation": drafting,
        "slots": size,
        "policy": policy,
        "measured_tpot": measured["tpot"],
        "measured_low": measured["low"],
        "measured_high": measured["high"],
        "simulated_tpot": outcome.tpot,
        "error": outcome.tpot / measured["tpot"] - 1,
        "measured_hit_rate": measured["hit_rate"],
        "simulated_hit_rate": outcome.hit_rate,
        "bound_tpot": outcome.bound_tpot,
    }


if __name__ == "__main__":
    app()
