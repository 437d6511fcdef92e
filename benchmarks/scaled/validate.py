"""Compares a scaled machine with the simulator, on the routing that its own engine recorded.

The simulator gets the paced seconds of loads and CPU experts, the plugin's own work in a layer as `vllm-spac profile`
measures it, and what remains of a step from the engine with all experts resident; nothing is fitted to the runs it is
compared with. Loads and CPU experts per step are decisions and must agree within 2 %, times within 10 %.
"""

from __future__ import annotations

import math
import sys
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serving"))
import host_probe
import plan
import prompts
from common import RESULTS, exit_on_sigterm, progress, show, write_result
from ladder import PACED, WATERFILL, disturbed, total
from paired import Side
from processes import EngineError, LiveEngine
from proportions import Proportions, names
from run import PACKED, Settings
from scale import Cores, Scale, head, on

from vllm_spac.config.types import SlotCount
from vllm_spac.decisions.costs import FORMAT, Costs, ExpertSize, HostWork, Provenance, Rate
from vllm_spac.errors import SpacError
from vllm_spac.recording.trace_file import Trace
from vllm_spac.system.machine import Machine
from vllm_spac.tools.machine.host_work import host_work
from vllm_spac.tools.traces.replayed import Outcome
from vllm_spac.tools.traces.simulation import simulate

DECISIONS, TIMES = 0.02, 0.10  # the greatest relative differences
_EPILOG = """[bold]Examples[/]

python benchmarks/scaled/validate.py .cache/toy/mid

python benchmarks/scaled/validate.py .cache/toy/mid --machine h200 --slots 25% --turns 24
"""
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@dataclass(frozen=True)
class Figures:
    """A run, measured or simulated: seconds per token after the first; loads and CPU experts per step."""

    tpot: float
    loads: float
    cpu: float

    @classmethod
    def measured(cls, answers: list[dict]) -> Figures:
        """Returns the figures of an engine's whole life, whose prompts were all answered one after another."""
        counters = total([answer["counters"] for answer in answers])
        steps = sum(counters["steps"].values())
        after_first = [len(answer["tokens"][0]) - 1 for answer in answers]
        seconds = sum(answer["tpot"][0] * count for answer, count in zip(answers, after_first, strict=True))
        return cls(seconds / sum(after_first), counters["loads"] / steps, counters["cpu_experts"] / steps)

    @classmethod
    def simulated(cls, outcome: Outcome) -> Figures:
        """Returns the figures of a replay of the same steps."""
        assert outcome.tpot is not None, "the engine records how many tokens a step emits"
        return cls(outcome.tpot, outcome.loads / outcome.steps, outcome.cpu / outcome.steps)

    def errors(self, measured: Figures) -> dict[str, float]:
        """Returns how far these are from the measured ones, relative to them; 0 if both are 0."""
        pairs = {name: (value, getattr(measured, name)) for name, value in asdict(self).items()}
        return {name: mine / its - 1 if its else float(mine > 0) for name, (mine, its) in pairs.items()}


def agrees(errors: dict[str, float]) -> bool:
    """Whether decisions and times are within their bounds."""
    return abs(errors["tpot"]) <= TIMES and max(abs(errors["loads"]), abs(errors["cpu"])) <= DECISIONS


def costs_of(scale: Scale, work: HostWork) -> Costs:
    """Returns the scaled machine's profile, for the simulator and for the engine's balancer.

    ``work`` takes the same seconds as on any machine; it is measured here, with loads that move nothing.
    """
    machine, resident, nbytes = scale.machine, scale.resident, scale.machine.expert_bytes
    fast = min(scale.speeds.fast, machine.layer_seconds / resident.top_k)
    here = Machine.here().model_copy(update={"cores": 1})  # what its engine sees: the core of the loads
    origin = Provenance(
        how="measured",
        source=f"benchmarks/scaled: {machine.machine} with {scale.factor:.4g} times its seconds",
        machine=here,
        expert_bytes=ExpertSize.of(nbytes).nbytes,
        store="host",
    )

    def rate(seconds: float) -> Rate:
        return Rate(bytes_per_second=nbytes / seconds)

    return Costs(
        format=FORMAT,
        name="scaled",
        provenance=origin,
        fast=rate(fast),
        load=rate(machine.load_seconds),
        cpu=rate(machine.cpu_seconds),
        load_at_once=1,
        other=resident.layers * (machine.layer_seconds - resident.top_k * fast),
        host_work=work,
    )


def compare(size: str, balancer: str, costs: Costs, settings: Settings, ids: list[list[int]], folder: Path) -> dict:
    """Returns the row of one engine.

    Args:
        size: value of ``--spac-slots``.
        balancer: ``none`` (no CPU experts) or ``waterfill``.

    Raises:
        EngineError: the engine failed.
        ConfigError: its trace cannot be read.
    """
    profile, recorded = folder / "profile.json", folder / "routing.trace"
    profile.write_text(costs.model_dump_json())
    recorded.unlink(missing_ok=True)
    cpu = {} if balancer == "none" else {**WATERFILL, "cpu_experts": balancer, "profile": str(profile)}
    side = Side(balancer, {"slots": size, "policy": "reuse", **PACED, **cpu, "trace": str(recorded)})
    with closing(LiveEngine(side.job(settings), False, settings.timeout)) as engine:
        answers = [engine.turn(prompt, settings.output_tokens) for prompt in ids]
    trace = Trace.load(recorded)
    share = SlotCount.parse(size).share
    assert share is not None, "checked when the command started"
    outcome = simulate(trace, math.ceil(share * trace.facts.total), costs, policy="reuse", balancer=balancer)
    measured, simulated = Figures.measured(answers), Figures.simulated(outcome)
    errors = simulated.errors(measured)
    return {
        "slots": size,
        "balancer": balancer,
        "steps": trace.steps,
        "measured": asdict(measured),
        "simulated": asdict(simulated),
        "errors": errors,
        "agrees": agrees(errors),
        "own": total([answer["counters"] for answer in answers])["own"],
    }


@app.command(help=__doc__, epilog=_EPILOG)
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.", exists=True, file_okay=False)],
    machine: Annotated[str, typer.Option(help=f"Of {', '.join(names())}.")] = "rtx4090",
    slots: Annotated[str, typer.Option(help="Values of --spac-slots, in percent.")] = "17%,25%,50%",
    balancers: Annotated[str, typer.Option(help="none: no CPU experts.")] = "none,waterfill",
    turns: Annotated[int, typer.Option(min=2, help="Prompts, one after another.")] = 12,
    warm: Annotated[int, typer.Option(min=0, help="Prompts on the resident engine before those that count.")] = 2,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 64,
    dtype: Annotated[str, typer.Option(help="Of all engines.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of prompts and engines.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that a start or a turn may take.")] = 1800.0,
    output: Annotated[
        Path | None, typer.Option(help="Default: benchmarks/results/scaled_MACHINE_simulated.json.")
    ] = None,
) -> None:
    exit_on_sigterm()
    console = Console(width=max(140, Console().width))
    output = output or RESULTS / f"scaled_{machine}_simulated.json"
    try:
        cores, real, sizes = Cores.here(), Proportions.of(machine), plan.split(slots)
        for size in sizes:
            if SlotCount.parse(size).share is None:
                raise plan.PlanError(f"--slots {size}: use a percentage of all experts")
        drafts = plan.Drafts(1, model, model)
        settings = Settings(
            model, (1,), prompt_tokens, output_tokens, seed, True, None, PACKED, drafts, timeout,
            dtype=dtype, environment=cores.environment(),
        )  # fmt: skip
        asked = prompts.load(model, warm + turns, prompt_tokens, seed)
        result = head(machine, asked, settings) | {"bounds": {"decisions": DECISIONS, "times": TIMES}}
        cases = [(size, balancer) for size in sizes for balancer in plan.split(balancers)]
        found = _compare_all(cases, settings, asked.ids, warm, (real, cores), result, output)
    except (ValueError, SpacError, EngineError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1 if isinstance(error, EngineError) else 2) from error
    both = [f"{kind}.{name}" for name in ("tpot", "loads", "cpu") for kind in ("measured", "simulated", "errors")]
    show(f"{result['label']}: measured and simulated", result["rows"], "slots", "balancer", *both, "agrees")
    console.print(_own_work(result), soft_wrap=True)
    for row in result["rows"]:
        if text := disturbed(row["own"], found.machine):
            console.print(f"{row['slots']}, balancer {row['balancer']}: {text}")
    console.print(f"wrote {output}", soft_wrap=True)
    if not all(row["agrees"] for row in result["rows"]):
        raise typer.Exit(1)


def _compare_all(
    cases: list[tuple[str, str]],
    settings: Settings,
    ids: list[list[int]],
    warm: int,
    where: tuple[Proportions, Cores],
    result: dict,
    output: Path,
) -> Scale:
    """Compares each (slots, balancer) of ``cases``; writes the result so far after each; returns the scale."""
    real, cores = where
    with (
        progress() as bar,
        tempfile.TemporaryDirectory(prefix="spac-scaled-") as folder,
    ):
        task = bar.add_task("all experts resident", total=1 + len(cases))
        points = host_probe.measure(cores.forward, int(PACED["io_threads"]), settings.environment)
        work = host_work(points, with_loads=True)
        result["host_work"] = work.model_dump() | {"points": points}
        scale = Scale.derive(real, settings, ids, warm, cores)
        result["scale"], costs = scale.plain(), costs_of(scale, work)
        settings = on(scale.machine, settings, Path(folder))
        for size, balancer in cases:
            bar.update(task, advance=1, description=f"{size}, balancer {balancer}")
            result["rows"].append(compare(size, balancer, costs, settings, ids[warm:], Path(folder)))
            write_result(output, result)
        bar.advance(task)
    return scale


def _own_work(result: dict) -> str:
    """Returns how long the plugin's own work takes, next to a layer."""
    work, layer = result["host_work"], result["scale"]["machine"]["layer_seconds"]
    whats = {"layer": "in each layer", "load": "more in one that loads", "divide": "more in one that the CPU shares"}
    parts = ", ".join(f"{1e3 * work[name]:.2f} ms {what}" for name, what in whats.items())
    return f"the plugin's own work: {parts}; a layer takes {1e3 * layer:.2f} ms"


if __name__ == "__main__":
    app()
