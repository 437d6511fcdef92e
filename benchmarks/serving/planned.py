"""Compares the tokens per second that ``vllm-spac plan`` calculates with measured ones.

The toy model is inflated to several sizes of experts. For each, this machine is measured as ``vllm-spac check`` does,
before the engines and after them, because disks of virtual machines drift. The plan then calculates each share of slots
twice: with its assumptions on locality, from none on, which give a range, and from a recording of the model's own
routing, as with ``--trace``. Engines with as many slots measure the time per token of prompts, one after the other.
Nothing is fitted.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import RESULTS, ROOT, TOY, Script, progress, provenance, show, write_result
from benchmarks.serving import prompts
from benchmarks.serving.cases import PACKED, Case, Drafts, PackedFolder, Settings, split
from benchmarks.serving.processes import run_engine
from benchmarks.toy.inflate import inflate, parse_bytes
from vllm_spac.decisions.costs import Costs, HostWork, Rate
from vllm_spac.recording.trace_file import Trace
from vllm_spac.storage.checkpoint.published import find_model
from vllm_spac.tools.machine import vllm_step
from vllm_spac.tools.machine.measure import cpu_kernel, measure
from vllm_spac.tools.planning import planned_routing
from vllm_spac.tools.planning.planned_machine import PlannedMachine
from vllm_spac.tools.planning.planned_memory import Choice, Load
from vllm_spac.tools.planning.planned_model import ServedModel
from vllm_spac.tools.planning.predict import Prediction, predict

WITHIN = 0.25  # of the measured speed: what a plan should keep
_EPILOG = """[bold]Examples[/]

python benchmarks/serving/planned.py

python benchmarks/serving/planned.py --sizes 1.2MB --slots 25% --repeats 1
"""
app = Script(__doc__, _EPILOG)


@dataclass(frozen=True)
class Comparison:
    """Tokens per second of one model with one share of slots.

    Attributes:
        planned: by routing: ``low`` and ``high`` of the plan's range, ``even`` without locality, ``trace``.
        measured: 1 / the mean time per token; ``slowest``, ``fastest``: of single prompts.
    """

    expert_bytes: int
    percent: int
    planned: dict[str, Prediction]
    measured: float
    slowest: float
    fastest: float
    hit_rate: float

    @property
    def error(self) -> float:
        """Of the plan from the model's own routing, as a share of the measured speed."""
        return self.planned["trace"].tokens_per_second / self.measured - 1

    @property
    def in_range(self) -> bool:
        """Whether the measured speed is in the plan's range without a trace, from no locality to the most assumed."""
        found = [self.planned[name].tokens_per_second for name in ("even", "low", "high")]
        return min(found) <= self.measured <= max(found)

    def plain(self) -> dict:
        """Returns the row for the result."""
        planned = {name: prediction.tokens_per_second for name, prediction in self.planned.items()}
        return {
            "expert_bytes": self.expert_bytes,
            "slots": f"{self.percent}%",
            "measured": self.measured,
            "measured_slowest": self.slowest,
            "measured_fastest": self.fastest,
            "planned": planned,
            "error": self.error,
            "within": abs(self.error) <= WITHIN,
            "in_range": self.in_range,
            "measured_hit_rate": self.hit_rate,
            "planned_hit_rate": self.planned["trace"].hit_rate,
            "limit": self.planned["trace"].limit,
        }


def predictions(
    model: ServedModel, costs: Costs, percent: int, context: int, trace: Trace, source: str
) -> dict[str, Prediction]:
    """Returns the plan's tokens per second for a share of slots with the others on disk, by routing. Pure."""
    assert costs.capacity is not None, "it was measured"
    machine = PlannedMachine("here", costs, costs.capacity.gpu, costs.capacity.host)
    choice, load = Choice(percent, "disk"), Load(context, 1)
    found = {one.name: predict(choice, model, machine, load, one) for one in planned_routing.assumed()}
    return found | {"trace": predict(choice, model, machine, load, planned_routing.recorded(trace, model, source)[0])}


@app.main
def main(
    sizes: Annotated[str, typer.Option(help="Sizes of an expert.")] = "0.3MB,1.2MB,4.7MB",
    slots: Annotated[str, typer.Option(help="Values of --spac-slots, in whole percent.")] = "10%,25%,50%",
    models: Annotated[Path, typer.Option(help="Folder of the inflated models.")] = ROOT / ".cache" / "toy",
    count: Annotated[int, typer.Option("--prompts", min=1, help="Prompts, one after the other.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 64,
    disk_dir: PackedFolder = PACKED,
    repeats: Annotated[int, typer.Option(min=1, help="Engines per configuration.")] = 2,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "planned_toy.json",
) -> None:
    origin = provenance()
    percents = [percent_of(size) for size in split(slots)]
    shape = count, prompt_tokens, output_tokens
    rows: list[Comparison] = []
    profiles: list[dict] = []
    with progress() as bar:
        task = bar.add_task("", total=len(split(sizes)) * (1 + len(percents)))

        def tell(text: str) -> None:
            bar.update(task, advance=1, description=text)

        for size in split(sizes):
            tell(f"experts of {size}")
            folder = inflated(models, size)
            found, profile = _one(folder, percents, shape, disk_dir, repeats, tell)
            rows += found
            profiles.append(profile.model_dump(mode="json"))
    result = {
        "label": "toy model",
        "prompts": [count, prompt_tokens],
        "output_tokens": output_tokens,
        "repeats": repeats,
        "within": WITHIN,
        "profiles": profiles,
        "rows": [row.plain() for row in rows],
        "provenance": origin,
    }
    write_result(output, result)
    compared = "measured", "planned.trace", "error", "planned.even", "planned.high", "in_range"
    show("tokens per second", [row.plain() for row in rows], "expert_bytes", "slots", *compared)
    good = sum(abs(row.error) <= WITHIN for row in rows)
    print(f"{good} of {len(rows)} plans are within {100 * WITHIN:.0f}%; wrote {output}")


def percent_of(size: str) -> int:
    """``"25%"`` -> 25; ``BadParameter`` for what is no whole percentage."""
    text = size.removesuffix("%")
    if not size.endswith("%") or not text.isdigit() or not 0 < int(text) <= 100:
        raise typer.BadParameter(f"--slots {size}: use whole percentages, e.g. 25%")
    return int(text)


def inflated(models: Path, size: str) -> Path:
    """Returns the toy model with experts of ``size``, which is written first if it is not there."""
    folder = models / f"planned-{size}"
    if not (folder / "config.json").exists():
        inflate(TOY / "models" / "target", folder, expert_bytes=parse_bytes(size))
    return folder


def _one(
    folder: Path,
    percents: Sequence[int],
    shape: tuple[int, int, int],
    disk_dir: Path,
    repeats: int,
    tell: Callable[[str], None],
) -> tuple[list[Comparison], Costs]:
    """Measures one model, and plans for it with the mean of the profiles before and after."""
    count, prompt_tokens, output_tokens = shape
    model = ServedModel.of(find_model(str(folder)))
    settings = Settings(folder, Drafts(1, folder, folder), prompt_tokens, output_tokens, disk_dir=disk_dir)
    ids = prompts.load(folder, count, prompt_tokens, 0).ids

    own = {layers: vllm_step.seconds_per_token(layers) for layers in vllm_step.LAYERS}

    def profile() -> Costs:
        found = measure(model.expert_bytes, disk_dir, store="disk", seconds=0.4, kernel=cpu_kernel())
        return vllm_step.added(found, own)

    measured: dict[int, dict] = {}
    before = profile()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "routing.trace")
        engines(settings, 50, ids, 1, path)
        trace = Trace.load(path)
    for percent in percents:
        tell(f"{folder.name}: {percent}%")
        measured[percent] = engines(settings, percent, ids, repeats)
    costs = between(before, profile())
    context = prompt_tokens + output_tokens
    rows = [
        Comparison(
            model.expert_bytes,
            percent,
            predictions(model, costs, percent, context, trace, "the recording"),
            1 / found["tpot"],
            1 / found["high"],
            1 / found["low"],
            found["hit_rate"],
        )
        for percent, found in measured.items()
    ]
    return rows, costs


def engines(settings: Settings, percent: int, ids: list[list[int]], repeats: int, trace: Path | None = None) -> dict:
    """Returns means over engines of the time per token and of the hit rate; the last one records its routing."""
    case = Case(f"{percent}%", {"slots": f"{percent}%", "policy": "reuse", "plane": "slots", "store": "disk"})
    times, rates = [], []
    for repeat in range(repeats):
        job = case.job(settings, ids)
        if trace is not None and repeat == repeats - 1:
            job["spac"]["record"] = f"trace={trace}"
        result, error = run_engine(job, False, settings.timeout)
        if error or result is None:
            raise typer.BadParameter(f"{case.name}: {error}")
        batch = result["batches"]["1"]
        times += batch["tpot"]
        counters = batch["counters"]
        rates.append(counters["hits"] / (counters["hits"] + counters["misses"]))
    means = {"tpot": statistics.fmean(times), "hit_rate": statistics.fmean(rates)}
    return means | {"low": min(times), "high": max(times)}


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


if __name__ == "__main__":
    app()
