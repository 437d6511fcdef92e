"""``vllm-spac tune``: measures a few ways to serve a model here, and keeps one that is faster than the default."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_spac.cli.tables import compact, examples, print_table, print_text, shown
from vllm_spac.errors import ConfigError, flag
from vllm_spac.system.untrusted import path_named

if TYPE_CHECKING:
    from vllm_spac.decisions.comparison import Ratio
    from vllm_spac.tools.tuning.session import Session
    from vllm_spac.tools.tuning.variants import Variant

EXAMPLES = examples("""
vllm-spac tune ./Qwen3-30B-A3B
vllm-spac tune ./Qwen3-30B-A3B --minutes 30 --prompts mine.jsonl --allow-rounding
vllm-spac tune ./model --slots 25% --engine '{"enforce_eager": true}' --minutes 5
vllm-spac tune ./model --speculative-config '{"method": "eagle3", "model": "./head", "num_speculative_tokens": 4}'
""")

_PROMPT_TOKENS = 512  # longer prompts are cut


def tune(
    model: Annotated[str, typer.Argument(help="Folder of a checkpoint, or a name in the Hugging Face cache.")],
    minutes: Annotated[float, typer.Option(help="Time to spend, after the first start.", min=0.1)] = 10.0,
    prompts: Annotated[
        Path | None, typer.Option(help="As for vllm-spac quality sweep.", show_default="24 prompts of the package")
    ] = None,
    output_tokens: Annotated[int, typer.Option(help="Tokens to generate after each prompt.", min=2)] = 64,
    slots: Annotated[str | None, typer.Option(help="As --spac-slots, for all.", show_default="as many as fit")] = None,
    speculative_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="Also with these drafts, as for vllm serve.")
    ] = None,
    allow_rounding: Annotated[
        bool | None,
        typer.Option(
            "--allow-rounding/--exact",
            help="Also CPU experts: exact up to rounding.",
            show_default="on a GPU, whose kernels round",
        ),
    ] = None,
    engine: Annotated[str | None, typer.Option(metavar="JSON", help="Further arguments of vllm.LLM.")] = None,
    disk_dir: Annotated[
        Path | None,
        typer.Option(help="As --spac-disk-dir; the profile is put there.", show_default="~/.cache/vllm_spac"),
    ] = None,
) -> None:
    """Measure a few ways to serve a model here, in turns with the default, and keep one that is faster."""
    from vllm_spac.config.tuned_profile import TunedProfile, identity, path_of, relevant_versions
    from vllm_spac.integration.hooks import device
    from vllm_spac.storage.checkpoint.headers import find_folder
    from vllm_spac.storage.checkpoint.published import find_model
    from vllm_spac.system.machine import DISK_DIR, Machine, gpu_names, now
    from vllm_spac.tools.evaluation.engine import options_of
    from vllm_spac.tools.evaluation.prompts import read
    from vllm_spac.tools.planning.planned_model import ServedModel
    from vllm_spac.tools.tuning import measurer
    from vllm_spac.tools.tuning.session import Session
    from vllm_spac.tools.tuning.variants import variants

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported
    options, drafts = options_of(engine, "--engine"), _drafts(options_of(speculative_config, "--speculative-config"))
    gpu = bool(gpu_names())
    rounding = gpu if allow_rounding is None else allow_rounding
    served = ServedModel.of(find_model(model), "slots", on_cpu=not gpu)
    if served.source != "headers":
        if Path(model).exists():
            raise ConfigError(f"{model} has no weights to measure; name a folder with *.safetensors")
        raise ConfigError(f"the weights of {model} are not here to measure; run: hf download {model}")
    _check_slots(slots)
    folder = path_named(disk_dir or DISK_DIR, "--disk-dir").absolute()
    texts = read(prompts or Path(str(files("vllm_spac.tools.tuning").joinpath("prompts.jsonl"))))
    model_identity, here = identity(find_folder(model)), Machine.here(folder, device.names())
    console, errors = Console(), Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%")
    with Progress(*columns, TimeElapsedColumn(), console=errors, transient=True) as progress:
        task = progress.add_task("", total=60 * minutes)
        one = Session(
            lambda resident: variants(slots, drafts, rounding=rounding, gpu=gpu, resident=resident),
            texts,
            output_tokens,
            60 * minutes,
            measurer.Measurer(model, disk_dir, options, _PROMPT_TOKENS),
            served.experts_bytes if rounding and not gpu else 0,
            lambda text, spent: progress.update(task, completed=spent, description=shown(text)),
            lambda text: print_text(progress.console, f"[dim]{shown(text)}[/]"),
        )
        _measure(one, errors, lambda variant: _command(model, variant, disk_dir))

    _print(console, model, one)
    for sentence in one.sentences():
        print_text(console, shown(sentence))
    for problem in (problems := list(one.errors())):
        print_text(errors, f"[bold red]error:[/] {shown(problem)}")
    if one.undecided and not problems:
        print_text(console, "no profile was written: the time was too short; give it more --minutes")
        return
    choice, kept = one.choice, one.choice.name != "default"
    profile = TunedProfile(
        model=model,
        identity=model_identity,
        machine=here,
        versions=relevant_versions(),
        choice=choice.name,
        knobs=dict(choice.knobs or {}) if kept else {},
        speculative_config=dict(choice.drafts) if kept and choice.drafts else None,
        ratio=None if one.last is None else one.last.ratio,
        engine=options,
        command=shlex.join(["vllm-spac", *sys.argv[1:]]),
        date=now(),
    )
    profile.write(path := path_of(folder, model_identity))
    print_text(console, f"written: {shown(path)}")
    if kept:
        where = "" if disk_dir is None else f" --spac-disk-dir {disk_dir}"
        where += " --spac-tuned auto@allow=rounding" if choice.rounds and not gpu else ""
        print_text(console, f"[green]run:[/] vllm serve {shown(model)} --plugin spac{shown(where)}")
        print_text(console, f"[dim]the same by hand: {shown(_command(model, choice, disk_dir))}[/]")
    if options:
        print_text(console, f"[dim]measured with the engine arguments {shown(json.dumps(options))}[/]")
    if problems:
        raise typer.Exit(1)


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM, which ends a run as Ctrl-C does."""


@contextmanager
def _terminating() -> Iterator[None]:
    """Lets SIGTERM raise ``_TerminatedError``."""

    def terminate(number: int, frame: object) -> None:
        raise _TerminatedError

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _measure(one: Session, console: Console, command: Callable[[Variant], str]) -> None:
    """Runs; of what is stopped it says which way was the fastest so far."""
    from vllm_spac.tools.tuning.measurer import MeasuringError
    from vllm_spac.tools.tuning.session import last_line

    try:
        with _terminating():
            one.run()
    except KeyboardInterrupt as stop:
        best = one.best
        if best is not None:
            print_text(console, f"stopped: the fastest so far is {shown(best)}; nothing was written")
            print_text(console, f"[green]to serve so:[/] {shown(command(best.variant))}")
        else:
            compared = any(comparison.speed is not None for comparison in one.compared)
            what = "the default is the fastest so far" if compared else "nothing was compared so far"
            print_text(console, f"stopped: {what}; nothing was written")
        raise typer.Exit(143 if isinstance(stop, _TerminatedError) else 130) from None
    except MeasuringError as error:
        for line in str(error).splitlines():
            print_text(console, f"[dim]{shown(line)}[/]")
        raise ConfigError(
            f"the default's engine failed: {last_line(str(error))}; see its log above, change --engine or --slots, and "
            "run the same command"
        ) from error


def _print(console: Console, model: str, one: Session) -> None:
    from vllm_spac.tools.tuning.session import last_line

    heads = "variant", "over the default (95 %)", "tokens/s", "first token", "turns", "tokens", "remark"
    rows = [("default", "", f"{median(rates):.1f}", "", "", "", "")] if (rates := one.default_rates) else []
    for comparison in sorted(one.compared, key=lambda comparison: -(comparison.speed or 0)):
        rate = f"{median(other for _, other in comparison.rates):.1f}" if comparison.rates else "-"
        first, tokens = (
            (f"{median(comparison.first_token):.3f} s", comparison.tokens) if comparison.rates else ("-", "-")
        )
        problem = last_line(comparison.problem) if comparison.problem else ""
        ratio, turns = _interval(comparison.ratio) if comparison.ratio else "-", str(len(comparison.rates))
        rows.append((shown(comparison.variant.name), ratio, rate, first, turns, shown(tokens), shown(problem)))
    title = f"{shown(model)}: measured here, one request at a time"
    table = compact(title, heads, rows, left=("variant", "tokens", "remark"))
    untried = "; ".join(variant.name for variant in one.untried)
    table.caption = f"no time was left for: {shown(untried)}" if untried else None
    print_table(console, table)


def _interval(ratio: Ratio) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f} - {ratio.high:.2f})"


def _command(model: str, variant: Variant, disk_dir: Path | None) -> str:
    """Returns the command that serves so without a profile."""
    given = dict(variant.knobs or {}) | ({} if disk_dir is None else {"disk_dir": disk_dir})
    options = [part for name, value in given.items() for part in (flag(name), str(value))]
    if variant.drafts is not None:
        options += ["--speculative-config", json.dumps(dict(variant.drafts))]
    return shlex.join(["vllm", "serve", model, "--plugin", "spac", *options])


def _drafts(drafts: dict[str, Any]) -> Mapping[str, Any] | None:
    """Returns the user's drafts, whose model may be in a folder: ``vllm serve`` may be started elsewhere."""
    from vllm_spac.config.tuned_profile import Drafts

    if not drafts:
        return None
    try:
        Drafts.check(drafts)
    except ValueError as error:
        raise ConfigError(
            f"--speculative-config has what a profile may not set ({error}); tune without it, and serve with it"
        ) from None
    named = drafts.get("model")
    return drafts | {"model": str(Path(named).absolute())} if named and Path(named).is_dir() else drafts


def _check_slots(slots: str | None) -> None:
    from vllm_spac.config.types import SlotCount

    try:
        SlotCount.parse(slots or "auto")
    except ValueError as error:
        raise ConfigError(f"--slots {error}") from error
