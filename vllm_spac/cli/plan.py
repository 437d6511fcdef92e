"""``vllm-spac plan``: how to serve a model on a machine, calculated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from vllm_spac.cli.stats import normal_url
from vllm_spac.cli.tables import examples, print_table, say, shown
from vllm_spac.config.types import DECIDED
from vllm_spac.errors import ConfigError
from vllm_spac.system.host_memory import gib

if TYPE_CHECKING:
    from vllm_spac.storage.checkpoint.published import NamedModel
    from vllm_spac.tools.planning.measured_server import ServerSpeed
    from vllm_spac.tools.planning.planned_model import ServedModel
    from vllm_spac.tools.planning.planned_routing import Routing
    from vllm_spac.tools.planning.planned_serving import Row, ServingPlan
    from vllm_spac.tools.planning.predict import Prediction

EXAMPLES = examples("""
vllm-spac plan ./Qwen3-30B-A3B --machine rtx4090
vllm-spac plan ./Qwen3-235B-A22B/config.json --machine h200   [dim]# before the weights are downloaded[/]
vllm-spac plan Qwen/Qwen3-30B-A3B --context 32768 --concurrency 4   [dim]# on this machine, measured once[/]
vllm-spac plan openai/gpt-oss-120b --machine rtx4090 --kernel table --decisions host   [dim]# from a disk, too[/]
vllm-spac plan ./Qwen3-30B-A3B --machine rtx4090 --host-memory 128GiB --trace run.trace --json
vllm-spac plan ./Qwen3-30B-A3B --machine rtx4090 --verify localhost:8000   [dim]# beside what a server reaches[/]
""")

CONTEXT = 4096
_HERE = "here"
_PLANES = {name: f"decisions={decided}" + (", kernel=table" * (name == "table")) for name, decided in DECIDED.items()}
_OPTIONS = {
    name: " ".join(f"--{knob.replace('=', ' ')}" for knob in plane.split(", ")) for name, plane in _PLANES.items()
}
_STOCK = (
    "all experts fit in {}, so stock vLLM serves this model: the plugin would have nothing to load, and stock chooses "
    "from all of its kernels, of which slots can use some"
)


def plan(
    model: Annotated[
        str, typer.Argument(help="Folder of a checkpoint, a config.json, or a name on the Hugging Face hub.")
    ],
    machine: Annotated[
        str,
        typer.Option(
            help="here (measured first, if it was not yet), a100, b200, h100, h200, rtx3090, rtx4090, rtx5090, or a "
            "file of check --measure. For another GPU the one with its PCIe generation, and its --fast-memory."
        ),
    ] = _HERE,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens per request, prompt included.", min=2, show_default=f"{CONTEXT}, or the model's"),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests that are served at once.", min=1, max=1024)] = 1,
    trace: Annotated[
        Path | None, typer.Option(help="Routing of this model, written by --spac-trace, instead of an assumption.")
    ] = None,
    fast_memory: Annotated[str | None, typer.Option(help="Memory of the GPU, e.g. 24GiB, instead of its own.")] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Memory of the host, e.g. 128GiB, instead of its own.")
    ] = None,
    decisions: Annotated[
        Literal["host", "device"] | None,
        typer.Option(
            "--decisions",
            "--spac-decisions",
            help="Who decides which experts are loaded.",
            show_default="the faster one",
        ),
    ] = None,
    kernel: Annotated[
        Literal["vllm", "table"] | None,
        typer.Option(
            "--kernel",
            "--spac-kernel",
            help="What computes experts.",
            show_default="the one that reads this checkpoint",
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a name on the hub, as for vllm serve.")
    ] = None,
    verify: Annotated[
        str | None, typer.Option(help="Also measure the server of this model at this address, and compare.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="VLLM_API_KEY", show_envvar=True, help="Of that server."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Calculate how to serve a model: memory, tokens per second and time to first token of each way; the command."""
    from vllm_spac.storage.checkpoint.published import find_model
    from vllm_spac.tools.planning.planned_machine import PlannedMachine
    from vllm_spac.tools.planning.planned_memory import Load
    from vllm_spac.tools.planning.planned_model import ServedModel
    from vllm_spac.tools.planning.planned_serving import best_plan

    sizes = {name: size_of(name, text) for name, text in (("fast", fast_memory), ("host", host_memory))}
    with Console(stderr=True).status("reading the model") as status:
        named = find_model(model, revision)
        if machine == _HERE:
            status.stop()
            _measured_here(named)
            status.start()
        planned = PlannedMachine.of(machine, sizes["fast"], sizes["host"])
        status.update("calculating")
        knobs, on_cpu = (decisions or "auto", kernel or "auto"), not planned.gpu
        ways = list(ServedModel.ways(named, *knobs, on_cpu=on_cpu, capability=planned.capability))
        context = context or min(CONTEXT, ways[0].architecture.longest or CONTEXT)
        found = best_plan(ways, planned, Load(context, concurrency), _routings(trace, ways[0]))
    checked = None if verify is None else _verified(normal_url(verify), api_key, named, found, trace)
    if as_json:
        print(json.dumps(_content(found) | ({} if checked is None else {"verified": asdict(checked)}), indent=2))
        return
    _show(Console(), found)
    if checked is not None:
        _show_verified(Console(), checked)


def _measured_here(named: NamedModel) -> None:
    """Measures this machine with experts of such a model, if it was not measured yet."""
    from vllm_spac.cli.measuring import measure_first
    from vllm_spac.system.machine import DISK_DIR
    from vllm_spac.system.untrusted import path_named
    from vllm_spac.tools.planning.planned_machine import profile_path

    path = profile_path()
    if not path.exists():
        measure_first(max(named.checkpoint().expert_bytes), path_named(DISK_DIR, "--disk-dir"), path)


@dataclass(frozen=True)
class PlanBesideServer:
    """A server beside what was calculated for the way in which it serves."""

    url: str
    measured: ServerSpeed
    planned: Row

    def __str__(self) -> str:
        low, high = self.planned.low.tokens_per_second, self.planned.high.tokens_per_second
        found = self.measured.tokens_per_second
        if low <= found <= high:
            return "inside"
        return f"{1 - found / low:.0%} below the range" if found < low else f"{found / high - 1:.0%} above the range"


def _verified(
    url: str, api_key: str | None, named: NamedModel, found: ServingPlan, trace: Path | None
) -> PlanBesideServer:
    from vllm_spac.tools.planning.measured_server import measure
    from vllm_spac.tools.planning.planned_model import Execution, ServedModel
    from vllm_spac.tools.planning.planned_serving import row_of

    machine = found.machine
    with Console(stderr=True).status(f"measuring {shown(url)}: a minute or two"):
        speed = measure(url, api_key, found.load.concurrency)
    if speed.execution not in _PLANES:
        raise ConfigError(f"the server at {url} runs execution={speed.execution}, which no plan calculates")
    kind = cast(Execution, speed.execution)
    served = ServedModel.of(named, kind, on_cpu=not machine.gpu, capability=machine.capability)
    planned = row_of(speed.choice, served, machine, found.load, _routings(trace, served))
    return PlanBesideServer(url, speed, planned)


def _show_verified(console: Console, checked: PlanBesideServer) -> None:
    speed, planned = checked.measured, checked.planned
    how = f"{speed.percent}% of the experts in slots, {_PLANES[speed.execution]}, store={speed.store}"
    text = f"{speed.tokens_per_second:.3g} tokens/s of {speed.requests} at once, first token {speed.first_token:.2g} s"
    say(console, f"[bold]measured[/] at {shown(checked.url)}: {text}; {how}")
    band = _range(_speed(planned.low), _speed(planned.high))
    say(console, f"[bold]calculated[/] for that: {band} tokens/s: {checked}")


def _routings(trace: Path | None, model: ServedModel) -> tuple[Routing, ...]:
    from vllm_spac.recording.trace_file import Trace
    from vllm_spac.tools.planning import planned_routing

    return (
        planned_routing.assumed() if trace is None else planned_routing.recorded(Trace.load(trace), model, str(trace))
    )


def size_of(name: str, text: str | None) -> int | None:
    """Parses ``--NAME-memory 24GiB`` to bytes; None for None."""
    from pydantic import TypeAdapter, ValidationError

    from vllm_spac.config.types import Size

    if text is None:
        return None
    try:
        found = int(TypeAdapter(Size).validate_python(text))
    except ValidationError:
        found = 0
    if found <= 0:
        raise ConfigError(f"--{name}-memory {text}: use a number of bytes with a unit, e.g. 24GiB")
    return found


def _show(console: Console, found: ServingPlan) -> None:
    """Prints the command, what it gives, what that rests on, and the tables that it is from."""
    from vllm_spac.tools.planning.planned_memory import command
    from vllm_spac.tools.planning.planned_serving import assumptions

    best = found.best
    console.print("[green]run:[/]")
    say(console, shown(command(best.choice, found.model, found.machine, best.load)))
    console.print()
    for text in _summary(found):
        console.print(shown(text), highlight=False)
    console.print()
    console.print("[dim]assumed:[/]")
    for text in assumptions(found):
        console.print(Padding(f"[dim]{shown(text)}[/]", (0, 0, 0, 2)), highlight=False)
    console.print()
    print_table(console, _memory(found))
    print_table(console, _choices(found))


def _summary(found: ServingPlan) -> Iterator[str]:
    """Yields what the command gives, and why it is this one, in sentences."""
    best, beside = found.best, found.beside
    speeds = _range(_speed(best.low), _speed(best.high))
    first = _range(*(f"{seconds:.2g}" for seconds in best.first_token))
    load = "one request" if found.load.concurrency == 1 else f"{found.load.concurrency} requests at once"
    yield f"calculated, not measured: {speeds} tokens/s with {load}; first token after {first} s"
    if best.choice.store == "none":
        yield _STOCK.format("GPU memory" if found.machine.gpu else "memory")
        return
    yield from (f"does not fit: {problem}" for problem in found.problems)
    if beside is not None and beside.best.choice.store != "none":
        low, high = (_speed(each) for each in (beside.best.low, beside.best.high))
        yield f"with {_OPTIONS[beside.model.execution]}: {_range(low, high)} tokens/s"
    if best.even is not None:
        yield (
            "range: from routing with no locality at all to routing as local as published of Qwen3-30B-A3B (at least "
            f"{_speed(best.compared)} tokens/s); --trace of this model narrows it"
        )
    if best.choice.cpu:
        yield (
            "CPU experts are exact up to rounding, and on an H100 they never paid; without them, see the rows below "
            "the first"
        )


def _memory(found: ServingPlan) -> Table:
    from vllm_spac.storage.checkpoint import quant_config

    split, model, best = found.split, found.model, found.best.choice
    title = f"{shown(model.name)} ({shown(model.checkpoint.name)}) on {shown(found.machine.name)}: memory, calculated"
    table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE_HEAD)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    slots = model.checkpoint.slots_of_tokens(best.tokens) if best.tokens else model.checkpoint.slots(best.percent)
    held = sum(count * size for count, size in slots)
    count = sum(count for count, _ in slots)
    load = f"{found.load.concurrency} x {found.load.context:,} tokens"
    table.add_row("weights that are no experts", gib(split.weights), "fast memory")
    shape = model.architecture
    part = f" of {len(shape.windows)} of {len(shape.windows) + shape.recurrent} layers" if shape.recurrent else ""
    table.add_row(f"KV cache{part}, {load}", gib(split.kv), "fast memory")
    table.add_row("run-time buffers", gib(split.working), "fast memory")
    if split.staging:
        table.add_row("buffers for prompts (staging)", gib(split.staging), "fast memory")
    if model.checkpoint.quantisation:
        method = shown(quant_config.method(model.checkpoint.quantisation))
        table.add_row(f"one expert in a slot ({method}, {_PLANES[model.execution]})", f"{model.expert_bytes:,} B", "")
    experts = (
        f"all {count:,} experts" if best.store == "none" else f"slots: {count:,} of {model.checkpoint.total:,} experts"
    )
    table.add_row(experts, gib(held), "fast memory")
    table.add_row("left", gib(split.room - held), f"of {gib(split.fast)} of fast memory")
    if best.store == "host":
        table.add_row("all experts", gib(model.experts_bytes), "host memory")
    if best.host_bytes:
        table.add_row("experts between slots and disk", gib(best.host_bytes), "host memory")
    if best.store in ("disk", "tiers"):
        table.add_row("all experts", gib(model.experts_bytes), "disk")
    return table


def _choices(found: ServingPlan) -> Table:
    stock = found.best.choice.store == "none"
    served = "of stock vLLM" if stock else f"with {_PLANES[found.model.execution]}"
    title = f"what to expect {served}, calculated: low–high"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)  # fits 80 columns
    columns = ("slots", "others in", "CPU experts", "drafts", "tokens/s", "hits", "limited by", "first token, s")
    for name in columns:
        table.add_column(name, justify="left" if name in ("others in", "limited by") else "right")
    for row in found.rows:
        style = "bold green" if row is found.best else None
        table.add_row(*_cells(row), style=style)
    return table


def _cells(row: Row) -> tuple[str, ...]:
    choice, low, high = row.choice, row.low, row.high
    stores = {"none": "-", "host": "host", "disk": "disk", "tiers": "host, disk"}
    limits = ", ".join(dict.fromkeys((low.limit, high.limit)))
    return (
        choice.slots,
        stores[choice.store],
        "auto" if choice.cpu else "-",
        f"ngram {choice.drafts}" if choice.drafts else "-",
        _range(_speed(low), _speed(high)),
        _range(f"{100 * low.hit_rate:.0f}", f"{100 * high.hit_rate:.0f}") + "%",
        limits,
        _range(*(f"{seconds:.2g}" for seconds in row.first_token)),
    )


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low}–{high}"


def _speed(prediction: Prediction) -> str:
    speed = prediction.tokens_per_second
    if speed < 1000:
        return f"{speed:.3g}"
    return f"{speed:,.0f}" if speed < 10_000 else f"{speed / 1000:.3g}k"


def _content(found: ServingPlan) -> dict:
    from vllm_spac.tools.planning.planned_memory import command
    from vllm_spac.tools.planning.planned_serving import assumptions

    def of_row(row: Row) -> dict:
        line = command(row.choice, found.model, found.machine, row.load)
        return asdict(row) | {"command": line}

    checkpoint = asdict(found.model.checkpoint) | {"dtypes": sorted(found.model.checkpoint.dtypes)}
    return {
        "calculated": True,
        "model": {
            "name": found.model.name,
            "source": found.model.source,
            "execution": found.model.execution,
            **checkpoint,
        },
        "architecture": asdict(found.model.architecture),
        "machine": found.machine.costs.model_dump(mode="json") | {"name": found.machine.name},
        "fast_memory": asdict(found.split) | {"room": found.split.room},
        "does_not_fit": list(found.problems),
        "assumptions": list(assumptions(found)),
        "choices": [of_row(row) for row in found.rows],
        "command": of_row(found.best)["command"],
    }
