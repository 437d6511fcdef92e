"""``vllm-spac plan``: how to serve a model on a machine, calculated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer
from rich import box
from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.table import Table

from vllm_spac.cli.tables import examples, print_table, print_text, shown
from vllm_spac.errors import ConfigError

if TYPE_CHECKING:
    from vllm_spac.storage.checkpoint.published import NamedModel
    from vllm_spac.tools.planning.planned_serving import Row, ServingPlan
    from vllm_spac.tools.planning.predict import Prediction

EXAMPLES = examples("""
vllm-spac plan ./Qwen3-30B-A3B --machine rtx4090
vllm-spac plan ./Qwen3-235B-A22B/config.json --machine h200   [dim]# before the weights are downloaded[/]
vllm-spac plan Qwen/Qwen3-30B-A3B --context 32768 --concurrency 4   [dim]# on this machine, measured once[/]
vllm-spac plan openai/gpt-oss-120b --machine rtx4090 --plane table   [dim]# from a disk, too[/]
vllm-spac plan openai/gpt-oss-120b --machine rtx3090 --gpus 24GiB,12GiB   [dim]# two pipeline stages[/]
vllm-spac plan ./Qwen3-30B-A3B --machine rtx4090 --host-memory 128GiB --trace run.trace --json
""")

_HERE = "here"
_MOST_GPUS = 64
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
        typer.Option(help="Tokens per request, prompt included.", min=2, show_default="4096, or the model's"),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests that are served at once.", min=1, max=1024)] = 1,
    trace: Annotated[
        Path | None, typer.Option(help="Routing of this model, written by --spac-record, instead of an assumption.")
    ] = None,
    fast_memory: Annotated[str | None, typer.Option(help="Memory of the GPU, e.g. 24GiB, instead of its own.")] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Memory of the host, e.g. 128GiB, instead of its own.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="Several GPUs, each a pipeline stage: how many, or the memory of each, e.g. 24GiB,12GiB.",
            show_default="one",
        ),
    ] = None,
    plane: Annotated[
        Literal["slots", "table", "pointers"] | None,
        typer.Option("--plane", "--spac-plane", help="How layers reach their experts.", show_default="the fastest one"),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a name on the hub, as for vllm serve.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Calculate how to serve a model: memory, tokens per second and time to first token of each way; the command."""
    from vllm_spac.storage.checkpoint.published import find_model
    from vllm_spac.tools.planning.planned_machine import PlannedMachine
    from vllm_spac.tools.planning.planned_serving import plan_model

    fast, host, cards = size_of("fast", fast_memory), size_of("host", host_memory), cards_of(gpus)
    with Console(stderr=True).status("reading the model") as status:
        named = find_model(model, revision)
        if machine == _HERE:
            status.stop()
            _measured_here(named)
            status.start()
        planned = PlannedMachine.of(machine, fast, host)
        planned = planned if cards is None else planned.with_cards(cards)
        status.update("calculating")
        plan = plan_model(
            named, planned, context=context, concurrency=concurrency,
            plane=plane or "auto", trace=trace,
        )  # fmt: skip
    if as_json:
        print(json.dumps(plan.content(), indent=2))
    else:
        print_plan(Console(), plan)


def _measured_here(named: NamedModel) -> None:
    """Measures this machine with experts of such a model, if it was not measured yet."""
    from vllm_spac.cli.measuring import measure_first
    from vllm_spac.system.machine import DISK_DIR
    from vllm_spac.system.untrusted import path_named
    from vllm_spac.tools.planning.planned_machine import profile_path

    path = profile_path()
    if not path.exists():
        measure_first(max(named.checkpoint().expert_bytes), path_named(DISK_DIR, "--disk-dir"), path)


def size_of(name: str, text: str | None) -> int | None:
    """Parses ``--NAME-memory 24GiB`` to bytes; None for None."""
    if text is None:
        return None
    return _size(text, f"--{name}-memory {text}: use a number of bytes with a unit, e.g. 24GiB")


def _size(text: str, wrong: str) -> int:
    """Parses ``24GiB``; an error says what is ``wrong``."""
    from pydantic import TypeAdapter, ValidationError

    from vllm_spac.config.types import Size

    try:
        found = int(TypeAdapter(Size).validate_python(text))
    except ValidationError:
        found = 0
    if found <= 0:
        raise ConfigError(wrong)
    return found


def cards_of(text: str | None) -> list[int | None] | None:
    """Parses ``--gpus``: the bytes of each, None for a GPU's own; None for None."""
    if text is None:
        return None
    if text.isdecimal() and int(text) <= _MOST_GPUS:
        return [None] * int(text)
    sizes = text.split(",")
    if len(sizes) > _MOST_GPUS:
        raise ConfigError(f"--gpus names {len(sizes)} GPUs; use at most {_MOST_GPUS}")
    return [
        _size(size, f"--gpus {text}: use a number of GPUs, or the memory of each, as 24GiB,12GiB") for size in sizes
    ]


def print_plan(console: Console, plan: ServingPlan) -> None:
    """Prints the command, what it gives, what that rests on, and the tables that it is from."""
    console.print("[green]run:[/]")
    print_text(console, shown(plan.best.command))
    console.print()
    for text in _summary(plan):
        console.print(shown(text), highlight=False)
    console.print()
    console.print("[dim]assumed:[/]")
    for text in plan.assumptions:
        console.print(Padding(f"[dim]{shown(text)}[/]", (0, 0, 0, 2)), highlight=False)
    console.print()
    print_table(console, _memory(plan))
    print_table(console, _choices(plan))


def _summary(plan: ServingPlan) -> Iterator[str]:
    """Yields what the command gives, and why it is this one, in sentences."""
    best, beside = plan.best, plan.beside
    first = _range(*(f"{seconds:.2g}" for seconds in best.first_token))
    load = "one request" if plan.load.concurrency == 1 else f"{plan.load.concurrency} requests at once"
    yield f"calculated, not measured: {_speeds(best)} tokens/s with {load}; first token after {first} s"
    if plan.stock:
        yield _STOCK.format("GPU memory" if plan.machine.gpu else "memory")
        return
    yield from (f"does not fit: {problem}" for problem in plan.problems)
    if beside is not None and not beside.stock:
        yield f"with --plane {beside.model.execution}: {_speeds(beside.best)} tokens/s"
    if best.even is not None:
        yield (
            "range: from routing with no locality at all to routing as local as published of Qwen3-30B-A3B (at least "
            f"{_speed(best.compared)} tokens/s); --trace of this model narrows it"
        )
    if best.choice.cpu:
        yield (
            "CPU experts are exact up to rounding, and on an H100, with an older kernel, they never paid; without "
            "them, see the rows below the first"
        )


def _memory(plan: ServingPlan) -> Table:
    model = plan.model
    machine = "this machine" if plan.machine.name == _HERE else shown(plan.machine.name)
    title = f"{shown(model.name)} ({shown(model.checkpoint.name)}) on {machine}: memory, calculated"
    table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE_HEAD)
    for side in ("left", "right", "left"):
        table.add_column(justify=cast(JustifyMethod, side))
    for line in plan.memory():
        table.add_row(*map(shown, line))
    return table


def _choices(plan: ServingPlan) -> Table:
    served = "of stock vLLM" if plan.stock else f"with {plan.plane}"
    title = f"what to expect {served}, calculated: low–high"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)  # fits 80 columns
    columns = ("slots", "others in", "CPU experts", "drafts", "tokens/s", "hits", "limited by", "first token, s")
    for name in columns:
        table.add_column(name, justify="left" if name in ("others in", "limited by") else "right")
    for row in plan.rows:
        table.add_row(*_cells(row), style="bold green" if row is plan.best else None)
    return table


def _cells(row: Row) -> tuple[str, ...]:
    choice, low, high = row.choice, row.low, row.high
    return (
        choice.slots,
        {"none": "-", "tiers": "host, disk"}.get(choice.store, choice.store),
        "auto" if choice.cpu else "-",
        f"ngram {choice.drafts}" if choice.drafts else "-",
        _speeds(row),
        _range(f"{100 * low.hit_rate:.0f}", f"{100 * high.hit_rate:.0f}") + "%",
        ", ".join(dict.fromkeys((low.limit, high.limit))),
        _range(*(f"{seconds:.2g}" for seconds in row.first_token)),
    )


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low}–{high}"


def _speeds(row: Row) -> str:
    return _range(_speed(row.low), _speed(row.high))


def _speed(prediction: Prediction) -> str:
    speed = prediction.tokens_per_second
    if speed < 1000:
        return f"{speed:.3g}"
    return f"{speed:,.0f}" if speed < 10_000 else f"{speed / 1000:.3g}k"
